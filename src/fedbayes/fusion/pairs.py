"""Arithmetic in pairs of float64, a value and its rounding error: about 32 digits."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b rounded, and the rounding error, exactly (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: Any, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a·b rounded, and the rounding error, exactly (Dekker; for values below 1e290)."""
    p = a * b
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    return p, al * bl - (((p - ah * bh) - al * bh) - ah * bl)


def _halves(a: Any) -> tuple[Any, Any]:
    """Split a float64 into two of 26 bits (Veltkamp)."""
    c = a * 134217729.0  # 2**27 + 1
    high = c - (c - a)
    return high, a - high
