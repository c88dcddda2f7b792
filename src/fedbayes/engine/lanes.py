"""Lanes: many clients in one step, their states stacked along a leading axis and evaluated by ``vmap``.

The network stays an ordinary module. One backward pass of the summed losses gives every lane its own gradient, because
no lane's loss depends on another lane's parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ..objective import Terms, cross_entropy, penalty
from ..seeds import derive
from .optimizers import corrected_second_moment, lane_update, second_half
from .packing import IDLE, Segment, lane_steps, pack
from .plan import Batches
from .rows import Rows
from .setting import Job, Outcome, Setting

_CHUNK_ELEMENTS = 4_000_000  # network inputs made ahead in one go, in numbers


class LaneLoop:
    """Trains jobs side by side, one eager step for all lanes at a time; lanes close up when the queue is empty."""

    def __init__(self, setting: Setting, lanes: int) -> None:
        self.setting, self.lanes = setting, lanes
        self.model = copy.deepcopy(setting.model).to(setting.device).train()
        self.lane_steps = self.real_lane_steps = self.steps = 0

    def train(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Train every job and yield each when it is done."""
        segments = pack([job.steps(self.setting.local) for job in jobs], self.lanes)
        self.steps = sum(segment.steps for segment in segments)
        self.lane_steps = lane_steps(segments)
        self.real_lane_steps = sum(job.steps(self.setting.local) for job in jobs)
        rows = Rows(self.setting, jobs, min(self.lanes, len(jobs)))
        devices = [self.setting.device] if self.setting.device.type == "cuda" else []
        run, seed = _Run(self, rows, jobs), noise_seed(jobs)
        for number, segment in enumerate(segments):
            with torch.random.fork_rng(devices=devices):  # the caller may draw between two updates
                torch.manual_seed(derive(seed, number))
                done = run.segment(segment)
            yield from done

    # -- one step --------------------------------------------------------------------------------------------

    def losses(
        self, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor, real: Tensor,
        terms: Terms | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Return loss, nll and new buffers of one lane."""
        names, logits = list(buffers), []
        for _ in range(self.setting.samples):
            state = {**parameters, **buffers}
            logits.append(functional_call(self.model, state, (x,)))
            buffers = {n: state[n] for n in names}  # functional_call leaves reassigned buffers in the dictionary
        nll = cross_entropy(torch.stack(logits), y, real)
        loss = nll if terms is None else nll + penalty(parameters, terms)
        return loss, nll, buffers

    def step(self, rows: Rows, width: int, x: Tensor, y: Tensor, real: Tensor, terms: Terms | None) -> Tensor:
        """Take one step on the first ``width`` lanes; return (width, 2): loss and nll."""
        s = self.setting
        trained = s.layout.trained
        leaves = {n: t.detach().requires_grad_() for n, t in trained.views(rows.parameters[:width]).items()}
        with s.autocast():
            lanes = vmap(self.losses, in_dims=(0, 0, 0, 0, 0, None if terms is None else 0), randomness="different")
            loss, nll, buffers = lanes(leaves, rows.buffers(width), x, y, real, terms)
        gradients = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            rows.store_buffers(buffers, width)
            filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, leaves.values(), strict=True)]
            lane_update(
                s.local, trained.split, rows.parameters[:width], trained.rows(filled),
                tuple(m[:width] for m in rows.moments.values()), rows.steps[:width], rows.rates[:width],
            )  # fmt: skip
        return torch.stack([loss.detach(), nll.detach()], dim=1)


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
        width = len(segment.jobs)
        terms = self.rows.terms(width)
        recorded = []
        for step, (x, y, real) in enumerate(self._inputs(segment)):
            recorded.append(self.loop.step(self.rows, width, x, y, real, terms))
            if self.rows.captured is not None:
                self._capture(segment, step, width)
        losses = torch.stack(recorded).double().cpu().numpy()
        return [outcome for lane in range(width) for outcome in self._leave(segment, lane, losses[:, lane])]

    def _seat(self, segment: Segment) -> None:
        moves = {}
        for lane, job in enumerate(segment.jobs):
            if job in self.lane_of and self.lane_of[job] != lane:
                moves[lane] = self.lane_of[job]
        self.rows.move(moves)
        for lane, job in enumerate(segment.jobs):
            if job != IDLE and job not in self.lane_of:
                self.rows.load(lane, self.jobs[job])
                self.batches[job] = self.jobs[job].batches(self.setting)
                self.losses[job] = []
            self.lane_of[job] = lane

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

    def _leave(self, segment: Segment, lane: int, losses: np.ndarray) -> list[Outcome]:
        job = segment.jobs[lane]
        self.losses[job].append(losses)
        batches = self.batches[job]
        if segment.begins[lane] + segment.steps < batches.steps:
            return []
        del self.lane_of[job], self.batches[job]
        count = batches.steps - second_half(batches.steps, batches.tail)
        return [
            Outcome(
                self.jobs[job],
                self.rows.state(lane),
                np.concatenate(self.losses.pop(job)),
                batches,
                self.rows.memory(lane) if self.setting.local.keep_state else None,
                self.rows.moment(lane, count),
            )
        ]


def noise_seed(jobs: Sequence[Job]) -> int:
    """Return the seed of a launch's layer noise: addressed (seed, "lanes", round) of every federation in it."""
    address: list[int | str] = ["lanes"]
    for seed, run, round in dict.fromkeys((j.assignment.seed, j.assignment.run, j.assignment.round) for j in jobs):
        address += [seed, run, round]
    return derive(*address)
