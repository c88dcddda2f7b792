"""Fusion in coordinates relative to the global posterior: what secure aggregation and differential privacy work on.

With m = (μₖ - μ_g)/σ_g and v = σₖ²/σ_g² the previous global posterior is N(0, 1) everywhere, statistics are numbers of
order one, and every rule that is a sum gives the same fused posterior as in absolute coordinates, because precision,
moments and their combinations all transform alike under a shift and a scale of each weight. Points become their
difference from the previous global ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..experiment import Experiment
from ..fusion import Accumulator, Fused, Rule, get_rule, get_weighting
from ..fusion.layout import Layout
from ..posterior import Gaussian, Posterior, Refusal, check, sigma_statistics
from .noise import secret_normal


class Relative:
    """Relative coordinates about one global posterior: to them, from them, and a rule's statistics in them as one vector."""

    def __init__(self, rule: Rule, reference: Posterior) -> None:
        self.rule, self.reference = rule, reference
        self.unit = Posterior(
            {n: _unit(g.mean) for n, g in reference.gaussians.items()},
            {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in reference.points.items()},
        )
        self.layout = Layout.of(self.unit)
        probe = self._terms(self.unit, 1.0, 0)
        self.names = sorted(probe)
        self.lengths = [probe[n].numel() for n in self.names]

    @property
    def size(self) -> int:
        """Numbers in a client's vector of statistics."""
        return sum(self.lengths)

    def to(self, posterior: Posterior) -> Posterior:
        """Return a client's posterior in relative coordinates, in float64."""
        gaussians = {}
        for name, g in posterior.gaussians.items():
            r = self.reference.gaussians[name]
            variance = r.variance.cpu().double()
            mean = (g.mean.cpu().double() - r.mean.cpu().double()) / variance.sqrt()
            gaussians[name] = Gaussian(mean, g.variance.cpu().double() / variance)
        points = {n: t.cpu().double() - self.reference.points[n].cpu().double() for n, t in posterior.points.items()}
        return Posterior(gaussians, points)

    def back(self, relative: Posterior) -> Posterior:
        """Return a posterior of relative coordinates in the reference's own, with the reference's types."""
        gaussians, points = {}, {}
        for name, g in relative.gaussians.items():
            r = self.reference.gaussians[name]
            variance = r.variance.cpu().double()
            mean = r.mean.cpu().double() + variance.sqrt() * g.mean
            new = (variance * g.variance).to(r.variance.dtype).clamp_(min=torch.finfo(r.variance.dtype).tiny)
            gaussians[name] = Gaussian(mean.to(r.mean.dtype).to(r.mean.device), new.to(r.mean.device))
        for name, move in relative.points.items():
            old = self.reference.points[name]
            new = old.cpu().double() + move
            new = new.clamp(min=0) if name.endswith("running_var") else new
            points[name] = (new if old.dtype.is_floating_point else new.round()).to(old.dtype).to(old.device)
        return Posterior(gaussians, points, self.reference.metadata)

    def vector(self, posterior: Posterior, weight: float, client: int) -> Tensor:
        """Return a client's statistics as one float64 vector (unchecked)."""
        terms = self._terms(self.to(posterior), weight, client)
        return torch.cat([terms[n] for n in self.names])

    def idle(self, weight: float, client: int) -> Tensor:
        """Return the statistics of a client that did not move: the point about which moves are clipped."""
        terms = self._terms(self.unit, weight, client)
        return torch.cat([terms[n] for n in self.names])

    def conclude(self, total: Tensor, weights: Mapping[int, float]) -> tuple[Posterior, dict[str, Any]]:
        """Return the fused posterior of a total, and the record of the fusion."""
        statistics = dict(zip(self.names, total.split(self.lengths)))
        accumulator = Accumulator(self.rule, reference=self.unit, previous=self.unit)
        accumulator.add_total(statistics, {str(c): w for c, w in weights.items()})
        fused = accumulator.conclude()
        posterior = self.back(fused.posterior)
        record = {k: v for k, v in fused.record.items() if k != "sigma"}
        if posterior.gaussians:
            record["sigma"] = sigma_statistics(posterior, self.reference)
        return posterior, record

    def _terms(self, relative: Posterior, weight: float, client: int) -> dict[str, Tensor]:
        """Return the statistics without their rounding errors, which are nothing beside a mask's grid and would be noised as if they were more."""
        terms = self.rule.summarize(relative, weight, self.unit, (client,), self.layout)
        return {name: term for name, term in terms.items() if not name.endswith("_low")}


