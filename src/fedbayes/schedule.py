"""What a round is given: its learning rate and its clients, by the experiment and the round's number alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .errors import RunError
from .experiment import Experiment
from .seeds import numpy_rng


def learning_rate(experiment: Experiment, round: int) -> float:
    """Return the learning rate of a round (counted from 1).

    exponential (Fischer 2024, Loomis 2023): constant for ``silent`` rounds, then multiplied every round. The paper's
    "factor .04" is read as exp(-0.04) (``exp``), 1 - 0.04 (``keep``) or, literally, 0.04 (``literal``: cannot train).
    step (FedBE): multiplied by ``factor`` once each milestone's share of the rounds has passed; with ``factors``, the
    rate times the first of them at the start, and times the next from each milestone on.
    """
    s, base = experiment.schedule, experiment.local.learning_rate
    if s.name == "exponential":
        factor = {"exp": math.exp(-s.decay), "keep": 1 - s.decay, "literal": s.decay}[s.reading]
        return base * factor ** max(0, round - s.silent)
    if s.name == "step":
        passed = sum(round - 1 >= m * experiment.rounds - 1e-9 for m in s.milestones)
        if not s.factors:
            return base * s.factor**passed
        return base * s.factors[passed]
    return base


def choose_clients(experiment: Experiment, sizes: Mapping[int, int], round: int) -> list[int]:
    """Draw the round's clients: the asked fraction (at least one) of those that hold data, without replacement."""
    able = sorted(c for c, n in sizes.items() if n > 0)
    if not able:
        raise RunError("no client holds any data; check the partition.")
    count = max(1, round_half_up(experiment.participation.fraction * len(able)))
    if count == len(able):
        return able
    chosen = numpy_rng(experiment.seed, "sample", round).choice(len(able), size=count, replace=False)
    return sorted(able[i] for i in chosen)


def round_half_up(value: float) -> int:
    """Round to the nearest whole number, halves up (Python's ``round`` takes 2.5 to 2)."""
    return math.floor(value + 0.5)
