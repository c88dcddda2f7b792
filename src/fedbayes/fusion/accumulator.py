"""``Accumulator``: clients come in one by one, only a total is kept, and the fused posterior comes out."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PosteriorError
from ..posterior import Posterior, Refusal, check, sigma_statistics
from . import exact
from .layout import Layout
from .rule import Rule, Statistics, get_rule

_CPU_BLOCK = 2**16
_GPU_BLOCK = 2**26
Client = int | str


@dataclass(frozen=True)
class Fused:
    """A fused posterior and what there is to say about it (the ``fusion`` entry of ``metrics.jsonl``)."""

    posterior: Posterior
    record: dict[str, Any]


class Accumulator:
    """Fuses posteriors as they arrive: memory holds the total, never the clients.

    ``reference`` gives the expected names, shapes and types; ``previous`` is the previous global posterior, needed by some rules
    and by the record. Totals do not depend on the order of arrival, to the last bit (see ``exact``);
    ``reproducible=False`` adds plain float64 instead, which is faster and agrees to rounding.
    """

    def __init__(
        self,
        rule: str | Rule = "nwa",
        reference: Posterior | None = None,
        previous: Posterior | None = None,
        *,
        reproducible: bool = True,
        floor: float = 1e-6,
        **options: Any,
    ) -> None:
        """``floor`` is the sigma below which a weight counts as deterministic in the record."""
        self.rule = get_rule(rule, **options)
        reference = reference if reference is not None else previous
        if reference is None:
            raise PosteriorError(
                "an Accumulator needs a reference posterior (or the previous global one) to know what to expect."
            )
        if self.rule.needs_previous and previous is None:
            raise PosteriorError(f"the rule '{self.rule.name}' needs the previous global posterior; pass previous=.")
        self.reference, self.previous, self.reproducible, self.floor = reference, previous, reproducible, floor
        self.layout = Layout.of(reference)
        if previous is not None:
            check(previous, reference, client="previous global", allow_zero_variance=self.rule.allows_zero_variance)
        self.weights: dict[Client, float] = {}
        self.refused: list[dict[str, Any]] = []
        self._pivot = previous if previous is not None else reference
        most = _CPU_BLOCK if self.layout.device.type == "cpu" else _GPU_BLOCK
        self._blocks = self.layout.blocks(most)
        self._cells: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}

    def absorb(self, posterior: Posterior, weight: float = 1.0, client: Client | None = None) -> None:
        """Check a client's posterior and add it; refuse it with ``PosteriorError``, the total untouched, if it is unfit.

        ``weight`` need not be normalised; a client of weight 0 is checked and adds nothing.
        """
        name: Client = client if client is not None else len(self.weights)
        try:
            self._check_weight(weight, name)
            check(posterior, self.reference, client=name, allow_zero_variance=self.rule.allows_zero_variance)
            if weight > 0:
                self._add(posterior, float(weight), self._address(posterior, client))
        except Refusal as refusal:
            self.refused.append({"client": refusal.client, "tensor": refusal.tensor, "reason": refusal.reason})
            raise
        self.weights[name] = float(weight)

    def merge(self, other: Accumulator) -> None:
        """Add another accumulator's total: regional servers fuse their clients, and a central one merges them."""
        if (other.rule, other.layout.gaussians, other.layout.points) != (
            self.rule,
            self.layout.gaussians,
            self.layout.points,
        ):
            raise PosteriorError("only accumulators of the same rule, options and tensors can be merged.")
        if not other._pivot.same_bits(self._pivot):
            raise PosteriorError(
                "only accumulators with the same previous global (or reference) posterior can be merged."
            )
        if other.reproducible != self.reproducible:
            raise PosteriorError("a reproducible accumulator and a plain one cannot be merged.")
        both = sorted(map(str, self.weights.keys() & other.weights.keys()))
        if both:
            raise PosteriorError(f"client {both[0]} is in both accumulators; name clients uniquely (client=...).")
        self._check_room(len(other.weights))
        for key, cells in other._cells.items():
            if key not in self._cells:
                self._cells[key] = cells.to(self.layout.device, copy=True)
            elif self.reproducible:
                exact.merge(self._cells[key], cells)
            else:
                for row in cells.to(self.layout.device):
                    exact.deposit_pairs(self._cells[key], row)
        self.weights |= other.weights
        self.refused += other.refused

    def add_total(self, statistics: Statistics, weights: Mapping[Client, float]) -> None:
        """Add statistics that are already a sum over ``weights``' clients, as secure aggregation gives them."""
        self._check_room(len(weights))
        for key, term in statistics.items():
            self._deposit(key, term.to(self.layout.device, torch.float64).reshape(-1), 0)
        self.weights |= dict(weights)

    def total(self) -> Statistics:
        """Return the total as float64 statistics."""
        total: Statistics = {}
        for key, cells in self._cells.items():
            total[key], total[f"{key}_low"] = exact.value(cells) if self.reproducible else (cells[0], cells[1])
        return total

    def conclude(self) -> Fused:
        """Make the fused posterior of the total, in the reference's types; the accumulator may go on absorbing."""
        used = [w for w in self.weights.values() if w > 0]
        if not used:
            raise PosteriorError("there is nothing to fuse: no client with a positive weight was absorbed.")
        posterior, repaired = self.rule.conclude(self.total(), used, self._pivot, self.layout)
        posterior = Posterior(posterior.gaussians, posterior.points, self.reference.metadata)
        sum_ = math.fsum(used)
        record: dict[str, Any] = {
            "rule": self.rule.name,
            "weights": {str(c): w / sum_ for c, w in sorted(self.weights.items(), key=lambda item: str(item[0]))},
            "refused": list(self.refused),
            "repaired": repaired,
        }
        if posterior.gaussians:
            record["sigma"] = sigma_statistics(posterior, self.previous, self.floor)
        return Fused(posterior, record)

    def save(self, path: str | Path) -> Path:
        """Write the total to a safetensors file, atomically, so that a server can be restarted in mid-round."""
        header = {
            "rule": self.rule.name,
            "options": self.rule.options(),
            "reproducible": self.reproducible,
            "weights": [[c, w] for c, w in self.weights.items()],
            "refused": self.refused,
            "seen": self._seen,
        }
        total = Posterior(points=self._cells, metadata={"accumulator": json.dumps(header)})
        return total.save(path)

    @staticmethod
    def load(path: str | Path, reference: Posterior | None = None, previous: Posterior | None = None) -> Accumulator:
        """Read what ``save`` wrote; ``reference`` and ``previous`` must be those it was made with."""
        stored = Posterior.load(path)
        if "accumulator" not in stored.metadata:
            raise PosteriorError(f"{path} holds a posterior, not an accumulator's total.")
        header = json.loads(stored.metadata["accumulator"])
        self = Accumulator(
            header["rule"], reference, previous, reproducible=header["reproducible"], **header["options"]
        )
        self._cells = {key: cells.to(self.layout.device) for key, cells in stored.points.items()}
        for key, cells in self._cells.items():
            if cells.shape[1] != self._length(key):
                raise PosteriorError(f"{path} was written for a model with other tensors than the reference.")
        self.weights = dict(header["weights"])
        self.refused, self._seen = header["refused"], header["seen"]
        return self

    def _check_weight(self, weight: float, client: Client) -> None:
        if client in self.weights:
            raise Refusal(client, "", "it was already absorbed in this round")
        if not (math.isfinite(weight) and weight >= 0):
            raise Refusal(client, "", f"its weight is {weight}; a weight must be finite and not negative")
        self._check_room(1)

    def _check_room(self, more: int) -> None:
        if len(self.weights) + more > exact.MOST_TERMS:
            raise PosteriorError(f"an accumulator takes at most {exact.MOST_TERMS} clients.")

    def _add(self, posterior: Posterior, weight: float, address: tuple[int | str, ...]) -> None:
        mass, at = self.rule.mass(weight), 0
        for i, pieces in enumerate(self._blocks):
            q, pivot = self.layout.flat_gaussian(posterior, pieces), self.layout.flat_gaussian(self._pivot, pieces)
            for key, term in self.rule.terms(q, mass, pivot, (*address, i)).items():
                self._deposit(key, term, at)
            at += q.mean.numel()
        if self.layout.points:
            self._deposit("points", weight * self.layout.flat_points(posterior), 0)

    def _deposit(self, key: str, term: Tensor, at: int) -> None:
        """Add part of a statistic; ``x_low`` goes to the cells of ``x``, which stand for the exact sum of both."""
        key = key.removesuffix("_low")
        if key not in self._cells:
            n, device = self._length(key), self.layout.device
            self._cells[key] = exact.new_cells(n, device) if self.reproducible else exact.new_pairs(n, device)
        cells = self._cells[key][:, at : at + term.numel()]
        (exact.deposit if self.reproducible else exact.deposit_pairs)(cells, term)

    def _length(self, key: str) -> int:
        return self.layout.numbers if key == "points" else self.layout.weights

    def _address(self, posterior: Posterior, client: Client | None) -> tuple[int | str, ...]:
        """Name a client for rules that draw: by its own name, else by its content, so that order does not matter."""
        if client is not None:
            return (client,)
        if not self.rule.draws:
            return ()
        digest = hashlib.blake2b(posterior.to_bytes(), digest_size=16).hexdigest()
        self._seen[digest] = self._seen.get(digest, -1) + 1
        return (digest, self._seen[digest])


