"""All scalars of one evaluation by name, and of a detection of out-of-distribution inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import as_labels, as_probabilities, chunks
from .calibration import brier, classwise_gap, nll, tabulate
from .predictive import UNCERTAINTIES, _per_example, per_example, ranking_scores
from .ranking import _auroc, detection, retained_curve

AVERAGED = ("entropy", "aleatoric", "epistemic", "mutual_information", "predictive_variance")


def summarize(probabilities: Any, labels: Any, bins: int = 15) -> dict[str, float]:
    """Every scalar of an evaluation by name, from the class probabilities (M, N, C) of M samples and N labels.

    ``accuracy, nll, brier, ece, ece_mass, ece_classwise, confidence, entropy, aleatoric, epistemic,
    mutual_information, predictive_variance``, then for each uncertainty U of entropy, aleatoric, epistemic and
    mutual_information: ``auroc_error_U`` (does U find the network's own errors; NaN when all answers are right or
    all wrong) and ``retained_U`` (area under accuracy against data retained). All are shares or nats, none percent.

    Works on the device of ``probabilities``, in float64, some thousand examples at a time, so that 25 samples of
    50,000 examples and 100 classes need little beside the input. A deterministic network is M = 1: epistemic 0.
    """
    p = as_probabilities(probabilities)
    y = as_labels(labels, p)
    parts = [_per_example(p, s) for s in chunks(p)]
    v = {name: torch.cat([part.pop(name) for part in parts]) for name in tuple(parts[0])}
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
    for name in UNCERTAINTIES:
        table[f"auroc_error_{name}"] = _auroc(v[name], ~correct)
        table[f"retained_{name}"] = retained_curve(v[name], correct).y.mean()
    return dict(zip(table, torch.stack(list(table.values())).tolist()))  # one transfer from the device


def summarize_outliers(probabilities: Any, probabilities_out: Any) -> dict[str, float]:
    """Scalars of an out-of-distribution set: its mean uncertainties, and how well each tells it from the known data.

    ``entropy, aleatoric, epistemic, mutual_information, confidence`` of the outliers, and for each uncertainty U
    ``auroc_U``, ``fpr95_U`` and ``aupr_U`` of detecting them among the inputs of ``probabilities`` (see ``detection``).
    """
    known, outliers = per_example(probabilities), per_example(probabilities_out)
    table = {name: float(outliers[name].mean()) for name in (*AVERAGED, "confidence")}
    for name, scores in ranking_scores(outliers).items():
        found = detection(known[name], scores)
        table |= {f"{key}_{name}": found[key] for key in ("auroc", "fpr95", "aupr")}
    return table


def _table_error(confidence: Tensor, correct: Tensor, bins: int, binning: Any) -> Tensor:
    """``ReliabilityTable.error`` without leaving the device."""
    table = tabulate(confidence, correct, bins, binning)
    gap = (table.confidence - table.accuracy).abs() * table.count
    return torch.nan_to_num(gap).sum() / len(confidence)
