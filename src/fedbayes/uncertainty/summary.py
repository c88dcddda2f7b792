"""All scalars of one evaluation by name, and of a detection of out-of-distribution inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import UncertaintyError, as_labels, as_probabilities
from .calibration import binned, brier, classwise_gap, nll
from .predictive import UNCERTAINTIES, every_value, per_example, ranking_scores
from .ranking import _sorted, auroc_of, detection, fpr95_of, retained_of

AVERAGED = ("entropy", "aleatoric", "epistemic", "mutual_information", "predictive_variance")


def summarize(probabilities: Any, labels: Any, bins: int = 15) -> dict[str, float]:
    """Every scalar of an evaluation by name, from the class probabilities (M, N, C) of M samples and N labels.

    ``accuracy, nll, brier, ece, ece_mass, ece_classwise, confidence, entropy, aleatoric, epistemic,
    mutual_information, predictive_variance``, then for each uncertainty U of entropy, aleatoric, epistemic and
    mutual_information: ``auroc_error_U`` and ``fpr95_error_U`` (does U find the network's own errors; share of right
    answers flagged when 95 % of the wrong ones are; NaN when all answers are right or all wrong) and ``retained_U``
    (area under accuracy against data retained). All are shares or nats, none percent.

    Works on the device of ``probabilities``, in float64, a few hundred or thousand examples at a time, so that 25 samples
    of 50,000 examples and 100 classes need little beside the input. A deterministic network is M = 1: epistemic 0.
    """
    p = as_probabilities(probabilities)
    y = as_labels(labels, p)
    v = every_value(p)
    correct = v["prediction"] == y
    table = {
        "accuracy": correct.to(v["mean"].dtype).mean(),
        "nll": nll(v["mean"], y).mean(),
        "brier": brier(v["mean"], y).mean(),
        "ece": _table_error(v["confidence"], correct, bins, "width"),
        "ece_mass": _table_error(v["confidence"], correct, bins, "mass"),
        "ece_classwise": classwise_gap(v["mean"], y, bins),
        "confidence": v["confidence"].mean(),
    }
    table |= {name: v[name].mean() for name in AVERAGED}
    ranked = _sorted(torch.stack(list(ranking_scores(v).values())), ~correct)
    kept = 1 - retained_of(ranked).mean(-1)  # the curve of the errors, so 1 minus it is the accuracy
    for name, auroc, fpr95, area in zip(UNCERTAINTIES, auroc_of(ranked), fpr95_of(ranked), kept):
        table |= {f"auroc_error_{name}": auroc, f"fpr95_error_{name}": fpr95, f"retained_{name}": area}
    return dict(zip(table, torch.stack(list(table.values())).tolist()))  # one transfer from the device


def summarize_outliers(probabilities: Any, probabilities_out: Any) -> dict[str, float]:
    """Scalars of an out-of-distribution set: its mean uncertainties, and how well each tells it from the known data.

    ``entropy, aleatoric, epistemic, mutual_information, confidence`` of the outliers, and for each uncertainty U
    ``auroc_U``, ``fpr95_U`` and ``aupr_U`` of detecting them among the inputs of ``probabilities`` (see ``detection``).
    """
    p, out = as_probabilities(probabilities), as_probabilities(probabilities_out)
    if p.shape[2] != out.shape[2]:
        raise UncertaintyError(
            f"the known inputs have {p.shape[2]} classes and the outliers {out.shape[2]}; both need the same network."
        )
    known, outliers = per_example(p), per_example(out)
    inside, outside = ranking_scores(known), ranking_scores(outliers)
    names = (*AVERAGED, "confidence")
    table: dict[str, float] = dict(zip(names, torch.stack([outliers[name].mean() for name in names]).tolist()))
    for name, scores in outside.items():
        found = detection(inside[name], scores)
        table |= {f"{key}_{name}": found[key] for key in ("auroc", "fpr95", "aupr")}
    return table


def _table_error(confidence: Tensor, correct: Tensor, bins: int, binning: Any) -> Tensor:
    """``ReliabilityTable.error`` without leaving the device."""
    table = binned(confidence, correct, bins, binning)
    gap = (table.confidence - table.accuracy).abs() * table.count
    return torch.nan_to_num(gap).sum() / len(confidence)
