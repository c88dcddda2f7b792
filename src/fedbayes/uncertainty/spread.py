"""How wide a posterior is: sigma per layer, signal-to-noise ratio; and Reyes' reliability index of a set of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import UncertaintyError, as_numbers

QUANTILES = (0.05, 0.5, 0.95)


def sigma_by_layer(gaussians: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Standard deviation of every Gaussian tensor: mean and the 5, 50 and 95 % quantiles, by name.

    ``gaussians`` is ``Posterior.gaussians``: name to (mean, variance). Empty for a deterministic network.
    """
    return {name: _spread(_numbers(variance, name).sqrt()) for name, (_, variance) in gaussians.items()}


def signal_to_noise(gaussians: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """|mean| / sigma of every weight, by layer: mean and quantiles, and the share of weights below 1.

    Weights with a ratio below 1 could be pruned (Graves 2011; Blundell et al. 2015). A weight of mean 0 and sigma 0
    counts as 0, one of sigma 0 alone as infinite; ``db`` is the median in decibel, 10 log10, as Blundell plots it.
    """
    out = {}
    for name, (mean, variance) in gaussians.items():
        mean, sigma = _numbers(mean, name).abs(), _numbers(variance, name).sqrt()
        ratio = torch.where(mean == 0, torch.zeros_like(mean), mean / sigma)
        row = _spread(ratio)
        median = row["q50"]
        row["db"] = 10 * math.log10(median) if 0 < median < math.inf else (-math.inf if median == 0 else math.inf)
        row["below_1"] = float((ratio < 1).double().mean())
        out[name] = row
    return out


def reliability_index(accuracies: Sequence[float], ddof: int = 0) -> float:
    """Reyes' reliability index in percent, (1 - sd/mean)·100, of test accuracies (Reyes et al. 2021, eq. 7).

    ``ddof`` 0 divides the variance by n, 1 by n - 1; the paper does not say which.
    """
    values = as_numbers(accuracies, "accuracies").double().flatten()
    if len(values) <= ddof:
        raise UncertaintyError(f"{len(values)} accuracies are too few for a standard deviation; {ddof + 1} are needed.")
    mean = float(values.mean())
    if not math.isfinite(mean) or mean <= 0:
        raise UncertaintyError(f"the mean accuracy is {mean}; it must be positive.")
    return (1 - float(values.std(correction=ddof)) / mean) * 100


def overall_reliability(groups: Sequence[Sequence[float]], ddof: int = 0) -> float:
    """Mean of the reliability indexes of several settings, e.g. batch sizes (Reyes et al. 2021, eq. 8)."""
    if not groups:
        raise UncertaintyError("no groups of accuracies were given; at least one is needed.")
    return sum(reliability_index(g, ddof) for g in groups) / len(groups)


def _numbers(values: Any, name: str) -> Tensor:
    return as_numbers(values, f"mean and variance of '{name}'").double()


def _spread(values: Tensor) -> dict[str, float]:
    ordered = values.flatten().sort().values  # torch.quantile refuses more than 16 million entries
    n = len(ordered)
    if n == 0:
        return {"mean": math.nan} | {f"q{round(q * 100):02d}": math.nan for q in QUANTILES}
    row = {"mean": float(ordered.mean())}
    for q in QUANTILES:
        position = q * (n - 1)
        low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
        row[f"q{round(q * 100):02d}"] = float(low if low == high else low + (high - low) * (position % 1))
    return row
