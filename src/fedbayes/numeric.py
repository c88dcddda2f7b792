"""Numbers of any origin as tensors: the one place that knows what NumPy may do and torch may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import FedBayesError


def as_numbers(values: Any, what: str, error: type[FedBayesError]) -> Tensor:
    """Return the tensor behind a tensor, array or nested list, without its graph, or say that there is none.

    Long doubles, foreign byte order, reversed and read-only arrays are copied into what torch can hold.
    """
    if isinstance(values, Tensor):
        return values.detach()
    kind = type(values).__name__
    try:
        array = np.asarray(values)
        kind = f"{array.dtype} (NumPy)" if isinstance(values, np.ndarray) else kind
        own = np.float64 if array.dtype.char == "g" else array.dtype.newbyteorder("=")
        array = array.astype(own, copy=False)
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError):
        raise error(f"{what} are of type {kind}, not a tensor or an array of numbers.") from None
