"""FedBayes: federated Bayesian deep learning.

Each client learns a distribution over the weights, the server fuses the distributions, and the result predicts and
says how sure it is. The few names most people need are here; every room has more under its own name.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names and rooms are imported when first used: `fedbayes --help` need not wait for torch, and whoever only fuses
# posteriors loads nothing that trains.
_HOMES = {
    "Experiment": "experiment",
    "Gaussian": "posterior",
    "Posterior": "posterior",
    "kl": "posterior",
    "fuse": "fusion",
    "bayesianize": "nn",
    "load": "predictor",
    "run": "runner",
    "Result": "runner",
}

if TYPE_CHECKING:
    from . import compare as compare
    from . import config as config
    from . import data as data
    from . import errors as errors
    from . import experiment as experiment
    from . import fusion as fusion
    from . import nn as nn
    from . import posterior as posterior
    from . import uncertainty as uncertainty
    from .experiment import Experiment
    from .fusion import fuse
    from .nn import bayesianize
    from .posterior import Gaussian, Posterior, kl
    from .predictor import load
    from .runner import Result, run

__all__ = ["Experiment", "Gaussian", "Posterior", "Result", "__version__", "bayesianize", "fuse", "kl", "load", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f".{name}", __name__)  # a room: fedbayes.data, fedbayes.config, ...
    raise AttributeError(f"module 'fedbayes' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
