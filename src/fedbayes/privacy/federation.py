"""``PrivateFederation``: the round loop when clients' moves are clipped and noised, or hidden behind masks.

Everything but the accumulator is the ordinary round loop. It also keeps account of ε.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cohort import Assignment, Update
from ..federation import Federation, options, rule_of_round
from ..posterior import Posterior
from ..rundir import write_atomically
from ..schedule import choose_clients
from ..seeds import torch_rng
from .accountant import Accountant
from .relative import RelativeAccumulator, finite, noise_of, refuse_unless_sum


@dataclass(frozen=True)
class MaskedTotal(Update):
    """What a round of secure aggregation gives in place of updates: a total, and who is in it.

    ``posterior`` is empty and ``client`` is -1. ``total`` are the statistics in relative coordinates, ``weights`` and
    ``sizes`` those of the clients in it; ``refusals`` name the clients that are not, with the reason.
    """

    total: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    weights: Mapping[int, float] = field(default_factory=dict)
    sizes: Mapping[int, int] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)


class PrivateFederation(Federation):
    """A federation whose server sees sums only (``fusion.private``), clipped and noised ones (``privacy.clip``), or both.

    Noise on a total that the server holds is added by the server; on a masked total every node has added its share
    already (``cohort.adds_noise``). A simulation draws it by address, so that it repeats; a deployment
    (``cohort.remote``) draws it from the operating system's entropy, because a seed that is known protects nothing.
    Then a round that is repeated after a crash is a second release: ``privacy.json`` in the run directory keeps the
    account of every round that was begun.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unless_sum(self.experiment, options(self.experiment))
        self.accountant = Accountant(self.experiment.privacy.noise)

    def _accumulator(self) -> Any:
        e, number = self.experiment, self.round + 1
        generator = None if self._remote else torch_rng(e.seed, "privacy", number)
        rule = rule_of_round(self.rule, e, number)
        return RelativeAccumulator(rule, self.posterior, bound=e.privacy.clip, generator=generator)

    def begin(self) -> list[Assignment]:
        """Start a round; the noise follows from its clients' weights."""
        assignments = super().begin()
        current, p = self._open_round(), self.experiment.privacy
        accumulator: Any = current.accumulator
        if not getattr(self.cohort, "adds_noise", False):
            accumulator.noise = noise_of(self.experiment, self.rule, current.weights)
        self.accountant.release(current.clients)
        if self._ledger is not None:
            write_atomically(self._ledger, json.dumps({"rounds begun": self.accountant.counts}).encode())
        if p.clip > 0:
            epsilon = finite(self.accountant.epsilon(p.delta))
            accumulator.about = {"epsilon": epsilon, "delta": p.delta, "clip": p.clip, "noise": p.noise}
        return assignments

    def absorb(self, update: Update) -> None:
        """Take an update, or the total that stands for all of them."""
        if not isinstance(update, MaskedTotal):
            return super().absorb(update)
        current = self._open_round()
        accumulator: Any = current.accumulator
        if update.weights:
            accumulator.add_total(update.total, update.weights)
        for client, size in update.sizes.items():
            current.arrived[client] = Update(client, update.round, Posterior(), size, update.metrics, update.run)
        for client, reason in update.refusals.items():
            self._refuse(client, "", reason)
        return None

    def restore(self) -> bool:
        """Continue from a checkpoint; what was released before stands in the ledger, or follows from the seed."""
        found = super().restore()
        if self._ledger is not None and self._ledger.exists():
            begun = json.loads(self._ledger.read_text())["rounds begun"]
            self.accountant.counts = {int(client): int(times) for client, times in begun.items()}
        elif found:
            sizes = self.cohort.sizes(self.run_number)
            for number in range(1, self.round + 1):
                self.accountant.release(choose_clients(self.experiment, sizes, number))
        return found

    @property
    def _remote(self) -> bool:
        return getattr(self.cohort, "remote", False)

    @property
    def _ledger(self) -> Path | None:
        """Where the rounds that were begun are written down, for noise that does not repeat."""
        noised = self._remote and self.directory is not None and self.experiment.privacy.clip > 0
        return self.directory.path / "privacy.json" if noised and self.directory is not None else None
