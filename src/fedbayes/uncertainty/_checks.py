"""What may be asked of probabilities and labels, said in one sentence each when it is not so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import numeric
from ..errors import FedBayesError

CHUNK_ELEMENTS = {"cpu": 1 << 17}
"""Probabilities worked on at a time, by kind of device, whatever the size of the whole: on a CPU 1 MB in float64, which
stays in its cache; elsewhere (``CHUNK_ELSEWHERE``) 32 MB, so that a GPU is full and 25 x 10,000 x 10 is one chunk."""

CHUNK_ELSEWHERE = 1 << 22

SUM_TOLERANCE = 1e-2
"""How far a row's sum may be from 1: covers float16 and bfloat16 softmax over hundreds of classes, not logits."""


class UncertaintyError(FedBayesError, ValueError):
    """Probabilities, labels or scores from which no uncertainty can be computed."""


def working_type(device: torch.device) -> torch.dtype:
    """Float64 where the device has it (all but Apple's MPS), else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def as_numbers(values: Any, what: str) -> Tensor:
    """Return the tensor behind a tensor, array or nested list, or say that there is none."""
    return numeric.as_numbers(values, what, UncertaintyError)


def as_probabilities(probabilities: Any) -> Tensor:
    """Return the tensor (M, N, C) behind ``probabilities`` (tensor or array), or say what is wrong with its shape."""
    p = as_numbers(probabilities, "probabilities")
    if p.ndim != 3:
        raise UncertaintyError(
            f"probabilities have shape {tuple(p.shape)}; (samples, examples, classes) is needed"
            + (" - for one deterministic pass write probabilities[None]." if p.ndim == 2 else ".")
        )
    if 0 in p.shape:
        raise UncertaintyError(f"probabilities of shape {tuple(p.shape)} are empty; at least one of each is needed.")
    if not p.is_floating_point():
        raise UncertaintyError(f"probabilities are {p.dtype}; a floating-point type is needed.")
    return p


def as_labels(labels: Any, like: Tensor) -> Tensor:
    """Return int64 labels (N,) on the device of ``like`` (M, N, C), or say why they do not fit."""
    y = as_numbers(labels, "labels")
    examples, classes = like.shape[1], like.shape[2]
    if y.shape != (examples,):
        raise UncertaintyError(f"labels have shape {tuple(y.shape)}; ({examples},) is needed, one per example.")
    if y.is_floating_point() or y.dtype == torch.bool or y.is_complex():
        raise UncertaintyError(f"labels are {y.dtype}; class numbers of an integer type are needed.")
    y = y.to(like.device, torch.int64)
    low, high = torch.stack(torch.aminmax(y)).tolist()
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise UncertaintyError(f"label {wrong} is outside 0..{classes - 1}, the {classes} classes predicted.")
    return y


def as_truth(truth: Any, what: str, values: Tensor) -> Tensor:
    """Return booleans beside ``values`` (N,) from booleans or 0 and 1; a class number or a NaN is neither, and said so."""
    found = as_numbers(truth, "truth values").to(values.device)
    if found.shape != values.shape:
        raise UncertaintyError(f"{tuple(found.shape)} truth values for {tuple(values.shape)} {what}; they must match.")
    if found.dtype != torch.bool and not bool(((found == 0) | (found == 1)).all()):
        raise UncertaintyError(
            "truth values are other than true and false (or 1 and 0): is `prediction == label` meant?"
        )
    return found.bool()


def chunk_elements(device: torch.device) -> int:
    """How many probabilities are worked on at a time on a device."""
    return CHUNK_ELEMENTS.get(device.type, CHUNK_ELSEWHERE)


def chunks(p: Tensor) -> list[slice]:
    """Slices of the example axis, each of at most ``chunk_elements`` probabilities (at least one example)."""
    step = max(1, chunk_elements(p.device) // (p.shape[0] * p.shape[2]))
    return [slice(i, min(i + step, p.shape[1])) for i in range(0, p.shape[1], step)]


def check_values(part: Tensor) -> Tensor:
    """Return a scalar that is true when a chunk in working precision holds probabilities; no host synchronisation."""
    low, high = torch.aminmax(part)
    off = (part.sum(-1) - 1).abs().max()
    return (low >= -1e-6) & (high <= 1 + SUM_TOLERANCE) & (off <= SUM_TOLERANCE)  # NaN compares false


def raise_for_values(part: Tensor, first_example: int) -> None:
    """Find the first offending example of a chunk that failed ``check_values`` and raise the sentence about it."""
    finite = torch.isfinite(part).all(-1)
    if not bool(finite.all()):
        sample, example = (~finite).nonzero()[0].tolist()
        raise UncertaintyError(
            f"the probabilities of example {first_example + example} in sample {sample} are not finite (NaN or "
            "infinity): the network has diverged or its input holds NaN."
        )
    wrong = (part.amin(-1) < -1e-6) | (part.amax(-1) > 1 + SUM_TOLERANCE) | ((part.sum(-1) - 1).abs() > SUM_TOLERANCE)
    sample, example = wrong.nonzero()[0].tolist()
    total = float(part[sample, example].sum())
    raise UncertaintyError(
        f"the values of example {first_example + example} in sample {sample} are no probabilities (they sum to "
        f"{total:.4g}, smallest {float(part[sample, example].min()):.4g}): apply softmax to logits first."
    )
