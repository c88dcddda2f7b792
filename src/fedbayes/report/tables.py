"""Honest tables of several runs: mean ± standard deviation over seeds, best within noise, ties called ties."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..predictor import interval
from . import prose
from .runs import Run

IGNORED = ("seed", "name", "checkpoint_every")
IGNORED_SECTIONS = ("engine",)
PROBLEM = ("data", "partition", "sonar")
"""Sections of the configuration that say what is to be learnt, not how: only runs alike in these are rivals."""
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
    problem: str = ""
    """What is to be learnt (data, partition), where the runs differ in it; "" where all have the same."""
    number: int = 0
    """Number of the label: rows of the same method in different problems share it, and so their colour."""

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
    """Put runs that differ only in their seed into one group; groups of the same problem stand together.

    Order: problems as they come, and within each the groups as they come.
    """
    settings = [_compared(run) for run in runs]
    names = sorted({k for s in settings for k in s})
    varying = [k for k in names if len({s.get(k) for s in settings}) > 1]
    by_key: dict[tuple[str | None, ...], list[int]] = {}
    for i, s in enumerate(settings):
        by_key.setdefault(tuple(s.get(k) for k in varying), []).append(i)
    members = list(by_key.values())
    rows = [_row_keys(settings[m[0]], varying) for m in members]
    problems = [_problem(settings[m[0]], varying) for m in members]
    differing = [k for k in rows[0] if len({row.get(k) for row in rows}) > 1] if rows else []
    rivals = len(set(problems)) < len(rows)  # else every row has a problem of its own: that is what tells them apart
    telling = [k for k in differing if not _of_problem(k)] if rivals else differing
    named = _needed([dict(kept) for kept in {tuple((k, row.get(k, "")) for k in telling) for row in rows}], telling)
    labels = [_label(row, named) or row["fusion.rule"] or runs[m[0]].name for row, m in zip(rows, members)]
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    groups = []
    for row, m, problem, label in zip(rows, members, problems, labels):
        shown = {k: v for k, v in row.items() if k in differing or k == "fusion.rule"}
        common = {k: v for k, v in row.items() if k not in shown}
        groups.append(Group(label, shown, [runs[i] for i in m], common, problem, numbers[label]))
    order = {problem: i for i, problem in enumerate(dict.fromkeys(problems))}
    return sorted(groups, key=lambda g: order[g.problem])


def blocks(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Groups by problem: (its text, its groups). One block with the text "" where there is nothing to part."""
    parted: dict[str, list[Group]] = {}
    for g in groups:
        parted.setdefault(g.problem, []).append(g)
    return list(parted.items()) if len(parted) < len(groups) else [("", list(groups))]


def _of_problem(key: str) -> bool:
    return key == "partition" or key.split(".")[0] in PROBLEM


def _problem(settings: Mapping[str, str], varying: Sequence[str]) -> str:
    """The part of the settings that says what is to be learnt, as far as the runs differ in it."""
    keys = [k for k in varying if _of_problem(k)]
    parts = [settings.get("data.name", "")] if any(k.startswith("data.") for k in keys) else []
    if any(k in (*PARTITION, "partition.column") for k in keys):
        parts.append(partition_text(settings))
    rest = [k for k in keys if k not in (*PARTITION, "partition.column", "data.name")]
    return ", ".join(parts + [f"{k.split('.')[-1]}={settings.get(k, '–')}" for k in rest])


def _label(row: Mapping[str, str], named: Sequence[str]) -> str:
    return " ".join(row[k] if _plain(k) else f"{k.split('.')[-1]}={row[k]}" for k in named)


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
    if seconds and not run.shared:
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
    """The whole comparison: one row of cells per group, and what may be said of it."""

    columns: list[Column]
    groups: list[Group]
    cells: list[list[Cell | None]]

    @property
    def blocks(self) -> list[tuple[str, list[Group]]]:
        """The rows by problem (see ``blocks``)."""
        return blocks(self.groups)

    @property
    def rivals(self) -> bool:
        """Whether at least two rows have the same problem, so that one can be better than the other."""
        return len({g.problem for g in self.groups}) < len(self.groups)

    @property
    def keys(self) -> list[str]:
        """The settings that are columns: those of the problem are not where they are headings of the blocks."""
        return [k for k in self.groups[0].keys if len(self.blocks) == 1 or not _of_problem(k)]

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
        if cell.mean == 0 and not cell.sd > 0:
            return "0"  # exactly, in every run
        return mean if math.isnan(cell.sd) else f"{mean} ± {sd}"


