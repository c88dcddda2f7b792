"""Calibration: does a confidence of 80 % come true in 80 % of the cases? Proper scores, ECE, reliability tables."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._checks import (
    SUM_TOLERANCE,
    UncertaintyError,
    as_labels,
    as_numbers,
    as_probabilities,
    as_truth,
    chunk_elements,
    working_type,
)
from .predictive import first_argmax, predictive_mean

Binning = Literal["width", "mass"]


class ReliabilityTable(NamedTuple):
    """One row per bin: edges, examples in it, mean confidence and accuracy of them (NaN where a bin is empty)."""

    low: Tensor
    high: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    def error(self) -> float:
        """Expected calibration error: the gap between confidence and accuracy, averaged over the examples."""
        filled = self.count > 0
        gap = (self.confidence - self.accuracy).abs()[filled] * self.count[filled]
        return float(gap.sum() / self.count.sum())


def nll(mean: Tensor, labels: Tensor) -> Tensor:
    """Negative log likelihood of each label under the mean prediction (N, C), in nats.

    A probability of exactly 0 counts as 1.2e-38, the smallest normal float32, since that is where a float32
    softmax underflows: one impossible label costs 87.3, not infinity, which no table could hold.
    """
    p = mean.gather(-1, labels[:, None])[:, 0]
    return -p.clamp(min=torch.finfo(torch.float32).tiny, max=1.0).log()


def brier(mean: Tensor, labels: Tensor) -> Tensor:
    """Brier score of each example in its multi-class form, |mean - onehot|^2, between 0 and 2."""
    p = mean.gather(-1, labels[:, None])[:, 0]
    return ((mean**2).sum(-1) - p**2 + (1 - p) ** 2).clamp(min=0)


def bin_edges(values: Tensor, bins: int, binning: Binning = "width") -> Tensor:
    """Edges of the bins, ``bins`` + 1 of them: equally wide over [0, 1], or quantiles of the values (equal mass)."""
    if isinstance(bins, bool) or not isinstance(bins, int | np.integer) or bins < 1:
        raise UncertaintyError(f"{bins!r} bins were asked for; a whole number of at least 1 is needed.")
    share = torch.linspace(0, 1, bins + 1, device=values.device, dtype=values.dtype)
    if binning == "width":
        return share
    if binning != "mass":
        raise UncertaintyError(f"binning '{binning}' is unknown; 'width' and 'mass' are.")
    ordered = values.sort().values
    position = share * (len(ordered) - 1)
    below = position.floor().long()
    above = (below + 1).clamp(max=len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def assign_bins(values: Tensor, edges: Tensor) -> Tensor:
    """Bin number of each value; bins are (low, high] as in Guo et al. (2017), and the first holds its low edge too.

    Equal values always share a bin, so equal-mass bins are only as equal as the ties allow.
    """
    return torch.bucketize(values, edges[1:-1].contiguous(), right=False)


def tabulate(confidence: Any, correct: Any, bins: int = 15, binning: Binning = "width") -> ReliabilityTable:
    """Reliability table of confidences against what came true: the numbers behind a reliability diagram."""
    confidence = as_numbers(confidence, "confidences")
    confidence = confidence.to(working_type(confidence.device))
    if confidence.ndim != 1 or not len(confidence):
        raise UncertaintyError(f"confidences have shape {tuple(confidence.shape)}; one number per example is needed.")
    if not bool(((confidence >= 0) & (confidence <= 1 + SUM_TOLERANCE)).all()):  # NaN compares false
        raise UncertaintyError("confidences are not all between 0 and 1; those of percent are to be divided by 100.")
    return binned(confidence, as_truth(correct, "confidences", confidence), bins, binning)


def binned(confidence: Tensor, correct: Tensor, bins: int, binning: Binning) -> ReliabilityTable:
    """``tabulate`` of numbers known to be good; no step waits for the device."""
    correct = correct.to(confidence.dtype)
    edges = bin_edges(confidence, bins, binning)
    where = assign_bins(confidence, edges)
    zeros = torch.zeros(bins, dtype=confidence.dtype, device=confidence.device)
    count = zeros.index_add(0, where, torch.ones_like(confidence))
    return ReliabilityTable(
        edges[:-1],
        edges[1:],
        count,
        zeros.index_add(0, where, confidence) / count,
        zeros.index_add(0, where, correct) / count,
    )


def reliability_table(probabilities: Any, labels: Any, bins: int = 15, binning: Binning = "width") -> ReliabilityTable:
    """Reliability table of the mean prediction of (M, N, C): top-class confidence against accuracy."""
    p = as_probabilities(probabilities)
    y = as_labels(labels, p)
    mean = predictive_mean(p)
    predicted = first_argmax(mean)
    return binned(mean.gather(-1, predicted[:, None])[:, 0], predicted == y, bins, binning)


def ece(probabilities: Any, labels: Any, bins: int = 15, binning: Binning = "width") -> float:
    """Expected calibration error of the mean prediction, equal-width or equal-mass bins (as a share, not percent)."""
    return reliability_table(probabilities, labels, bins, binning).error()


def classwise_gap(mean: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Classwise ECE of mean predictions (N, C): each class's calibration error, averaged over the classes.

    Kull et al. (2019), static calibration error of Nixon et al. (2019): all C probabilities of every example are
    judged, not only the highest.
    """
    examples, classes = mean.shape
    edges = bin_edges(mean[:, 0], bins)
    confidence = torch.zeros(classes * bins, dtype=mean.dtype, device=mean.device)
    truth = torch.zeros_like(confidence)
    offset = torch.arange(classes, device=mean.device) * bins
    step = max(1, chunk_elements(mean.device) // classes)
    for i in range(0, examples, step):
        part = mean[i : i + step]
        where = assign_bins(part, edges) + offset
        confidence.index_add_(0, where.flatten(), part.flatten())
        hit = where.gather(1, labels[i : i + step, None])[:, 0]
        truth.index_add_(0, hit, torch.ones_like(hit, dtype=mean.dtype))
    return (confidence - truth).abs().sum() / (examples * classes)


def ece_classwise(probabilities: Any, labels: Any, bins: int = 15) -> float:
    """Classwise expected calibration error of the mean prediction of (M, N, C)."""
    p = as_probabilities(probabilities)
    return float(classwise_gap(predictive_mean(p), as_labels(labels, p), bins))
