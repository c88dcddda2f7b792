"""What a client minimises: the negative evidence lower bound per example, and the penalties beside it.

A lane's loss is ``weighted mean cross-entropy + penalty(parameters, terms)``. The penalty is computed from the
parameters, outside ``forward``; its coefficients are tensors (``Terms``), so that lanes may differ in them without
recompiling. The KL divergence is the analytic one and a *sum* over weights:

    -ELBO / n  =  mean over examples of E_q[-log p(y | x, w)]  +  KL(q || prior) / divisor

Three divisors, by name (``kl_divisor``):

- ``client``: the client's own examples (Loomis 2023). Each client's ELBO as if it were alone. Right for training one
  client, or for one that keeps its model; in a federation the prior is counted once per client.
- ``federation``: the examples of all clients. The size-weighted mean of the clients' objectives is then the negative
  ELBO of the pooled data, divided by its size: right for averaging rules (fedavg, nwa, lp, aalv, wasserstein ...).
- ``shared``: the client's own examples, with the prior to the power 1/K (``client_prior``). The product of the clients'
  posteriors then holds the prior exactly once: right for product rules (conflation, precision). DWC takes the full
  prior out K-1 times itself: use ``client`` with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cohort import Assignment
from .errors import ConfigError, PosteriorError, nearest
from .nn.state import RHO, gaussian_names
from .posterior import Gaussian, Posterior


class Terms(NamedTuple):
    """Coefficients of one lane's penalty, all tensors; stacked along a leading axis they serve many lanes.

    A term is left out of the computation altogether where its structure says so: no prior variances, no KL; no
    ``anchor``, no proximal term; an ``l2`` without elements, no L2 term. ``make_terms`` and ``stack_terms`` see to it.
    """

    kl: Tensor
    """Multiplies KL(q || prior): KL weight / divisor."""
    prior_mean: dict[str, Tensor]
    """Prior means by Gaussian name: a scalar, or a tensor of the weight's shape."""
    prior_variance: dict[str, Tensor]
    """Prior variances likewise."""
    l2: Tensor
    """Multiplies the sum of squares of deterministic weights."""
    proximal: Tensor
    """FedProx: mu."""
    anchor: dict[str, Tensor]
    """Parameters (raw, with ``_rho``) at the start of the round, for the proximal term."""
    divisor: Tensor
    """What a KL is divided by; scales the proximal KL of Gaussian weights."""


def kl_divisor(kl_scale: str, client_examples: int, federation_examples: int, clients: int = 1) -> float:
    """Return the number a client's KL is divided by; see the module's text for when each scaling is right.

    With ``shared`` the prior must be widened too: ``client_prior``.
    """
    divisors = {
        "client": client_examples,
        "federation": federation_examples,
        "shared": client_examples,
    }
    if kl_scale not in divisors:
        raise ConfigError(f"kl_scale '{kl_scale}' is unknown; {nearest(kl_scale, divisors)}")
    if divisors[kl_scale] < 1 or clients < 1:
        raise ConfigError(f"kl_scale '{kl_scale}' needs at least one example and one client.")
    return float(divisors[kl_scale])


def client_prior(
    kl_scale: str, prior_std: float, prior: Posterior | None, clients: int
) -> tuple[float, Posterior | None]:
    """Return the prior each of K clients that hold data uses, as (standard deviation, posterior or None).

    ``shared`` raises the prior to the power 1/K: a Gaussian of the same mean and K times the variance. The other
    scalings leave it as it is. (Points of a posterior are no part of a prior and stay.)
    """
    kl_divisor(kl_scale, 1, 1, clients)  # refuses unknown scalings and numbers of clients
    if kl_scale != "shared":
        return prior_std, prior
    if prior is None:
        return prior_std * math.sqrt(clients), None
    widened = {n: (mean, variance * clients) for n, (mean, variance) in prior.gaussians.items()}
    return prior_std, Posterior(widened, prior.points, prior.metadata)  # type: ignore[arg-type]


