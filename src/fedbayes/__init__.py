"""FedBayes: federated Bayesian deep learning.

Each client learns a distribution over the weights, the server fuses the distributions, and the result predicts and
says how sure it is. The few names most people need are here; every room has more under its own name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .experiment import Experiment
from .posterior import Gaussian, Posterior, kl

__version__ = "0.1.0"

# Imported when first used, so that `import fedbayes` stays light and needs torch, numpy and safetensors alone.
_LAZY = {"fuse": ".fusion", "bayesianize": ".nn", "load": ".predictor", "run": ".runner", "Result": ".runner"}

if TYPE_CHECKING:
    from .fusion import fuse
    from .nn import bayesianize
    from .predictor import load
    from .runner import Result, run

__all__ = ["Experiment", "Gaussian", "Posterior", "Result", "__version__", "bayesianize", "fuse", "kl", "load", "run"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module 'fedbayes' has no attribute '{name}'")
