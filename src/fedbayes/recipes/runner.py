"""``reproduce``: run what a recipe still lacks, compare with the printed numbers, write one page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..experiment import Experiment
from ..rundir import is_finished
from . import measures
from .grid import Cell, Recipe, digest, load_recipe
from .published import Coordinates

RunMany = Callable[[Sequence[tuple[str, Experiment, Path]]], None]
"""Runs experiments (label, experiment, directory), resuming what is unfinished."""


AT_ONCE = 12
"""Cells handed to one grid: enough to share launches, few enough that their data fit into memory."""


@dataclass(frozen=True)
class Reproduction:
    """What ``reproduce`` gives back: the verdicts, where runs and page are, and what could not be run."""

    recipe: Recipe
    verdicts: tuple[measures.Verdict, ...]
    runs: Mapping[Coordinates, tuple[Sequence[Path], str]]
    page: Path
    skipped: Mapping[str, str]
    changed: bool = False

    def __str__(self) -> str:
        from .page import as_text

        return as_text(self)


def reproduce(
    name: str,
    scale: str = "quick",
    only: Sequence[str] = (),
    out: str | Path = Path("runs") / "reproduce",
    data_dir: str | Path | None = None,
    *,
    readings: Mapping[str, str] | None = None,
    changes: Mapping[str, object] | None = None,
    seeds: int | None = None,
    run_many: RunMany | None = None,
    listeners: Callable[[Any], list[Callable[[dict[str, Any]], None]]] | None = None,
) -> Reproduction:
    """Reproduce a table or figure by name and write ``NAME-SCALE.html`` in ``out``.

    Finished runs are not run again, unfinished ones are resumed; recipes that share cells share their runs (in
    ``out/runs``). ``only`` chooses what is run, the cells whose label (``partition=iid rule=nwa``) holds every word of
    one of the items (shell patterns allowed); the page shows all that has finished. ``smoke`` runs one cell, a figure
    the one its table has run already. ``readings`` takes other readings of the paper's ambiguities, ``changes`` overrides
    configuration fields of every cell. ``listeners`` makes what is told of a cell's events while it runs (a progress bar).
    """
    if seeds is not None and seeds < 1:
        raise ConfigError("--seeds must be at least 1.")
    recipe = load_recipe(name, scale, readings)
    if "seed" in (changes or {}):
        raise ConfigError("a recipe's seeds count up from 0; say with --seeds (seeds=) how many.")
    if changes:
        from .. import config

        cells = [replace(c, experiment=config.override(c.experiment, changes, "command line")) for c in recipe.cells]
        recipe = replace(recipe, cells=tuple(cells))
    chosen = _chosen(recipe, only)
    numbers = range(recipe.seeds if seeds is None else seeds)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if scale == "smoke" and not only:
        chosen = _few(chosen, out)
    skipped: dict[str, str] = {}
    if recipe.trains:
        skipped = _run_cells(chosen, numbers, out, data_dir, run_many or run_with_lanes(data_dir, listeners))
    runs = {c.at: ([p for p in _paths(c, numbers, out) if is_finished(p)], c.model) for c in recipe.cells}
    verdicts = _verdicts(recipe, runs)
    from .page import write_page

    free = {"engine.device", "engine.lanes", "engine.workers", "engine.compile"}  # how it is computed, not what
    changed = bool(set(changes or ()) - free)
    page = write_page(recipe, verdicts, runs, skipped, out, changed)
    return Reproduction(recipe, verdicts, runs, page, skipped, changed)


def run_path(experiment: Experiment, out: Path) -> Path:
    """Return the directory of a run: a readable name and eight letters that tell configurations apart."""
    e = experiment
    parts = [
        e.data.name,
        e.model.name,
        e.model.kind,
        e.fusion.rule,
        e.fusion.weighting,
        e.partition.scheme,
        f"s{e.seed}",
    ]
    if e.distill.enabled:
        parts.insert(-1, f"{e.distill.distribution}_{e.distill.swa}")
    words = "-".join(p.replace("/", "_").removesuffix(".npz") for p in parts)
    return out / "runs" / f"{words}-{digest(e)}"


def _paths(cell: Cell, seeds: Sequence[int], out: Path) -> list[Path]:
    return [run_path(cell.with_seed(s), out) for s in seeds]


def _chosen(recipe: Recipe, only: Sequence[str]) -> list[Cell]:
    if only and not recipe.trains:
        raise ConfigError(f"{recipe.name} is drawn without runs, so --only has nothing to choose from.")
    for item in only:
        if not any(matches(cell, item) for cell in recipe.cells):
            raise ConfigError(
                f"--only '{item}' fits no cell of {recipe.name}; a cell is called '{recipe.cells[0].label}'."
            )
    return [c for c in recipe.cells if not only or any(matches(c, item) for item in only)]


def matches(cell: Cell, item: str) -> bool:
    """Whether a cell's label holds every word of an item of ``only`` (shell patterns; a value alone stands for its word)."""
    return all(
        any(fnmatch(word, want) or word.endswith(f"={want}") for word in cell.label.split()) for want in item.split()
    )