def layered_prior(start: Posterior, prior_std: float, layers: Sequence[str]) -> Posterior | None:
    """Return the prior N(0, s²) whose s differs by layer, as a posterior; None without ``layers``.

    ``layers`` are texts ``pattern=s`` (the experiment's ``objective.prior_layers``), ``prior_std`` holds for the rest.
    """
    if not layers:
        return None
    by_layer: dict[str, float] = {}
    for text in layers:
        pattern, _, std = text.partition("=")
        try:
            by_layer[pattern.strip()] = float(std)
        except ValueError:
            raise ConfigError(
                f"objective.prior_layers: '{text}' must be pattern=standard deviation, as in fc*=10."
            ) from None
    stds = prior_stds(list(start.gaussians), prior_std, by_layer)
    means = {n: torch.zeros_like(g.mean) for n, g in start.gaussians.items()}
    return Posterior({n: Gaussian(mean, torch.full_like(mean, stds[n] ** 2)) for n, mean in means.items()})


def annealed(kl_weight: float, round: int, kl_anneal: int) -> float:
    """Return the KL weight of a round (the first is 1): it rises linearly and is full from round ``kl_anneal`` on.

    Annealing lets the means find a good region before the prior pulls; the bound itself holds only at full weight.
    """
    return kl_weight * min(1.0, round / kl_anneal) if kl_anneal > 0 else kl_weight


def _zero(parameters: Mapping[str, Tensor]) -> Tensor:
    """A scalar on the parameters' device, so that no sum starts on another one."""
    return next(iter(parameters.values())).new_zeros(())


def _wide(t: Tensor) -> Tensor:
    """``t`` in at least float32: sums over all weights have no room in 16 bits."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def gaussian_kl(
    parameters: Mapping[str, Tensor], prior_mean: Mapping[str, Tensor], prior_variance: Mapping[str, Tensor]
) -> Tensor:
    """Return KL(q || prior) summed over every weight that has a ``_rho`` (mean-field Gaussians, closed form).

    KL = sum[ (r² + z² - 1) / 2 - log r ] with r = sigma / s and z = (mu - m) / s, s² = v the prior's variance. Taken
    element by element, so that nothing cancels between weights (within one, float32 leaves about 1e-7 nats), and with
    log r rather than log r², so that it holds far below the square root of the smallest number.
    """
    total = _zero(parameters)
    for name in gaussian_names(parameters):
        precision = _wide(prior_variance[name]).rsqrt()
        ratio = F.softplus(_wide(parameters[name + RHO])) * precision
        shift = (_wide(parameters[name]) - prior_mean[name]) * precision
        total = total + (0.5 * (ratio.square() + shift.square() - 1) - ratio.log()).sum()
    return total


def squared_weights(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of squares of the deterministic weights: parameters with two or more axes that are no bias.

    That is the L2 penalty of the papers' point networks (Loomis: 1e-4 on kernels); it is a Gaussian prior on them, up
    to its scale. Biases, batch-norm parameters and Gaussian weights (their prior is their penalty) do not count.
    """
    gaussian = set(gaussian_names(parameters))
    total = _zero(parameters)
    for name, t in parameters.items():
        point = name not in gaussian and not name.endswith(RHO)
        if point and t.dim() > 1 and "bias" not in name.rpartition(".")[2]:
            total = total + _wide(t).square().sum()
    return total


