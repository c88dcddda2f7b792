"""When lanes do not fit a GPU's memory: how that is recognised, and what is done."""

from __future__ import annotations

import gc
import warnings

import torch

from ..errors import RunError


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is a device's lack of memory, or came of it (a capture or a compilation given up)."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in words or "alloc_failed" in words:
            return True
        error = error.__cause__ or error.__context__
    return False


def fewer_lanes(lanes: int) -> int:
    """Return half the lanes, with a warning, and free what the last attempt left; one lane that does not fit is an error.

    To be called outside the ``except`` block: while an error is handled, its traceback keeps the attempt's tensors alive.
    """
    if lanes == 1:
        raise RunError("the GPU's memory does not hold a single lane of this network; use a smaller local.batch_size.")
    gc.collect()  # a program and its compiled parts refer to each other
    torch.cuda.empty_cache()
    warnings.warn(
        f"{lanes} lanes do not fit the GPU's memory; going on with {lanes // 2}.", RuntimeWarning, stacklevel=2
    )
    return lanes // 2
