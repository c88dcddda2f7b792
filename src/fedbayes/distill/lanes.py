"""Many students at once: one lane each, and on a GPU the step captured in a CUDA graph and replayed.

A student takes some 1,500 small steps a round; taken one after the other by Python they last longer than all clients
together. Here every student of a launch is a lane of one step, and everything a step needs (which inputs, which rate,
whether a snapshot is taken) lies on the device beforehand, so that nothing waits for the host. The plain loop
(:func:`fedbayes.distill.train_student`) is the reference: both take the same batches, rates and snapshots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from ..engine.graph import lanes_as_channels
from ..engine.layout import Layout
from ..nn.state import RHO, caller
from ..seeds import derive
from .student import (
    Lesson,
    Training,
    batch_norms,
    check_schedule,
    distillation_loss,
    learning_rate_at,
    orders,
    takes_snapshot,
)

_WARM_UP = 3
_MOST_STEPS = 10  # of one captured graph


_kept: WeakKeyDictionary[nn.Module, dict[tuple, StudentLanes]] = WeakKeyDictionary()


def train_students(
    model: nn.Module, lessons: Sequence[Lesson], transform: Any, device: torch.device, precision: str = "float32"
) -> list[tuple[dict[str, Tensor], Training]]:
    """Distil every lesson and return what ``train_student`` does for each; lessons of one shape train side by side.

    The captured step is kept with the network, so that it is captured once for all rounds.
    """
    groups: dict[tuple, list[int]] = {}
    for i, lesson in enumerate(lessons):
        check_schedule(len(lesson.inputs), lesson.settings)
        groups.setdefault(lesson.shape, []).append(i)
    made: dict[int, tuple[dict[str, Tensor], Training]] = {}
    for shape, members in groups.items():
        key = (shape, len(members), str(device), precision)
        kept = _kept.setdefault(model, {})
        if key not in kept:
            kept[key] = StudentLanes(model, lessons[members[0]], len(members), transform, device, precision)
        made |= dict(zip(members, kept[key].train([lessons[i] for i in members]), strict=True))
    return [made[i] for i in range(len(lessons))]


class StudentLanes:
    """A step of fixed width for students of one shape: its memory, its tables, its graph."""

    def __init__(
        self, model: nn.Module, lesson: Lesson, width: int, transform: Any, device: torch.device, precision: str
    ) -> None:
        self.width, self.device, self.bf16 = width, device, precision == "bf16"
        self.model = copy.deepcopy(model).to(device).train()
        self.call, self.transform = caller(self.model), transform.to(device)
        parameters = dict(self.model.named_parameters())
        self.layout = Layout.of({n: p for n, p in parameters.items() if not n.endswith(RHO)})
        fixed = {n: p for n, p in parameters.items() if n.endswith(RHO)} | dict(self.model.named_buffers())
        self.fixed = {n: torch.zeros(width, *t.shape, dtype=t.dtype, device=device) for n, t in fixed.items()}
        self.buffers = [n for n, _ in self.model.named_buffers()]
        self.rows, self.velocity = (torch.zeros(width, self.layout.size, device=device) for _ in range(2))
        self.total = torch.zeros(width, self.layout.size, dtype=torch.float64, device=device)
        self.leaves = {n: v.detach().requires_grad_() for n, v in self.layout.views(self.rows).items()}
        self.steps = check_schedule(len(lesson.inputs), lesson.settings)
        size = min(lesson.settings.batch_size, len(lesson.inputs))
        self.inputs = torch.zeros(width, *lesson.inputs.shape, dtype=lesson.inputs.dtype, device=device)
        self.targets = torch.zeros(width, *lesson.targets.shape, device=device)
        self.lane = torch.arange(width, device=device)[:, None]
        self.tables = {
            "index": torch.zeros(self.steps, width, size, dtype=torch.int64, device=device),
            "weight": torch.ones(self.steps, width, size, device=device),
            "rate": torch.zeros(self.steps, width, 1, device=device),
            "take": torch.zeros(self.steps, width, 1, dtype=torch.float64, device=device),
        }
        self.coefficients = torch.ones(width, 3, device=device)  # momentum, weight decay, scale of the loss
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(self.steps, width, device=device)
        self.block = max(b for b in range(1, _MOST_STEPS + 1) if self.steps % b == 0)
        self.graph: torch.cuda.CUDAGraph | None = None

    # -- one step --------------------------------------------------------------------------------------------

    def _now(self, key: str) -> Tensor:
        return self.tables[key].index_select(0, self.counter).squeeze(0)

    def _loss(self, parameters: Any, fixed: Any, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        state = {**parameters, **fixed}
        logits = self.call(state, x)
        return distillation_loss(logits, y, weight, "batch"), {n: state[n] for n in self.buffers}

    def _forward(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return every lane's loss and new buffers."""
        fixed = {n: t.clone() for n, t in self.fixed.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            return vmap(self._loss, randomness="different")(self.leaves, fixed, lanes_as_channels(x), y, weight)

    def _step(self) -> None:
        index = self._now("index")
        x = self.transform(self.inputs[self.lane, index], client=-1)
        loss, buffers = self._forward(x, self.targets[self.lane, index], self._now("weight"))
        loss = loss * self.coefficients[:, 2]
        found = torch.autograd.grad(loss.sum(), list(self.leaves.values()), allow_unused=True)
        with torch.no_grad():
            filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, self.leaves.values(), strict=True)]
            gradient = self.layout.stack(filled).addcmul_(self.coefficients[:, 1:2], self.rows)
            self.velocity.mul_(self.coefficients[:, 0:1]).add_(gradient)
            self.rows.addcmul_(self.velocity, self._now("rate"), value=-1)
            self.total.addcmul_(self.rows.double(), self._now("take"))
            for name, t in buffers.items():
                self.fixed[name].copy_(t)
            self.losses.index_copy_(0, self.counter, loss.detach()[None])
            self.counter.add_(1)

    def _capture(self) -> None:
        """Capture a block of steps; what is in memory is worthless afterwards."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self.counter.zero_()
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.block):
                self._step()
        self.graph = graph

    # -- a launch --------------------------------------------------------------------------------------------

    def train(self, lessons: Sequence[Lesson]) -> list[tuple[dict[str, Tensor], Training]]:
        """Distil lessons of this shape, one a lane."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if self.device.type == "cuda" and self.graph is None:
                self._load(lessons)  # indices that exist, for the warm-up
                self._capture()
            self._load(lessons)
            torch.manual_seed(derive("students", *(part for lesson in lessons for part in lesson.seed_address)))
            for _ in range(self.steps // self.block):
                if self.graph is not None:
                    self.graph.replay()
                else:
                    for _ in range(self.block):
                        self._step()
            counts = self.tables["take"].sum(0)[:, 0].long().tolist()
            self._average(counts)
            if any(n and lesson.settings.refresh_batchnorm for n, lesson in zip(counts, lessons, strict=True)):
                self._refresh(
                    [bool(n) and lesson.settings.refresh_batchnorm for n, lesson in zip(counts, lessons, strict=True)],
                    lessons[0].settings.batch_size,
                )
        return self._results(lessons, counts)

    def _load(self, lessons: Sequence[Lesson]) -> None:
        """Write starts, data, plan and coefficients to the device."""
        with torch.no_grad():
            for k, lesson in enumerate(lessons):
                s = lesson.settings
                self.rows[k] = self.layout.row(lesson.state, torch.float32, self.device)
                for name, t in self.fixed.items():
                    t[k] = lesson.state[name].to(self.device)
                self.inputs[k].copy_(lesson.inputs)
                self.targets[k].copy_(lesson.targets)
                index, weight = orders(len(lesson.inputs), s, lesson.seed_address)
                rates = np.array([learning_rate_at(i, s) for i in range(self.steps)], dtype=np.float32)
                takes = np.array([takes_snapshot(i, s) for i in range(self.steps)], dtype=np.float64)
                for key, array in (("index", index), ("weight", weight), ("rate", rates), ("take", takes)):
                    table = self.tables[key][:, k]
                    table.copy_(torch.from_numpy(array).view(table.shape))
                scale = 1 / lesson.targets.shape[-1] if s.reduction == "batch-classes" else 1.0
                self.coefficients[k] = torch.tensor([s.momentum, s.weight_decay, scale], device=self.device)
            for t in (self.velocity, self.total, self.counter):
                t.zero_()

    def _average(self, counts: Sequence[int]) -> None:
        for k, n in enumerate(counts):
            if n:
                self.rows[k] = (self.total[k] / n).float()

    def _refresh(self, lanes: Sequence[bool], batch_size: int) -> None:
        """Measure batch-norm's statistics of some lanes anew, as ``refresh_batchnorm`` does: the mean over batches."""
        layers = batch_norms(self.model)
        if not layers:
            return
        momenta = {name: m.momentum for name, m in layers.items()}
        sums: dict[str, Tensor] = {}
        count = 0
        for m in layers.values():
            m.momentum = 1.0  # the statistics after a pass are then the batch's own
        with torch.no_grad():
            for start in range(0, self.inputs.shape[1], batch_size):
                x = self.transform(self.inputs[:, start : start + batch_size], client=-1)
                if x.shape[1] < 2 and start:
                    continue
                ones = torch.ones(x.shape[:2], device=self.device)
                _, buffers = self._forward(x, self.targets[:, start : start + batch_size], ones)
                for name in (f"{layer}.{part}" for layer in layers for part in ("running_mean", "running_var")):
                    name = name.lstrip(".")
                    sums[name] = buffers[name] + sums[name] if name in sums else buffers[name].clone()
                count += 1
        chosen = torch.tensor(list(lanes), device=self.device)
        for name, total in sums.items():
            self.fixed[name][chosen] = (total / count)[chosen]
        for layer, m in layers.items():
            m.momentum = momenta[layer]
            self.fixed[f"{layer}.num_batches_tracked".lstrip(".")][chosen] = count

    def _results(self, lessons: Sequence[Lesson], counts: Sequence[int]) -> list[tuple[dict[str, Tensor], Training]]:
        history = self.losses.cpu()
        per_epoch = self.steps // lessons[0].settings.epochs
        made = []
        for k, n in enumerate(counts):
            views = self.layout.views(self.rows[k])
            state = {name: t.clone() for name, t in views.items()} | {m: t[k].clone() for m, t in self.fixed.items()}
            first, last = float(history[:per_epoch, k].mean()), float(history[-per_epoch:, k].mean())
            made.append((state, Training(self.steps, n, first, last)))
        return made
