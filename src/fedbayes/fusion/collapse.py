"""Recognising a posterior that shrinks to a point."""

from __future__ import annotations

import math
from collections.abc import Sequence

_ROUNDS, _RATIO, _OVERALL = 3, 0.8, 0.01


def _collapsing(ratios: Sequence[float]) -> bool:
    shrinking = len(ratios) >= _ROUNDS and all(r < _RATIO for r in ratios[-_ROUNDS:])
    return shrinking or math.prod(ratios) < _OVERALL


def collapse_note(ratios: Sequence[float | None], rule: str = "", clients: int = 0) -> str | None:
    """Return, once, the sentence that tells a user that sigma collapses; None before, after, and where it does not.

    ``ratios`` is the history of ``record["sigma"]["ratio"]``, the last round's last (None where there was no previous round). Sigma counts as
    collapsing when it fell below 0.8 times the previous round's three rounds in a row, or below 1 % of where it began.
    """
    known = [r for r in ratios if r is not None]
    if not ratios or ratios[-1] is None or not _collapsing(known):
        return None
    if any(_collapsing(known[:n]) for n in range(1, len(known))):
        return None
    product = math.prod(known)
    by = f"the rule '{rule}'" if rule else "the fusion rule"
    expected = (
        f", as products of {clients} densities do (1/√{clients} = {clients**-0.5:.2f} a round)" if clients > 1 else ""
    )
    return (
        f"The posterior is collapsing: under {by} sigma is now {product:.2g} of what it was {len(known)} rounds ago "
        f"({known[-1]:.2f} in the last round{expected}). A network with such small sigmas is practically deterministic: its accuracy may "
        "be good, but its epistemic uncertainty means nothing. Rules that keep the variance: nwa, aalv, llp, wasserstein, lp."
    )
