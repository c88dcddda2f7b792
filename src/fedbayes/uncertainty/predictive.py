"""Per-input uncertainty from M sampled predictions: entropy, Kwon's decomposition, mutual information, variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ._checks import (
    UncertaintyError,
    as_numbers,
    as_probabilities,
    check_values,
    chunks,
    raise_for_values,
    working_type,
)

UNCERTAINTIES = ("entropy", "aleatoric", "epistemic", "mutual_information")
"""The names by which inputs can be ranked from sure to unsure."""


def predictive_mean(probabilities: Any) -> Tensor:
    """Mean over the M samples, (N, C), in float64: the prediction of a Bayesian network.

    M equal samples give exactly that sample, whatever rounding a sum of M would bring.
    """
    p = as_probabilities(probabilities)
    return assembled(p, lambda q: {"mean": _mean_and_deltas(q)[0]})["mean"]


def per_example(probabilities: Any) -> dict[str, Tensor]:
    """Everything known of each input, as tensors of length N on the device of ``probabilities`` (M, N, C).

    - ``prediction``: the class of highest mean probability (the first one of equals); ``confidence``: that probability
    - ``entropy``: normalised predictive entropy in [0, 1], -sum p log p / log C (Fischer eq. 8)
    - ``aleatoric``: trace of Kwon's aleatoric covariance, mean over samples of 1 - |p_m|^2 (Fischer eq. 9, left)
    - ``epistemic``: trace of Kwon's epistemic covariance, mean of |p_m - mean|^2 (eq. 9, right); 0 when M = 1
    - ``mutual_information``: H(mean) - mean H(p_m) in nats, computed as the mean KL(p_m || mean), never negative
    - ``predictive_variance``: as Loomis reports it (see ``predictive_variance``)

    aleatoric + epistemic = 1 - |mean|^2, the variance of a one-hot draw from the mean prediction.
    """
    values = every_value(as_probabilities(probabilities))
    return {name: value for name, value in values.items() if name != "mean"}


def covariances(probabilities: Any) -> tuple[Tensor, Tensor]:
    """Kwon's aleatoric and epistemic covariance matrices (Fischer eq. 9), each (N, C, C), in float64.

    Memory grows with N C²; for the traces use ``per_example``.
    """
    p = as_probabilities(probabilities)

    def both(q: Tensor) -> dict[str, Tensor]:
        _, deltas = _mean_and_deltas(q)
        second = torch.einsum("mnc,mnd->ncd", q, q) / len(q)
        return {
            "aleatoric": torch.diag_embed(q.mean(0)) - second,
            "epistemic": torch.einsum("mnc,mnd->ncd", deltas, deltas) / len(q),
        }

    found = assembled(p, both)
    return found["aleatoric"], found["epistemic"]


def entropy(mean: Any) -> Tensor:
    """Normalised entropy of each row of (..., C): 0 for a certain class, 1 for all classes alike (Fischer eq. 8)."""
    p = as_numbers(mean, "probabilities")
    if p.ndim == 0:
        raise UncertaintyError("probabilities are a single number; a row of them, one per class, is needed.")
    rows = as_probabilities(p.reshape(1, -1, p.shape[-1]) if p.numel() else p[None, None])
    return _entropy(_load(rows, slice(0, rows.shape[1]))[0]).reshape(p.shape[:-1])


def _entropy(mean: Tensor) -> Tensor:
    classes = mean.shape[-1]
    if classes == 1:
        return torch.zeros_like(mean[..., 0])
    return (-torch.special.xlogy(mean, mean).sum(-1) / math.log(classes)).clamp(0, 1)


def predictive_variance(probabilities: Any, reading: Literal["sum", "mean", "predicted"] = "sum") -> Tensor:
    """Variance of the M predictions for each input, (N,): the thesis's "variance, a measure of epistemic uncertainty".

    Loomis (2023, ch. 3 and Tables 4.1-4.5) prints no formula. It is 0 for a deterministic network, so it is the
    variance over the samples (divided by M) of the class probabilities; whether these are summed over the classes
    (``sum``: its 0.03-0.09 is the size of that sum, and it equals the trace of Kwon's epistemic matrix), averaged
    (``mean``), or taken of the predicted class alone (``predicted``) is a reading.
    """
    p = as_probabilities(probabilities)
    if reading not in ("sum", "mean", "predicted"):
        raise UncertaintyError(f"reading '{reading}' of the predictive variance is unknown; sum, mean, predicted are.")

    def read(q: Tensor) -> dict[str, Tensor]:
        mean, deltas = _mean_and_deltas(q)
        variance = (deltas**2).mean(0)
        if reading == "sum":
            return {reading: variance.sum(-1)}
        if reading == "mean":
            return {reading: variance.mean(-1)}
        return {reading: variance.gather(-1, first_argmax(mean)[:, None])[:, 0]}

    return assembled(p, read)[reading]


def first_argmax(rows: Tensor) -> Tensor:
    """Index of the largest entry of each row, the first one of equals (torch.argmax promises no order on a GPU)."""
    index = torch.arange(rows.shape[-1], device=rows.device)
    return torch.where(rows == rows.amax(-1, keepdim=True), index, rows.shape[-1]).amin(-1)


def ranking_scores(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of ``per_example`` by which inputs are ranked from sure to unsure, in the usual order.

    Rounded to single precision, which is that of a network's probabilities: what differs by the rounding of float64 (even
    votes summed in another order) then ties, whatever its size, and no difference that a float32 could show is lost.
    """
    return {name: values[name].float().to(values[name].dtype) for name in UNCERTAINTIES}


def assembled(p: Tensor, work: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Results of ``work``, done on some examples at a time, for all of them.

    They are written into tensors made beforehand: small results kept among large temporaries would scatter over the
    heap, and it would grow with every chunk.
    """
    found: dict[str, Tensor] = {}
    for s in chunks(p):
        for name, value in work(_load(p, s)).items():
            if name not in found:
                found[name] = value.new_empty((p.shape[1], *value.shape[1:]))
            found[name][s] = value
    return found


def every_value(p: Tensor) -> dict[str, Tensor]:
    """``per_example`` of probabilities (M, N, C), and the ``mean`` prediction (N, C)."""
    return assembled(p, _per_example)


def _load(p: Tensor, s: slice) -> Tensor:
    """Return a chunk in working precision, checked to be probabilities."""
    part = p[:, s].to(working_type(p.device))
    if not bool(check_values(part)):
        raise_for_values(part, s.start)
    return part.clamp(0, 1)


def _mean_and_deltas(q: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over samples and deviations from it. Equal samples give exactly that sample and exactly 0.

    Otherwise it is the plain mean, so that classes that got equal votes stay tied.
    """
    mean = torch.where((q == q[0]).all(0), q[0], q.mean(0))
    return mean, q - mean


def _per_example(q: Tensor) -> dict[str, Tensor]:
    mean, deltas = _mean_and_deltas(q)
    epistemic = (deltas**2).mean(0).sum(-1)
    prediction = first_argmax(mean)
    return {
        "mean": mean,
        "prediction": prediction,
        "confidence": mean.gather(-1, prediction[:, None])[:, 0],
        "entropy": _entropy(mean),
        "aleatoric": (q.sum(-1) - (q**2).sum(-1)).mean(0).clamp(min=0),
        "epistemic": epistemic,
        "mutual_information": _information(q, mean, deltas),
        "predictive_variance": epistemic,
    }


def _information(q: Tensor, mean: Tensor, deltas: Tensor) -> Tensor:
    """Mean over the samples of KL(p_m || mean), from the deviations, so that a tiny spread is not lost in rounding.

    q log(q / mean) - (q - mean) is never negative, and what is taken off sums to 0 over the samples.
    """
    ratio = deltas / mean.clamp(min=torch.finfo(mean.dtype).tiny)
    ratio = ratio.clamp(min=torch.finfo(mean.dtype).eps / 2 - 1)  # q = 0: 0 log 0 is 0
    return (q * ratio.log1p() - deltas).sum(-1).mean(0).clamp(min=0)
