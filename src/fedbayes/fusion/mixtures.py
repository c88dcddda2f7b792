"""Rules that match the moments of the mixture of the clients' posteriors: exactly, or by sampling.

The variance of a mixture is a difference of moments, E[θ²] - E[θ]². With means near 1 and variances near 1e-10, float64
sums would leave four digits of it, or none. So moments are taken about the previous global mean, and first and second moments are
kept as pairs of float64, a value and its rounding error (``move`` and ``move_low``): about 32 digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..posterior import Gaussian
from ..seeds import torch_rng
from .pairs import two_product, two_sum
from .rule import Rule, Statistics, WeightSums, register


@dataclass(frozen=True)
class _Moments(Rule):
    """What mixture rules share: first and second moments about the pivot, in double-double arithmetic."""

    @staticmethod
    def moments(weight: Any, move: Tensor, move_low: Any, variance: Tensor) -> Statistics:
        """Return w·d, w·d² (each with its rounding error) and the weighted variance, for d = move + move_low."""
        first, first_low = two_product(weight, move)
        square, square_error = two_product(move, move)
        second, second_low = two_product(weight, square)
        return {
            "move": first,
            "move_low": first_low + weight * move_low,
            "square": second,
            "square_low": second_low + weight * (square_error + 2 * move * move_low),
            "variance": weight * variance,
        }

    @staticmethod
    def split(total: Statistics, weights: WeightSums) -> tuple[Tensor, Tensor]:
        """Return the mean move and W·Σwd² - (Σwd)² over W²: the variance of the clients' means."""
        w, w_low = weights.total, weights.total_low
        s1, s1_low = total["move"], total.get("move_low", torch.zeros_like(total["move"]))
        s2, s2_low = total["square"], total.get("square_low", torch.zeros_like(total["square"]))
        a, a_low = two_product(w, s2)
        b, b_low = two_product(s1, s1)
        a_low, b_low = a_low + w * s2_low + w_low * s2, b_low + 2 * s1 * s1_low
        difference, error = two_sum(a, -b)
        disagreement = (difference + (error + (a_low - b_low))) / (w * w)
        return (s1 + s1_low) / w, disagreement.clamp(min=0)


@register
@dataclass(frozen=True)
class LP(_Moments):
    """Linear pooling: the Gaussian with the mixture's mean and variance (Fischer eq. 12-14).

    σ² = Σ wσₖ² + Σ w(μₖ - μ)², the minimiser of the forward KL from the mixture.
    """

    name: ClassVar[str] = "lp"
    aliases: ClassVar[tuple[str, ...]] = ("linear-pooling", "fkl", "merging", "mixture")
    formula: ClassVar[str] = "μ = Σ wₖμₖ; σ² = Σ wₖ(σₖ² + (μₖ-μ)²)"
    papers: ClassVar[str] = "Fischer 2024 eq. (12)-(14) LP; BA-BFL fkl"
    effect: ClassVar[str] = "widens it by the clients' disagreement"
    when: ClassVar[str] = "disagreement between clients should show as uncertainty"

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        return {"mean": weight * q.mean, **self.moments(weight, *two_sum(q.mean, -pivot.mean), q.variance)}

    def terms_near(self, q: Gaussian, weight: Any, pivot: Gaussian) -> Statistics:
        move = q.mean - pivot.mean
        return {
            "mean": weight * q.mean,
            "move": weight * move,
            "square": weight * (move * move),
            "variance": weight * q.variance,
        }

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        _, disagreement = self.split(total, weights)
        return Gaussian(total["mean"] / weights.total, total["variance"] / weights.total + disagreement)


@register
@dataclass(frozen=True)
class PPA(_Moments):
    """Population pooling: draw wₖ·population values from every client, pool them, take mean and variance (Ozer PPA).

    The mean and the squared deviations of n Gaussian draws are themselves drawn (a normal and a chi-squared variable, independent of
    each other), so any population costs two draws a weight, and the result has exactly the distribution of pooling
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
    """Draws pooled per weight, shared among the clients by weight (each gives at least two)."""
    seed: int = 0
    """Seed of the draws; every client draws from (seed, "ppa", client)."""

    def __post_init__(self) -> None:
        if self.population < 2:
            raise ConfigError(f"option 'population' of the rule 'ppa' is {self.population}; it must be at least 2.")

    def mass(self, weight: float) -> float:
        return float(max(2, round(weight * self.population))) if weight > 0 else 0.0

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        rng = torch_rng(self.seed, "ppa", *address, device=q.mean.device)
        n = torch.as_tensor(weight, dtype=q.mean.dtype, device=q.mean.device)
        noise = torch.randn(q.mean.shape, dtype=q.mean.dtype, device=q.mean.device, generator=rng)
        move = q.mean - pivot.mean + noise * torch.sqrt(q.variance / n)
        half = ((n - 1) / 2).expand(q.mean.shape).contiguous()
        chi_squared = 2 * torch._standard_gamma(half, generator=rng)  # pyright: ignore - n - 1 degrees of freedom
        return self.moments(n, move, 0.0, chi_squared * q.variance / n)

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        n = weights.total
        move, disagreement = self.split(total, weights)
        return Gaussian(pivot.mean + move, (total["variance"] / n + disagreement) * (n / (n - 1)))
