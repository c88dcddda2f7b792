"""Choosing between the plain loop and lanes by measuring both for a moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .lanes import LaneLoop
from .plain import PlainLoop
from .setting import Job, Setting

MOST_LANES = 128
CLEARLY = 1.25
"""Lanes are taken when they are this much faster; in between, the plain loop is, so that the choice seldom wavers."""

_known: dict[tuple, tuple[int, str]] = {}


def choose_lanes(setting: Setting, jobs: Sequence[Job]) -> tuple[int, str]:
    """Return the number of lanes that trains these jobs fastest here, and the reason in words.

    Candidates are 1 and the number of clients in the launch (at most 128). Each trains a few real batches; nothing
    of it is kept, and the generators' state is untouched. The answer is remembered in the process for networks of the
    same layout.
    """
    count = min(len(jobs), MOST_LANES)
    if count == 1:
        return 1, "a single client"
    key = (setting.layout.trained, count, setting.local.batch_size, setting.samples, setting.engine, str(setting.device),
           type(setting.model), tuple(setting.examples.inputs.shape[1:]))  # fmt: skip
    if key not in _known:
        plain = _seconds_per_step(PlainLoop(setting), jobs[:1])
        lanes = _seconds_per_step(LaneLoop(setting, count), jobs[:count]) / count
        gain = plain / lanes
        best = count if gain >= CLEARLY else 1
        _known[key] = best, f"measured: {count} lanes train {gain:.2g} times as fast as the plain loop"
    return _known[key]


def _seconds_per_step(loop: PlainLoop | LaneLoop, jobs: Sequence[Job], steps: int = 3) -> float:
    """Return the seconds of one step, the least of several short launches after a warm-up."""
    short = [
        replace(
            job, assignment=replace(job.assignment, steps=steps), shard=job.shard[: 4 * loop.setting.local.batch_size]
        )
        for job in jobs
    ]
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        for _outcome in loop.train(short):
            pass
        seconds.append((time.perf_counter() - begun) / steps)
    return float(np.min(seconds[1:]))
