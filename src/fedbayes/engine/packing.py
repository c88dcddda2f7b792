"""Packing: which client is on which lane at which step.

Lanes are slots. Clients are queued longest first; a slot whose client is done takes the next one. When the queue is
empty, lanes either close up (``compact``: the last slot's client moves into the free slot and the width shrinks, so no
step is wasted) or keep their place and idle (fixed width, which a compiled step needs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

IDLE = -1


@dataclass(frozen=True)
class Segment:
    """A stretch of steps during which the same clients sit on the same slots.

    ``jobs`` names the job on each slot (``IDLE``: none), ``begins`` each job's own step at the start of the stretch.
    """

    jobs: tuple[int, ...]
    begins: tuple[int, ...]
    steps: int


def pack(lengths: Sequence[int], lanes: int, *, block: int = 1, compact: bool = True) -> list[Segment]:
    """Plan jobs of ``lengths`` steps on ``lanes`` slots; slots change hands only at multiples of ``block`` steps."""
    width = max(1, min(lanes, len(lengths)))
    queue = sorted(range(len(lengths)), key=lambda job: (-lengths[job], job))
    slots, queue = queue[:width], queue[width:]
    if not compact:
        slots += [IDLE] * (max(1, lanes) - len(slots))
    done = [0] * len(lengths)
    blocks = [-(-length // block) for length in lengths]
    segments: list[Segment] = []
    while any(job != IDLE for job in slots):
        stretch = min(blocks[job] - done[job] for job in slots if job != IDLE)
        begins = tuple(0 if job == IDLE else done[job] * block for job in slots)
        if stretch:
            segments.append(Segment(tuple(slots), begins, stretch * block))
        for job in slots:
            if job != IDLE:
                done[job] += stretch
        finished = [i for i, job in enumerate(slots) if job != IDLE and done[job] == blocks[job]]
        for i in finished:
            slots[i] = queue.pop(0) if queue else IDLE
        if compact:
            slots = _close_up(slots)
    return segments


def _close_up(slots: list[int]) -> list[int]:
    """Fill idle slots with the last ones, so that busy slots are a prefix and few rows move."""
    slots = list(slots)
    i = 0
    while i < len(slots):
        while slots and slots[-1] == IDLE:
            slots.pop()
        if i < len(slots) and slots[i] == IDLE:
            slots[i] = slots.pop()
        i += 1
    return slots


def lane_steps(segments: Sequence[Segment]) -> int:
    """Return the lane-steps the machine does, idle ones included."""
    return sum(segment.steps * len(segment.jobs) for segment in segments)


def widest(launches: Sequence[Sequence[int]], lanes: int, *, block: int = 1, occupancy: float = 0.9) -> int:
    """Return the widest fixed width up to ``lanes`` at which at least ``occupancy`` of these launches' lane-steps do real work.

    With clients of unequal size the longest one sets the number of steps; lanes beyond total / longest only idle.
    """
    real = sum(map(sum, launches))
    for width in range(min(lanes, max(map(len, launches))), 1, -1):
        packed = (pack(lengths, width, block=block, compact=False) for lengths in launches)
        if real >= occupancy * sum(map(lane_steps, packed)):
            return width
    return 1


def block_size(lengths: Sequence[int], most: int = 8, waste: float = 0.02) -> int:
    """Return the largest block up to ``most`` steps whose masked steps at clients' ends are at most a share ``waste``."""
    real = sum(lengths)
    for block in range(most, 1, -1):
        if sum(-(-length // block) * block for length in lengths) <= (1 + waste) * real:
            return block
    return 1
