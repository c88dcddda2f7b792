"""What the report says of a run over Flower: bytes each client sent and was sent, and who did not answer. Needs no flwr."""

from __future__ import annotations

from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..report.runs import Run

CLIENTS = 30
"""Clients shown one by one, at most; all of them are in ``metrics.jsonl``."""
FAILURES = 20


def section(run: Run) -> str | None:
    """Return the section of a run that went over machines; None for a simulation."""
    rounds = [e for e in run.rounds if (e.get("bytes") or {}).get("clients")]
    if not rounds:
        return None
    parts = [f'<p class="lead">{_lead(rounds)}</p>', _table(rounds), _failures(rounds)]
    return "".join(parts)


def _lead(rounds: list[dict[str, Any]]) -> str:
    each = [way["up"] for e in rounds for way in e["bytes"]["clients"].values() if way["up"]]
    down = [way["down"] for e in rounds for way in e["bytes"]["clients"].values() if way["down"]]
    wire = escape(str((rounds[-1].get("engine") or {}).get("wire", "float32")))
    return (
        f"A client sent {median(each) if each else 0:,.0f} bytes a round and was sent {median(down) if down else 0:,.0f} "
        f"(medians; answers as {wire})."
    )


def _table(rounds: list[dict[str, Any]]) -> str:
    clients = sorted({int(c) for e in rounds for c in e["bytes"]["clients"]})
    rows = []
    for client in clients[:CLIENTS]:
        found = [e["bytes"]["clients"][str(client)] for e in rounds if str(client) in e["bytes"]["clients"]]
        up, down = (sum(f[way] for f in found) for way in ("up", "down"))
        cells = (client, len(found), f"{up / len(found):,.0f}", f"{down / len(found):,.0f}", f"{up:,}", f"{down:,}")
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    names = ("client", "rounds", "bytes up a round", "bytes down a round", "up in all", "down in all")
    head = "<tr>" + "".join(f"<th>{n}</th>" for n in names) + "</tr>"
    left = f'<p class="note">and {len(clients) - CLIENTS} more clients</p>' if len(clients) > CLIENTS else ""
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>{left}'


def _failures(rounds: list[dict[str, Any]]) -> str:
    found = [(e["round"], f) for e in rounds for f in (e.get("engine") or {}).get("failures") or ()]
    if not found:
        return ""
    items = "".join(
        f"<li>round {number}, client {f['client']}: {escape(str(f['reason']))}</li>" for number, f in found[:FAILURES]
    )
    more = f"<li>and {len(found) - FAILURES} more</li>" if len(found) > FAILURES else ""
    return f'<p class="note">Clients without a usable answer:</p><ul>{items}{more}</ul>'
