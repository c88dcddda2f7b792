"""The lane engine: training many clients together, and evaluating many networks together."""

from .cohort import LocalCohort
from .packing import Segment, pack
from .predict import predict
from .setting import resolve_device

__all__ = ["LocalCohort", "Segment", "pack", "predict", "resolve_device"]
