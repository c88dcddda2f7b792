"""Adam on lanes on a CPU: torch's fused kernel over whole stretches of rows.

One pass over memory instead of seven. Lanes that have taken as many steps at the same rate, the usual case, are one
flat piece and one call; others are grouped as far as they go.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..experiment import Local
from .optimizers import clipped_and_decayed


class FusedAdam:
    """Adam for one stretch of steps: the same clients on the same lanes, ``width`` of them."""

    def __init__(
        self, local: Local, split: int, parameters: Tensor, moments: tuple[Tensor, ...], steps: Tensor, rates: Tensor
    ) -> None:
        """Take views of the first rows: (lanes, P) parameters and moments, (lanes, 1) steps, (lanes, 2) rates."""
        self.local, self.parameters, self.moments, self.steps = local, parameters, moments, steps
        size = parameters.shape[1]
        whole = [(0, size, rate) for rate in rates[:, 0].tolist()]
        if not torch.equal(rates[:, 0], rates[:, 1]) and split < size:
            halves = [[(0, split, mean), (split, size, sigma)] for mean, sigma in rates.tolist()]
        else:
            halves = [[part] for part in whole]
        pieces = [
            (lane * size + begin, lane * size + end, rate, count)
            for lane, (parts, count) in enumerate(zip(halves, steps[:, 0].tolist(), strict=True))
            for begin, end, rate in parts
            if end > begin
        ]
        self._calls: dict[float, list[tuple[slice, Tensor]]] = {}
        for (rate, count), run in itertools.groupby(pieces, key=lambda piece: piece[2:]):
            stretch = list(run)  # neighbours in memory
            place = slice(stretch[0][0], stretch[-1][1])
            self._calls.setdefault(rate, []).append((place, torch.tensor(count, dtype=torch.float32)))

    def step(self, gradients: Tensor) -> None:
        """Take one step on every lane, in place, and count it."""
        local = self.local
        gradients = clipped_and_decayed(local, self.parameters, gradients)
        flat = [t.reshape(-1) for t in (self.parameters, gradients, *self.moments)]
        for rate, places in self._calls.items():
            rows, slopes, first, second = ([t[place] for place, _ in places] for t in flat)
            adam(
                rows, slopes, first, second, [], [count for _, count in places], fused=True, amsgrad=False,
                beta1=local.betas[0], beta2=local.betas[1], lr=rate, weight_decay=0.0, eps=local.eps, maximize=False,
            )  # fmt: skip
        self.steps.add_(1)
