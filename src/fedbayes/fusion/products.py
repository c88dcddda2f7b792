"""Rules that multiply densities: precisions add."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import ConfigError, PosteriorError
from ..posterior import Gaussian
from .pairs import two_product, two_sum
from .rule import Rule, Statistics, WeightSums, register


@register
@dataclass(frozen=True)
class Conflation(Rule):
    """The normalised product of the clients' densities (Fischer eq. 15; Loomis FedIV): inverse-variance weighting."""

    name: ClassVar[str] = "conflation"
    aliases: ClassVar[tuple[str, ...]] = ("fediv", "inverse-variance", "iv", "ep-mcmc", "product")
    formula: ClassVar[str] = "1/σ² = Σ 1/σₖ²; μ = σ² Σ μₖ/σₖ²"
    papers: ClassVar[str] = "Fischer 2024 eq. (15); Loomis 2023 FedIV; Hill 2008"
    effect: ClassVar[str] = "divides it by about K each round"
    when: ClassVar[str] = (
        "one round with the prior shared among clients (kl_scale = shared): over many rounds σ collapses"
    )
    weighs: ClassVar[bool] = False

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        precision = 1 / q.variance
        return {"precision": precision, "shift": precision * q.mean}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        return Gaussian(total["shift"] / total["precision"], 1 / total["precision"])


@dataclass(frozen=True)
class _WeightedProduct(Rule):
    """Precision-weighted mean with weights; subclasses scale the variance."""

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        precision = weight / q.variance
        return {"precision": precision, "shift": precision * q.mean}


@register
@dataclass(frozen=True)
class WC(_WeightedProduct):
    """Weighted conflation (Fischer eq. 16; Ozer CF). With equal weights it is conflation."""

    name: ClassVar[str] = "wc"
    aliases: ClassVar[tuple[str, ...]] = ("cf", "weighted-conflation")
    formula: ClassVar[str] = "1/σ² = Σ wₖ/σₖ² / max w; μ = Σ wₖμₖ/σₖ² / Σ wₖ/σₖ²"
    papers: ClassVar[str] = "Fischer 2024 eq. (16) WC; Ozer 2022 CF"
    effect: ClassVar[str] = "divides it by about K each round"
    when: ClassVar[str] = "as conflation, when clients' sizes differ"

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        return Gaussian(total["shift"] / total["precision"], weights.largest / total["precision"])


@register
@dataclass(frozen=True)
class LLP(_WeightedProduct):
    """Log-linear pooling: the weighted geometric mean of the densities; the minimiser of the reverse KL."""

    name: ClassVar[str] = "llp"
    aliases: ClassVar[tuple[str, ...]] = ("log-linear", "log-linear-pooling", "rkl", "feduab")
    formula: ClassVar[str] = "1/σ² = Σ wₖ/σₖ²; μ = σ² Σ wₖμₖ/σₖ²"
    papers: ClassVar[str] = "Fischer 2024 §2.5.4 (LLP); BA-BFL rkl; FedUAB"
    effect: ClassVar[str] = "keeps it: harmonic mean, at most that of aalv"
    when: ClassVar[str] = "certain clients should count more, without shrinking σ"

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        return Gaussian(total["shift"] / total["precision"], weights.total / total["precision"])


