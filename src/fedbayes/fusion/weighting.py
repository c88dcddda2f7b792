"""Weights of the clients: equal, by size, by discrepancy, by distance, or the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, FedBayesError, PosteriorError, nearest
from ..own import own_name
from ..posterior import Posterior, alike, kl
from .layout import Layout

Client = int | str
LEAST_WEIGHT, MOST_WEIGHT = 1e-100, 1e100
"""Weights (but 0) within these make no term too large or too small to sum."""
KL_FLOOR = 1e-12
"""Least KL (nats, whole model) a weight is divided by: equal posteriors are equally close, not infinitely important."""


@dataclass(frozen=True)
class Weighting:
    """A way of weighing clients, by name."""

    name: str
    aliases: tuple[str, ...]
    formula: str
    papers: str
    when: str
    uses_individuals: bool
    """Whether it needs every client's posterior at once (so it neither streams nor works under secure aggregation)."""
    needs_previous: bool
    compute: Callable[[Mapping[Client, int], Mapping[Client, Posterior], Posterior | None], Mapping[Client, float]]
    needs_gaussians: bool = False
    """Whether it compares distributions, so that point models cannot be weighed by it."""

    def require_gaussians(self, posterior: Posterior) -> None:
        """Raise if it compares distributions and this posterior has none."""
        if self.needs_gaussians and not posterior.gaussians:
            raise ConfigError(
                f"the weighting '{self.name}' compares distributions, and this network has none: weigh point models by size or equally."
            )


_WEIGHTINGS: dict[str, Weighting] = {}


def register_weighting(weighting: Weighting) -> Weighting:
    """Make a weighting usable by its name and aliases everywhere, including configuration files."""
    for name in (weighting.name, *weighting.aliases):
        if name in _WEIGHTINGS and _WEIGHTINGS[name].name != weighting.name:
            raise ConfigError(f"the weighting name '{name}' is taken by '{_WEIGHTINGS[name].name}'; choose another.")
        _WEIGHTINGS[name] = weighting
    return weighting


def weightings() -> tuple[Weighting, ...]:
    """Return every registered weighting, once each."""
    return tuple({w.name: w for w in _WEIGHTINGS.values()}.values())


def get_weighting(name: str) -> Weighting:
    """Return the weighting of that name or alias; ``package.module:name`` imports the module first, for weightings of your own."""
    name = own_name(name, "weighting")
    found = _WEIGHTINGS.get(name.strip().lower().replace("_", "-"))
    if found is None:
        raise ConfigError(f"there is no weighting '{name}'; {nearest(name, _WEIGHTINGS)}")
    return found


def client_weights(
    weighting: str | Weighting | Mapping[Client, float],
    sizes: Mapping[Client, int],
    posteriors: Mapping[Client, Posterior] | None = None,
    previous: Posterior | None = None,
) -> dict[Client, float]:
    """Return the clients' weights, summing to one, in the order of ``sizes``.

    ``weighting`` is a name, or a mapping of the user's own weights (normalised here). ``posteriors`` is needed by
    weightings that compare posteriors, ``previous`` by distance to the previous global one.
    """
    for what, given in (("sizes", sizes), ("posteriors", posteriors or {})):
        if not isinstance(given, Mapping):
            raise ConfigError(f"{what} is of type {type(given).__name__}; give a mapping by client.")
    if not sizes:
        raise PosteriorError("there are no clients to weigh.")
    if not isinstance(weighting, str | Weighting | Mapping):
        raise ConfigError(f"a weighting is a name or a mapping by client, not of type {type(weighting).__name__}.")
    if isinstance(weighting, Mapping):
        missing = [c for c in sizes if c not in weighting]
        if missing:
            raise ConfigError(f"client {missing[0]} has no weight; give one for each of {list(sizes)}.")
        return _normalised({c: weighting[c] for c in sizes})
    chosen = get_weighting(weighting) if isinstance(weighting, str) else weighting
    if chosen.uses_individuals:
        missing = [c for c in sizes if c not in (posteriors or {})]
        if missing:
            raise ConfigError(
                f"the weighting '{chosen.name}' needs every client's posterior; client {missing[0]} has none."
            )
        chosen.require_gaussians((posteriors or {})[next(iter(sizes))])
    if chosen.needs_previous and previous is None:
        raise ConfigError(f"the weighting '{chosen.name}' needs the previous global posterior.")
    computed = chosen.compute(sizes, posteriors or {}, previous)
    missing = [c for c in sizes if c not in computed]
    if missing:
        raise ConfigError(f"the weighting '{chosen.name}' gave client {missing[0]} no weight; it must give each one.")
    return _normalised({c: computed[c] for c in sizes})


def weight_of(client: Client, given: Any, error: type[FedBayesError] = PosteriorError) -> float:
    """Return a client's weight as a float, or say what is wrong with it."""
    try:
        weight = float(given)
    except (TypeError, ValueError):
        raise error(f"the weight of client {client} is {given!r}; weights must be numbers.") from None
    except OverflowError:
        weight = math.inf
    if not (math.isfinite(weight) and weight >= 0):
        raise error(f"the weight of client {client} is {weight}; weights must be finite and not negative.")
    return weight


def scaled(weights: list[float], normalised: bool = False) -> list[float]:
    """Return weights, normalised if asked; those too large or small to sum are all scaled by one power of two."""
    top = max(weights, default=0.0)
    if top > 0 and not LEAST_WEIGHT <= top <= MOST_WEIGHT:
        weights = [math.ldexp(w, -math.frexp(top)[1]) for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights] if normalised and total > 0 else weights


