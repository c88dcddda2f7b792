"""Lanes on a GPU: one compiled step of fixed width, captured in a CUDA graph and replayed without waiting for the host.

Everything a step needs lies on the device: examples, the plan of a launch (which examples, which augmentation, whose
lane is active at which step) and a step counter that the step itself advances. A graph holds a block of steps; clients
change lanes between replays by row copies, so nothing is compiled or captured again from round to round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..posterior import Posterior
from .lane_layers import with_lane_layers
from .lanes import noise_seed
from .memory import fewer_lanes, out_of_memory
from .optimizers import corrected_second_moment, lane_update, second_half
from .packing import IDLE, Segment, block_size, lane_steps, pack, widest
from .plan import Batches
from .rows import Rows
from .setting import Job, Outcome, Setting, on, with_moment
from .stacked import StackedModel

_LEAST_CAPACITY = 256  # steps that the device's plan holds at least; longer launches are run in pieces
_WARM_UP = 3
_DRAWS = 20  # launches that are drawn to choose the width where not all clients take part


class Left(NamedTuple):
    """Clients that ended together: what is still on the device about them."""

    jobs: list[int]
    posteriors: list[Posterior]
    divergence: Tensor


class Program:
    """The step for one width: its memory, its compiled parts, its graph."""

    def __init__(self, model: StackedModel, jobs: Sequence[Job], width: int, block: int, capacity: int) -> None:
        self.model, self.setting = model, model.setting
        self.width, self.block, self.capacity = width, block, capacity
        self.rows = Rows(self.setting, jobs, width)
        self.leaves = model.leaves(self.rows, width)
        self.terms = self.rows.terms(width)
        self.tables = self._make_tables(jobs[0])
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.setting.device)
        self.record = torch.zeros(capacity, width, 2, device=self.setting.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.forward: Callable[..., Any] = self._forward
        self.update: Callable[..., Any] = self._update

    def _make_tables(self, job: Job) -> dict[str, Tensor]:
        batch = self.setting.local.batch_size
        drawn = self.setting.transform.draw(np.random.default_rng(0), batch)
        shapes = {"indices": ((batch,), np.int64), "real": ((batch,), np.float32), "active": ((), np.bool_)}
        if self.setting.capture.enabled:
            shapes["late"] = ((), np.float32)
        shapes |= {f"augment/{k}": ((batch, *v.shape[1:]), v.dtype) for k, v in drawn.items()}
        return {
            key: torch.from_numpy(np.zeros((self.capacity, self.width, *shape), dtype=dtype)).to(self.setting.device)
            for key, (shape, dtype) in shapes.items()
        }

    # -- one step --------------------------------------------------------------------------------------------

    def _now(self, key: str) -> Tensor:
        return self.tables[key].index_select(0, self.counter).squeeze(0)

    def _forward(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Gather and transform the step's inputs and return the summed loss, losses, nlls and new buffers."""
        indices = self._now("indices")
        numbers = {k.removeprefix("augment/"): self._now(k) for k in self.tables if k.startswith("augment/")}
        x = lanes_as_channels(self.setting.inputs(indices, self.rows.client, numbers))
        if self.setting.bf16 and x.device.type == "cuda":
            x = x.to(torch.bfloat16)  # half the bytes to write; the first layer would cast it anyway
        y, real = self.setting.examples.labels[indices], self._now("real")
        loss, nll, buffers = self.model.forward(self.leaves, self.rows.buffers(self.width), x, y, real, self.terms)
        return loss.sum(), loss.detach(), nll.detach(), buffers

    def _update(self, gradients: list[Tensor], loss: Tensor, nll: Tensor, buffers: dict[str, Tensor]) -> None:
        """Take the optimiser's step on active lanes, store buffers and losses, advance the counter."""
        s, rows = self.setting, self.rows
        active = self._now("active")[:, None]
        stacked = s.layout.trained.stack(gradients)
        loss = self.model.add_kl(rows, self.width, stacked, loss)
        old = [rows.parameters, *rows.moments.values(), rows.steps]
        new = [t.clone() for t in old]
        lane_update(
            s.local, s.layout.trained.split, new[0], torch.where(active, stacked, 0.0), tuple(new[1:-1]), new[-1],
            rows.rates,
        )  # fmt: skip
        for target, value in zip(old, new, strict=True):
            target.copy_(torch.where(active, value, target))
        rows.store_buffers(buffers, self.width, active)
        if rows.captured is not None:
            second = rows.moments["exp_avg_sq"]
            if s.capture.bias_correction:
                second = corrected_second_moment(second, rows.steps.clamp(min=1), s.local)
            rows.captured.addcmul_(second, self._now("late")[:, None].expand_as(second))
        self.record.index_copy_(0, self.counter, torch.stack([loss, nll], dim=1)[None])
        self.counter.add_(1)

    def step(self) -> None:
        """Take one step on every lane."""
        total, loss, nll, buffers = self.forward()
        gradients = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True)
        with torch.no_grad():
            filled = [
                torch.zeros_like(p) if g is None else g for g, p in zip(gradients, self.leaves.values(), strict=True)
            ]
            self.update(filled, loss, nll, buffers)

    # -- compiling and running -------------------------------------------------------------------------------

    def build(self) -> None:
        """Compile the step and, on a GPU, capture a block of steps; what is in memory is worthless afterwards."""
        self.forward = torch.compile(self._forward, fullgraph=True, dynamic=False)
        self.update = torch.compile(self._update, fullgraph=True, dynamic=False)
        if self.setting.device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self.setting.device)
        stream.wait_stream(torch.cuda.current_stream(self.setting.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self.step()
        torch.cuda.current_stream(self.setting.device).wait_stream(stream)
        self.counter.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.block):
                self.step()
        self.graph = graph

    def run(self, steps: int) -> None:
        """Take ``steps`` steps, a multiple of the block."""
        for _ in range(steps // self.block):
            if self.graph is not None:
                self.graph.replay()
            else:
                for _ in range(self.block):
                    self.step()

    def upload(self, columns: dict[str, np.ndarray]) -> None:
        """Write the plan of the next steps to the device and set the counter to its beginning."""
        for key, array in columns.items():
            host = torch.from_numpy(np.ascontiguousarray(array))
            if self.setting.device.type == "cuda":
                host = host.pin_memory()
            self.tables[key][: len(array)].copy_(host, non_blocking=True)
        self.counter.zero_()


class GraphLoop:
    """Trains jobs on lanes of fixed width with a compiled, captured step (``compiled`` False: the same steps, eagerly).

    ``clients`` are the numbers of examples of all clients there are; ``shape`` (width, steps in a graph, steps in a plan)
    is chosen at the first launch unless given.
    """

    def __init__(
        self,
        setting: Setting,
        lanes: int,
        compiled: bool = True,
        clients: Sequence[int] = (),
        shape: Sequence[int] | None = None,
    ) -> None:
        self.setting, self.asked, self.compiled, self.clients = setting, lanes, compiled, clients
        self.model = StackedModel(setting)
        if setting.device.type == "cuda" and setting.bf16:
            with_lane_layers(self.model.model)
        self.programs: dict[tuple[bool, bool, bool], Program] = {}
        self.shape = None if shape is None else (shape[0], shape[1], shape[2])
        self.compile_seconds = 0.0
        self.lane_steps = self.real_lane_steps = self.steps = 0

    @property
    def lanes(self) -> int:
        """Lanes in use: at most those asked for."""
        return self.asked if self.shape is None else self.shape[0]

    def train(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Train every job; the updates come when all are done, since nothing waits for the device before."""
        lengths = [job.steps(self.setting.local) for job in jobs]
        devices = [self.setting.device] if self.setting.device.type == "cuda" else []
        with on(self.setting.device), torch.random.fork_rng(devices=devices):
            program = self._program(jobs, lengths)
            segments = pack(lengths, program.width, block=program.block, compact=False)
            self.steps = sum(segment.steps for segment in segments)
            self.lane_steps, self.real_lane_steps = lane_steps(segments), sum(lengths)
            program.rows.forget()
            torch.manual_seed(noise_seed(jobs))
            launch = _Launch(program, jobs, lengths)
            for piece in pieces(segments, program.capacity):
                launch.run(piece)
        yield from launch.outcomes()

    def _program(self, jobs: Sequence[Job], lengths: Sequence[int]) -> Program:
        """Return the program for this kind of launch, compiling it the first time; fewer lanes where memory is short."""
        shape = self.shape or self._choose(jobs[0], lengths)
        a = [job.assignment for job in jobs]
        kind = (any(x.prior is not None for x in a), any(x.proximal != 0 for x in a), any(x.l2 != 0 for x in a))
        begun = time.perf_counter()
        while kind not in self.programs:
            self.shape = shape
            try:
                self.programs[kind] = self._built(jobs)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            if kind not in self.programs:
                self.programs.clear()
                shape = (fewer_lanes(shape[0]), *shape[1:])
            else:
                self.compile_seconds += time.perf_counter() - begun
        return self.programs[kind]

    def _built(self, jobs: Sequence[Job]) -> Program:
        assert self.shape is not None
        program = Program(self.model, jobs, *self.shape)
        if self.compiled:
            program.build()
        return program

    def _choose(self, job: Job, lengths: Sequence[int]) -> tuple[int, int, int]:
        """Return width, steps in a graph and steps in a plan that suit launches like this one.

        Where only a part of the clients takes part, such launches are drawn from all of them: the first round's clients may
        be long or short by chance, and the width stays.
        """
        launches = [lengths]
        if len(lengths) < len(self.clients):
            everyone = [replace(job, shard=range(n)).steps(self.setting.local) for n in self.clients if n]
            rng = np.random.default_rng(0)
            launches = [
                rng.choice(everyone, min(len(lengths), len(everyone)), replace=False).tolist() for _ in range(_DRAWS)
            ]
        block = block_size([length for lengths in launches for length in lengths])
        width = widest(launches, self.asked, block=block)
        packed = [pack(lengths, width, block=block, compact=False) for lengths in launches]
        return width, block, max(_LEAST_CAPACITY, *(sum(s.steps for s in segments) for segments in packed))


class _Launch:
    """One launch: plans to upload, clients to seat and to let go."""

    def __init__(self, program: Program, jobs: Sequence[Job], lengths: Sequence[int]) -> None:
        self.program, self.jobs, self.lengths, self.setting = program, jobs, lengths, program.setting
        self.batches: dict[int, Batches] = {}
        self.seated: set[int] = set()
        self.left: list[Left] = []
        self.memories: dict[int, Any] = {}
        self.records: list[tuple[list[Segment], Tensor]] = []

    def run(self, piece: list[Segment]) -> None:
        """Upload the plan of some segments and run them."""
        rows = self.program.rows
        for job in {job for segment in piece for job in segment.jobs} - {IDLE} - self.batches.keys():
            self.batches[job] = self.jobs[job].batches(self.setting)
        self.program.upload(self._columns(piece))
        for segment in piece:
            new = {lane: job for lane, job in enumerate(segment.jobs) if job != IDLE and job not in self.seated}
            rows.load({lane: self.jobs[job] for lane, job in new.items()})
            self.seated |= set(new.values())
            self.program.run(segment.steps)
            self._leave(segment)
        steps = sum(segment.steps for segment in piece)
        self.records.append((piece, self.program.record[:steps].clone()))

    def _columns(self, piece: list[Segment]) -> dict[str, np.ndarray]:
        """Return the plan of some segments, step by step and lane by lane; steps beyond a client's last are inactive."""
        steps = sum(segment.steps for segment in piece)
        columns = {
            key: np.zeros((steps, *table.shape[1:]), dtype=_numpy_type(table))
            for key, table in self.program.tables.items()
        }
        at = 0
        for segment in piece:
            for lane, (job, first) in enumerate(zip(segment.jobs, segment.begins, strict=True)):
                if job != IDLE:
                    count = min(segment.steps, self.lengths[job] - first)
                    self._fill(columns, slice(at, at + count), lane, self.batches[job], first)
            at += segment.steps
        return columns

    def _fill(self, columns: dict[str, np.ndarray], steps: slice, lane: int, batches: Batches, first: int) -> None:
        own = slice(first, first + steps.stop - steps.start)
        columns["indices"][steps, lane] = batches.indices[own]
        columns["real"][steps, lane] = batches.real[own]
        columns["active"][steps, lane] = True
        if "late" in columns:
            late = np.arange(own.start, own.stop) >= second_half(batches.steps, batches.tail)
            columns["late"][steps, lane] = late
        for key, array in batches.augmentation.items():
            columns[f"augment/{key}"][steps, lane] = array[own]

    def _leave(self, segment: Segment) -> None:
        """Copy out the clients that end with this segment, without waiting for the device."""
        rows = self.program.rows
        done = [
            lane for lane, (job, first) in enumerate(zip(segment.jobs, segment.begins, strict=True))
            if job != IDLE and first + segment.steps >= self.lengths[job]
        ]  # fmt: skip
        if not done:
            return
        posteriors = rows.posteriors(done)
        for i, lane in enumerate(done):
            job = segment.jobs[lane]
            b = self.batches[job]
            if rows.captured is not None:
                posteriors[i] = with_moment(posteriors[i], rows.moment(lane, b.steps - second_half(b.steps, b.tail)))
            if self.setting.local.keep_state:
                self.memories[job] = rows.memory(lane)
        index = torch.tensor(done, device=self.setting.device)
        self.left.append(Left([segment.jobs[i] for i in done], posteriors, rows.divergence(self.program.width)[index]))

    def outcomes(self) -> Iterator[Outcome]:
        """Wait for the device and yield every client's outcome."""
        losses: dict[int, list[np.ndarray]] = {job: [] for job in range(len(self.jobs))}
        for piece, record in self.records:
            host, at = record.double().cpu().numpy(), 0
            for segment in piece:
                for lane, (job, first) in enumerate(zip(segment.jobs, segment.begins, strict=True)):
                    if job != IDLE:
                        count = min(segment.steps, self.lengths[job] - first)
                        losses[job].append(host[at : at + count, lane])
                at += segment.steps
        for left in self.left:
            divergences = left.divergence.tolist()
            for job, posterior, divergence in zip(left.jobs, left.posteriors, divergences, strict=True):
                yield Outcome(
                    self.jobs[job], posterior, np.concatenate(losses[job]), divergence, self.batches[job],
                    self.memories.get(job),
                )  # fmt: skip


def pieces(segments: Sequence[Segment], capacity: int) -> Iterator[list[Segment]]:
    """Cut a launch into pieces of at most ``capacity`` steps, splitting segments that are longer."""
    piece: list[Segment] = []
    room = capacity
    for segment in segments:
        begins, left = segment.begins, segment.steps
        while left:
            if room == 0:
                yield piece
                piece, room = [], capacity
            take = min(left, room)
            piece.append(Segment(segment.jobs, begins, take))
            begins, left, room = tuple(b + take for b in begins), left - take, room - take
    if piece:
        yield piece


def lanes_as_channels(x: Tensor) -> Tensor:
    """Lay images (lanes, batch, C, H, W) out as (batch, H, W, lanes · C) in memory: what a grouped convolution reads."""
    if x.dim() != 5:
        return x
    lanes, batch, channels, *size = x.shape
    x = x.transpose(0, 1).reshape(batch, lanes * channels, *size).contiguous(memory_format=torch.channels_last)
    return x.view(batch, lanes, channels, *size).transpose(0, 1)


def _numpy_type(table: Tensor) -> Any:
    return torch.empty(0, dtype=table.dtype).numpy().dtype