def _few(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """Choose the cell of a smoke run: one that another recipe has run already, else the first."""
    done = [c for c in cells if is_finished(run_path(c.with_seed(0), out))]
    return [(done or list(cells))[0]]


def _run_cells(
    cells: Sequence[Cell], seeds: Sequence[int], out: Path, data_dir: str | Path | None, run_many: RunMany
) -> dict[str, str]:
    """Run what is not finished; a cell whose data are not there is skipped with its reason."""
    todo: dict[Path, tuple[str, Experiment, Path]] = {}
    skipped: dict[str, str] = {}
    missing: dict[tuple[str, ...], str | None] = {}
    for cell in cells:
        wants = _sets(cell.experiment)
        if wants not in missing:
            missing[wants] = _absent(cell.experiment, data_dir)
        if reason := missing[wants]:
            skipped[cell.label] = reason
            continue
        for seed in seeds:
            experiment = cell.with_seed(seed)
            path = run_path(experiment, out)
            todo.setdefault(path, (f"{cell.label} seed={seed}", experiment, path))
    run_many(list(todo.values()))
    return skipped


def _sets(e: Experiment) -> tuple[str, ...]:
    return (e.data.name, e.data.ood, e.distill.data if e.distill.enabled else "")


def _absent(experiment: Experiment, data_dir: str | Path | None) -> str | None:
    """Say why a cell's data cannot be had, or None."""
    from ..data import load_source
    from ..data.arrays import npz_inputs

    server = experiment.distill.data if experiment.distill.enabled else ""
    for name in _sets(experiment):
        try:
            if name and name == server and name.endswith(".npz"):
                npz_inputs(Path(name).expanduser())  # needs no labels
            elif name:
                load_source(name, data_dir=data_dir)
        except DataError as error:
            return str(error)
    return None


def run_with_lanes(data_dir: str | Path | None, listeners: Any = None) -> RunMany:
    """Return the usual way to run cells: ``compare.run_grid``, which shares launches between like runs."""

    def run(items: Sequence[tuple[str, Experiment, Path]]) -> None:
        from ..compare import Cell as GridCell
        from ..compare import run_grid

        cells = [GridCell(label, {}, e.seed, e, path) for label, e, path in items]
        for start in range(0, len(cells), AT_ONCE):  # every prepared cell holds its data set
            run_grid(cells[start : start + AT_ONCE], data_dir=data_dir, listeners=listeners)

    return run


def _verdicts(recipe: Recipe, runs: Mapping[Coordinates, tuple[Sequence[Path], str]]) -> tuple[measures.Verdict, ...]:
    if recipe.published is None:
        return ()
    return tuple(
        measures.judge(
            e.at, e.metric, e.value, e.spread, measures.outcome(e.at, e.metric, recipe.report, runs), recipe.noise,
            ran=measures.ran(e.at, runs),
        )
        for e in recipe.published.entries
    )  # fmt: skip
