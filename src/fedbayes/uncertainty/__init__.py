"""How sure a prediction is: numbers from the class probabilities of M samples, shape (M, N, C).

``summarize`` gives the scalars of an evaluation by name, ``per_example`` what is known of each input; curves,
tables and the full covariance matrices have functions of their own. Everything runs on the device of its input,
treats ties as ties, and gives a deterministic network (M = 1) the same tables with an epistemic part of 0.
"""

from ._checks import UncertaintyError
from .calibration import ReliabilityTable, ece, ece_classwise, reliability_table, tabulate
from .predictive import (
    UNCERTAINTIES,
    covariances,
    entropy,
    per_example,
    predictive_mean,
    predictive_variance,
    ranking_scores,
)
from .ranking import Curve, accuracy_at, auroc, detection, retained_area, retained_curve, risk_coverage, roc_curve
from .spread import overall_reliability, reliability_index, sigma_by_layer, signal_to_noise
from .summary import summarize, summarize_outliers

__all__ = [
    "UNCERTAINTIES",
    "Curve",
    "ReliabilityTable",
    "UncertaintyError",
    "accuracy_at",
    "auroc",
    "covariances",
    "detection",
    "ece",
    "ece_classwise",
    "entropy",
    "overall_reliability",
    "per_example",
    "predictive_mean",
    "predictive_variance",
    "ranking_scores",
    "reliability_index",
    "reliability_table",
    "retained_area",
    "retained_curve",
    "risk_coverage",
    "roc_curve",
    "sigma_by_layer",
    "signal_to_noise",
    "summarize",
    "summarize_outliers",
    "tabulate",
]
