"""Grids of runs: vary fields over values and seeds, skip what is finished, put mean and spread in one table."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import config, runner
from .data.holdings import align
from .engine import resolve_device
from .errors import ConfigError
from .experiment import Experiment
from .federation import Event
from .rundir import is_finished, read_events, refuse_another_configuration
from .setup import Setup, prepare, same_examples, share_a_launch


@dataclass(frozen=True)
class Cell:
    """One run of a grid: what was varied, with which seed, and where it is kept."""

    label: str
    changes: Mapping[str, Any]
    seed: int
    experiment: Experiment
    path: Path


def parse_vary(items: Sequence[str]) -> dict[str, list[str]]:
    """Read ``key=value,value`` pairs; brackets keep commas together (``local.betas=[0.9,0.99],[0.8,0.9]``)."""
    axes: dict[str, list[str]] = {}
    fields: set[str] = set()  # `fusion` and `fusion.rule` are one
    for item in items:
        key, equals, text = item.partition("=")
        values = _split(text)
        if not equals or not values:
            raise ConfigError(f"--vary '{item}': write it as key=value,value (for example fusion=nwa,ws).")
        field = f"{key}.{config.PRINCIPAL[key]}" if key in config.PRINCIPAL else key
        if field in fields:
            raise ConfigError(f"--vary '{key}' is given twice; list all its values in one.")
        fields.add(field)
        axes[key] = values
    return axes


def _split(text: str) -> list[str]:
    values, depth, word = [], 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            values.append(word)
            word = ""
        else:
            word += char
    return [v.strip() for v in [*values, word] if v.strip()]


def grid(base: Experiment, axes: Mapping[str, Sequence[Any]], seeds: int | Sequence[int], root: Path) -> list[Cell]:
    """Return every cell of a grid; values are checked, so that a wrong one stops the grid before its first run."""
    numbers = [base.seed + i for i in range(seeds)] if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise ConfigError("--seeds must be at least 1.")
    if "seed" in axes and len(numbers) > 1:
        raise ConfigError("--vary seed=... and --seeds both choose seeds; use one of them.")
    cells = []
    for values in itertools.product(*axes.values()):
        changes = dict(zip(axes, values))
        label = " ".join(f"{k}={v}" for k, v in changes.items()) or base.name
        for seed in numbers:
            experiment = config.override(base, {"seed": seed, **changes}, "--vary")
            cells.append(
                Cell(label, changes, experiment.seed, experiment, root / f"{_slug(label)}-seed{experiment.seed}")
            )
    first: dict[str, Cell] = {}
    for cell in cells:
        same = {str(cell.path): f"would share {cell.path}", config.dumps(cell.experiment): "are the same experiment"}
        for key, what in same.items():
            if (other := first.setdefault(key, cell)) is not cell:
                raise ConfigError(f"--vary: '{other.label}' and '{cell.label}' {what}; give each value once.")
    return cells


def _slug(label: str) -> str:
    """A label as a folder's name; a long one (file systems allow 255 bytes) is cut and ends in a digest of the whole."""
    slug = "".join(c if c.isalnum() or c in "=.-+" else "_" for c in label)
    if len(slug.encode()) <= 200:
        return slug
    return slug.encode()[:180].decode(errors="ignore") + "-" + hashlib.sha256(label.encode()).hexdigest()[:12]


def run_grid(
    cells: Sequence[Cell],
    *,
    data_dir: str | Path | None = None,
    listeners: Callable[[Cell], list[Callable[[Event], None]]] | None = None,
    lanes_shared: bool | None = None,
    most_together: int = 12,
) -> list[Cell]:
    """Run what is not finished and return the cells that were run now.

    Runs that can share a launch (same network and data) train together as lanes where ``lanes_shared`` says so; None
    shares on a GPU alone. There it pays; on a CPU one run fills the machine, and a run of its own repeats to the bit
    from its ``config.toml``, which one whose noise was drawn together with others' does not. An unfinished run is
    resumed; a directory that holds a run of another configuration is refused before anything starts.
    """
    todo = [c for c in cells if not _done(c)]
    for cell in todo:
        if (cell.path / "config.toml").exists():
            refuse_another_configuration(cell.path, config.read(cell.path), cell.experiment)
    for group in _groups(todo, data_dir, lanes_shared, most_together):
        launches = [
            runner.Launch(setup, cell.path, resume=True, listeners=listeners(cell) if listeners else [])
            for cell, setup in group
        ]
        for launch in launches:
            launch.path.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
        runner.run_setups(launches, report=False)
    return todo


