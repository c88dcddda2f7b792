"""What the report says of differential privacy: ε after each round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..report.runs import Run

ROWS = 12
"""Rounds shown at most; all of them are in ``metrics.jsonl``."""


def section(run: Run) -> str | None:
    """Return the section of a run whose clients' moves were clipped; None for any other."""
    spent = [(e["round"], e["fusion"]["privacy"]) for e in run.rounds if (e.get("fusion") or {}).get("privacy")]
    if not spent:
        return None
    last = spent[-1][1]
    lead = (
        f"ε = {_number(last['epsilon'])} at δ = {last['delta']:g} after {len(spent)} rounds: what the published models can "
        f"tell about whether any one client took part with its data (clip {last['clip']:g}, noise multiplier {last['noise']:g}; "
        "dp-accounting's Rényi accountant, no amplification by sampling)."
    )
    rows = "".join(
        f"<tr><td>{number}</td><td>{_number(p['epsilon'])}</td><td>{'' if p['clipped'] is None else p['clipped']}</td></tr>"
        for number, p in some(spent)
    )
    head = "<tr><th>round</th><th>ε so far</th><th>clients clipped</th></tr>"
    return (
        f'<p class="lead">{lead}</p><div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    )


def some(rows: Sequence[Any], most: int = ROWS) -> list[Any]:
    """Return at most ``most`` rows, evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
