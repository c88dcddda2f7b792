"""Client-level differential privacy, and the relative coordinates it and secure aggregation work in."""

from .accountant import Accountant, epsilon_of
from .noise import secret_normal
from .relative import Relative, RelativeAccumulator, clip, refuse_unless_sum, sensitivity

__all__ = [
    "Accountant",
    "Relative",
    "RelativeAccumulator",
    "clip",
    "epsilon_of",
    "refuse_unless_sum",
    "secret_normal",
    "sensitivity",
]