def _normalised(given: Mapping[Client, Any]) -> dict[Client, float]:
    weights = [weight_of(c, w, ConfigError) for c, w in given.items()]
    if max(weights) == 0:
        raise ConfigError("all clients have weight 0; at least one must be positive.")
    return dict(zip(given, scaled(weights, normalised=True), strict=True))


def pairwise_kl(posteriors: Mapping[Client, Posterior] | Sequence[Posterior]) -> Tensor:
    """Return the matrix KL(qᵢ‖qⱼ) in nats over the whole model, in the order given, by matrix products in float64.

    KL = ½ Σ (log σⱼ² - log σᵢ² + (σᵢ² + (μᵢ-μⱼ)²)/σⱼ² - 1). Expanded, Σ (σᵢ² + μᵢ²)/σⱼ² - 2 Σ μᵢ μⱼ/σⱼ² + Σ μⱼ²/σⱼ² are two products of
    K×P by P×K matrices. Means are centred on their average first, so that little cancels. O(K² P) arithmetic but O(K P)
    memory traffic, against K² passes over the model. Where a divergence is less than a millionth of the terms that make it
    (two clients near each other and far from the average, in units of their sigmas), the pair is computed by itself.
    """
    clients = list(posteriors.values() if isinstance(posteriors, Mapping) else posteriors)
    if not clients:
        return torch.zeros(0, 0, dtype=torch.float64)
    for client in clients:
        alike(clients[0], client)
    layout = Layout.of(clients[0])
    k, device = len(clients), layout.device
    result, size = torch.zeros(2, k, k, dtype=torch.float64, device=device)
    most = max(1, 2**24 // k)
    for pieces in layout.blocks(most):
        flats = [layout.flat_gaussian(client, pieces) for client in clients]
        value, terms = _pairwise_block(torch.stack([f.mean for f in flats]), torch.stack([f.variance for f in flats]))
        result, size = result + value, size + terms
    close = (result < 1e-6 * size).fill_diagonal_(False)
    for i, j in close.nonzero().tolist():
        a, b = clients[i], clients[j]
        result[i, j] = 0.0 if _same(a, b) else kl(a, b)
    return result.clamp_(min=0).fill_diagonal_(0)


def _same(a: Posterior, b: Posterior) -> bool:
    return a is b or all(
        torch.equal(g.mean, b.gaussians[n].mean) and torch.equal(g.variance, b.gaussians[n].variance)
        for n, g in a.gaussians.items()
    )


def _pairwise_block(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (K, K) matrix of KL summed over one block of weights, and how large the terms are that cancel in it."""
    means = means - means.mean(0)
    precision, log = 1 / variances, torch.log(variances).sum(1)
    scaled = means * precision
    terms = (variances + means * means) @ precision.T + (means * scaled).sum(1)[None, :]
    return 0.5 * (terms - 2 * (means @ scaled.T) + log[None, :] - log[:, None] - means.shape[1]), terms


def _discrepancy(reading: str) -> Callable[..., Mapping[Client, float]]:
    def compute(
        sizes: Mapping[Client, int], posteriors: Mapping[Client, Posterior], previous: Posterior | None
    ) -> dict:
        clients = list(sizes)
        if len(clients) == 1:
            return {clients[0]: 1.0}
        matrix = pairwise_kl({c: posteriors[c] for c in clients})
        fill = -math.inf if reading == "farthest" else math.inf
        matrix = matrix.fill_diagonal_(fill)
        extreme = matrix.amax(1) if reading == "farthest" else matrix.amin(1)
        return {c: 1 / max(float(d), KL_FLOOR) for c, d in zip(clients, extreme.tolist())}

    return compute


def _distance(sizes: Mapping[Client, int], posteriors: Mapping[Client, Posterior], previous: Posterior | None) -> dict:
    assert previous is not None
    return {c: 1 / max(float(kl(previous, posteriors[c])), KL_FLOOR) for c in sizes}


register_weighting(
    Weighting("equal", ("uniform",), "wₖ = 1/K", "Fischer 2024 eq. (18); Ozer 2022 FVBA", "sizes are secret or alike", False, False,
              lambda sizes, posteriors, previous: dict.fromkeys(sizes, 1.0))
)  # fmt: skip
register_weighting(
    Weighting("size", ("train-size", "examples"), "wₖ = |Dₖ|/|D|", "Fischer 2024 eq. (19); Ozer 2022 FVBWA; McMahan 2017",
              "the default: every example counts once", False, False, lambda sizes, posteriors, previous: sizes)
)  # fmt: skip
register_weighting(
    Weighting("max-discrepancy", (), "γₖ = 1/max_{j≠k} KL(qₖ‖qⱼ)", "Fischer 2024 eq. (20) by its name", "extreme clients should count less",
              True, False, _discrepancy("farthest"), True)
)  # fmt: skip
register_weighting(
    Weighting("max-discrepancy-nearest", (), "γₖ = max_{j≠k} 1/KL(qₖ‖qⱼ)", "Fischer 2024 eq. (20) as printed",
              "clients with a close neighbour should count more", True, False, _discrepancy("nearest"), True)
)  # fmt: skip
register_weighting(
    Weighting("distance", (), "γₖ = 1/KL(q_g‖qₖ)", "Fischer 2024 eq. (21)", "clients far from the previous global posterior should count less",
              True, True, _distance, True)
)  # fmt: skip
