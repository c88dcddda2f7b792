"""``Layout``: the names, shapes and types that every posterior of a federation shares, and flat views of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..posterior import Gaussian, Posterior, least_positive


def _whole(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to whole numbers that the type holds; a float64 rounds int64's largest up to one that it does not."""
    if dtype == torch.bool:
        return numbers.round()
    most = torch.iinfo(dtype).max
    top = float(most) if int(float(most)) <= most else math.nextafter(float(most), 0.0)
    return numbers.round().clamp(float(torch.iinfo(dtype).min), top)


class Entry(NamedTuple):
    """One tensor of the layout."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    variance_dtype: torch.dtype | None = None
    """The type of a Gaussian's variance, which need not be its mean's; None for a point."""


class Piece(NamedTuple):
    """Part of a Gaussian tensor, by name and range of its flat view."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """How a posterior lies in two flat vectors: all Gaussian weights, and all points, each in order of name."""

    gaussians: tuple[Entry, ...]
    points: tuple[Entry, ...]
    device: torch.device

    @staticmethod
    def of(reference: Posterior) -> Layout:
        """Return the layout of a posterior."""
        gaussians = tuple(
            Entry(n, g.mean.shape, g.mean.dtype, g.variance.dtype) for n, g in sorted(reference.gaussians.items())
        )
        points = tuple(Entry(n, t.shape, t.dtype) for n, t in sorted(reference.points.items()))
        tensors = [g.mean for g in reference.gaussians.values()] or list(reference.points.values())
        return Layout(gaussians, points, tensors[0].device if tensors else torch.device("cpu"))

    @property
    def weights(self) -> int:
        """Number of Gaussian weights."""
        return sum(e.shape.numel() for e in self.gaussians)

    @property
    def numbers(self) -> int:
        """Number of point values."""
        return sum(e.shape.numel() for e in self.points)

    def blocks(self, most: int) -> list[tuple[Piece, ...]]:
        """Cut the Gaussian weights, in order, into runs of about ``most``: small tensors together, large ones in parts."""
        runs: list[list[Piece]] = []
        filled = most
        for entry in self.gaussians:
            size = entry.shape.numel()
            for start in range(0, size, most):
                stop = min(start + most, size)
                if filled + stop - start > most:
                    runs.append([])
                    filled = 0
                runs[-1].append(Piece(entry.name, start, stop))
                filled += stop - start
        return [tuple(run) for run in runs]

    def flat_gaussian(self, posterior: Posterior, pieces: Sequence[Piece] | None = None) -> Gaussian:
        """Return mean and variance of those pieces (default: all) as flat float64 vectors on the layout's device."""
        if pieces is None:
            pieces = [Piece(e.name, 0, e.shape.numel()) for e in self.gaussians]
        means = [posterior.gaussians[n].mean.reshape(-1)[a:b] for n, a, b in pieces]
        variances = [posterior.gaussians[n].variance.reshape(-1)[a:b] for n, a, b in pieces]
        return Gaussian(self._cat(means).double(), self._cat(variances).double())

    def flat_points(self, posterior: Posterior) -> Tensor:
        """Return all points as one flat float64 vector."""
        tensors = [posterior.points[e.name] for e in self.points]
        # Concatenating promotes exactly once integers are float64 (beside float32 alone they would lose digits).
        return self._cat([t if t.is_floating_point() else t.double() for t in tensors]).double()

    def build(self, flat: Gaussian, points: Tensor) -> Posterior:
        """Return the posterior of flat vectors, in the layout's types: integers are rounded and stay integers.

        A number beyond the largest of its type (linear pooling in float16 can give one) becomes that largest number, and a variance
        below the least positive one becomes that. Counters are exact up to 2**53, as float64 is.
        """
        gaussians, at = {}, 0
        for entry in self.gaussians:
            piece = slice(at, at := at + entry.shape.numel())
            of_mean, of_variance = entry.dtype, entry.variance_dtype or entry.dtype
            most = torch.finfo(of_mean).max
            mean = flat.mean[piece].clamp(-most, most).to(of_mean)
            variance = flat.variance[piece].clamp(max=torch.finfo(of_variance).max).to(of_variance)
            variance = variance.clamp_(min=least_positive(of_variance))
            gaussians[entry.name] = Gaussian(mean.reshape(entry.shape), variance.reshape(entry.shape))
        fused, at = {}, 0
        for entry in self.points:
            piece = points[at : (at := at + entry.shape.numel())]
            if not (entry.dtype.is_floating_point or entry.dtype.is_complex):
                piece = _whole(piece, entry.dtype)
            fused[entry.name] = piece.to(entry.dtype).reshape(entry.shape)
        return Posterior(gaussians, fused)

    def _cat(self, tensors: list[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        flat = [t.detach().reshape(-1).to(self.device) for t in tensors]
        return flat[0] if len(flat) == 1 else torch.cat(flat)
