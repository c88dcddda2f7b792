"""Where a network's state lies: one flat row per lane for all parameters, one per kind of buffer.

A row makes the optimiser a handful of operations on one (lane, parameter) matrix instead of hundreds on small tensors,
and moving a client between lanes one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..errors import PosteriorError, nearest
from ..nn.state import RHO


@dataclass(frozen=True)
class Layout:
    """Names, shapes and places of tensors in a flat row.

    Points come first, then the means of Gaussians, then their untransformed sigmas in the same order, from element
    ``split`` on: so the Gaussians of a row are two slices of equal length (``mean_slice``, ``rho_slice``).
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    split: int

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """Lay tensors out: points in their order, then Gaussian means, then their sigmas."""
        rhos = [name for name in tensors if name.endswith(RHO)]
        means = [name.removesuffix(RHO) for name in rhos]
        points = [name for name in tensors if name not in rhos and name not in means]
        names = [*points, *means, *rhos]
        split = sum(tensors[name].numel() for name in (*points, *means))
        return Layout(tuple(names), tuple(tensors[name].shape for name in names), split)

    @property
    def mean_slice(self) -> slice:
        """Where the means of Gaussians lie."""
        return slice(2 * self.split - self.size, self.split)

    @property
    def rho_slice(self) -> slice:
        """Where their untransformed sigmas lie."""
        return slice(self.split, self.size)

    @property
    def gaussians(self) -> Layout:
        """The layout of the means alone, as in a posterior's Gaussians."""
        kept = [(n, s) for n, s in zip(self.names, self.shapes, strict=True) if n + RHO in self.names]
        sizes = [math.prod(shape) for _, shape in kept]
        return Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept), sum(sizes))

    @property
    def points(self) -> Layout:
        """The layout of everything that is not Gaussian: the first elements of a row."""
        kept = [
            (n, s) for n, s in zip(self.names, self.shapes, strict=True)
            if n + RHO not in self.names and not n.endswith(RHO)
        ]  # fmt: skip
        return Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept), sum(math.prod(s) for _, s in kept))

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
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
        return {n: p.view((*lead, *shape)) for n, p, shape in zip(self.names, parts, self.shapes, strict=True)}

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
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
