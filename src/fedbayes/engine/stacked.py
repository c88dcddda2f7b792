"""One network under many parameter sets: losses and gradients of all lanes in one forward and one backward pass.

The network stays an ordinary module: ``vmap`` over ``functional_call`` evaluates it for every lane's parameters. One
backward pass of the summed losses gives each lane its own gradient, because no lane's loss depends on another lane's
parameters. The KL's gradient is added in closed form, on whole rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..nn.state import caller
from ..objective import Terms, cross_entropy, penalty
from .rows import Rows
from .setting import Setting

Buffers = dict[str, Tensor]


class Gradients(NamedTuple):
    """What one forward and backward pass of all lanes gives."""

    rows: Tensor  # (lanes, P)
    losses: Tensor  # (lanes, 2): loss and nll
    buffers: Buffers


class StackedModel:
    """A cohort's network, evaluated under the parameters of many lanes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = copy.deepcopy(setting.model).to(setting.device).train()
        self.call = caller(self.model)

    def leaves(self, rows: Rows, width: int) -> dict[str, Tensor]:
        """Return the first ``width`` lanes' parameters as tensors to differentiate by; they share the rows' memory."""
        views = self.setting.layout.trained.views(rows.parameters[:width])
        return {name: view.detach().requires_grad_() for name, view in views.items()}

    def lane(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Buffers,
        x: Tensor,
        y: Tensor,
        real: Tensor,
        terms: Terms | None,
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Return one lane's loss without its KL, its nll and its new buffers."""
        names, logits = list(buffers), []
        for _ in range(self.setting.samples):
            state = {**parameters, **buffers}
            logits.append(self.call(state, x))
            buffers = {n: state[n] for n in names}  # the call leaves reassigned buffers in the dictionary
        nll = cross_entropy(logits[0] if len(logits) == 1 else torch.stack(logits), y, real)
        return nll if terms is None else nll + penalty(parameters, terms), nll, buffers

    def forward(
        self, leaves: Mapping[str, Tensor], buffers: Buffers, x: Tensor, y: Tensor, real: Tensor, terms: Terms | None
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Return every lane's loss without KL, nll and new buffers."""
        lanes = vmap(self.lane, in_dims=(0, 0, 0, 0, 0, None if terms is None else 0), randomness="different")
        with self.setting.autocast():
            return lanes(leaves, buffers, x, y, real, terms)

    def gradients(
        self,
        rows: Rows,
        width: int,
        leaves: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        real: Tensor,
        terms: Terms | None,
    ) -> Gradients:
        """Return gradients of every lane's whole loss."""
        loss, nll, buffers = self.forward(leaves, rows.buffers(width), x, y, real, terms)
        found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, leaves.values(), strict=True)]
            gradients = self.setting.layout.trained.stack(filled)
            loss = self.add_kl(rows, width, gradients, loss.detach())
            return Gradients(gradients, torch.stack([loss, nll.detach()], dim=1), buffers)

    def add_kl(self, rows: Rows, width: int, gradients: Tensor, loss: Tensor) -> Tensor:
        """Add the KL term to losses and gradients of a network that has Gaussians."""
        if not rows.gaussians.names:
            return loss
        return loss + rows.scalars[:width, 0] * rows.add_kl_gradient(gradients, width)


def unvectorised(error: RuntimeError) -> str:
    """Return what ``vmap`` has no way to run (an operation without a batching rule, ``.item()``, a branch), or nothing."""
    words = str(error)
    return words.partition(". ")[0] if "vmap" in words or "atching rule" in words else ""
