"""Choosing between the plain loop, the same on several processes, and lanes by measuring each for a moment."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import ConfigError
from .lanes import LaneLoop
from .plain import PlainLoop
from .processes import ProcessLoop, can_fork
from .setting import Job, Setting

MOST_LANES = {"cpu": 128, "cuda": 256}
FEW_LANES = 8
"""Lanes measured first on a CPU: of a convolutional network they can be faster than many, which its caches do not hold."""
SHARE_OF_MEMORY = 0.6
"""Share of a GPU's free memory that lanes may take."""
CLEARLY = 1.25
"""Another way is taken when it is this much faster than the plain loop; in between, the plain loop is, so that the choice
seldom wavers."""
_PATIENCE = 2.0  # seconds after which a way is not measured again


class Choice(NamedTuple):
    """How clients are trained here, and why in words."""

    lanes: int
    workers: int
    why: str


_known: dict[tuple, Choice] = {}


def choose(setting: Setting, jobs: Sequence[Job]) -> Choice:
    """Return the way that trains these jobs fastest here.

    Candidates are the plain loop, the plain loop on processes (``engine.workers``, or one for each core where that is left
    open), and one lane a client (at most 128; on a GPU 256, and what its memory holds). On a CPU eight lanes are tried
    before more, and more only where eight are no slower than the plain loop (they would take minutes and gigabytes to say
    no); eight are taken where they are clearly faster than more. Each trains a few real batches; nothing of it is kept, and the generators' state is untouched. On a CPU a network
    that cannot run as lanes (a recurrent one, say) gets the plain loop. Where a GPU's step is to be compiled, lanes are
    taken without measuring, since compiling to find out costs more. The answer is remembered in the process.
    """
    count, workers = min(len(jobs), MOST_LANES[setting.device.type]), possible_workers(setting, len(jobs))
    if count == 1:
        return Choice(1, workers, "a single client")
    key = (setting.layout.trained, count, workers, setting.local, setting.samples, setting.engine, str(setting.device),
           type(setting.model), tuple(setting.examples.inputs.shape[1:]))  # fmt: skip
    if key not in _known:
        _known[key] = _measured(setting, jobs, count, workers)
    return _known[key]


def possible_workers(setting: Setting, jobs: int) -> int:
    """Return how many processes could share out so many jobs: as many as asked for, or one for each core of this process."""
    if setting.engine.workers or not can_fork(setting):
        return max(1, setting.engine.workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, jobs))


def _measured(setting: Setting, jobs: Sequence[Job], count: int, workers: int) -> Choice:
    if setting.device.type == "cuda":
        count = min(count, _lanes_in_memory(setting, jobs))
        if setting.engine.compile or count == 1:
            return Choice(count, 1, "as many clients as there are, or as the GPU's memory holds")
    plain = _seconds_per_step(PlainLoop(setting), jobs[:1])
    shared = plain
    if workers > 1:
        loop = ProcessLoop(setting, workers)
        shared = _seconds_per_step(loop, jobs[:workers])
        loop.close()
    gains, refused = {(1, workers): plain / shared}, ""
    try:
        for lanes in (FEW_LANES, count) if count > FEW_LANES and setting.device.type == "cpu" else (count,):
            loop = LaneLoop(setting, lanes)
            gains[lanes, 1] = plain / _seconds_per_step(loop, jobs[:lanes], hopeless=CLEARLY * min(plain, shared))
            if gains[lanes, 1] < 1:
                break
    except (RuntimeError, TypeError, ValueError, ConfigError) as error:  # the plain loop has just trained the same jobs
        what = "more lanes" if len(gains) > 1 else "lanes"
        refused = f"the network cannot run as {what} ({str(error.__cause__ or error).partition('. ')[0]})"
    told = [f"{n} lanes train {gain:.2g} times as fast as the plain loop" for (n, _), gain in gains.items() if n > 1]
    told += [refused] if refused else []
    told += [f"{workers} processes {plain / shared:.2g} times"] if workers > 1 else []
    whole, few = (count, 1), (FEW_LANES, 1)
    if whole != few and whole in gains and gains.get(few, 0.0) < CLEARLY * gains[whole]:
        gains.pop(few, None)  # a lane a client: none is left to train at the end with few lanes busy
    best = max(gains, key=lambda way: gains[way])
    if setting.engine.workers < 2 and gains[best] < CLEARLY:
        best = (1, 1)
    return Choice(*best, "measured: " + ", ".join(told))


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


def _seconds_per_step(
    loop: PlainLoop | ProcessLoop | LaneLoop, jobs: Sequence[Job], steps: int = 5, hopeless: float = float("inf")
) -> float:
    """Return the seconds of one client's step, the least of several short launches after one of a single step.

    That one is not counted: the first lanes of a process take half a second more, to import what ``vmap`` needs. A way
    that is slow is not measured for long, and not again where a launch is ``hopeless`` three times over.
    """
    size = loop.setting.local.batch_size

    def launch(steps: int) -> float:
        begun = time.perf_counter()
        for _outcome in loop.train(
            [replace(j, assignment=replace(j.assignment, steps=steps), shard=j.shard[: 4 * size]) for j in jobs]
        ):
            pass
        return (time.perf_counter() - begun) / (steps * len(jobs))

    launch(1)
    seconds: list[float] = []
    while len(seconds) < 3:
        seconds.append(launch(steps))
        if seconds[0] > 3 * hopeless or sum(seconds) * steps * len(jobs) > _PATIENCE:
            break
    return min(seconds)
