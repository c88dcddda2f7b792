"""Lanes, eagerly: many clients in one step. Works on every device and needs no compiler.

Lanes close up as clients finish, so no step is wasted; a client that is done has left its row before another moves in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..posterior import Posterior
from ..seeds import derive
from .fused import FusedAdam
from .memory import fewer_lanes, out_of_memory
from .optimizers import corrected_second_moment, lane_update, second_half
from .packing import Segment, pack
from .plan import Batches
from .rows import Rows
from .setting import Job, Outcome, Setting, with_moment
from .stacked import StackedModel, unvectorised

_CHUNK_ELEMENTS = 4_000_000  # network inputs made ahead in one go, in numbers


class LaneLoop:
    """Trains jobs side by side, one eager step for all lanes at a time."""

    def __init__(self, setting: Setting, lanes: int) -> None:
        self.setting, self.lanes = setting, lanes
        self.model = StackedModel(setting)
        self.lane_steps = self.real_lane_steps = self.steps = 0

    def train(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Train every job and yield each when it is done; what a GPU's memory does not hold begins anew on fewer lanes."""
        left = list(jobs)
        self.lane_steps = self.steps = 0
        self.real_lane_steps = sum(job.steps(self.setting.local) for job in jobs)
        while left:
            try:
                for outcome in self._launch(left):
                    left = [job for job in left if job is not outcome.job]
                    yield outcome
            except RuntimeError as error:
                if reason := unvectorised(error):
                    raise ConfigError(
                        f"the network cannot run as lanes ({reason}); set 'engine.lanes' to 1."
                    ) from error
                if not out_of_memory(error):
                    raise
            if left:
                self.lanes = fewer_lanes(min(self.lanes, len(left)))

    def _launch(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        segments = pack([job.steps(self.setting.local) for job in jobs], self.lanes)
        run = _Run(self, Rows(self.setting, jobs, min(self.lanes, len(jobs))), jobs)
        seed = noise_seed(jobs)
        devices = [self.setting.device] if self.setting.device.type == "cuda" else []
        for number, segment in enumerate(segments):
            with torch.random.fork_rng(devices=devices):  # the caller may draw between two updates
                torch.manual_seed(derive(seed, number))
                done = run.segment(segment)
            self.steps += segment.steps
            self.lane_steps += segment.steps * len(segment.jobs)
            yield from done


class _Run:
    """One launch: which job is on which lane, its batches, the losses recorded so far."""

    def __init__(self, loop: LaneLoop, rows: Rows, jobs: Sequence[Job]) -> None:
        self.loop, self.rows, self.jobs, self.setting = loop, rows, jobs, loop.setting
        self.lane_of: dict[int, int] = {}
        self.batches: dict[int, Batches] = {}
        self.losses: dict[int, list[np.ndarray]] = {}

    def segment(self, segment: Segment) -> list[Outcome]:
        """Run one stretch of steps and return the jobs that end with it."""
        self._seat(segment)
        rows, width = self.rows, len(segment.jobs)
        terms, leaves = rows.terms(width), self.loop.model.leaves(rows, width)
        update, recorded = self._optimizer(width), []
        for step, (x, y, real) in enumerate(self._inputs(segment)):
            found = self.loop.model.gradients(rows, width, leaves, x, y, real, terms)
            recorded.append(found.losses)
            with torch.no_grad():
                rows.store_buffers(found.buffers, width)
                update(found.rows)
                if rows.captured is not None:
                    self._capture(segment, step, width)
        return self._leave(segment, torch.stack(recorded).double().cpu().numpy())

    def _optimizer(self, width: int) -> Callable[[Tensor], None]:
        """Return what takes a step on the first ``width`` lanes, given their gradients."""
        rows, local, split = self.rows, self.setting.local, self.setting.layout.trained.split
        moments = tuple(m[:width] for m in rows.moments.values())
        state = (moments, rows.steps[:width], rows.rates[:width])
        if local.optimizer == "adam" and self.setting.device.type == "cpu":
            return FusedAdam(local, split, rows.parameters[:width], *state).step
        return lambda gradients: lane_update(local, split, rows.parameters[:width], gradients, *state)

    def _seat(self, segment: Segment) -> None:
        moves = {}
        for lane, job in enumerate(segment.jobs):
            if job in self.lane_of and self.lane_of[job] != lane:
                moves[lane] = self.lane_of[job]
        self.rows.move(moves)
        new = {lane: job for lane, job in enumerate(segment.jobs) if job not in self.lane_of}
        self.rows.load({lane: self.jobs[job] for lane, job in new.items()})
        for job in new.values():
            self.batches[job] = self.jobs[job].batches(self.setting)
            self.losses[job] = []
        self.lane_of = {job: lane for lane, job in enumerate(segment.jobs)}

    def _inputs(self, segment: Segment) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs (lanes, batch, ...), labels and weights step by step, made a stretch of steps at a time."""
        s, width = self.setting, len(segment.jobs)
        per_step = width * s.local.batch_size * s.examples.inputs[0].numel()
        chunk = max(1, _CHUNK_ELEMENTS // per_step)
        for begin in range(0, segment.steps, chunk):
            end = min(segment.steps, begin + chunk)
            indices, real = self._table("indices", segment, begin, end), self._table("real", segment, begin, end)
            keys = self.batches[segment.jobs[0]].augmentation
            numbers = {key: self._table(key, segment, begin, end) for key in keys}
            x = s.inputs(indices, self.rows.client[:width].expand(end - begin, width), numbers)
            y = s.examples.labels[indices]
            yield from zip(x.unbind(), y.unbind(), real.unbind(), strict=True)

    def _table(self, key: str, segment: Segment, begin: int, end: int) -> Tensor:
        """Return one column of the plan for steps begin..end of a segment, (steps, lanes, ...)."""
        parts = []
        for job, first in zip(segment.jobs, segment.begins, strict=True):
            batches = self.batches[job]
            array = getattr(batches, key) if key in ("indices", "real") else batches.augmentation[key]
            parts.append(array[first + begin : first + end])
        return self.setting.to_device(np.stack(parts, axis=1))

    def _capture(self, segment: Segment, step: int, width: int) -> None:
        """Add Adam's second moment on lanes that are in the second half of their last epoch."""
        s, rows = self.setting, self.rows
        counts = [
            first + step >= second_half(self.batches[job].steps, self.batches[job].tail)
            for job, first in zip(segment.jobs, segment.begins, strict=True)
        ]
        if any(counts) and rows.captured is not None:
            second = rows.moments["exp_avg_sq"][:width]
            if s.capture.bias_correction:
                second = corrected_second_moment(second, rows.steps[:width], s.local)
            mask = torch.tensor(counts, dtype=torch.float32, device=s.device)[:, None]
            rows.captured[:width].addcmul_(second, mask)

    def _leave(self, segment: Segment, losses: np.ndarray) -> list[Outcome]:
        """Return the jobs that end with this segment; ``losses`` is (steps, lanes, 2)."""
        done = []
        for lane, (job, first) in enumerate(zip(segment.jobs, segment.begins, strict=True)):
            self.losses[job].append(losses[:, lane])
            if first + segment.steps == self.batches[job].steps:
                done.append(lane)
        if not done:
            return []
        divergences = self.rows.divergence(len(segment.jobs)).cpu()
        posteriors = self.rows.posteriors(done)
        return [
            self._outcome(segment.jobs[i], i, p, float(divergences[i])) for i, p in zip(done, posteriors, strict=True)
        ]

    def _outcome(self, job: int, lane: int, posterior: Posterior, divergence: float) -> Outcome:
        batches = self.batches.pop(job)
        if self.rows.captured is not None:
            count = batches.steps - second_half(batches.steps, batches.tail)
            posterior = with_moment(posterior, self.rows.moment(lane, count))
        memory = self.rows.memory(lane) if self.setting.local.keep_state else None
        return Outcome(self.jobs[job], posterior, np.concatenate(self.losses.pop(job)), divergence, batches, memory)


def noise_seed(jobs: Sequence[Job]) -> int:
    """Return the seed of a launch's layer noise: addressed (seed, "lanes", round) of every federation in it."""
    address: list[int | str] = ["lanes"]
    for seed, run, round in dict.fromkeys((j.assignment.seed, j.assignment.run, j.assignment.round) for j in jobs):
        address += [seed, run, round]
    return derive(*address)
