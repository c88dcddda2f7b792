"""Torch's optimisers for the plain loop, without the class around them.

``torch.optim.Optimizer`` imports torch's compiler when the first one is made: a second of processor time, which a process
that answers one message (a Flower node) would pay every round. These steps call torch's functional forms with the same
arguments, so they give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ..experiment import Local
from ..nn.state import RHO
from .layout import Layout
from .optimizers import Memory, Rates, moments_of


class Stepper:
    """Adam or SGD on one client's parameters, sigmas at a rate of their own.

    ``state`` holds each parameter's moments and ``step`` by torch's names for them, from the first step on.
    """

    def __init__(self, local: Local, parameters: Mapping[str, nn.Parameter], rates: Rates) -> None:
        self.local, self.parameters, self.moments = local, parameters, moments_of(local)
        means = [p for n, p in parameters.items() if not n.endswith(RHO)]
        sigmas = [p for n, p in parameters.items() if n.endswith(RHO)]
        self.groups = [(group, rate) for group, rate in ((means, rates.mean), (sigmas, rates.sigma)) if group]
        self.fused = all(p.device.type == "cpu" for p in means + sigmas)  # an eighth of a LeNet's step
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {p: {} for p in means + sigmas}

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the parameters' gradients, all of which must be there."""
        for group, rate in self.groups:
            gradients = [p.grad for p in group if p.grad is not None]
            (self._adam if self.local.optimizer == "adam" else self._sgd)(group, gradients, rate)

    def _adam(self, parameters: list[nn.Parameter], gradients: list[Tensor], rate: float) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state |= {name: torch.zeros_like(p) for name in self.moments} | {"step": torch.tensor(0.0)}
        first, second, steps = ([s[name] for s in states] for name in (*self.moments, "step"))
        beta1, beta2 = self.local.betas
        adam(
            list(parameters), gradients, first, second, [], steps, fused=self.fused or None, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=rate, weight_decay=self.local.weight_decay, eps=self.local.eps, maximize=False,
        )  # fmt: skip

    def _sgd(self, parameters: list[nn.Parameter], gradients: list[Tensor], rate: float) -> None:
        momentum = self.local.momentum
        buffers = [self.state[p].get("momentum_buffer") for p in parameters]
        sgd(
            list(parameters), gradients, buffers, weight_decay=self.local.weight_decay, momentum=momentum, lr=rate,
            dampening=0.0, nesterov=self.local.nesterov and momentum > 0, maximize=False,
        )  # fmt: skip
        for p, buffer in zip(parameters, buffers, strict=True):
            if momentum and buffer is not None:
                self.state[p]["momentum_buffer"] = buffer

    def remember(self, layout: Layout) -> Memory:
        """Return the state as flat rows."""
        first = self.state[self.parameters[layout.names[0]]]
        rows = {
            moment: torch.cat([self.state[self.parameters[n]][moment].reshape(-1) for n in layout.names]).clone()
            for moment in self.moments
        }
        return Memory(int(first["step"]) if "step" in first else 0, rows)

    def recall(self, memory: Memory, layout: Layout) -> None:
        """Take rows back, laid out in memory as the parameters are: the fused kernel goes through both in one pass."""
        for moment, row in memory.rows.items():
            for name, value in layout.views(row).items():
                parameter = self.parameters[name]
                self.state[parameter][moment] = torch.empty_like(parameter).copy_(value).detach()
                if self.local.optimizer == "adam":
                    self.state[parameter]["step"] = torch.tensor(float(memory.steps))