def table(groups: Sequence[Group]) -> Table:
    """Collect the groups' numbers into a table; columns that no run has are left out.

    The best are marked within each problem: an accuracy on other data, or on another partition, is no rival.
    """
    numbers = [[values(run) for run in g.runs] for g in groups]
    columns = [c for c in COLUMNS if any(c.key in v for row in numbers for v in row)]
    by_column = []
    for c in columns:
        samples = [[v[c.key] for v in row if c.key in v] for row in numbers]
        cells: list[Cell | None] = []
        for problem in dict.fromkeys(g.problem for g in groups):
            cells += compare([s for s, g in zip(samples, groups) if g.problem == problem], c.better)
        by_column.append(cells)
    return Table(columns, list(groups), [list(row) for row in zip(*by_column)])


def findings(t: Table) -> list[str]:
    """What the table shows, in sentences: who is best within noise, problem by problem."""
    out = []
    for problem, groups in t.blocks:
        said = _leaders(t, groups) if t.rivals and t.repeated else []
        if said:
            out += (
                [f"{problem}: {'; '.join(said)}."] if problem else [f"{line[:1].upper()}{line[1:]}." for line in said]
            )
    if not t.rivals and len(t.groups) > 1:
        out.append("Every row is another problem (data or partition), so none is called best.")
    if not t.repeated:
        out.append(
            "Every row is a single run, so nothing here tells a difference from luck: repeat with --seeds 3."
            + _sampling(t)
        )
    gone = list(dict.fromkeys(g.label for g in t.groups if g.collapsed))
    if gone:
        out.append(
            f"The posterior of {_list(gone)} has collapsed: {'it is a point model' if len(gone) == 1 else 'they are point models'} "
            "in all but name, and should be compared as such."
        )
    return out


JUDGED = {"accuracy": "accuracy", "nll": "NLL", "ece": "calibration error"}
"""Metrics of which the findings name the best."""


def _leaders(t: Table, groups: Sequence[Group]) -> list[str]:
    """Who leads in a block, metric by metric; metrics in which nobody does are named together."""
    found = {JUDGED[c.key]: line for c in t.columns if c.key in JUDGED and (line := _best(t, c, groups)) is not None}
    level = [name for name, line in found.items() if not line]
    out = [line for line in found.values() if line]
    return [*out, f"no difference in {_list(level, 'or')} is larger than the run-to-run spread"] if level else out


def _best(t: Table, column: Column, groups: Sequence[Group]) -> str | None:
    """The best of a block by one metric, and who ties with it; "" where all tie, None where there is nothing to compare."""
    name, j = JUDGED[column.key], t.columns.index(column)
    cells = [(g, cell) for g, row in zip(t.groups, t.cells) if g in groups and (cell := row[j]) is not None]
    if len(cells) < 2:
        return None
    ordered = sorted(cells, key=lambda gc: -gc[1].mean * column.better)
    top = ordered[0][0]
    number = t.text(t.groups.index(top), j) + (" %" if column.scale == 100 else "")
    shown = f"{top.label} ({number})"
    ties = [g.label for g, c in ordered[1:] if c.best]
    if len(ties) == len(cells) - 1:
        return ""
    if ties:
        return f"best {name}: {shown}, a tie with {_list(ties)}"
    return f"best {name}: {shown}, ahead by more than the run-to-run spread"


def _sampling(t: Table) -> str:
    """How much an accuracy is uncertain from the size of the test set alone."""
    errors = []
    for g in t.groups:
        evaluations = g.runs[0].evaluations("test")
        n, a = int(evaluations[-1].get("examples", 0)) if evaluations else 0, g.runs[0].headline.get("accuracy")
        if n and a is not None and math.isfinite(a):
            bounds = interval(a, n)
            errors.append((50 * (bounds[1] - bounds[0]), n))
    if not errors:
        return ""
    sizes = sorted({n for _, n in errors})
    inputs = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    low, high = f"{min(errors)[0]:.1f}", f"{max(errors)[0]:.1f}"
    spread = low if low == high else f"{low} to {high}"
    return f" Being measured on {inputs} test inputs, each accuracy is uncertain by ± {spread} points already."


def _list(names: Sequence[str], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"