def proximal_point(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """Return 1/2 · |w - w_start|² over the deterministic parameters: FedProx (Li et al. 2020) without its mu.

    Right where unlike clients drift apart in many local steps; it slows learning where they do not.
    """
    gaussian = set(gaussian_names(parameters))
    total = _zero(parameters)
    for name, t in parameters.items():
        if name not in gaussian and not name.endswith(RHO):
            total = total + 0.5 * (_wide(t) - anchor[name]).square().sum()
    return total


def proximal_kl(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """Return KL(q || q_start) over the Gaussian weights: what FedProx's distance becomes between distributions.

    To second order it is half the squared distance in units of the start's sigmas, so weights that are sure already are
    held and uncertain ones may move; it also holds the sigmas, which a distance between means would let run.
    """
    names = gaussian_names(parameters)
    variance = {n: F.softplus(_wide(anchor[n + RHO])).square() for n in names}
    return gaussian_kl(parameters, anchor, variance)


def penalty(parameters: Mapping[str, Tensor], terms: Terms) -> Tensor:
    """Return everything of a lane's loss that is not the data's: a scalar, differentiable, fit for ``vmap``.

    kl · KL(q || prior)  +  l2 · |deterministic weights|²  +  proximal · (|w - w_start|² / 2 + KL(q || q_start) / divisor)

    Terms without a prior leave the first one out: the lane engine adds its gradient in closed form.
    """
    total = torch.zeros_like(terms.kl)
    if terms.prior_variance:
        total = terms.kl * gaussian_kl(parameters, terms.prior_mean, terms.prior_variance)
    if terms.l2.numel():
        total = total + terms.l2 * squared_weights(parameters)
    if terms.anchor:
        distance = proximal_point(parameters, terms.anchor) + proximal_kl(parameters, terms.anchor) / terms.divisor
        total = total + terms.proximal * distance
    return total


def make_terms(
    assignment: Assignment,
    parameters: Mapping[str, Tensor],
    *,
    prior_std: Mapping[str, float] | None = None,
    l2: bool | None = None,
    proximal: bool | None = None,
) -> Terms:
    """Return the coefficients of one client's penalty for one round.

    ``parameters`` are the client's at the start of the round (raw, by name): they name the Gaussian weights, give
    device and type, and are the anchor of the proximal term. The prior is the assignment's posterior, or
    N(0, prior_std²) everywhere; ``prior_std`` (glob pattern of a layer or weight -> standard deviation, first match)
    sets it by layer. A wide prior (10) leaves the means alone and lets sigma grow towards 10 where the data say little;
    a narrow one (1, or near the means' own spread) holds both, which wide layers with few data per weight need.
    ``l2`` and ``proximal`` force a term in (True) or out (False); by default it is there when its coefficient is not 0.
    """
    if not 0 < assignment.divisor < math.inf:
        raise ConfigError(f"the divisor of the KL is {assignment.divisor}; it counts examples and is positive.")
    for term in ("kl_weight", "l2", "proximal"):
        if not 0 <= getattr(assignment, term) < math.inf:
            raise ConfigError(f"{term} is {getattr(assignment, term)}; a term's weight is 0 or more, and finite.")
    if not parameters:
        raise ConfigError("there are no parameters; a client needs some to train.")
    some = next(iter(parameters.values()))
    scalar = torch.zeros((), dtype=torch.float32, device=some.device)
    names = gaussian_names(parameters)
    if assignment.prior is None:
        stds = prior_stds(names, assignment.prior_std, prior_std or {})
        mean = dict.fromkeys(names, scalar)
        variance = {n: scalar + std**2 for n, std in stds.items()}
    elif prior_std:
        raise ConfigError("a posterior is the prior already; it leaves no room for standard deviations by layer.")
    else:
        mean, variance = _prior_tensors(assignment.prior, parameters, names)
    keep_l2 = assignment.l2 != 0 if l2 is None else l2
    keep_proximal = assignment.proximal != 0 if proximal is None else proximal
    return Terms(
        kl=scalar + assignment.kl_weight / assignment.divisor,
        prior_mean=mean,
        prior_variance=variance,
        l2=scalar + assignment.l2 if keep_l2 else scalar.new_zeros(0),
        proximal=scalar + assignment.proximal,
        anchor={n: t.detach().clone() for n, t in parameters.items()} if keep_proximal else {},
        divisor=scalar + assignment.divisor,
    )


def prior_stds(names: Sequence[str], default: float, by_layer: Mapping[str, float]) -> dict[str, float]:
    """Return the prior's standard deviation of every Gaussian weight: of the first pattern that matches, or ``default``.

    A pattern is matched with the weight's name (``fc1.weight``) and with its layer's (``fc1``), as ``where`` is.
    """
    stds: dict[str, float] = {}
    for pattern in by_layer:
        if not any(_matches(n, pattern) for n in names):
            raise ConfigError(f"prior by layer: no Gaussian weight matches '{pattern}'; there are: {', '.join(names)}")
    for name in names:
        stds[name] = next((s for pattern, s in by_layer.items() if _matches(name, pattern)), default)
        if not 1e-15 <= stds[name] <= 1e15:
            raise ConfigError(
                f"prior_std of '{name}' is {stds[name]}; a prior's standard deviation is positive and between 1e-15 and "
                "1e15, so that squares of it are numbers."
            )
    return stds


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _prior_tensors(
    prior: Posterior, parameters: Mapping[str, Tensor], names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    for name in names:
        if name not in prior.gaussians:
            raise PosteriorError(f"the prior has no Gaussian '{name}'; {nearest(name, prior.gaussians)}")
        if prior.gaussians[name].mean.shape != parameters[name].shape:
            raise PosteriorError(
                f"the prior's '{name}' has shape {tuple(prior.gaussians[name].mean.shape)}, "
                f"the network's {tuple(parameters[name].shape)}."
            )
        variance = prior.gaussians[name].variance
        if not ((variance > 0) & (variance < math.inf)).all():
            worst = variance[~((variance > 0) & (variance < math.inf))][0].item()
            raise PosteriorError(f"the prior's '{name}' has a variance of {worst:g}; a KL needs positive, finite ones.")
    like = {
        n: {"device": t.device, "dtype": torch.promote_types(t.dtype, torch.float32)} for n, t in parameters.items()
    }
    return (
        {n: prior.gaussians[n].mean.detach().to(**like[n]) for n in names},
        {n: prior.gaussians[n].variance.detach().to(**like[n]) for n in names},
    )


def stack_terms(lanes: Sequence[Terms]) -> Terms:
    """Stack the terms of several lanes along a new leading axis, for ``vmap`` with ``in_dims=0``.

    Lanes may differ in which terms they have: missing ones are filled in with a coefficient of 0, scalar priors are
    spread out where another lane's are full tensors.
    """
    l2 = [t.l2 if t.l2.numel() else torch.zeros_like(t.kl) for t in lanes]
    anchors = [t.anchor for t in lanes]
    model = next((a for a in anchors if a), {})
    filled = [a or {n: torch.zeros_like(t) for n, t in model.items()} for a in anchors]
    return Terms(
        kl=torch.stack([t.kl for t in lanes]),
        prior_mean=_stack_by_name([t.prior_mean for t in lanes]),
        prior_variance=_stack_by_name([t.prior_variance for t in lanes]),
        l2=torch.stack(l2) if any(t.l2.numel() for t in lanes) else torch.stack([t.l2 for t in lanes]),
        proximal=torch.stack([t.proximal if t.anchor else torch.zeros_like(t.proximal) for t in lanes]),
        anchor=_stack_by_name(filled),
        divisor=torch.stack([t.divisor for t in lanes]),
    )


def _stack_by_name(lanes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack(torch.broadcast_tensors(*(lane[n] for lane in lanes))) for n in lanes[0]}


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted mean negative log likelihood per example: the data's part of the loss.

    ``logits`` (B, C), or (S, B, C) for S weight samples, whose *losses* are averaged (the ELBO's expectation; averaging
    probabilities instead would be another bound). ``weights`` (B,): 0 for the examples that complete a batch.
    Computed in float32 whatever the network ran in.
    """
    flat = logits.float().reshape(-1, logits.shape[-1])
    samples = logits.shape[:-2].numel()
    losses = F.cross_entropy(flat, labels.repeat(samples), reduction="none").reshape(samples, -1).mean(0)
    if weights is None:
        return losses.mean()
    return (losses * weights).sum() / weights.sum().clamp_min(1e-12)


def sampled_logits(forward: Callable[[Tensor], Tensor], inputs: Tensor, samples: int = 1) -> Tensor:
    """Return logits (S, B, C) of S independent passes, or (B, C) for one: more weight samples a step, less noise.

    Worth S times the work where the weights' noise, not the batch's, limits learning: ``sample`` layers, large sigmas,
    small batches. Flipout's examples are nearly independent draws already: one pass is right there.
    """
    if samples == 1:
        return forward(inputs)
    return torch.stack([forward(inputs) for _ in range(samples)])
