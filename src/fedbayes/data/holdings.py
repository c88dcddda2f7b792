"""Who holds what, as numbers and as text: the table behind ``fedbayes partition``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Holding:
    """What one client holds: how many examples, of which classes, and how many distinct values of each column."""

    client: int
    name: str
    examples: int
    counts: tuple[int, ...]
    columns: Mapping[str, int]


def table(
    shards: Sequence[np.ndarray],
    labels: Tensor | np.ndarray,
    classes: Sequence[str],
    columns: Mapping[str, np.ndarray] | None = None,
    names: Sequence[str] | None = None,
) -> list[Holding]:
    """Count, for every client, its examples of each class (and the distinct values of each column)."""
    host = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    return [
        Holding(
            client,
            names[client] if names else f"client {client}",
            len(shard),
            tuple(int(n) for n in np.bincount(host[shard], minlength=len(classes))),
            {name: len(np.unique(values[shard])) for name, values in (columns or {}).items()},
        )
        for client, shard in enumerate(shards)
    ]


def partition_record(holdings: Sequence[Holding], classes: Sequence[str]) -> dict[str, Any]:
    """Return the table as plain values for ``partition.json``: classes, names, sizes, counts (clients x classes)."""
    return {
        "classes": list(classes),
        "names": [row.name for row in holdings],
        "sizes": [row.examples for row in holdings],
        "counts": [list(row.counts) for row in holdings],
        "clients": [asdict(row) for row in holdings],
    }


def render(holdings: Sequence[Holding], classes: Sequence[str], width: int = 12) -> str:
    """Return the table as text: a line a client, a column a class, totals below; zeros are dots."""
    columns = list(holdings[0].columns) if holdings else []
    head = ["client", "examples", *(_short(c, width) for c in classes), *(f"{c}s" for c in columns)]
    body = [
        [r.name, f"{r.examples:,}", *(f"{n:,}" if n else "·" for n in r.counts), *(str(r.columns[c]) for c in columns)]
        for r in holdings
    ]
    totals = np.array([r.counts for r in holdings]).sum(0) if holdings else np.zeros(len(classes), dtype=int)
    body.append(["all", f"{sum(r.examples for r in holdings):,}", *(f"{n:,}" for n in totals), *("" for _ in columns)])
    return align(head, body)


def align(head: Sequence[str], body: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Lay out a table as text: the columns ``left`` flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *(line(row) for row in body)])


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
