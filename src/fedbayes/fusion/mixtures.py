"""Rules that match the moments of the mixture of the clients' posteriors: exactly, or by sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import ConfigError
from ..posterior import Gaussian
from ..seeds import torch_rng
from .rule import Rule, Statistics, WeightSums, register


@register
@dataclass(frozen=True)
class LP(Rule):
    """Linear pooling: the Gaussian with the mixture's mean and variance (Fischer eq. 12-14).

    σ² = Σ w(σₖ² + (μₖ - μ)²), the minimiser of the forward KL from the mixture. Moments are taken about the previous
    global mean, so nothing cancels when means are large and variances tiny.
    """

    name: ClassVar[str] = "lp"
    aliases: ClassVar[tuple[str, ...]] = ("linear-pooling", "fkl", "merging", "mixture")
    formula: ClassVar[str] = "μ = Σ wₖμₖ; σ² = Σ wₖ(σₖ² + (μₖ-μ)²)"
    papers: ClassVar[str] = "Fischer 2024 eq. (12)-(14) LP; BA-BFL fkl"
    effect: ClassVar[str] = "widens it by the clients' disagreement"
    when: ClassVar[str] = "disagreement between clients should show as uncertainty"

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        move = q.mean - pivot.mean
        return {"move": weight * move, "second": weight * (q.variance + move * move)}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        move = total["move"] / weights.total
        return Gaussian(pivot.mean + move, total["second"] / weights.total - move * move)


@register
@dataclass(frozen=True)
class PPA(Rule):
    """Population pooling: draw wₖ·population values from every client, pool them, take mean and variance (Ozer PPA).

    The sum and the squared deviations of n Gaussian draws are themselves drawn (a normal and a chi-squared variable, which are
    independent), so any population costs two draws a weight, and the result has exactly the distribution of pooling
    the draws one by one. Weights should sum to one for ``population`` to be the size of the whole population.
    Converges to ``lp`` as the population grows.
    """

    name: ClassVar[str] = "ppa"
    aliases: ClassVar[tuple[str, ...]] = ("population", "population-pooling")
    formula: ClassVar[str] = "mean and variance of wₖ·M draws from each N(μₖ, σₖ²), pooled"
    papers: ClassVar[str] = "Ozer 2022 PPA"
    effect: ClassVar[str] = "that of lp, with sampling noise"
    when: ClassVar[str] = "comparison with Ozer 2022; otherwise lp is its exact limit"

    draws: ClassVar[bool] = True

    population: int = 1000
    """Draws pooled per weight, shared among the clients by weight (each gives at least one)."""
    seed: int = 0
    """Seed of the draws; every client draws from (seed, "ppa", client)."""

    def __post_init__(self) -> None:
        if self.population < 2:
            raise ConfigError(f"option 'population' of the rule 'ppa' is {self.population}; it must be at least 2.")

    def mass(self, weight: float) -> float:
        return float(max(1, round(weight * self.population))) if weight > 0 else 0.0

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        rng = torch_rng(self.seed, "ppa", *address, device=q.mean.device)
        n = torch.as_tensor(weight, dtype=q.mean.dtype, device=q.mean.device)
        noise = torch.randn(q.mean.shape, dtype=q.mean.dtype, device=q.mean.device, generator=rng)
        move = q.mean - pivot.mean + noise * torch.sqrt(q.variance / n)
        half = ((n - 1) / 2).expand(q.mean.shape)
        squares = 2 * torch._standard_gamma(half.clamp(min=0.5), generator=rng)  # chi-squared, n - 1 degrees of freedom
        squares = torch.where(half > 0, squares, 0.0) * q.variance
        return {"move": n * move, "second": squares + n * move * move}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        n = weights.total
        move = total["move"] / n
        spread = (total["second"] - n * move * move) / max(n - 1, 1.0)
        return Gaussian(pivot.mean + move, spread)
