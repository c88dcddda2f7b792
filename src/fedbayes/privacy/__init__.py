"""Client-level differential privacy, and the relative coordinates it and secure aggregation work in."""

from .accountant import Accountant, epsilon_of, rdp_gaussian, rdp_sampled_gaussian
from .relative import Relative, RelativeAccumulator, clip, refuse_unless_sum, sensitivity

__all__ = [
    "Accountant",
    "Relative",
    "RelativeAccumulator",
    "clip",
    "epsilon_of",
    "rdp_gaussian",
    "rdp_sampled_gaussian",
    "refuse_unless_sum",
    "sensitivity",
]