def _done(cell: Cell) -> bool:
    if not is_finished(cell.path):
        return False
    refuse_another_configuration(cell.path, config.read(cell.path), cell.experiment)
    return next((e["rounds"] for e in read_events(cell.path) if e["kind"] == "end"), 0) >= cell.experiment.rounds


def _may_share(asked: bool | None, setup: Setup) -> bool:
    return resolve_device(setup.experiment.engine.device).type == "cuda" if asked is None else asked


def _groups(cells: Sequence[Cell], data_dir: Any, shared: bool | None, most: int) -> list[list[tuple[Cell, Setup]]]:
    groups: list[list[tuple[Cell, Setup]]] = []
    for cell in cells:
        setup = _sharing(prepare(cell.experiment, data_dir=data_dir), [g[0][1] for g in groups])
        for group in groups:
            if _may_share(shared, setup) and len(group) < most and share_a_launch(group[0][1], setup):
                group.append((cell, setup))
                break
        else:
            groups.append([(cell, setup)])
    return groups


def _sharing(setup: Setup, others: Sequence[Setup]) -> Setup:
    """Return the setup with another's data set in place of an equal one of its own: memory holds each set once."""
    for other in others:
        if same_examples(setup.dataset, other.dataset):
            return dataclasses.replace(setup, dataset=other.dataset)
    return setup


# -- the table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table: a label and, per metric, the values of its seeds."""

    label: str
    values: Mapping[str, list[float]]

    def mean(self, metric: str) -> float:
        """Return the mean over seeds."""
        return statistics.fmean(self.values[metric]) if self.values.get(metric) else math.nan

    def spread(self, metric: str) -> float:
        """Return the standard deviation over seeds (NaN for one seed)."""
        return statistics.stdev(self.values[metric]) if len(self.values.get(metric, [])) > 1 else math.nan


def summary_of(path: Path) -> dict[str, float]:
    """Return one finished run's numbers: test metrics and mean sigma, both of the best round."""
    events = list(read_events(path))
    return {**runner.metrics_of(events), "sigma": runner.mean_sigma(events)}


def rows(cells: Sequence[Cell]) -> list[Row]:
    """Collect the finished cells of a grid into rows, one a label, in the grid's order."""
    table: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        if is_finished(cell.path):
            values = table.setdefault(cell.label, {})
            for metric, value in summary_of(cell.path).items():
                if value is not None:
                    values.setdefault(metric, []).append(value)
    return [Row(label, values) for label, values in table.items()]


HEADINGS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE %", "sigma": "mean sigma", "epistemic": "epistemic"}


def render(
    table: Sequence[Row],
    columns: Sequence[str] = ("accuracy", "nll", "ece", "sigma", "epistemic"),
    heading: str = "run",
) -> str:
    """Return the table as text: mean ± standard deviation over seeds; ``heading`` says what a row is."""
    body = [[row.label, *(_cell(row, c) for c in columns)] for row in table]
    return align([heading, *(HEADINGS.get(c, c) for c in columns)], body)


def _cell(row: Row, metric: str) -> str:
    mean, spread = row.mean(metric), row.spread(metric)
    if math.isnan(mean):
        return "-"
    percent = 100 if metric in ("accuracy", "ece") else 1
    digits = ".3g" if metric in ("sigma", "epistemic") else ".2f" if percent == 100 else ".3f"
    text = format(mean * percent, digits)
    return text if math.isnan(spread) else f"{text} ± {format(spread * percent, '.2g')}"


def write_csv(table: Sequence[Row], path: Path) -> None:
    """Write every metric of every row, mean, standard deviation and number of seeds."""
    metrics = sorted({m for r in table for m in r.values})
    with open(path, "w", newline="", encoding="utf-8") as f:
        out = csv.writer(f)
        out.writerow(["label", "seeds", *(f"{m}{suffix}" for m in metrics for suffix in ("", " sd"))])
        for r in table:
            seeds = max((len(v) for v in r.values.values()), default=0)
            out.writerow([r.label, seeds, *(v for m in metrics for v in (r.mean(m), r.spread(m)))])
