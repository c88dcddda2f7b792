"""Rules that average: of variances, of log-variances, of standard deviations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..posterior import Gaussian
from .rule import Rule, Statistics, WeightSums, register


@register
@dataclass(frozen=True)
class NWA(Rule):
    """μ = Σ wμₖ, σ² = Σ wσₖ² (Fischer eq. 10; Ozer EAA). The variance of a typical client, however many there are."""

    name: ClassVar[str] = "nwa"
    aliases: ClassVar[tuple[str, ...]] = ("eaa", "naive-weighted-average", "clp")
    formula: ClassVar[str] = "μ = Σ wₖμₖ; σ² = Σ wₖσₖ²"
    papers: ClassVar[str] = "Fischer 2024 eq. (10) NWA; Ozer 2022 EAA; Loomis 2023 FedAvg (as described)"
    effect: ClassVar[str] = "keeps it: that of a typical client"
    when: ClassVar[str] = "the default; with the KL divided by the federation's examples"

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        return {"mean": weight * q.mean, "variance": weight * q.variance}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        return Gaussian(total["mean"] / weights.total, total["variance"] / weights.total)


@register
@dataclass(frozen=True)
class FedAvg(NWA):
    """Weighted mean of point models (McMahan 2017). Gaussians, where there are any, are fused as by ``nwa``."""

    name: ClassVar[str] = "fedavg"
    aliases: ClassVar[tuple[str, ...]] = ("fed-avg", "federated-averaging")
    formula: ClassVar[str] = "θ = Σ wₖθₖ"
    papers: ClassVar[str] = "McMahan 2017; the baseline of all five papers"
    effect: ClassVar[str] = "points have none (Gaussians: as nwa)"
    when: ClassVar[str] = "deterministic and MC-dropout networks"


@register
@dataclass(frozen=True)
class WS(Rule):
    """σ² = Σ w²σₖ²: the variance of a weighted sum of independent Gaussian variables (Fischer eq. 11; Ozer GAA)."""

    name: ClassVar[str] = "ws"
    aliases: ClassVar[tuple[str, ...]] = ("gaa", "weighted-sum", "arithmetic-varscale")
    formula: ClassVar[str] = "μ = Σ wₖμₖ; σ² = Σ wₖ²σₖ²"
    papers: ClassVar[str] = "Fischer 2024 eq. (11) WS; Ozer 2022 GAA; Loomis 2023 §2.3"
    effect: ClassVar[str] = "divides it by about K each round"
    when: ClassVar[str] = "one round, or accuracy alone matters: over many rounds σ collapses"

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        return {"mean": weight * q.mean, "variance": weight * weight * q.variance}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        return Gaussian(total["mean"] / weights.total, total["variance"] / weights.total**2)


@register
@dataclass(frozen=True)
class AALV(Rule):
    """σ² = exp Σ w log σₖ²: the geometric mean of the variances (Ozer AALV)."""

    name: ClassVar[str] = "aalv"
    aliases: ClassVar[tuple[str, ...]] = ("geometric", "log-variance")
    formula: ClassVar[str] = "μ = Σ wₖμₖ; σ² = exp Σ wₖ log σₖ²"
    papers: ClassVar[str] = "Ozer 2022 AALV"
    effect: ClassVar[str] = "keeps it: geometric mean, at most that of nwa"
    when: ClassVar[str] = "as nwa, when a few clients have far larger variances"

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        return {"mean": weight * q.mean, "log_variance": weight * torch.log(q.variance)}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        return Gaussian(total["mean"] / weights.total, torch.exp(total["log_variance"] / weights.total))


@register
@dataclass(frozen=True)
class Wasserstein(Rule):
    """σ = Σ wσₖ: the Wasserstein-2 barycentre of Gaussians (BA-BFL wb_diag)."""

    name: ClassVar[str] = "wasserstein"
    aliases: ClassVar[tuple[str, ...]] = ("wb", "wb-diag", "barycentre")
    formula: ClassVar[str] = "μ = Σ wₖμₖ; σ = Σ wₖσₖ"
    papers: ClassVar[str] = "BA-BFL wb_diag (2-Wasserstein barycentre)"
    effect: ClassVar[str] = "keeps it: between aalv and nwa"
    when: ClassVar[str] = "as nwa; the average of standard deviations"

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        return {"mean": weight * q.mean, "deviation": weight * torch.sqrt(q.variance)}

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        return Gaussian(total["mean"] / weights.total, (total["deviation"] / weights.total) ** 2)
