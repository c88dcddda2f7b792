"""Optimisers on (lane, parameter) rows, for many clients at once (the plain loop's are in ``stepping``).

The lane forms follow ``torch.optim`` operation by operation (Adam: Kingma & Ba 2015 with bias correction; SGD with
momentum, Nesterov's form by option; weight decay as an L2 gradient), so that lanes and plain loop agree to rounding.
Steps, rates and moments are per lane.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, nearest
from ..experiment import Local


@dataclass(frozen=True)
class Rates:
    """Learning rates: of the means and deterministic weights, and of the untransformed sigmas."""

    mean: float
    sigma: float

    @staticmethod
    def of(local: Local, learning_rate: float) -> Rates:
        """Return a round's rates: a sigma rate of its own follows the same schedule as the means'."""
        if not local.sigma_learning_rate:
            return Rates(learning_rate, learning_rate)
        schedule = learning_rate / local.learning_rate if local.learning_rate else 1.0
        return Rates(learning_rate, local.sigma_learning_rate * schedule)


MOMENTS: Mapping[str, tuple[str, ...]] = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""The rows an optimiser keeps, by torch's names for them."""


def moments_of(local: Local) -> tuple[str, ...]:
    """Return the names of the rows this optimiser keeps."""
    if local.optimizer not in MOMENTS:
        raise ConfigError(f"local.optimizer '{local.optimizer}' is not known; {nearest(local.optimizer, MOMENTS)}")
    return () if local.optimizer == "sgd" and not local.momentum else MOMENTS[local.optimizer]


@dataclass(frozen=True)
class Memory:
    """An optimiser's state as flat rows, so that it can be kept, saved and moved between lanes and the plain loop."""

    steps: int
    rows: Mapping[str, Tensor]


# -- lanes ---------------------------------------------------------------------------------------------------


def clipped_and_decayed(local: Local, parameters: Tensor, gradients: Tensor) -> Tensor:
    """Scale each lane's gradient to at most ``clip_norm`` (as ``torch.nn.utils.clip_grad_norm_``), then add weight decay."""
    if local.clip_norm:
        lengths = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients = gradients * (local.clip_norm / (lengths + 1e-6)).clamp(max=1.0)
    return gradients.add(parameters, alpha=local.weight_decay) if local.weight_decay else gradients


def lane_update(
    local: Local,
    split: int,
    parameters: Tensor,
    gradients: Tensor,
    moments: tuple[Tensor, ...],
    steps: Tensor,
    rates: Tensor,
) -> None:
    """Take one optimiser step on every lane, in place.

    ``parameters``, ``gradients`` and each of ``moments`` are (lanes, P); ``steps`` (lanes, 1) float64 counts each lane's
    own steps and is advanced; ``rates`` (lanes, 2) float64 are the learning rates of elements before and from ``split``.
    """
    gradients = clipped_and_decayed(local, parameters, gradients)
    steps.add_(1)
    if local.optimizer == "adam":
        _adam(local, split, parameters, gradients, moments, steps, rates)
    else:
        _sgd(local, split, parameters, gradients, moments, rates)


def _adam(
    local: Local,
    split: int,
    parameters: Tensor,
    gradients: Tensor,
    moments: tuple[Tensor, ...],
    steps: Tensor,
    rates: Tensor,
) -> None:
    first, second = moments
    beta1, beta2 = local.betas
    first.lerp_(gradients, 1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    correction = (1 - beta2**steps).sqrt().to(second.dtype)
    move = torch.sqrt(second).div_(correction).add_(local.eps)
    move = first / move
    _descend(parameters, move, rates / (1 - beta1**steps), split)


def _sgd(
    local: Local, split: int, parameters: Tensor, gradients: Tensor, moments: tuple[Tensor, ...], rates: Tensor
) -> None:
    move = gradients
    if moments:
        (momentum,) = moments
        momentum.mul_(local.momentum).add_(gradients)
        move = gradients.add(momentum, alpha=local.momentum) if local.nesterov else momentum
    _descend(parameters, move, rates, split)


def _descend(parameters: Tensor, move: Tensor, rates: Tensor, split: int) -> None:
    """Subtract rate × move, with the second rate from ``split`` on."""
    rates = rates.to(parameters.dtype)
    if split < parameters.shape[1]:
        parameters[:, split:].addcmul_(move[:, split:], rates[:, 1:], value=-1)
    if split:
        parameters[:, :split].addcmul_(move[:, :split], rates[:, :1], value=-1)


def corrected_second_moment(second: Tensor, steps: Tensor, local: Local) -> Tensor:
    """Return Adam's second raw moment divided by its bias correction 1 - beta2^t."""
    return second / (1 - local.betas[1] ** steps).to(second.dtype)


def second_half(steps: int, tail: int) -> int:
    """Return the first step (0-based) of the second half of the last epoch: where Adam's moment is captured from."""
    return steps - max(1, math.ceil(tail / 2))
