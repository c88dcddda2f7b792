"""``Accumulator``: clients come in one by one, only a total is kept, and the fused posterior comes out."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PosteriorError
from ..posterior import Gaussian, Posterior, Refusal, check, sigma_statistics
from . import exact
from .layout import Layout
from .rule import Rule, Statistics, get_rule, rules
from .weighting import LEAST_WEIGHT, MOST_WEIGHT, Client

_CPU_BLOCK = 2**16
_GPU_BLOCK = 2**26
_LEAST_PLAIN, _MOST_PLAIN = 1e-45, 1e40
"""Numbers within these (as all of float32 are) make no term too large to sum; terms of others are computed twice, first to look."""
_HEADER = ("rule", "module", "pivot", "floor", "options", "reproducible", "weights", "refused", "seen")
"""What a saved total says of itself, and which of its clients came without a name."""


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
        if not 0 <= floor < math.inf:
            raise PosteriorError(f"floor is {floor}; it must be a sigma, not negative.")
        reference = reference if reference is not None else previous
        if reference is None:
            raise PosteriorError(
                "an Accumulator needs a reference posterior (or the previous global one) to know what to expect."
            )
        if self.rule.needs_previous and previous is None:
            raise PosteriorError(f"the rule '{self.rule.name}' needs the previous global posterior; pass previous=.")
        self.reference, self.previous, self.reproducible, self.floor = reference, previous, reproducible, floor
        for what, given, zero in (
            ("reference", reference, True),
            ("previous global", previous, self.rule.allows_zero_variance),
        ):
            if given is None:
                continue
            expect(given, f"the {what} posterior")
            try:
                check(given, reference, allow_zero_variance=zero)
            except Refusal as refusal:
                raise PosteriorError(f"the {what} posterior is unfit: '{refusal.tensor}' {refusal.reason}.") from None
        self.layout = Layout.of(reference)
        self.weights: dict[Client, float] = {}
        self.refused: list[dict[str, Any]] = []
        self._pivot = previous if previous is not None else reference
        self._plain_pivot = _plain(self._pivot)
        most = _CPU_BLOCK if self.layout.device.type == "cpu" else _GPU_BLOCK
        self._blocks = self.layout.blocks(most)
        self._cells: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}
        self._unnamed: set[int] = set()

    def absorb(self, posterior: Posterior, weight: float = 1.0, client: Client | None = None) -> None:
        """Check a client's posterior and add it; refuse it with ``PosteriorError``, the total untouched, if it is unfit.

        ``weight`` need not be normalised; a client of weight 0 is checked and adds nothing.
        """
        client = None if client is None else name_of(client)
        number = self._next_name()
        name = number if client is None else client
        expect(posterior, f"client {name}'s update")
        self.absorb_as(posterior, weight, name, client)
        if client is None:
            self._unnamed.add(number)

    def absorb_as(self, posterior: Posterior, weight: float, name: Client, address: Client | None) -> None:
        """Absorb a posterior under a name of the server's; rules that draw take ``address``, or without one its content."""
        try:
            weight = self._check_weight(weight, name)
            check(posterior, self.reference, client=name, allow_zero_variance=self.rule.allows_zero_variance)
            if weight > 0:
                self._check_terms(posterior, weight, name)
                self._add(posterior, weight, self._address(posterior, address))
        except Refusal as refusal:
            self.refused.append({"client": refusal.client, "tensor": refusal.tensor, "reason": refusal.reason})
            raise
        self.weights[name] = weight

    def merge(self, other: Accumulator) -> None:
        """Add another accumulator's total: regional servers fuse their clients, and a central one merges them.

        Clients that came without a name take a free number here. Name clients to have one that is in both totals noticed.
        """
        if not isinstance(other, Accumulator):
            raise PosteriorError(f"merge takes another Accumulator; a {type(other).__name__} was given.")
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
        if other is self:
            raise PosteriorError("an accumulator cannot be merged with itself.")
        names = self._names_here(other)
        arrived = {names.get(client, client): weight for client, weight in other.weights.items()}
        self._check_new(arrived)
        for key, cells in other._cells.items():
            if key not in self._cells:
                self._cells[key] = cells.to(self.layout.device, copy=True)
            elif self.reproducible:
                exact.merge(self._cells[key], cells)
            else:
                for row in cells.to(self.layout.device):
                    exact.deposit_pairs(self._cells[key], row)
        self.weights |= arrived
        self._unnamed |= set(names.values())
        self.refused += other.refused

    def add_total(self, statistics: Statistics, weights: Mapping[Client, float]) -> None:
        """Add statistics that are already a sum over ``weights``' clients, as secure aggregation gives them."""
        self._check_new(weights)
        flat = {key: term.to(self.layout.device, torch.float64).reshape(-1) for key, term in statistics.items()}
        missing = sorted(self._statistics() - flat.keys())
        if missing:
            raise PosteriorError(f"the total lacks the statistic '{missing[0]}' of the rule '{self.rule.name}'.")
        for key, term in flat.items():
            if term.numel() != self._length(key):
                raise PosteriorError(
                    f"the statistic '{key}' has {term.numel()} numbers where the model has {self._length(key)}."
                )
        for key, term in flat.items():
            self._deposit(key, term, 0)
        self.weights |= dict(weights)

    def holds(self, client: Client) -> bool:
        """Whether a client of this name is in the total; 1 and "1" are one client, as in the record."""
        return client in self.weights or _twin(client) in self.weights

    def total(self) -> Statistics:
        """Return the total as float64 statistics."""
        total: Statistics = {}
        for key, cells in self._cells.items():
            if key.removesuffix("_low") in self._cells and key.endswith("_low"):
                continue
            value, low = exact.value(cells) if self.reproducible else (cells[0], cells[1])
            errors = self._cells.get(f"{key}_low")
            total[key], total[f"{key}_low"] = value, low if errors is None else low + exact.value(errors)[0]
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
        if self.layout.weights:
            record["sigma"] = sigma_statistics(posterior, self.previous, self.floor)
        return Fused(posterior, record)

    def save(self, path: str | Path) -> Path:
        """Write the total to a safetensors file, atomically, so that a server can be restarted in mid-round."""
        header = {
            "rule": self.rule.name,
            "module": type(self.rule).__module__,
            "pivot": _digest(self._pivot),
            "floor": self.floor,
            "options": self.rule.options(),
            "reproducible": self.reproducible,
            "weights": [[c, w] for c, w in self.weights.items()],
            "refused": self.refused,
            "seen": self._seen,
        }
        assert tuple(header) == _HEADER
        header["unnamed"] = sorted(self._unnamed)
        total = Posterior(points=self._cells, metadata={"accumulator": json.dumps(header)})
        return total.save(path)

    @staticmethod
    def load(path: str | Path, reference: Posterior | None = None, previous: Posterior | None = None) -> Accumulator:
        """Read what ``save`` wrote; ``reference`` and ``previous`` must be those it was made with."""
        stored = Posterior.load(path)
        if "accumulator" not in stored.metadata:
            raise PosteriorError(f"{path} holds a posterior, not an accumulator's total.")
        try:
            found = json.loads(stored.metadata["accumulator"])
            header = {name: found[name] for name in _HEADER}
        except (ValueError, KeyError) as error:
            raise PosteriorError(
                f"{path} does not hold the total of an accumulator of this version ({error})."
            ) from None
        known = {r.name for r in rules()}
        rule = header["rule"] if header["rule"] in known else f"{header['module']}:{header['rule']}"
        self = Accumulator(
            get_rule(rule, **header["options"]),
            reference,
            previous,
            reproducible=header["reproducible"],
            floor=header["floor"],
        )
        self._cells = {key: cells.to(self.layout.device) for key, cells in stored.points.items()}
        for key, cells in self._cells.items():
            if cells.shape[1] != self._length(key):
                raise PosteriorError(f"{path} was written for a model with other tensors than the reference.")
        if header["pivot"] != _digest(self._pivot):
            raise PosteriorError(
                f"{path} was written with another previous global (or reference) posterior; pass that one."
            )
        self.weights = dict(header["weights"])
        self.refused, self._seen, self._unnamed = header["refused"], header["seen"], set(found.get("unnamed", ()))
        return self

    def _check_weight(self, given: float, client: Client) -> float:
        if self.holds(client):
            raise Refusal(client, "", "it was already absorbed in this round")
        right = f"a weight must be 0 or between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}"
        try:
            weight = float(given)
        except (TypeError, ValueError, OverflowError):
            raise Refusal(client, "", f"its weight is {str(given)[:40]!r}; {right}") from None
        if not (weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT):
            raise Refusal(client, "", f"its weight is {weight}; {right}")
        self._check_room(1)
        return weight

    def _check_terms(self, posterior: Posterior, weight: float, client: Client) -> None:
        """Refuse a client whose terms are too large to sum, before any is added."""
        if self._plain_pivot and _plain(posterior):
            return
        mass = self.rule.mass(weight)
        for pieces in self._blocks:
            q, pivot = self.layout.flat_gaussian(posterior, pieces), self.layout.flat_gaussian(self._pivot, pieces)
            for term in self.rule.checked_terms(q, mass, pivot, ("trial",)).values():
                self._check_size(term, client, pieces[0].name)
        for name, t in posterior.points.items():
            self._check_size(weight * t.double(), client, name)

    def _check_size(self, term: Tensor, client: Client, name: str) -> None:
        if term.numel() and not bool((term.abs() < exact.LARGEST).all()):
            raise Refusal(
                client,
                name,
                f"has numbers too extreme to sum under the rule '{self.rule.name}' (a term is beyond {exact.LARGEST:.0e})",
            )

    def _next_name(self) -> int:
        """Name a client that came without a name: by how many came before it, refused ones counted."""
        name = len(self.weights) + len(self.refused)
        while self.holds(name):
            name += 1
        return name

    def _names_here(self, other: Accumulator) -> dict[Client, int]:
        """Return what the other's clients without a name are called here: as there, or by the next number that neither holds."""
        free = (n for n in itertools.count(self._next_name()) if not (self.holds(n) or other.holds(n)))
        return {name: next(free) if self.holds(name) else name for name in sorted(other._unnamed)}

    def _statistics(self) -> set[str]:
        """Return the names of the statistics that a total has (rounding errors aside)."""
        one = torch.ones(1, dtype=torch.float64)
        terms = self.rule.checked_terms(Gaussian(one, one), self.rule.mass(1.0), Gaussian(one, one), ("names",))
        names = {key for key in terms if not key.endswith("_low")} if self.layout.weights else set()
        return names | {"points"} if self.layout.points else names

    def _check_new(self, weights: Mapping[Client, float]) -> None:
        both = sorted(str(client) for client in weights if self.holds(client))
        if both:
            raise PosteriorError(f"client {both[0]} is in both totals; name clients uniquely (client=...).")
        self._check_room(len(weights))

    def _check_room(self, more: int) -> None:
        if len(self.weights) + more > exact.MOST_TERMS:
            raise PosteriorError(f"an accumulator takes at most {exact.MOST_TERMS} clients.")

    def _add(self, posterior: Posterior, weight: float, address: tuple[int | str, ...]) -> None:
        mass, at = self.rule.mass(weight), 0
        for i, pieces in enumerate(self._blocks):
            q, pivot = self.layout.flat_gaussian(posterior, pieces), self.layout.flat_gaussian(self._pivot, pieces)
            for key, term in self.rule.checked_terms(q, mass, pivot, (*address, i)).items():
                self._deposit(key, term, at)
            at += q.mean.numel()
        if self.layout.points:
            self._deposit("points", weight * self.layout.flat_points(posterior), 0)

    def _deposit(self, key: str, term: Tensor, at: int) -> None:
        """Add part of a statistic. ``x_low`` has cells of its own, which keep as many digits below those of ``x``; a plain pair takes both."""
        key = key if self.reproducible else key.removesuffix("_low")
        if key not in self._cells:
            n, device = self._length(key), self.layout.device
            self._cells[key] = exact.new_cells(n, device) if self.reproducible else exact.new_pairs(n, device)
        cells = self._cells[key][:, at : at + term.numel()]
        (exact.deposit if self.reproducible else exact.deposit_pairs)(cells, term)

    def _length(self, key: str) -> int:
        return self.layout.numbers if key.removesuffix("_low") == "points" else self.layout.weights

    def _address(self, posterior: Posterior, client: Client | None) -> tuple[int | str, ...]:
        """Name a client for rules that draw: by its own name, else by its content, so that order does not matter."""
        if client is not None:
            return (client,)
        if not self.rule.draws:
            return ()
        digest = _digest(posterior)
        self._seen[digest] = self._seen.get(digest, -1) + 1
        return (digest, self._seen[digest])


