"""Where a network's state lies: one flat row per lane for all parameters, one per kind of buffer.

A row makes the optimiser a handful of operations on one (lane, parameter) matrix instead of hundreds on small tensors,
and moving a client between lanes one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import PosteriorError, nearest
from ..nn.state import RHO


@dataclass(frozen=True)
class Layout:
    """Names, shapes and places of tensors in a flat row; elements from ``split`` on are untransformed sigmas."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    split: int

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """Lay tensors out in their order, those named ``..._rho`` last (they may have a learning rate of their own)."""
        names = sorted(tensors, key=lambda name: name.endswith(RHO))  # sorted is stable
        sizes = [tensors[name].numel() for name in names if not name.endswith(RHO)]
        return Layout(tuple(names), tuple(tensors[name].shape for name in names), sum(sizes))

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Elements of a row."""
        return sum(self.sizes)

    def row(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one state as a flat row."""
        if not self.names:
            return torch.empty(0, dtype=dtype, device=device)
        return torch.cat([tensors[name].to(device=device, dtype=dtype).reshape(-1) for name in self.names])

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the named tensors of rows (..., size) as views, shape (..., *shape)."""
        parts = rows.split(self.sizes, dim=-1) if self.names else ()
        lead = rows.shape[:-1]
        return {n: p.view(*lead, *shape) for n, p, shape in zip(self.names, parts, self.shapes, strict=True)}

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return stacked tensors (lanes, *shape), in layout order, as rows (lanes, size)."""
        return torch.cat([t.reshape(t.shape[0], -1) for t in tensors], dim=1)


@dataclass(frozen=True)
class StateLayout:
    """How a module's state is split: trained parameters, and constants and buffers by dtype (not trained)."""

    trained: Layout
    others: Mapping[torch.dtype, Layout]
    dtypes: Mapping[str, torch.dtype]

    @staticmethod
    def of(module: nn.Module) -> StateLayout:
        """Read a module's parameters and buffers."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        rest = {n: p for n, p in module.named_parameters() if not p.requires_grad} | dict(module.named_buffers())
        by_type: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, tensor in rest.items():
            by_type.setdefault(tensor.dtype, {})[name] = tensor
        return StateLayout(
            Layout.of(trained),
            {dtype: Layout.of(tensors) for dtype, tensors in by_type.items()},
            {n: t.dtype for n, t in (trained | rest).items()},
        )

    def check(self, state: Mapping[str, Tensor], client: int) -> None:
        """Refuse a starting state that does not belong to this network, naming the first tensor at fault."""
        shapes = dict(zip(self.trained.names, self.trained.shapes, strict=True))
        for layout in self.others.values():
            shapes |= dict(zip(layout.names, layout.shapes, strict=True))
        for name in state:
            if name not in shapes:
                raise PosteriorError(
                    f"client {client}: the posterior holds '{name}', which this network does not have; "
                    f"{nearest(name, shapes)}"
                )
        for name, shape in shapes.items():
            if name not in state:
                raise PosteriorError(f"client {client}: the posterior lacks '{name}', which this network needs.")
            if state[name].shape != shape:
                raise PosteriorError(
                    f"client {client}: '{name}' has shape {tuple(state[name].shape)} in the posterior and "
                    f"{tuple(shape)} in this network."
                )
