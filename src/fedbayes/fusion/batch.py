"""``fuse``: any iterable of posteriors to one, for those who use nothing else of this library."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Literal, get_args

from ..errors import ConfigError, PosteriorError, nearest
from ..posterior import Posterior, Refusal, check
from .accumulator import Accumulator, expect, name_of
from .rule import Rule, get_rule
from .weighting import Client, scaled, weight_of

OnBadClient = Literal["refuse", "stop"]


def fuse(
    posteriors: Iterable[Posterior] | Mapping[Client, Posterior],
    rule: str | Rule = "nwa",
    weights: Sequence[float] | Mapping[Client, float] | None = None,
    previous: Posterior | None = None,
    *,
    on_bad_client: OnBadClient = "refuse",
    **options: Any,
) -> Posterior:
    """Fuse posteriors by a rule: any iterable, read lazily, so that one client at a time is in memory.

    ``weights`` (default equal) is a sequence in the same order, or a mapping when ``posteriors`` is one; it need not be
    normalised. ``previous`` is the previous global posterior. ``options`` are the rule's own (``ppa`` shares its population out by
    weight; of a stream of unknown length without weights every client draws all of it). A posterior that cannot be fused (a NaN, a
    variance that is not positive, other tensors than ``previous`` or, without one, than most of a list or dict, the first good
    client of a stream) is left out with a warning that names client, tensor and reason; ``on_bad_client="stop"`` raises instead.
    Another warning says what share of the weights a rule had to repair (``dwc``).

    >>> fuse([a, b], rule="conflation")                                            # doctest: +SKIP
    """
    if on_bad_client not in get_args(OnBadClient):
        raise ConfigError(f"on_bad_client is {on_bad_client!r}; {nearest(str(on_bad_client), get_args(OnBadClient))}")
    if isinstance(posteriors, Posterior) or not isinstance(posteriors, Iterable):
        kind = "one posterior" if isinstance(posteriors, Posterior) else repr(posteriors)
        raise PosteriorError(f"fuse takes several posteriors, a list or any other iterable of them; {kind} was given.")
    if previous is not None:
        expect(previous, "previous")
    if isinstance(weights, str):
        raise PosteriorError(
            f"weights is {weights!r}; give one number for each posterior: client_weights({weights!r}, sizes) gives them by name."
        )
    if weights is not None and not isinstance(weights, Mapping):
        if not hasattr(weights, "__iter__"):
            raise PosteriorError(f"weights is {weights!r}; give one number for each posterior.")
        weights = [weight_of(k, w) for k, w in enumerate(weights)]
    named: Iterable[tuple[Client | None, Posterior]]
    if isinstance(posteriors, Mapping):
        named = ((name_of(c), q) for c, q in posteriors.items())
    else:
        named = ((None, q) for q in posteriors)
    chosen = get_rule(rule, **options)
    given = _weights(posteriors, weights, normalised=chosen.draws)
    expected = _usual(posteriors) if previous is None else previous
    accumulator, position, refusals = None, -1, []
    for position, (client, posterior) in enumerate(named):
        if not isinstance(posterior, Posterior):
            raise PosteriorError(
                f"fuse takes Posterior objects; number {position} is of type {type(posterior).__name__}."
            )
        name, weight = position if client is None else client, given(client, position)
        try:
            if accumulator is None:
                lenient = chosen.allows_zero_variance
                check(posterior, expected or posterior, client=name, allow_zero_variance=lenient)
                accumulator = Accumulator(chosen, posterior, previous)
            accumulator.absorb_as(posterior, weight, name, client)
        except Refusal as refusal:
            if on_bad_client == "stop" or refusal.client != name:
                raise
            refusals.append(str(refusal))
            warnings.warn(str(refusal), stacklevel=2)
    if isinstance(weights, list) and len(weights) > position + 1:
        raise PosteriorError(f"{len(weights)} weights were given for {position + 1} posteriors; give one for each.")
    if accumulator is None or not accumulator.weights:
        all_bad = (
            f"all {len(refusals)} were refused; the first: {refusals[0]}" if refusals else "no posterior was given."
        )
        raise PosteriorError(f"there is nothing to fuse: {all_bad}")
    fused = accumulator.conclude()
    if share := fused.record["repaired"]:
        warnings.warn(
            f"the rule '{chosen.name}' gave {100 * share:.3g} % of the weights no positive precision; they were repaired "
            f"(options: {', '.join(f'{n}={v}' for n, v in chosen.options().items())}).",
            stacklevel=2,
        )
    return fused.posterior


def _usual(posteriors: Any) -> Posterior | None:
    """Return one with the tensors that most posteriors at hand have, so that an odd one is refused wherever it stands; None for a stream."""
    if not isinstance(posteriors, list | tuple | dict):
        return None
    known = posteriors.values() if isinstance(posteriors, dict) else posteriors
    tensors = [(_tensors(q), q) for q in known if isinstance(q, Posterior)]
    usual = Counter(names for names, _ in tensors).most_common(1)
    return next((q for names, q in tensors if names == usual[0][0]), None)


def _tensors(posterior: Posterior) -> frozenset[tuple[Any, ...]]:
    """Return names, shapes and kinds of a posterior's tensors."""
    gaussians = {(n, "Gaussian", g.mean.shape, g.mean.is_floating_point()) for n, g in posterior.gaussians.items()}
    return frozenset(gaussians | {(n, "point", t.shape, t.is_floating_point()) for n, t in posterior.points.items()})


def _weights(
    posteriors: Any, weights: list[float] | Mapping[Client, float] | None, normalised: bool
) -> Callable[[Client | None, int], float]:
    """Return a function giving the weight of a client by name or position; complain early where lengths are known.

    ``normalised``: make them sum to one (equal ones of a stream of unknown length stay 1).
    """
    if weights is None:
        equal = 1 / len(posteriors) if normalised and isinstance(posteriors, Sized) and len(posteriors) else 1.0
        return lambda client, position: equal
    if isinstance(weights, Mapping):
        if not isinstance(posteriors, Mapping):
            raise PosteriorError(
                "weights by client need posteriors by client: pass both as mappings, or both as sequences."
            )
        missing = [c for c in posteriors if c not in weights]
        if missing:
            raise PosteriorError(f"client {missing[0]} has no weight; give one for each of {list(posteriors)}.")
        chosen = {name_of(c): weight_of(c, weights[c]) for c in posteriors}
        by_name = dict(zip(chosen, scaled(list(chosen.values()), normalised)))
        return lambda client, position: by_name[client]  # type: ignore[index]
    by_position = scaled(weights, normalised)
    size = len(posteriors) if isinstance(posteriors, (Sequence, Mapping)) else len(by_position)
    if len(by_position) != size:
        raise PosteriorError(f"{len(by_position)} weights were given for {size} posteriors; give one for each.")

    def at(client: Client | None, position: int) -> float:
        if position >= len(by_position):
            raise PosteriorError(
                f"{len(by_position)} weights were given, but there are more posteriors; give one for each."
            )
        return by_position[position]

    return at
