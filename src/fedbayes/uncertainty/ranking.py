"""Ranking inputs by a score: accuracy retained, risk-coverage, AUROC and FPR95, all with ties treated as ties."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import UncertaintyError, as_numbers, as_truth, working_type


class Curve(NamedTuple):
    """Points of a curve: ``x`` (share of data retained) and ``y`` (accuracy or risk on it)."""

    x: Tensor
    y: Tensor


def _scores(scores: Any, what: str = "scores") -> Tensor:
    s = as_numbers(scores, what)
    s = s.to(working_type(s.device))
    if s.ndim != 1 or len(s) == 0:
        raise UncertaintyError(f"{what} have shape {tuple(s.shape)}; one number per example is needed.")
    if not bool(torch.isfinite(s).all()):
        raise UncertaintyError(f"{what} hold NaN or infinity at example {int((~torch.isfinite(s)).nonzero()[0])}.")
    return s


class _Sorted(NamedTuple):
    """Truth values in ascending order of their scores, along the last axis, with the borders of each group of ties.

    ``first`` and ``last`` (exclusive) are the places of the group that an entry belongs to; ``before`` counts the
    truths in front of every place, N + 1 of them. No step waits for the device.
    """

    truth: Tensor
    first: Tensor
    last: Tensor
    before: Tensor


def _sorted(scores: Tensor, truth: Tensor) -> _Sorted:
    ordered, order = scores.sort(-1)
    flags = truth.to(scores.dtype).expand_as(scores).gather(-1, order)
    first = torch.searchsorted(ordered, ordered)
    last = torch.searchsorted(ordered, ordered, right=True)
    return _Sorted(flags, first, last, torch.nn.functional.pad(flags.cumsum(-1), (1, 0)))


def _truth(truth: Any, s: Tensor) -> Tensor:
    return as_truth(truth, "scores", s)


def auroc(scores: Any, positive: Any) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, equal scores counting half.

    The Mann-Whitney statistic from mid-ranks. NaN when there are no positives or no negatives: the question has
    no answer then, and 0.5 would be an invention.
    """
    s = _scores(scores)
    return float(auroc_of(_sorted(s, _truth(positive, s))))


def auroc_of(s: _Sorted) -> Tensor:
    """``auroc`` of sorted truth values, one number for each row."""
    n_pos = s.before[..., -1]
    n_neg = s.truth.shape[-1] - n_pos
    total = ((s.first + s.last + 1) / 2 * s.truth).sum(-1)  # the mean of the ranks that tied entries share
    return (total - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)  # 0/0 is NaN, as promised


def roc_curve(scores: Any, positive: Any) -> Curve:
    """ROC curve: share of negatives (``x``) and of positives (``y``) at or above each threshold, from (0, 0) to (1, 1).

    Equal scores are one threshold, so the curve goes straight through ties; the area below it is ``auroc``.
    """
    s = _scores(scores)
    pos = _truth(positive, s)
    _, group, count = torch.unique(-s, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(count), dtype=s.dtype, device=s.device).index_add_(0, group, pos.to(s.dtype))
    hits, misses = hits.cumsum(0), (count - hits).cumsum(0)
    start = hits.new_zeros(1)
    return Curve(torch.cat([start, misses / misses[-1]]), torch.cat([start, hits / hits[-1]]))


def detection(scores_in: Any, scores_out: Any) -> dict[str, float]:
    """How well a score (high: unsure) tells out-of-distribution inputs from those of the known distribution.

    - ``auroc``: chance that an outlier scores above an inlier, ties counting half
    - ``fpr95``: share of inliers flagged at the highest threshold (score >= t) that flags at least 95 % of outliers
    - ``fpr95_inliers``: the other usual convention (ODIN): share of outliers passed (score <= t) at the lowest
      threshold that passes at least 95 % of inliers
    - ``aupr``: average precision with outliers as positives, equal scores as one step
    """
    low, high = _scores(scores_in, "in-distribution scores"), _scores(scores_out, "out-of-distribution scores")
    high = high.to(low.device)
    s = torch.cat([low, high])
    outside = torch.arange(len(s), device=s.device) >= len(low)
    ranked = _sorted(s, outside)
    found = {
        "auroc": auroc_of(ranked),
        "fpr95": fpr95_of(ranked),
        "fpr95_inliers": fpr95_of(_sorted(-s, ~outside)),
        "aupr": _average_precision(ranked),
    }
    return dict(zip(found, torch.stack(list(found.values())).tolist()))  # one transfer from the device


def fpr95_of(s: _Sorted, share: float = 0.95) -> Tensor:
    """Share of the others at or above the highest threshold that has ``share`` of the truths at or above it.

    One number for each row; NaN where there are no truths or no others.
    """
    n, total = s.truth.shape[-1], s.before[..., -1:]
    need = (total * share - 1e-9).ceil()  # the tolerance undoes 0.95 * 20 = 18.999999999999996
    caught = total - s.before.gather(-1, s.first)  # for each entry: truths that score as high or higher
    place = torch.where(caught >= need, s.first, 0).amax(-1, keepdim=True)
    flagged = (n - place) - (total - s.before.gather(-1, place))
    return torch.where(total > 0, flagged / (n - total), torch.nan).squeeze(-1)  # 0/0 is NaN


def _average_precision(s: _Sorted) -> Tensor:
    """Sum of precision times gained recall over distinct thresholds: the mean precision at the positives' scores."""
    total = s.before[-1]
    precision = (total - s.before[s.first]) / (len(s.truth) - s.first)  # of all that score as high or higher
    return (precision * s.truth).sum() / total


def retained_curve(scores: Any, correct: Any) -> Curve:
    """Accuracy on the k surest inputs against the share k/N of data retained (Fischer, Figs. 2, 4, 6, 7).

    Inputs of equal score have no order: within such a group every input counts as right with the group's share of
    right ones, which is the expectation over all orders, so the curve never depends on how the data were sorted.
    """
    s = _scores(scores)
    y = retained_of(_sorted(s, _truth(correct, s)))
    return Curve(torch.arange(1, len(s) + 1, device=s.device, dtype=s.dtype) / len(s), y)


def retained_of(s: _Sorted) -> Tensor:
    """``retained_curve`` (its y) of sorted truth values, one curve for each row."""
    k = torch.arange(1, s.truth.shape[-1] + 1, device=s.truth.device, dtype=s.truth.dtype)
    ahead = s.before.gather(-1, s.first)
    share = (s.before.gather(-1, s.last) - ahead) / (s.last - s.first)
    return (ahead + (k - s.first) * share) / k


def retained_area(scores: Any, correct: Any) -> float:
    """Area under ``retained_curve``: the mean accuracy over all shares retained; 1 - this is the AURC."""
    return float(retained_curve(scores, correct).y.mean())


def risk_coverage(scores: Any, correct: Any) -> Curve:
    """Share of errors among the answered against the share answered when the least sure are left out first."""
    curve = retained_curve(scores, correct)
    return Curve(curve.x, 1 - curve.y)


def accuracy_at(scores: Any, correct: Any, retained: float) -> float:
    """Accuracy to expect when only the surest ``retained`` share of inputs is answered (at least one input)."""
    if not isinstance(retained, Real) or not 0 < retained <= 1:
        raise UncertaintyError(f"retained share {retained!r} is outside (0, 1].")
    curve = retained_curve(scores, correct)
    k = max(1, round(retained * len(curve.x)))
    return float(curve.y[k - 1])
