"""FedBayes: federated Bayesian deep learning."""

from .posterior import Gaussian, Posterior, kl

__version__ = "0.1.0"
__all__ = ["Gaussian", "Posterior", "__version__", "kl"]
