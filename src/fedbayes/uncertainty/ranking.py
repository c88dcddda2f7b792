"""Ranking inputs by a score: accuracy retained, risk-coverage, AUROC and FPR95, all with ties treated as ties."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import UncertaintyError, working_type


class Curve(NamedTuple):
    """Points of a curve: ``x`` (share of data retained) and ``y`` (accuracy or risk on it)."""

    x: Tensor
    y: Tensor


def _scores(scores: Any, what: str = "scores") -> Tensor:
    s = torch.as_tensor(scores)
    s = s.to(working_type(s.device))
    if s.ndim != 1 or len(s) == 0:
        raise UncertaintyError(f"{what} have shape {tuple(s.shape)}; one number per example is needed.")
    if not bool(torch.isfinite(s).all()):
        raise UncertaintyError(f"{what} hold NaN or infinity at example {int((~torch.isfinite(s)).nonzero()[0])}.")
    return s


def _mid_ranks(s: Tensor) -> Tensor:
    """Rank of each entry, 1 the smallest; equal entries share the mean of their ranks."""
    _, group, count = torch.unique(s, return_inverse=True, return_counts=True)
    last = count.cumsum(0)
    return (last - (count - 1) / 2)[group].to(s.dtype)


def auroc(scores: Any, positive: Any) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, equal scores counting half.

    The Mann-Whitney statistic from mid-ranks. NaN when there are no positives or no negatives: the question has
    no answer then, and 0.5 would be an invention.
    """
    s = _scores(scores)
    pos = torch.as_tensor(positive, device=s.device).bool()
    if pos.shape != s.shape:
        raise UncertaintyError(f"{tuple(pos.shape)} truth values for {tuple(s.shape)} scores; they must match.")
    return float(_auroc(s, pos))


def _auroc(s: Tensor, pos: Tensor) -> Tensor:
    n_pos = pos.sum().to(s.dtype)
    n_neg = len(s) - n_pos
    total = (_mid_ranks(s) * pos).sum()
    return (total - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)  # 0/0 is NaN, as promised


def roc_curve(scores: Any, positive: Any) -> Curve:
    """ROC curve: share of negatives (``x``) and of positives (``y``) at or above each threshold, from (0, 0) to (1, 1).

    Equal scores are one threshold, so the curve goes straight through ties; the area below it is ``auroc``.
    """
    s = _scores(scores)
    pos = torch.as_tensor(positive, device=s.device).bool()
    if pos.shape != s.shape:
        raise UncertaintyError(f"{tuple(pos.shape)} truth values for {tuple(s.shape)} scores; they must match.")
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
    pos = torch.arange(len(s), device=s.device) >= len(low)
    return {
        "auroc": float(_auroc(s, pos)),
        "fpr95": _share_caught(caught=high, others=low, share=0.95),
        "fpr95_inliers": _share_caught(caught=-low, others=-high, share=0.95),
        "aupr": _average_precision(s, pos),
    }


def _share_caught(caught: Tensor, others: Tensor, share: float) -> float:
    """Share of ``others`` at or above the highest threshold that has at least ``share`` of ``caught`` at or above."""
    descending = caught.sort(descending=True).values
    # the smallest count k with k / n >= share; the tolerance undoes 0.95 * 20 = 18.999999999999996
    need = max(1, int(torch.ceil(torch.tensor(share * len(caught) - 1e-9, dtype=torch.float64))))
    return float((others >= descending[need - 1]).to(others.dtype).mean())


def _average_precision(s: Tensor, pos: Tensor) -> float:
    """Sum of precision times gained recall over distinct thresholds from the highest down."""
    _, group, count = torch.unique(-s, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(count), dtype=s.dtype, device=s.device).index_add_(0, group, pos.to(s.dtype))
    precision = hits.cumsum(0) / count.cumsum(0)
    return float((precision * hits).sum() / hits.sum())


def retained_curve(scores: Any, correct: Any) -> Curve:
    """Accuracy on the k surest inputs against the share k/N of data retained (Fischer, Figs. 2, 4, 6, 7).

    Inputs of equal score have no order: within such a group every input counts as right with the group's share of
    right ones, which is the expectation over all orders, so the curve never depends on how the data were sorted.
    """
    s = _scores(scores)
    right = torch.as_tensor(correct, device=s.device).to(s.dtype)
    if right.shape != s.shape:
        raise UncertaintyError(f"{tuple(right.shape)} truth values for {tuple(s.shape)} scores; they must match.")
    _, group, count = torch.unique(s, return_inverse=True, return_counts=True)
    share = torch.zeros(len(count), dtype=s.dtype, device=s.device).index_add_(0, group, right) / count
    expected = torch.repeat_interleave(share, count)
    k = torch.arange(1, len(s) + 1, device=s.device, dtype=s.dtype)
    return Curve(k / len(s), expected.cumsum(0) / k)


def retained_area(scores: Any, correct: Any) -> float:
    """Area under ``retained_curve``: the mean accuracy over all shares retained; 1 - this is the AURC."""
    return float(retained_curve(scores, correct).y.mean())


def risk_coverage(scores: Any, correct: Any) -> Curve:
    """Share of errors among the answered against the share answered when the least sure are left out first."""
    curve = retained_curve(scores, correct)
    return Curve(curve.x, 1 - curve.y)


def accuracy_at(scores: Any, correct: Any, retained: float) -> float:
    """Accuracy to expect when only the surest ``retained`` share of inputs is answered (at least one input)."""
    if not 0 < retained <= 1:
        raise UncertaintyError(f"retained share {retained} is outside (0, 1].")
    curve = retained_curve(scores, correct)
    k = max(1, round(retained * len(curve.x)))
    return float(curve.y[k - 1])
