"""What every way of training clients shares: the network, the data, the settings, and one client's work and result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cohort import Assignment
from ..data import Examples, Transform
from ..errors import ConfigError
from ..experiment import Engine, Local
from ..nn.state import from_posterior
from ..posterior import Gaussian, Posterior
from .layout import StateLayout
from .optimizers import Memory
from .plan import Batches, count_steps, draw_batches

VARIANCE_FLOOR = 1e-37
"""Least variance of a captured second moment: a weight whose gradient was always 0 (a dead unit) would have none."""


def resolve_device(name: str) -> torch.device:
    """Return the device a configuration names; ``auto`` is the first CUDA device where there is one."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except (RuntimeError, TypeError):
        device, known = torch.device("cpu"), False
    if not known:
        raise ConfigError(f"engine.device '{name}' is not a device; valid are cpu, cuda, cuda:1 or auto.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"engine.device is '{name}', but this machine has {count} CUDA devices; use cpu or auto.")
        return torch.device("cuda", device.index or 0)
    return device


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a CUDA device is the current one: captures and kernels of our own run on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class Capture:
    """Whether Adam's second raw moment is captured as a variance (Reyes et al. 2021), and how."""

    enabled: bool = False
    bias_correction: bool = True


@dataclass(frozen=True)
class Setting:
    """Everything about a cohort that does not change from round to round."""

    model: nn.Module
    examples: Examples
    transform: Transform
    local: Local
    engine: Engine
    device: torch.device
    samples: int
    capture: Capture
    layout: StateLayout
    sites: tuple[int, ...] = (0,)
    """Each run's first client among the transform's, which has the clients of all runs one after the other."""

    @property
    def bf16(self) -> bool:
        """Whether forward and backward passes run in bfloat16."""
        return self.engine.precision == "bf16"

    def autocast(self) -> torch.autocast:
        """Return the context for forward passes."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def site(self, assignment: Assignment) -> int:
        """Return whose mean the transform subtracts for an assignment."""
        return self.sites[assignment.run] + assignment.client

    def inputs(self, indices: Tensor, client: Tensor | int, augmentation: Mapping[str, Tensor]) -> Tensor:
        """Return transformed inputs for indices (..., batch); ``client`` has the leading axes before the batch."""
        return self.transform(self.examples.inputs[indices], client=client, **augmentation)

    def to_device(self, array: np.ndarray) -> Tensor:
        """Copy a host array to the training device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Job:
    """One assignment with what it needs here: the client's examples and, where kept, its optimiser's memory."""

    assignment: Assignment
    shard: np.ndarray
    memory: Memory | None = None

    def steps(self, local: Local) -> int:
        """Optimiser steps of this job."""
        return count_steps(len(self.shard), local.batch_size, self.assignment.epochs, self.assignment.steps)

    def batches(self, setting: Setting) -> Batches:
        """Draw the job's batches."""
        a = self.assignment
        return draw_batches(
            self.shard, setting.local.batch_size, epochs=a.epochs, steps=a.steps, seed=a.seed, round=a.round,
            client=a.client, draw=setting.transform.draw,
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What training one job gave: its posterior, per-step losses (steps, 2: loss and nll), the KL to the prior at the end."""

    job: Job
    posterior: Posterior
    losses: np.ndarray
    divergence: float
    batches: Batches
    memory: Memory | None = None


def with_moment(posterior: Posterior, moment: Mapping[str, Tensor]) -> Posterior:
    """Give deterministic parameters the captured second moment, floored, as their variance."""
    captured = {
        n: Gaussian(posterior.points[n], v.clamp(min=VARIANCE_FLOOR)) for n, v in moment.items() if n in posterior.points
    }  # fmt: skip
    points = {n: t for n, t in posterior.points.items() if n not in captured}
    return Posterior({**posterior.gaussians, **captured}, points, posterior.metadata)


def starting_state(posterior: Posterior, layout: StateLayout, device: torch.device) -> dict[str, Tensor]:
    """Return the network state a posterior starts from.

    A Gaussian over a parameter that this network keeps as a point (a captured second moment, say) starts at its mean.
    """
    known = layout.dtypes
    points = {n: g.mean for n, g in posterior.gaussians.items() if n + "_rho" not in known}
    gaussians = {n: g for n, g in posterior.gaussians.items() if n not in points}
    state = from_posterior(Posterior(gaussians, {**posterior.points, **points}))
    return {n: t.to(device=device, dtype=known.get(n)) for n, t in state.items()}