@register
@dataclass(frozen=True)
class DWC(Rule):
    """Distributed weight consolidation: the product of the clients, the shared prior counted once (Fischer eq. 17).

    1/σ² = Σ 1/σₖ² - (K-1)/σ₀², where q₀ is the previous global posterior, the prior every client started from.
    Exact for conjugate models with disjoint data. The mean is written about q₀, μ = μ₀ + σ² Σ (μₖ-μ₀)/σₖ², and moves
    and precisions are pairs of float64, so nothing is lost however little or much the clients differ from q₀.
    A client less certain than the prior can make the precision non-positive; the option ``repair`` says what happens there.
    """

    name: ClassVar[str] = "dwc"
    aliases: ClassVar[tuple[str, ...]] = ("distributed-weight-consolidation", "bcm", "bayesian-committee-machine")
    formula: ClassVar[str] = "1/σ² = Σ 1/σₖ² - (K-1)/σ₀²; μ = σ² (Σ μₖ/σₖ² - (K-1) μ₀/σ₀²)"
    papers: ClassVar[str] = "Fischer 2024 eq. (17) DWC; McClure 2018; Bayesian committee machine"
    effect: ClassVar[str] = "shrinks it by what the data tell, the prior counted once"
    when: ClassVar[str] = "clients' prior is the previous global posterior (objective.prior = previous)"
    needs_previous: ClassVar[bool] = True
    weighs: ClassVar[bool] = False

    repair: Literal["previous", "floor", "stop"] = "previous"
    """Where the precision is not positive: keep the previous global posterior; floor the precision at ``floor`` times the previous one's, keeping the previous mean; or stop."""
    floor: float = 0.01
    """Least precision relative to the previous global posterior's, for the policy floor."""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ConfigError(
                f"option 'floor' of the rule 'dwc' is {self.floor}; it must be a share of the previous precision, above 0 and at most 1."
            )

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        precision = 1 / q.variance
        move, error = two_sum(q.mean, -pivot.mean)
        shift, lost = two_product(precision, move)
        return {"precision": precision, "shift": shift, "shift_low": lost + precision * error}

    def terms_near(self, q: Gaussian, weight: Any, pivot: Gaussian) -> Statistics:
        precision = 1 / q.variance
        return {"precision": precision, "shift": precision * (q.mean - pivot.mean)}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        # q₀ is in the sum K-1 times too many.
        counted, counted_low = two_product(weights.count - 1.0, 1 / pivot.variance)
        difference, error = two_sum(total["precision"], -counted)
        low = total.get("precision_low", torch.zeros_like(error))
        precision = difference + (error + (low - counted_low))
        move = total["shift"] / precision
        product, product_low = two_product(move, precision)
        rest = (total["shift"] - product) - product_low + total.get("shift_low", torch.zeros_like(error))
        mean, lost = two_sum(pivot.mean, move)
        return Gaussian(mean + (lost + rest / precision), 1 / precision)

    def mend(self, fused: Gaussian, pivot: Gaussian) -> tuple[Gaussian, Tensor | None]:
        bad = ~((fused.variance > 0) & torch.isfinite(fused.variance) & torch.isfinite(fused.mean))
        if self.repair == "stop" and bool(bad.any()):
            raise PosteriorError(
                f"dwc: the precision of {int(bad.sum())} of {bad.numel()} weights is not positive, because clients are less certain "
                "than the previous global posterior; train longer or start from a wider posterior, or set repair=previous."
            )
        kept = pivot.variance if self.repair != "floor" else pivot.variance / self.floor
        mean, variance = torch.where(bad, pivot.mean, fused.mean), torch.where(bad, kept, fused.variance)
        return Gaussian(mean, variance), bad


@register
@dataclass(frozen=True)
class Precision(Rule):
    """Precision-weighted averaging of point models (Reyes eq. 6): each weight by the inverse of its estimated variance.

    A client's variance is the second raw moment v of its gradients (Adam's). The paper gives v two meanings.
    ``sign="inverse"`` is eq. (6) with v as the variance: μ = Σ μₖ/vₖ / Σ 1/vₖ. ``sign="fisher"`` is its section 3, where v
    estimates the Fisher information, the inverse of the variance: μ = Σ vₖμₖ / Σ vₖ. The fused v is the one of the estimate
    in the same units: 1/Σ 1/vₖ, or Σ vₖ. Tensors without an estimate are points and are averaged by weight.
    """

    name: ClassVar[str] = "precision"
    aliases: ClassVar[tuple[str, ...]] = ("precision-weighted", "pw", "pwfl")
    formula: ClassVar[str] = "μ = Σ μₖ/vₖ / Σ 1/vₖ (inverse), or Σ vₖμₖ / Σ vₖ (fisher)"
    papers: ClassVar[str] = "Reyes 2021 eq. (6), both readings of the sign"
    effect: ClassVar[str] = "v is an estimate of each round, not a posterior's variance"
    when: ClassVar[str] = (
        "point models with Adam's second moment captured; on non-IID clients sign=fisher: eq. (6) taken literally favours "
        "clients that lack a class (docs/reproductions.md)"
    )
    weighs: ClassVar[bool] = False
    allows_zero_variance: ClassVar[bool] = True

    sign: Literal["inverse", "fisher"] = "inverse"
    """inverse: weigh by 1/v (eq. 6); fisher: weigh by v (section 3)."""
    floor: float = 1e-16
    """Least v: the square of torch's eps, below which Adam itself cannot tell v from zero (dead units have v = 0)."""
    by_size: bool = False
    """Whether the client's weight multiplies (eq. 6 has no such factor)."""
    bias_correction: bool = True
    """Whether clients divide v by 1 - beta2^t; without it a client that took few steps seems to have a small v."""

    def __post_init__(self) -> None:
        if not 0 < self.floor < math.inf:
            raise ConfigError(
                f"option 'floor' of the rule 'precision' is {self.floor}; it must be positive and finite."
            )

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        v = q.variance.clamp(min=self.floor)
        precision = 1 / v if self.sign == "inverse" else v
        if self.by_size:
            precision = precision * weight
        return {"precision": precision, "shift": precision * q.mean}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        precision = total["precision"]
        scaled = precision / weights.total if self.by_size else precision
        return Gaussian(total["shift"] / precision, 1 / scaled if self.sign == "inverse" else scaled)
