"""Absorbing many clients at once: what lanes on a GPU return is there together, and one pass is cheaper than one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..posterior import Gaussian, Posterior, Refusal
from . import exact
from .accumulator import Accumulator, Client

_MOST_NUMBERS = 2**27  # float64 numbers of one statistic at a time: 1 GiB


def absorb_together(
    total: Accumulator, posteriors: Sequence[Posterior], weights: Sequence[float], clients: Sequence[Client]
) -> dict[Client, Refusal]:
    """Absorb several clients' posteriors and return those refused, by client; the total has the bits of ``absorb`` one by one.

    It holds a few float64 copies of the clients given, so give it as many as fit. Clients that need a closer look (unfit numbers,
    other tensors, float64 values, weights out of range) and rules that draw go through ``absorb``.
    """
    refused: dict[Client, Refusal] = {}
    alike = [i for i, p in enumerate(posteriors) if _alike(p, total)] if _possible(total) else []
    fit = set(_fit(total, [posteriors[i] for i in alike], alike))
    fit = [i for i in sorted(fit) if 1e-100 < weights[i] < 1e100 and not total.holds(clients[i])]
    for i in set(range(len(posteriors))) - set(fit):
        try:
            total.absorb(posteriors[i], weights[i], clients[i])
        except Refusal as refusal:
            refused[clients[i]] = refusal
    size = max(1, _MOST_NUMBERS // max(1, total.layout.weights + total.layout.numbers))
    for begin in range(0, len(fit), size):
        some = fit[begin : begin + size]
        _deposit(total, [posteriors[i] for i in some], [float(weights[i]) for i in some])
        total.weights |= {clients[i]: float(weights[i]) for i in some}
    return refused


def _possible(total: Accumulator) -> bool:
    entries = (*total.layout.gaussians, *total.layout.points)
    doubles = any(torch.float64 in (e.dtype, e.variance_dtype) for e in entries)
    return total.reproducible and not total.rule.draws and not doubles


def _alike(posterior: Posterior, total: Accumulator) -> bool:
    """Whether a posterior has the reference's tensors, to the type, on its device."""
    mine = {n: g.mean for n, g in posterior.gaussians.items()} | dict(posterior.points)
    layout = total.layout
    entries = {e.name: e for e in (*layout.gaussians, *layout.points)}
    return (
        mine.keys() == entries.keys()
        and posterior.gaussians.keys() == {e.name for e in layout.gaussians}
        and all(posterior.gaussians[e.name].variance.dtype == e.variance_dtype for e in layout.gaussians)
        and all(
            t.shape == entries[n].shape and t.dtype == entries[n].dtype and t.device == layout.device
            for n, t in mine.items()
        )
    )


def _fit(total: Accumulator, posteriors: Sequence[Posterior], numbers: Sequence[int]) -> list[int]:
    """Return which of these clients have finite numbers and proper variances, waiting for the device once."""
    if not posteriors:
        return []
    layout, zero = total.layout, total.rule.allows_zero_variance
    bounds = []
    groups: list[tuple[Callable[[Posterior], list[Tensor]], str]] = [
        (lambda p: [p.gaussians[e.name].mean for e in layout.gaussians], "finite"),
        (lambda p: [p.gaussians[e.name].variance for e in layout.gaussians], "not negative" if zero else "positive"),
        (lambda p: [p.points[e.name] for e in layout.points if e.dtype.is_floating_point], "finite"),
        (lambda p: [p.points[e.name] for e in layout.points if e.name.endswith("running_var")], "not negative"),
    ]
    for choose, demand in groups:
        tensors = [choose(p) for p in posteriors]
        if tensors[0] and any(t.numel() for t in tensors[0]):
            low, high = torch.aminmax(_rows(tensors), dim=1)
            least = low > 0 if demand == "positive" else low >= 0 if demand == "not negative" else low > -torch.inf
            bounds.append(least & (high < torch.inf))
    if not bounds:
        return list(numbers)
    return [n for n, good in zip(numbers, torch.stack(bounds).all(0).tolist(), strict=True) if good]


def _rows(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return one row a client of all its tensors, by one operation a tensor."""
    return torch.cat([torch.stack(column).reshape(len(column), -1) for column in zip(*tensors, strict=True)], dim=1)


def _deposit(total: Accumulator, posteriors: Sequence[Posterior], weights: Sequence[float]) -> None:
    layout, rule, at = total.layout, total.rule, 0
    device = layout.device
    mass = torch.tensor([rule.mass(w) for w in weights], dtype=torch.float64, device=device)[:, None]
    for pieces in total._blocks:
        means = _rows([[p.gaussians[n].mean.reshape(-1)[a:b] for n, a, b in pieces] for p in posteriors])
        variances = _rows([[p.gaussians[n].variance.reshape(-1)[a:b] for n, a, b in pieces] for p in posteriors])
        pivot = layout.flat_gaussian(total._pivot, pieces)
        terms = rule.terms(Gaussian(means.double(), variances.double()), mass, pivot, ())
        for key, term in terms.items():
            _add(total, key, term.expand(len(posteriors), means.shape[1]), at)
        at += means.shape[1]
    if layout.points:
        points = [[p.points[e.name] for e in layout.points] for p in posteriors]
        points = [[t if t.is_floating_point() else t.double() for t in row] for row in points]
        w = torch.tensor(weights, dtype=torch.float64, device=device)[:, None]
        _add(total, "points", w * _rows(points).double(), 0)


def _add(total: Accumulator, key: str, terms: Tensor, at: int) -> None:
    if key not in total._cells:
        total._cells[key] = exact.new_cells(total._length(key), total.layout.device)
    exact.deposit_many(total._cells[key][:, at : at + terms.shape[1]], terms)
