"""What the server does with the fused model beyond taking it: FedAvgM's momentum on the means."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .errors import ConfigError
from .posterior import Gaussian, Posterior

RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of batch-norm's running statistics, which are measured and not learned."""


def server_step(
    previous: Posterior,
    fused: Posterior,
    momentum_state: Mapping[str, Tensor] | None,
    learning_rate: float = 1.0,
    momentum: float = 0.0,
) -> tuple[Posterior, dict[str, Tensor]]:
    """Take FedAvgM's step from the previous global model towards the fused one (Hsu et al. 2019).

    With Δ = w_previous − w_fused the server's velocity becomes v ← momentum·v + Δ and the model
    w ← w_previous − learning_rate·v. It acts on the means of Gaussian tensors and on learned points; variances
    and batch-norm's running statistics are taken as fused, because a momentum step could make them negative.
    With ``learning_rate = 1`` and ``momentum = 0`` the fused posterior comes back unchanged, bit for bit.

    When: few local steps or strongly unequal clients, where the average of one round is a noisy direction.
    Returns the new global posterior and the velocity by tensor name (float32; save it with the checkpoint).
    """
    if not 0 <= momentum < 1:
        raise ConfigError(f"fusion.server_momentum = {momentum}: it must be at least 0 and below 1.")
    if not learning_rate > 0:
        raise ConfigError(f"fusion.server_learning_rate = {learning_rate}: it must be above 0.")
    if momentum == 0 and learning_rate == 1:
        return fused, {}
    velocity: dict[str, Tensor] = {}
    state = momentum_state or {}

    def step(name: str, before: Tensor, after: Tensor) -> Tensor:
        v = before.double() - after.double()
        if name in state:
            v = v + momentum * state[name].to(v.device).double()
        velocity[name] = v.float()
        return (before.double() - learning_rate * v).to(after.dtype)

    gaussians = {
        n: Gaussian(step(n, previous.gaussians[n].mean, g.mean), g.variance) for n, g in fused.gaussians.items()
    }
    points = {n: step(n, previous.points[n], t) if _learned(n, t) else t for n, t in fused.points.items()}
    return Posterior(gaussians, points, fused.metadata), velocity


def _learned(name: str, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and name.rsplit(".", 1)[-1] not in RUNNING and torch.numel(tensor) > 0
