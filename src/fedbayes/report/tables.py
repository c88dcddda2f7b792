"""Honest tables of several runs: mean ± standard deviation over seeds, best within noise, ties called ties."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import prose
from .runs import Run

IGNORED = ("seed", "name", "checkpoint_every")
IGNORED_SECTIONS = ("engine",)
ALWAYS = ("fusion.rule", "fusion.weighting", "partition")
PARTITION = ("partition.scheme", "partition.alpha", "partition.clients", "partition.classes_per_client")
HEADINGS = {
    "fusion.rule": "rule",
    "fusion.weighting": "weights",
    "model.kind": "network",
    "model.name": "architecture",
    "data.name": "data",
    "objective.kl_scale": "KL per",
}


@dataclass(frozen=True)
class Column:
    """A metric of the table: key, heading, factor, digits, and which direction is better (+1, -1, 0 neither)."""

    key: str
    heading: str
    scale: float = 1.0
    digits: int | None = 2
    better: int = 0


COLUMNS = (
    Column("accuracy", "accuracy, %", 100, 2, +1),
    Column("nll", "NLL", 1, 3, -1),
    Column("ece", "ECE, %", 100, 2, -1),
    Column("epistemic", "epistemic", 1, None),
    Column("sigma", "median sigma", 1, None),
    Column("auroc_error_entropy", "finds errors (AUROC)", 1, 3, +1),
    Column("auroc_ood", "finds unknown (AUROC)", 1, 3, +1),
    Column("brier", "Brier", 1, 3, -1),
    Column("seconds", "s per round", 1, 2),
)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed: one row of the table."""

    label: str
    keys: Mapping[str, str]
    runs: Sequence[Run]
    common: Mapping[str, str] = field(default_factory=dict)
    """Settings that would be columns of the table, but are the same in every row."""

    @property
    def collapsed(self) -> bool:
        """Whether the posterior of every run of the group has collapsed."""
        return all(prose.collapsed(r) for r in self.runs)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration as dotted names."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def _compared(run: Run) -> dict[str, str]:
    """The settings of a run by which runs may differ, as text."""
    flat = flatten(run.config)
    return {
        k: v if isinstance(v, str) else json.dumps(v)
        for k, v in flat.items()
        if k not in IGNORED and k.split(".")[0] not in IGNORED_SECTIONS
    }


def partition_text(settings: Mapping[str, str]) -> str:
    """The partition in a few letters: ``dirichlet 0.5, 10 clients``."""
    scheme = settings.get("partition.scheme", "")
    if scheme in ("dirichlet", "dirichlet-unequal", "quantity"):
        scheme += f" {settings.get('partition.alpha', '')}"
    elif scheme == "shards":
        scheme = f"{settings.get('partition.classes_per_client', '2')}-class"
    elif scheme == "column":
        return f"by {settings.get('partition.column', 'owner')}"
    return f"{scheme}, {settings.get('partition.clients', '?')} clients"


def group(runs: Sequence[Run]) -> list[Group]:
    """Put runs that differ only in their seed into one group, in the order in which they come."""
    settings = [_compared(run) for run in runs]
    names = sorted({k for s in settings for k in s})
    varying = [k for k in names if len({s.get(k) for s in settings}) > 1]
    by_key: dict[tuple[str | None, ...], list[int]] = {}
    for i, s in enumerate(settings):
        by_key.setdefault(tuple(s.get(k) for k in varying), []).append(i)
    keys = [_row_keys(settings[members[0]], varying) for members in by_key.values()]
    differing = [k for k in keys[0] if len({row.get(k) for row in keys}) > 1] if keys else []
    named = _needed(keys, differing)
    groups = []
    for row, members in zip(keys, by_key.values()):
        label = " ".join(row[k] if _plain(k) else f"{k.split('.')[-1]}={row[k]}" for k in named)
        shown = {k: v for k, v in row.items() if k in differing or k == "fusion.rule"}
        common = {k: v for k, v in row.items() if k not in shown}
        label = label or row["fusion.rule"] or runs[members[0]].name
        groups.append(Group(label, shown, [runs[i] for i in members], common))
    return groups


def _needed(rows: Sequence[Mapping[str, str]], keys: Sequence[str]) -> list[str]:
    """The fewest of the keys, later ones dropped first, that still tell all rows apart: what a label must say."""
    kept = list(keys)
    for key in reversed(keys):
        fewer = [k for k in kept if k != key]
        if len({tuple(row.get(k) for k in fewer) for row in rows}) == len(rows):
            kept = fewer
    return kept


def _plain(key: str) -> bool:
    return key in ("fusion.rule", "fusion.weighting", "model.kind", "model.name", "partition", "data.name")


def _row_keys(settings: Mapping[str, str], varying: Sequence[str]) -> dict[str, str]:
    row = {"fusion.rule": settings.get("fusion.rule", ""), "fusion.weighting": settings.get("fusion.weighting", ""),
           "partition": partition_text(settings)}  # fmt: skip
    return row | {k: settings.get(k, "") for k in varying if k not in (*ALWAYS, *PARTITION)}


