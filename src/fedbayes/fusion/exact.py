"""Sums that do not depend on the order of their terms, to the last bit.

Floating-point addition is not associative: updates that arrive in another order would give other bits. Here every
term is first cut into digits on a grid that does not depend on the other terms, and digits add without rounding
(the binned sums of Demmel & Nguyen, *Parallel Reproducible Summation*, IEEE Trans. Comput. 2015):

- The real line is divided into bins of ``W = 36`` bits. A term belongs to the lowest bin ``b`` with
  ``|x| < 2**(36 b - 1)``; the digit of bin ``b`` is a multiple of ``2**(36 (b - 1))`` below ``2**35`` times that grid.
- A cell keeps three limbs: the sums of the digits of the highest bin seen so far and of the two below it. Digits of
  lower bins are dropped, which is the only error: less than ``2**-71`` of the largest term, per term, so a
  total is more accurate than plain float64 addition.
- Limbs are float64 holding integers below ``2**53`` grids: exact for up to ``2**18`` terms.
- When a term of a higher bin arrives, limbs move down and the lowest falls away. What is left is, whatever the order,
  the sum of the same digits; so deposits in any order and merges in any tree give the same limbs.

A cell array is a float64 tensor of shape (4, n): three limbs and the grid of the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FedBayesError

WIDTH = 36
"""Bits per digit."""
MOST_TERMS = 2**18
"""Terms (clients) a cell can take before a limb could round."""
_LOWEST_BIN, _HIGHEST_BIN = -25, 27
_DOWN = 2.0**-WIDTH
_ANCHOR = 1.5 * 2.0**52
_REACH = 2.0 ** (WIDTH - 1)
LARGEST = 2.0 ** (_HIGHEST_BIN * WIDTH - 1)
"""Terms must be below this (about 2e292)."""


def new_cells(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return ``n`` empty cells."""
    cells = torch.zeros(4, n, dtype=torch.float64, device=device)
    cells[3] = 2.0 ** ((_LOWEST_BIN - 1) * WIDTH)
    return cells


def deposit(cells: Tensor, term: Tensor) -> None:
    """Add one float64 term to every cell, in place."""
    grown = term.abs() >= cells[3] * _REACH
    if bool(grown.any()):
        _raise(cells, _grid_of(term))
    anchor = cells[3] * _ANCHOR
    for i in range(3):
        digit = (term + anchor).sub_(anchor)  # rounds to the limb's grid: the anchor's last bit is one grid
        cells[i] += digit
        if i < 2:
            term = term - digit
            anchor *= _DOWN


def deposit_many(cells: Tensor, terms: Tensor) -> None:
    """Add several float64 terms (K, n) to every cell, in place: the same digits as one by one, so the same bits."""
    largest = terms.abs().amax(0)
    if bool((largest >= cells[3] * _REACH).any()):
        _raise(cells, _grid_of(largest))
    anchor = cells[3] * _ANCHOR
    for i in range(3):
        digits = (terms + anchor).sub_(anchor)
        cells[i] += digits.sum(0)  # exact in any order: multiples of one grid that fit 53 bits
        if i < 2:
            terms = terms - digits
            anchor *= _DOWN


def merge(cells: Tensor, other: Tensor) -> None:
    """Add other cells to these, in place."""
    other = other.to(cells.device, copy=True)
    grid = torch.maximum(cells[3], other[3])
    _raise(cells, grid)
    _raise(other, grid)
    cells[:3] += other[:3]


def value(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the totals as float64, and what is lost by rounding them to it."""
    upper, middle = cells[0], cells[1]
    high = upper + middle  # TwoSum, then the same with the third limb
    t = high - upper
    low = ((upper - (high - t)) + (middle - t)) + cells[2]
    total = high + low
    return total, low - (total - high)


def new_pairs(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return ``n`` empty pairs of float64, value and error: the plain, faster sum, whose last bits depend on the order."""
    return torch.zeros(2, n, dtype=torch.float64, device=device)


def deposit_pairs(pairs: Tensor, term: Tensor) -> None:
    """Add one float64 term to every pair, in place (compensated: Knuth's TwoSum)."""
    before = pairs[0].clone()
    pairs[0] += term
    t = pairs[0] - before
    pairs[1] += (before - (pairs[0] - t)) + (term - t)


def _grid_of(term: Tensor) -> Tensor:
    """Return the grid of the bin each term belongs to."""
    if not bool((term.abs() < LARGEST).all()):
        raise FedBayesError(
            f"a statistic of a client is {float(term.abs().max()):.3g}, beyond {LARGEST:.0e}, the largest that can be summed; "
            "rescale the client weights or check its posterior."
        )
    _, exponent = torch.frexp(term)
    bins = torch.div(exponent + WIDTH, WIDTH, rounding_mode="floor")
    bins = torch.where(term == 0, _LOWEST_BIN, bins).clamp_(min=_LOWEST_BIN)
    # The power of two by its bits: torch.ldexp goes through pow, which no device promises to be exact.
    return ((bins.long() - 1) * WIDTH + 1023 << 52).view(torch.float64)


def _raise(cells: Tensor, grid: Tensor) -> None:
    """Move limbs down where ``grid`` is coarser than the cell's own."""
    grid = torch.maximum(cells[3], grid)
    ratio = cells[3] / grid  # 1, 2**-36, 2**-72, ... (0 when far below)
    first, second, third = cells[0].clone(), cells[1].clone(), cells[2].clone()
    stay, one, two = ratio == 1.0, ratio == _DOWN, ratio == _DOWN * _DOWN
    zero = torch.zeros((), dtype=torch.float64, device=cells.device)
    cells[0] = torch.where(stay, first, zero)
    cells[1] = torch.where(stay, second, torch.where(one, first, zero))
    cells[2] = torch.where(stay, third, torch.where(one, second, torch.where(two, first, zero)))
    cells[3] = grid
