"""The student: SGD on pseudo-labels from the average model, stochastic weight averaging, batch-norm refresh."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..experiment import Distill
from ..seeds import derive, numpy_rng

Transform = Any


@dataclass(frozen=True)
class Training:
    """What distillation did: steps, snapshots averaged, and the loss of the first and the last epoch."""

    steps: int
    snapshots: int
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class Lesson:
    """What one student learns: where it starts, from which inputs, towards which targets, how, in what order."""

    state: Mapping[str, Tensor]
    inputs: Tensor
    targets: Tensor
    settings: Distill
    seed_address: tuple[int | str, ...]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What students must have in common to be lanes of one step: everything that decides its shapes."""
        s = self.settings
        return tuple(self.inputs.shape), self.inputs.dtype, tuple(self.targets.shape), s.epochs, s.batch_size


class RunningAverage:
    """The mean of snapshots of named tensors, in float64: w_SWA = (1/n) Σ w_n (Izmailov et al. 2018)."""

    def __init__(self) -> None:
        """Start with no snapshot."""
        self.count = 0
        self._mean: dict[str, Tensor] = {}

    def absorb(self, tensors: Mapping[str, Tensor]) -> None:
        """Take one snapshot in."""
        self.count += 1
        for name, t in tensors.items():
            t = t.detach().double()
            if self.count == 1:
                self._mean[name] = t.clone()
            else:
                self._mean[name] += (t - self._mean[name]) / self.count

    def mean(self) -> dict[str, Tensor]:
        """Return the mean so far, in float64."""
        return dict(self._mean)


def learning_rate_at(step: int, settings: Distill) -> float:
    """Return the learning rate of step 0, 1, …: constant, or (cyclical SWA, from ``swa_start`` on) falling linearly in each cycle.

    A cycle of c steps runs from ``learning_rate`` in its first step to ``learning_rate_min`` in its last, where
    the snapshot is taken (Izmailov et al. 2018, eq. 1 of the SWA paper's schedule).
    """
    if settings.swa != "cyclical" or step < settings.swa_start:
        return settings.learning_rate
    if settings.swa_cycle == 1:
        return settings.learning_rate_min
    t = ((step - settings.swa_start) % settings.swa_cycle) / (settings.swa_cycle - 1)
    return (1 - t) * settings.learning_rate + t * settings.learning_rate_min


def takes_snapshot(step: int, settings: Distill) -> bool:
    """Whether the weights after step 0, 1, … are averaged: at the end of every cycle from ``swa_start`` on."""
    if settings.swa == "none" or step < settings.swa_start:
        return False
    return (step - settings.swa_start) % settings.swa_cycle == settings.swa_cycle - 1


