"""What the round loop asks of clients, and what they answer: the protocol between ``Federation`` and its clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .posterior import Posterior


@dataclass(frozen=True)
class Assignment:
    """One client's work for one round. Everything in it is plain data, so it can be sent to another machine.

    ``seed`` is the experiment's seed; a client derives every draw from (seed, round, client, purpose).
    ``divisor`` is the number the KL is divided by (see ``objective.kl_divisor``); ``kl_weight`` includes
    annealing. ``prior`` is None when the objective's own N(0, s²) holds. ``run`` tells federations apart that
    share one launch; a lone federation is run 0.
    """

    client: int
    round: int
    start: Posterior
    seed: int
    learning_rate: float
    epochs: int = 1
    steps: int = 0  # when positive: that many optimiser steps instead of epochs
    divisor: float = 1.0
    kl_weight: float = 1.0
    prior_std: float = 1.0
    prior: Posterior | None = None
    l2: float = 0.0
    proximal: float = 0.0
    run: int = 0


@dataclass(frozen=True)
class Update:
    """What a client answers: its posterior, how many examples it holds, and what it measured while training."""

    client: int
    round: int
    posterior: Posterior
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # loss, nll, kl of the last epoch; steps; seconds
    run: int = 0


class Cohort(Protocol):
    """A set of clients that can train: in this process (``LocalCohort``) or on other machines (``FlowerCohort``)."""

    def sizes(self, run: int = 0) -> Mapping[int, int]:
        """Examples held by each client, by client number."""
        ...

    def train(self, assignments: Sequence[Assignment]) -> Iterator[Update]:
        """Do the assignments and yield each update as soon as it is there, in any order."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """What the last ``train`` cost: lanes, steps, occupancy, bytes sent; written to ``metrics.jsonl``."""
        ...

    def state(self) -> dict[str, Any]:
        """State that must survive a restart (persistent optimisers), as tensors and plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave."""
        ...