def fuse(
    posteriors: Iterable[Posterior] | Mapping[Client, Posterior],
    rule: str | Rule = "nwa",
    weights: Sequence[float] | Mapping[Client, float] | None = None,
    previous: Posterior | None = None,
    **options: Any,
) -> Posterior:
    """Fuse posteriors by a rule: any iterable, read lazily, so that one client at a time is in memory.

    ``weights`` (default equal) is a sequence in the same order, or a mapping when ``posteriors`` is one; it need not be
    normalised. ``previous`` is the previous global posterior. ``options`` are the rule's own.

    >>> fuse([a, b], rule="conflation")                                            # doctest: +SKIP
    """
    named: Iterable[tuple[Client | None, Posterior]]
    if isinstance(posteriors, Mapping):
        named = posteriors.items()  # pyright: ignore[reportAssignmentType]
    else:
        named = ((None, q) for q in posteriors)
    accumulator = None
    chosen = get_rule(rule, **options)
    size = len(posteriors) if isinstance(posteriors, (Sequence, Mapping)) else 0
    given = _weights(posteriors, weights, size)
    for position, (client, posterior) in enumerate(named):
        if accumulator is None:
            accumulator = Accumulator(chosen, posterior, previous)
        accumulator.absorb(posterior, given(client, position), client)
    if accumulator is None:
        raise PosteriorError("there is nothing to fuse: no posterior was given.")
    return accumulator.conclude().posterior


def _weights(
    posteriors: Any, weights: Sequence[float] | Mapping[Client, float] | None, size: int
) -> Callable[[Client | None, int], float]:
    """Return a function giving the weight of a client by name or position; complain early where lengths are known."""
    if weights is None:
        return lambda client, position: 1.0
    if isinstance(weights, Mapping):
        if not isinstance(posteriors, Mapping):
            raise PosteriorError(
                "weights by client need posteriors by client: pass both as mappings, or both as sequences."
            )
        missing = [c for c in posteriors if c not in weights]
        if missing:
            raise PosteriorError(f"client {missing[0]} has no weight; give one for each of {list(posteriors)}.")
        return lambda client, position: weights[client]  # type: ignore[index]
    if size and len(weights) != size:
        raise PosteriorError(f"{len(weights)} weights were given for {size} posteriors; give one for each.")

    def at(client: Client | None, position: int) -> float:
        if position >= len(weights):
            raise PosteriorError(
                f"{len(weights)} weights were given, but there are more posteriors; give one for each."
            )
        return float(weights[position])

    return at