def check_schedule(examples: int, settings: Distill) -> int:
    """Return the number of steps, or say in one sentence why this schedule would average nothing."""
    if settings.epochs < 1 or settings.batch_size < 1 or settings.swa_cycle < 1:
        raise ConfigError("distill.epochs, distill.batch_size and distill.swa_cycle must each be at least 1.")
    steps = settings.epochs * -(-examples // settings.batch_size)
    if settings.swa != "none" and not any(takes_snapshot(s, settings) for s in range(steps)):
        raise ConfigError(
            f"distill.swa = '{settings.swa}' would average no snapshot: {examples} inputs give {steps} steps, but the "
            f"first snapshot comes after step {settings.swa_start + settings.swa_cycle}; lower distill.swa_start, "
            "raise distill.epochs, or set distill.swa = 'none'."
        )
    return steps


def distillation_loss(logits: Tensor, target: Tensor, weight: Tensor, reduction: str) -> Tensor:
    """Return KL(teacher ‖ student), the weighted mean over the batch (divided by the classes if ``batch-classes``)."""
    log_student = torch.log_softmax(logits.float(), -1)
    kl = (torch.xlogy(target, target) - target * log_student).sum(-1)
    loss = (weight * kl).sum() / weight.sum()
    return loss / target.shape[-1] if reduction == "batch-classes" else loss


def train_student(
    model: nn.Module,
    state: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    transform: Transform,
    settings: Distill,
    seed_address: Sequence[int | str],
    device: torch.device,
    precision: str = "float32",
) -> tuple[dict[str, Tensor], Training]:
    """Distil ``targets`` into the network that starts at ``state``; return its new full state.

    Untransformed scales (``…_rho``) keep their values: cross-entropy against pseudo-labels has no prior term, so
    training them would only shrink them. The model passed in is not changed.
    """
    steps = check_schedule(len(inputs), settings)
    student = copy.deepcopy(model).to(device)
    student.load_state_dict({n: t.to(device) for n, t in state.items()})
    student.train()
    trained = {n: p for n, p in student.named_parameters() if not n.endswith("_rho")}
    for name, p in student.named_parameters():
        p.requires_grad_(name in trained)
    optimizer = torch.optim.SGD(
        trained.values(), lr=settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    inputs, targets = inputs.to(device), targets.to(device)
    transform = transform.to(device) if hasattr(transform, "to") else transform  # a plain function has no tensors
    average = RunningAverage()
    losses: list[Tensor] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive(*seed_address, "noise"))
        indices, weights = (torch.from_numpy(a).to(device) for a in orders(len(inputs), settings, seed_address))
        for step, (index, weight) in enumerate(zip(indices, weights, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, settings)
            batch = transform(inputs[index], client=-1, offsets=None, flips=None)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = student(batch)
            loss = distillation_loss(logits, targets[index], weight, settings.reduction)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if takes_snapshot(step, settings):
                average.absorb(trained)
        if average.count:
            with torch.no_grad():
                for name, mean in average.mean().items():
                    trained[name].copy_(mean.to(trained[name].dtype))
        if average.count and settings.refresh_batchnorm:
            refresh_batchnorm(student, inputs, transform, settings.batch_size)
    per_epoch = steps // settings.epochs
    history = torch.stack(losses).float().cpu()
    record = Training(steps, average.count, float(history[:per_epoch].mean()), float(history[-per_epoch:].mean()))
    return {n: t.detach().clone() for n, t in student.state_dict().items()}, record


def refresh_batchnorm(model: nn.Module, inputs: Tensor, transform: Transform, batch_size: int) -> int:
    """Re-estimate batch-norm's running statistics as the plain mean over batches of ``inputs``; return the layers touched.

    Averaged weights have activations that no running statistic was measured with; one pass of the server's
    inputs measures them (Izmailov et al. 2018, section 3.2). Networks without batch-norm are left alone.
    """
    layers = list(batch_norms(model).values())
    if not layers:
        return 0
    momenta = [m.momentum for m in layers]
    was_training = model.training
    for m in layers:
        m.reset_running_stats()
        m.momentum = None  # cumulative average
    model.train()
    with torch.no_grad():
        for start in range(0, len(inputs), batch_size):
            batch = inputs[start : start + batch_size]
            if len(batch) < 2 and start:  # a batch of one has no variance to measure
                continue
            model(transform(batch, client=-1, offsets=None, flips=None))
    for m, momentum in zip(layers, momenta, strict=True):
        m.momentum = momentum
    model.train(was_training)
    return len(layers)


def batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return a network's batch-norm layers that keep running statistics, by name."""
    kinds = nn.modules.batchnorm._BatchNorm
    return {n: m for n, m in model.named_modules() if isinstance(m, kinds) and m.track_running_stats}


def orders(n: int, settings: Distill, seed_address: Sequence[int | str]) -> tuple[np.ndarray, np.ndarray]:
    """Return every step's input indices and their weights, (steps, batch) each.

    All batches are full: the last of an epoch is completed from the epoch's beginning with weight 0.
    """
    size = min(settings.batch_size, n)
    steps = -(-n // settings.batch_size)
    weight = np.zeros(steps * size, dtype=np.float32)
    weight[:n] = 1.0
    index = []
    for epoch in range(settings.epochs):
        order = numpy_rng(*seed_address, "order", epoch).permutation(n)
        index.append(np.concatenate([order, order[: steps * size - n]]).reshape(steps, size))
    return np.concatenate(index), np.tile(weight.reshape(steps, size), (settings.epochs, 1))
