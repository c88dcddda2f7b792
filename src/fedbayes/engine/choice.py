"""Choosing between the plain loop and lanes by measuring both for a moment, and the number of lanes by memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from .lanes import LaneLoop
from .plain import PlainLoop
from .setting import Job, Setting

MOST_LANES = {"cpu": 128, "cuda": 256}
SHARE_OF_MEMORY = 0.6
"""Share of a GPU's free memory that lanes may take."""
CLEARLY = 1.25
"""Lanes are taken when they are this much faster; in between, the plain loop is, so that the choice seldom wavers."""

_known: dict[tuple, tuple[int, str]] = {}


def choose_lanes(setting: Setting, jobs: Sequence[Job]) -> tuple[int, str]:
    """Return the number of lanes that trains these jobs fastest here, and the reason in words.

    Candidates are 1 and the number of clients in the launch (at most 128; on a GPU 256, and what its memory holds). Each
    trains a few real batches; nothing of it is kept, and the generators' state is untouched. Where a GPU's
    step is to be compiled, lanes are taken without measuring, since compiling to find out costs more. The answer is remembered in the process.
    """
    count = min(len(jobs), MOST_LANES[setting.device.type])
    if count == 1:
        return 1, "a single client"
    key = (setting.layout.trained, count, setting.local.batch_size, setting.samples, setting.engine, str(setting.device),
           type(setting.model), tuple(setting.examples.inputs.shape[1:]))  # fmt: skip
    if key not in _known:
        _known[key] = _measured(setting, jobs, count)
    return _known[key]


def _measured(setting: Setting, jobs: Sequence[Job], count: int) -> tuple[int, str]:
    if setting.device.type == "cuda":
        count = min(count, _lanes_in_memory(setting, jobs))
        if setting.engine.compile or count == 1:
            return count, "as many clients as there are, or as the GPU's memory holds"
    workers = min(setting.engine.workers, len(jobs))
    plain = _seconds_per_step(PlainLoop(setting), jobs[:1]) / workers
    lanes = _seconds_per_step(LaneLoop(setting, count), jobs[:count]) / count
    gain = plain / lanes
    best = count if gain >= CLEARLY else 1
    return best, f"measured: {count} lanes train {gain:.2g} times as fast as the plain loop"


def _lanes_in_memory(setting: Setting, jobs: Sequence[Job]) -> int:
    """Return how many lanes a GPU's free memory holds, from the peaks of two lanes and of four."""
    peaks = []
    for lanes in (2, 4):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.device)
        _seconds_per_step(LaneLoop(setting, lanes), [jobs[i % len(jobs)] for i in range(lanes)], steps=1)
        peaks.append(torch.cuda.max_memory_allocated(setting.device))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(setting.device)
    return max(1, int(SHARE_OF_MEMORY * free / max(1, (peaks[1] - peaks[0]) / 2)))


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