def values(run: Run) -> dict[str, float]:
    """The numbers of one run that the table shows."""
    m = dict(run.headline)
    if run.sigma:
        m["sigma"] = run.sigma.get("q50") or run.sigma.get("mean") or 0.0
    seconds = [e["seconds"] for e in run.rounds if e.get("seconds")]
    if seconds:
        m["seconds"] = statistics.median(seconds)
    found = [r["auroc"] for r in prose.outlier_rows(run) if r["by"] == "entropy"]
    if found:
        m["auroc_ood"] = statistics.fmean(found)
    return {k: v for k, v in m.items() if v is not None and math.isfinite(v)}


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over runs, and whether it is the best within noise."""

    mean: float
    sd: float
    n: int
    best: bool = False
    tie: bool = False


def compare(samples: Sequence[Sequence[float]], better: int) -> list[Cell | None]:
    """Mean and spread of each row, with the best within noise marked.

    The difference between two rows counts only when it exceeds their combined run-to-run spread,
    sqrt(sd_a² + sd_b²); rows that do not differ from the best by more are ties with it. A row of a single run
    borrows the pooled spread of the rows that have several. Where no row has, nothing is marked: one run each
    cannot tell a difference from luck.
    """
    cells = [
        Cell(statistics.fmean(s), statistics.stdev(s) if len(s) > 1 else math.nan, len(s)) if len(s) else None
        for s in samples
    ]
    known = [(c.sd**2 * (c.n - 1), c.n - 1) for c in cells if c and c.n > 1]
    present = [c for c in cells if c]
    if not better or not known or len(present) < 2:
        return cells
    pooled = math.sqrt(sum(v for v, _ in known) / sum(d for _, d in known))
    top = max(present, key=lambda c: c.mean * better)

    def spread(c: Cell) -> float:
        return pooled if math.isnan(c.sd) else c.sd

    def within(c: Cell) -> bool:
        return c is top or abs(c.mean - top.mean) <= math.hypot(spread(c), spread(top))

    ties = sum(within(c) for c in present) > 1
    return [c and Cell(c.mean, c.sd, c.n, within(c), ties and within(c)) for c in cells]


@dataclass(frozen=True)
class Table:
    """The whole comparison: headings, one row of texts and cells per group, and what may be said of it."""

    key_headings: list[str]
    columns: list[Column]
    groups: list[Group]
    cells: list[list[Cell | None]]

    @property
    def repeated(self) -> bool:
        """Whether at least one row has several runs, so that a spread is known."""
        return any(len(g.runs) > 1 for g in self.groups)

    def text(self, row: int, column: int) -> str:
        """One cell as text: mean ± sd."""
        cell, spec = self.cells[row][column], self.columns[column]
        if cell is None:
            return "–"
        if spec.digits is None:
            mean, sd = prose.small(cell.mean * spec.scale), f"{cell.sd * spec.scale:.1g}"
        else:
            mean, sd = f"{cell.mean * spec.scale:.{spec.digits}f}", f"{cell.sd * spec.scale:.{spec.digits}f}"
        return mean if math.isnan(cell.sd) else f"{mean} ± {sd}"


def table(groups: Sequence[Group]) -> Table:
    """Collect the groups' numbers into a table; columns that no run has are left out."""
    numbers = [[values(run) for run in g.runs] for g in groups]
    columns = [c for c in COLUMNS if any(c.key in v for row in numbers for v in row)]
    by_column = [compare([[v[c.key] for v in row if c.key in v] for row in numbers], c.better) for c in columns]
    headings = [HEADINGS.get(k, k) for k in groups[0].keys]
    return Table(headings, columns, list(groups), [list(row) for row in zip(*by_column)])


def findings(t: Table) -> list[str]:
    """What the table shows, in sentences."""
    out = []
    for j, column in enumerate(t.columns):
        if column.key not in ("accuracy", "nll", "ece"):
            continue
        cells = [(g, cell) for g, row in zip(t.groups, t.cells) if (cell := row[j]) is not None]
        if len(cells) < 2:
            continue
        ordered = sorted(cells, key=lambda gc: -gc[1].mean * column.better)
        top = ordered[0]
        name = {"accuracy": "accuracy", "nll": "NLL", "ece": "calibration error"}[column.key]
        shown = t.text(t.groups.index(top[0]), j) + (" %" if column.scale == 100 else "")
        if not t.repeated:
            out.append(f"Best {name} in these runs: {top[0].label} ({shown}).")
            continue
        ties = [g.label for g, c in ordered[1:] if c.best]
        text = f"Best {name}: {top[0].label} ({shown})"
        out.append(
            text
            + (
                f"; {_list(ties)} {'is a tie' if len(ties) == 1 else 'are ties'} with it."
                if ties
                else ", ahead by more than the run-to-run spread."
            )
        )
    if not t.repeated:
        out.append(
            f"Every row is a single run, so nothing here tells a difference from luck: repeat with --seeds 3.{_sampling(t)}"
        )
    gone = [g.label for g in t.groups if g.collapsed]
    if gone:
        out.append(
            f"The posterior of {_list(gone)} has collapsed: {'it is' if len(gone) == 1 else 'they are'} point "
            f"{'model' if len(gone) == 1 else 'models'} in all but name, and should be compared as such."
        )
    return out


def _sampling(t: Table) -> str:
    """How much an accuracy is uncertain from the size of the test set alone."""
    column = next((j for j, c in enumerate(t.columns) if c.key == "accuracy"), None)
    cells = [row[column] for row in t.cells] if column is not None else []
    accuracies = [c.mean for c in cells if c]
    evaluations = t.groups[0].runs[0].evaluations("test")
    n = int(evaluations[-1].get("examples", 0)) if evaluations else 0
    if not n or not accuracies:
        return ""
    a = statistics.fmean(accuracies)
    return f" Being measured on {n:,} test inputs, each accuracy is uncertain by ± {196 * math.sqrt(a * (1 - a) / n):.1f} points already."


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
