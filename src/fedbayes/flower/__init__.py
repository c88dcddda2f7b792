"""The same federation over real machines: Flower's deployment engine under FedBayes' round loop.

Needs the extra ``flower`` (``pip install 'fedbayes[flower]'``).

- ``client_app`` and ``server_app``: what a thin Flower app points at (``examples/flower_app``).
- ``FlowerCohort``: clients on other machines, behind the protocol the round loop speaks.
- ``FusionStrategy``: our fusion rules inside somebody else's Flower app (``examples/flower_fusion_strategy``).
- ``rehearse``: a whole deployment on loopback, with TLS and authenticated nodes (``fedbayes deploy --local``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import client_app as client_app
    from .cohort import FlowerCohort as FlowerCohort
    from .deploy import rehearse as rehearse
    from .records import put_posterior as put_posterior
    from .records import take_posterior as take_posterior
    from .server import server_app as server_app
    from .strategy import FusionStrategy as FusionStrategy

_WHERE = {
    "client_app": "client",
    "server_app": "server",
    "FlowerCohort": "cohort",
    "FusionStrategy": "strategy",
    "rehearse": "deploy",
    "put_posterior": "records",
    "take_posterior": "records",
}
__all__ = [
    "FlowerCohort",
    "FusionStrategy",
    "client_app",
    "put_posterior",
    "rehearse",
    "server_app",
    "take_posterior",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that a node does not load what only a server needs."""
    if name not in _WHERE:
        raise AttributeError(f"module 'fedbayes.flower' has no attribute '{name}'")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