def expect(given: Any, what: str) -> None:
    """Raise unless it is a posterior."""
    if not isinstance(given, Posterior):
        raise PosteriorError(f"{what} is of type {type(given).__name__}; it must be a Posterior.")


def name_of(client: Any) -> Client:
    """Return a client's name as text or a plain integer (NumPy's integers cannot be saved)."""
    try:
        return client if isinstance(client, str) else operator.index(client)
    except TypeError:
        raise PosteriorError(f"a client's name must be text or a whole number; {client!r} is neither.") from None


def _twin(client: Client) -> Client | None:
    """Return the other name that a record writes alike: "1" for 1 and 1 for "1"."""
    if isinstance(client, int):
        return str(client)
    return int(client) if client.isdecimal() and str(int(client)) == client else None


def _plain(posterior: Posterior) -> bool:
    """Whether no number is so large or small that a rule's terms could overflow."""
    doubles = [t for g in posterior.gaussians.values() for t in g if t.dtype == torch.float64]
    doubles += [t for t in posterior.points.values() if t.dtype == torch.float64]
    small = [g.variance for g in posterior.gaussians.values() if g.variance.dtype == torch.float64]
    return all(bool((t.abs() <= _MOST_PLAIN).all()) for t in doubles) and all(
        bool(((v >= _LEAST_PLAIN) | (v == 0)).all()) for v in small
    )


def _digest(posterior: Posterior) -> str:
    """Return a short name of a posterior's tensors, bit for bit (its metadata aside)."""
    bare = Posterior(posterior.gaussians, posterior.points)
    return hashlib.blake2b(bare.to_bytes(), digest_size=16).hexdigest()
