"""Several networks of one form on the same inputs: the members of an ensemble as lanes of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from ..data import Transform

_EXAMPLES = 40_000
"""Network inputs (members x examples) of one forward pass: enough to fill a GPU, few enough for its memory."""


def stacked(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the states of several networks of one form stacked along a leading lane axis."""
    return {name: torch.stack([s[name] for s in states]) for name in states[0]}


def forward_members(
    call: Callable[..., Tensor],
    states: dict[str, Tensor],
    inputs: Tensor,
    transform: Transform,
    server: int,
    autocast: Callable[[], torch.autocast],
) -> Tensor:
    """Return the members' class probabilities (R, N, C), float32 on the CPU.

    ``states`` is stacked (R, ...). The networks must be free of noise (or have their weights drawn already), since
    lanes have no random address of their own.
    """
    members = len(next(iter(states.values())))
    device = next(iter(states.values())).device

    def one(state: dict[str, Tensor], x: Tensor) -> Tensor:
        return call(dict(state), x)

    found: list[Tensor] = []
    for raw in _batches(inputs, max(1, _EXAMPLES // members)):
        x = transform(raw.to(device), client=server)
        with autocast():
            logits = vmap(one, in_dims=(0, None), randomness="different")(states, x)
        found.append(logits.float().softmax(-1))
    return torch.cat(found, 1).cpu()


def _batches(inputs: Tensor, size: int) -> Iterator[Tensor]:
    for begin in range(0, len(inputs), size):
        yield inputs[begin : begin + size]
