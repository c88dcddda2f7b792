"""Names of one's own: ``my_rules:power-mean`` is what the module ``my_rules`` registers as ``power-mean``."""

from __future__ import annotations

import importlib

from .errors import ConfigError, FedBayesError


def own_name(name: str, kind: str) -> str:
    """Import the module of a name written ``package.module:name``, so that what it registers is known, and return the name alone."""
    module, colon, name = name.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except FedBayesError:
            raise
        except Exception as error:  # whatever its code raises
            raise ConfigError(
                f"the module '{module}' of the {kind} '{name}' cannot be imported ({type(error).__name__}: {error}); "
                f"name it as in an import statement, my_module:{name or 'name'} for a file my_module.py in the folder you work in."
            ) from error
    return name
