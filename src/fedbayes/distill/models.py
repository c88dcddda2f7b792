"""Distributions over *models*: from the clients of a round to samples of global models (Chen & Chao 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, PosteriorError, nearest
from ..experiment import Distill
from ..posterior import Gaussian, Posterior
from ..seeds import derive

POINT_VARIANCE = 1e-12
"""Variance given to a weight drawn from its distribution: the model stays variational in form, but sigma is 1e-6."""


NO_POSTERIOR = (
    "distill.distribution = 'posterior' samples from variational clients, but this model has no Gaussian "
    "weights; use 'gaussian' or 'dirichlet', or a variational model.kind such as flipout."
)


@dataclass(frozen=True)
class Round:
    """What a distribution over models may look at: the clients of one round, their weights, and both global models.

    ``weights`` sum to one. ``fixed`` names the point tensors that are not sampled (batch-norm's running
    statistics); integer tensors never are. Fixed tensors take their value in the fused posterior.
    """

    fused: Posterior
    clients: Sequence[Posterior]
    weights: Sequence[float]
    previous: Posterior | None
    fixed: Collection[str] = frozenset()


Sampler = Callable[[Round, Distill, torch.Generator], Posterior]
_SAMPLERS: dict[str, Sampler] = {}


def register(name: str) -> Callable[[Sampler], Sampler]:
    """Make a distribution over models available as ``distill.distribution = name``; it draws one model a call."""

    def add(sampler: Sampler) -> Sampler:
        _SAMPLERS[name] = sampler
        return sampler

    return add


def distributions() -> tuple[str, ...]:
    """Return the names of the distributions over models, ``clients`` (no samples: v-distillation) among them."""
    return (*_SAMPLERS, "clients")


def draw(round_: Round, settings: Distill, seed_address: Sequence[int | str]) -> list[Posterior]:
    """Draw ``settings.samples`` models from the named distribution; model m has the address (…, "model", m)."""
    if settings.distribution == "clients":
        return []
    sampler = _SAMPLERS.get(settings.distribution)
    if sampler is None:
        hint = nearest(settings.distribution, distributions())
        raise ConfigError(f"distill.distribution = '{settings.distribution}' is not known; {hint}")
    models = []
    for m in range(settings.samples):
        generator = torch.Generator().manual_seed(
            derive(*seed_address, "model", m)
        )  # host: same models on every device
        models.append(sampler(round_, settings, generator))
    return models


def ensemble(round_: Round, settings: Distill, seed_address: Sequence[int | str]) -> list[Posterior]:
    """Return Algorithm 1's ensemble {average} ∪ clients ∪ samples; for v-distillation the clients alone."""
    if settings.distribution == "clients":
        return list(round_.clients)
    return [round_.fused, *round_.clients, *draw(round_, settings, seed_address)]


def gaussian_moments(clients: Sequence[Posterior], weights: Sequence[float]) -> dict[str, Gaussian]:
    """Return mean and variance of the clients' models, by tensor name (poster's Gaussian).

    μ = Σ pᵢ wᵢ and Σ_diag = Σ pᵢ (wᵢ − μ)², with pᵢ = |Dᵢ|/|D|. For a Gaussian tensor wᵢ is its mean. Second
    moments are taken about μ in float64, so nothing cancels. Integer tensors are left out.
    """
    p = _normalised(weights, len(clients))
    moments = {}
    for name in _names(clients[0]):
        stack = torch.stack([_centre(c, name).double() for c in clients])
        w = torch.tensor(p, dtype=torch.float64, device=stack.device).view(-1, *[1] * (stack.dim() - 1))
        mean = (w * stack).sum(0)
        moments[name] = Gaussian(mean, (w * (stack - mean) ** 2).sum(0))
    return moments


@register("gaussian")
def _gaussian(round_: Round, settings: Distill, generator: torch.Generator) -> Posterior:
    """N(μ, Σ_diag) of the poster. Gaussian weights keep the fused variance around the drawn mean."""
    moments = gaussian_moments(round_.clients, round_.weights)
    return _rebuild(round_, {n: _normal(g.mean, g.variance, generator) for n, g in moments.items()})


@register("dirichlet")
def _dirichlet(round_: Round, settings: Distill, generator: torch.Generator) -> Posterior:
    """Σ γᵢ|Dᵢ| wᵢ / Σ γᵢ|Dᵢ| with γ ~ Dirichlet(α, …, α): a random convex combination of the clients."""
    p = dirichlet_weights(round_.weights, settings.dirichlet_alpha, generator)
    mixed = {}
    for name in _names(round_.clients[0]):
        total = torch.zeros_like(_centre(round_.clients[0], name), dtype=torch.float64)
        for share, client in zip(p, round_.clients, strict=True):
            total += share * _centre(client, name).double()
        mixed[name] = total
    return _rebuild(round_, mixed)