def _unit(mean: Tensor) -> Gaussian:
    return Gaussian(torch.zeros(mean.shape, dtype=torch.float64), torch.ones(mean.shape, dtype=torch.float64))


def clip(move: Tensor, bound: float) -> tuple[Tensor, bool]:
    """Shorten a vector to at most ``bound``; return it and whether it was longer."""
    norm = float(torch.linalg.vector_norm(move))
    return (move * (bound / norm), True) if norm > bound else (move, False)


def sensitivity(rule: Rule, weights: Mapping[int, float], bound: float) -> float:
    """Largest norm by which one client can change the sum: the clip, times the largest weight where weights count."""
    return bound * (max(weights.values(), default=0.0) if rule.weighs else 1.0)


def clipped(relative: Relative, posterior: Posterior, weight: float, client: int, bound: float) -> tuple[Tensor, bool]:
    """Return a client's statistics with their distance from an idle client's clipped (``bound`` 0: as they are).

    A vector that is not finite (a variance near nothing under a rule of precisions) has no distance: it is refused.
    """
    vector = relative.vector(posterior, weight, client)
    if not torch.isfinite(vector).all():
        raise Refusal(client, "", "its statistics are not finite in units of the global posterior")
    if bound <= 0:
        return vector, False
    idle = relative.idle(weight, client)
    move, was = clip(vector - idle, bound * (weight if relative.rule.weighs else 1.0))
    return idle + move, was


