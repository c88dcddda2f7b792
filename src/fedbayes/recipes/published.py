"""The numbers the papers print, as data: one TOML file a table, checked against the shape of the printed table."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..errors import ConfigError, nearest

UNITS = {"percent": 0.01, "share": 1.0, "plain": 1.0}
"""Factor from a printed unit to ours: shares, never percent; rounds and nats are plain."""

Coordinates = tuple[tuple[str, str], ...]
"""A place in a table, as sorted (coordinate, value) pairs, e.g. (("partition", "iid"), ("rule", "nwa"))."""


def place(at: Mapping[str, Any]) -> Coordinates:
    """Return a mapping of coordinates in the form that can be compared and used as a key."""
    return tuple(sorted((str(k), str(v)) for k, v in at.items()))


@dataclass(frozen=True)
class Entry:
    """One printed number: where it stands, which metric it is, its value and printed spread (None: none printed)."""

    at: Coordinates
    metric: str
    value: float
    spread: float | None


@dataclass(frozen=True)
class Published:
    """One table of a paper in our units, with the place it was printed at (page 0: the source marks no pages)."""

    name: str
    paper: str
    table: str
    page: int
    section: str
    caption: str
    entries: tuple[Entry, ...]

    @property
    def where(self) -> str:
        """Where the table stands, in words: ``Table 4.2, page 35``."""
        return f"{self.table}, page {self.page}" if self.page else f"{self.table}, section {self.section}"

    def places(self, derived: frozenset[str] = frozenset()) -> set[Coordinates]:
        """Every place that holds a number of a run of its own.

        ``derived`` leaves out a coordinate that needs no runs (``target``), or the places where a coordinate has a
        value that is computed from other places (``batch=mean``).
        """
        dropped = {tuple(d.split("=", 1)) for d in derived if "=" in d}
        return {tuple((k, v) for k, v in e.at if k not in derived) for e in self.entries if not dropped & set(e.at)}


def published_names() -> list[str]:
    """Return the names of every table carried."""
    folder = resources.files("fedbayes.recipes") / "published"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_published(name: str) -> Published:
    """Read a published table by name; its numbers are checked against the shape the paper prints."""
    if name not in published_names():
        raise ConfigError(f"no published table is named '{name}'; {nearest(name, published_names())}")
    text = (resources.files("fedbayes.recipes") / "published" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_published(name, tomllib.loads(text))


def parse_published(name: str, table: Mapping[str, Any]) -> Published:
    """Make a published table of a parsed TOML file, or say which row does not fit the printed shape."""
    for key in ("paper", "table", "page", "section", "caption", "columns", "metrics", "shape", "units", "row"):
        if key not in table:
            raise ConfigError(f"published table {name}: '{key}' is missing.")
    columns, rows, shape = table["columns"], table["row"], table["shape"]
    if len(rows) != shape["rows"] or len(columns) != shape["columns"]:
        raise ConfigError(
            f"published table {name}: it holds {len(rows)} rows x {len(columns)} columns, but the paper's table has "
            f"{shape['rows']} x {shape['columns']}."
        )
    entries: list[Entry] = []
    for number, row in enumerate(rows, 1):
        for metric in table["metrics"]:
            entries += _row(name, number, row, metric, columns, table["units"])
    seen = {(e.at, e.metric) for e in entries}
    if len(seen) != len(entries):
        raise ConfigError(f"published table {name}: two rows stand at the same place.")
    head = {k: table[k] for k in ("paper", "table", "page", "section", "caption")}
    return Published(name=name, entries=tuple(entries), **head)


def _row(
    name: str,
    number: int,
    row: Mapping[str, Any],
    metric: str,
    columns: list[Mapping[str, Any]],
    units: Mapping[str, str],
) -> list[Entry]:
    values = row.get(metric)
    spreads = row.get(f"{metric}_sd", [None] * len(columns))
    spread_units = row.get(f"{metric}_sd_unit", [units.get(f"{metric}_sd", "plain")] * len(columns))
    for what, items in ((metric, values), (f"{metric}_sd", spreads), (f"{metric}_sd_unit", spread_units)):
        if items is None or len(items) != len(columns):
            count = "no" if items is None else len(items)
            raise ConfigError(
                f"published table {name}, row {number}: {count} values of {what} for {len(columns)} columns."
            )
    factor = _factor(name, units.get(metric, "plain"))
    found = []
    for column, value, spread, unit in zip(columns, values or [], spreads, spread_units, strict=True):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"published table {name}, row {number}: {metric} holds {value!r}, which is not a number.")
        scaled = None if spread is None else float(spread) * _factor(name, unit)
        found.append(Entry(place({**row["at"], **column}), metric, float(value) * factor, scaled))
    return found


def _factor(name: str, unit: str) -> float:
    if unit not in UNITS:
        raise ConfigError(f"published table {name}: unit '{unit}' is not known; {nearest(unit, UNITS)}")
    return UNITS[unit]