def dirichlet_weights(weights: Sequence[float], alpha: float, generator: torch.Generator) -> list[float]:
    """Return γᵢ pᵢ / Σ γⱼ pⱼ with γ ~ Dirichlet(α, …, α).

    NumPy draws the γ on the host (by stick breaking where α is small, so that nothing underflows).
    """
    if not 0 < alpha < math.inf:
        raise ConfigError(f"distill.dirichlet_alpha = {alpha}: a Dirichlet needs a finite concentration above 0.")
    seed = int(torch.randint(2**62, (), generator=generator))
    gamma = np.random.default_rng(seed).dirichlet(np.full(len(weights), alpha))
    scaled = gamma * np.array(_normalised(weights, len(weights)))
    return [float(s) for s in scaled / scaled.sum()]


@register("posterior")
def _posterior(round_: Round, settings: Distill, generator: torch.Generator) -> Posterior:
    """One draw of the weights from the fused variational posterior: what no paper did."""
    if not round_.fused.gaussians:
        raise ConfigError(NO_POSTERIOR)
    gaussians = {}
    for name, g in round_.fused.gaussians.items():
        weight = _normal(g.mean.double(), g.variance.double(), generator).to(g.mean.dtype)
        gaussians[name] = Gaussian(weight, torch.full_like(g.variance, POINT_VARIANCE))
    return Posterior(gaussians, round_.fused.points)


@register("gaussian-released")
def _gaussian_released(round_: Round, settings: Distill, generator: torch.Generator) -> Posterior:
    """The released code's Gaussian: noise on *directions* of the clients' moves, around the previous global model.

    Per tensor: each client's move wᵢ − w_prev is scaled to unit L2 norm; unweighted mean and variance of these
    directions (variance at least 1e-5), standard deviation times ``released_scale``; the draw is multiplied by
    the mean length of the moves and added to w_prev. Running statistics are sampled too, as there; where the
    released code divides by zero (a tensor no client moved) the tensor stays, and running variances stay positive.
    """
    if round_.previous is None:
        raise ConfigError("distill.distribution = 'gaussian-released' needs the previous global model; there is none.")
    drawn = {}
    for name in _names(round_.clients[0]):
        before = _centre(round_.previous, name).double().to(_centre(round_.clients[0], name).device)
        moves = torch.stack([_centre(c, name).double() - before for c in round_.clients])
        lengths = moves.flatten(1).norm(dim=1)
        if not bool((lengths > 0).all()):
            drawn[name] = before + moves.mean(0)
            continue
        directions = moves / lengths.view(-1, *[1] * before.dim())
        variance = directions.var(0, unbiased=False).clamp_min(1e-5) * settings.released_scale**2
        drawn[name] = before + lengths.mean() * _normal(directions.mean(0), variance, generator)
        if name.endswith("running_var"):
            drawn[name] = drawn[name].clamp_min(1e-5)
    return _rebuild(Round(round_.fused, round_.clients, round_.weights, round_.previous), drawn)


def _rebuild(round_: Round, drawn: Mapping[str, Tensor]) -> Posterior:
    """Put drawn tensors into the form of the fused posterior; fixed and integer tensors are the fused ones."""
    fused = round_.fused
    gaussians = {n: Gaussian(drawn[n].to(g.mean), g.variance) for n, g in fused.gaussians.items()}
    points = {n: t if n in round_.fixed or n not in drawn else drawn[n].to(t) for n, t in fused.points.items()}
    return Posterior(gaussians, points)


def _normal(mean: Tensor, variance: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
    return mean + variance.sqrt() * noise.to(mean.device)


def _names(posterior: Posterior) -> list[str]:
    """Names of every tensor that can be averaged: Gaussian ones and floating-point points."""
    return [*posterior.gaussians, *(n for n, t in posterior.points.items() if t.is_floating_point())]


def _centre(posterior: Posterior, name: str) -> Tensor:
    if name in posterior.gaussians:
        return posterior.gaussians[name].mean
    if name in posterior.points:
        return posterior.points[name]
    raise PosteriorError(f"a client's model has no tensor '{name}'; every client must hold the same network.")


def _normalised(weights: Sequence[float], count: int) -> list[float]:
    total = float(sum(weights))
    if len(weights) != count or not 0 < total < math.inf or min(weights) < 0:
        raise ConfigError(
            f"{count} client models need {count} non-negative weights with a positive, finite sum; got {list(weights)}."
        )
    return [float(w) / total for w in weights]