class RelativeAccumulator:
    """Stands in for ``fusion.Accumulator`` when moves are clipped and noise is added: same methods, relative inside.

    ``noise`` is the standard deviation of the Gaussian noise on the total, drawn by ``generator`` so that a simulation
    repeats, or, without one, by ``secret_normal``.
    """

    def __init__(
        self, rule: Rule, reference: Posterior, *, bound: float = 0.0, noise: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        self.relative, self.reference, self.rule = Relative(_keeping_previous(rule), reference), reference, rule
        self.bound, self.noise, self.generator = bound, noise, generator
        self.weights: dict[int, float] = {}
        self.clipped: int | None = 0
        self.about: dict[str, Any] = {}  # added to the record
        self._total = torch.zeros(self.relative.size, dtype=torch.float64)

    def absorb(self, posterior: Posterior, weight: float = 1.0, client: int = 0) -> None:
        """Check a client's posterior, clip its move, add its statistics."""
        check(posterior, self.reference, client=client, allow_zero_variance=self.rule.allows_zero_variance)
        vector, was = clipped(self.relative, posterior, weight, client, self.bound)
        self._total += vector
        self.clipped = (self.clipped or 0) + was
        self.weights[client] = weight

    def add_total(self, total: Tensor, weights: Mapping[int, float]) -> None:
        """Take a total that secure aggregation gave; how many clients were clipped in it nobody knows."""
        self._total += total
        self.weights |= dict(weights)
        self.clipped = None

    def conclude(self) -> Fused:
        """Add the noise and make the fused posterior; where noise made a variance impossible, the previous one stays."""
        total = self._total
        if self.noise > 0:
            drawn = (
                secret_normal(total.numel())
                if self.generator is None
                else torch.randn(total.shape, dtype=torch.float64, generator=self.generator)
            )
            total = total + self.noise * drawn
        posterior, record = self.relative.conclude(total, self.weights)
        if self.about:
            record["privacy"] = {**self.about, "clipped": self.clipped}
        return Fused(posterior, record)


class _KeepsPrevious(Rule):
    """Mixed into a rule whose total carries noise: where that leaves no Gaussian, the previous one (the pivot) stays."""

    def mend(self, fused: Gaussian, pivot: Gaussian) -> tuple[Gaussian, Tensor | None]:
        fused, mask = super().mend(fused, pivot)
        least, most = 1e-12 * pivot.variance, 1e30  # in units of the previous variance and sigma
        bad = ~((fused.mean.abs() < most) & (fused.variance > least) & (fused.variance < most))
        kept = Gaussian(torch.where(bad, pivot.mean, fused.mean), torch.where(bad, pivot.variance, fused.variance))
        return kept, bad if mask is None else bad | mask


def _keeping_previous(rule: Rule) -> Rule:
    kind = type(rule)
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    return type(kind.__name__, (_KeepsPrevious, kind), {})(**values)


def refuse_unless_sum(experiment: Experiment, options: Mapping[str, str] | None = None) -> Rule:
    """Return the rule of a private experiment, or say in one sentence why it cannot be private."""
    rule = get_rule(experiment.fusion.rule, **(options or {}))
    weighting = get_weighting(experiment.fusion.weighting)
    what = "fusion.private" if experiment.fusion.private else "privacy.clip"
    if not rule.is_sum or rule.uses_individuals:
        raise ConfigError(
            f"{what}: the rule '{rule.name}' needs single clients' posteriors; choose a rule that is a sum."
        )
    if experiment.fusion.private and rule.allows_zero_variance:
        raise ConfigError(
            f"fusion.private: the rule '{rule.name}' adds up 1/v for estimates v down to zero, numbers of any size, which "
            "masks of a fixed step cannot carry; choose another rule."
        )
    if weighting.uses_individuals:
        raise ConfigError(
            f"{what}: the weighting '{weighting.name}' compares single clients' posteriors, which nobody may see; "
            "use fusion.weighting = equal or size."
        )
    if experiment.fusion.max_update:
        raise ConfigError(
            f"{what}: 'fusion.max_update' compares single clients' moves; set it to 0 (privacy.clip bounds them)."
        )
    if experiment.distill.enabled:
        raise ConfigError(f"{what}: distillation draws from single clients' models; set 'distill.enabled' to false.")
    if experiment.privacy.clip > 0:
        _refuse_unless_bounded(experiment, rule)
    elif experiment.privacy.noise > 0:
        raise ConfigError("privacy.noise without privacy.clip protects nothing: set 'privacy.clip' above 0.")
    return rule


def _refuse_unless_bounded(experiment: Experiment, rule: Rule) -> None:
    if get_weighting(experiment.fusion.weighting).name != "equal":
        raise ConfigError(
            "privacy.clip: weights by size tell how many examples a client holds; use fusion.weighting = equal."
        )
    if rule.draws:
        raise ConfigError(f"privacy.clip: the rule '{rule.name}' draws at random, so a move cannot be bounded; use lp.")
    for name, given, use in (("mean", "global", "none or client"), ("scale", "standard", "unit or none")):
        if getattr(experiment.data, name) == given:
            raise ConfigError(
                f"privacy.clip: 'data.{name} = {given}' is measured on everybody's data and carries no noise, so epsilon would "
                f"not cover it; use data.{name} = {use}."
            )


def noise_of(experiment: Experiment, rule: Rule, weights: Mapping[int, float]) -> float:
    """Standard deviation of the noise on the total of a round: multiplier times sensitivity."""
    p = experiment.privacy
    return p.noise * sensitivity(rule, weights, p.clip) if p.clip > 0 else 0.0


def finite(value: float) -> float | None:
    """A number for JSON: None stands for infinity."""
    return value if math.isfinite(value) else None
