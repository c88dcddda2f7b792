"""Recipes: a paper's table or figure as a grid of experiments, read from TOML and checked against the printed table."""

from __future__ import annotations

import functools
import hashlib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from .. import config
from ..errors import ConfigError, nearest
from ..experiment import Experiment
from .published import Coordinates, Published, load_published, place
from .readings import Option, take

SCALES = ("smoke", "quick", "full")
KINDS = ("table", "figure", "study")
KEYS = {
    "also", "title", "paper", "kind", "published", "cells_of", "only", "seeds", "report", "model", "figures", "derived",
    "readings", "base", "axis", "scale", "noise", "note",
}  # fmt: skip
IGNORED = ("name", "checkpoint_every")
"""Fields that do not change what a run computes: two cells that differ only here share their run."""


@dataclass(frozen=True)
class Cell:
    """One experiment of a recipe: where it stands in the table, and its configuration for seed 0."""

    at: Coordinates
    experiment: Experiment
    model: str = "global"
    """Which predictor's evaluation is read: global, or 1-ensemble, ensemble, average of a distilling run."""

    @property
    def label(self) -> str:
        """The cell in words: ``partition=iid rule=nwa``."""
        return " ".join(f"{k}={v}" for k, v in self.at)

    def with_seed(self, seed: int) -> Experiment:
        """Return the experiment of another seed."""
        return config.override(self.experiment, {"seed": seed})


@dataclass(frozen=True)
class Recipe:
    """A table or figure that can be reproduced by name."""

    name: str
    title: str
    paper: str
    kind: str
    cells: tuple[Cell, ...]
    seeds: int
    report: str
    readings: Mapping[str, str]
    published: Published | None = None
    derived: frozenset[str] = frozenset()
    figures: tuple[str, ...] = ()
    noise: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    scale: str = "full"
    taken: Mapping[str, str] = field(default_factory=dict)
    """Readings taken otherwise than the recipe does."""

    @property
    def stem(self) -> str:
        """What its page is called: name, scale, and what was read otherwise."""
        return "-".join([self.name, self.scale, *(f"{k}={v}" for k, v in sorted(self.taken.items()))])

    @property
    def trains(self) -> bool:
        """Whether there is anything to run: some figures are drawn from the rules alone."""
        return self.figures != ("fused-densities",)

    def needs(self) -> tuple[str, ...]:
        """Return the data sets its cells read."""
        found = {c.experiment.data.name for c in self.cells}
        found |= {c.experiment.distill.data for c in self.cells if c.experiment.distill.enabled}
        found |= {c.experiment.data.ood for c in self.cells}
        return tuple(sorted(found - {""}))


def digest(experiment: Experiment) -> str:
    """Return eight letters that tell apart experiments that compute different things."""
    values = {k: v for k, v in config.flatten(experiment).items() if k not in IGNORED}
    return hashlib.blake2b(repr(sorted(values.items())).encode(), digest_size=4).hexdigest()


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    folder = resources.files("fedbayes.recipes") / "books"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_recipe(name: str, scale: str = "full", readings: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe at a scale, with other readings of its ambiguities where given."""
    if scale not in SCALES:
        raise ConfigError(f"scale '{scale}' does not exist; {nearest(scale, SCALES)}")
    name = name if name in recipe_names() else _other_names().get(name, name)
    return parse_recipe(name, _book(name), scale, readings)


def _book(name: str) -> dict[str, Any]:
    if name not in recipe_names():
        raise ConfigError(f"no recipe is named '{name}'; {nearest(name, [*recipe_names(), *_other_names()])}")
    text = (resources.files("fedbayes.recipes") / "books" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def _other_names() -> dict[str, str]:
    """Return the recipes by the figures that they show beside the one they are named after."""
    return {other: name for name in recipe_names() for other in _book(name).get("also", ())}


def parse_recipe(
    name: str, table: Mapping[str, Any], scale: str = "full", readings: Mapping[str, str] | None = None
) -> Recipe:
    """Make a recipe of a parsed TOML file; a grid that does not match the paper's table is refused."""
    source = f"recipe {name}"
    unknown = set(table) - KEYS
    if unknown:
        raise ConfigError(f"{source}: unknown key '{min(unknown)}'; {nearest(min(unknown), KEYS)}")
    if table.get("cells_of"):
        inner = _book(table["cells_of"])
        table = {
            **{k: inner[k] for k in ("base", "axis", "readings", "scale", "seeds", "report") if k in inner},
            **table,
        }
    if table.get("kind") not in KINDS:
        raise ConfigError(
            f"{source}: kind '{table.get('kind')}' does not exist; {nearest(str(table.get('kind')), KINDS)}"
        )
    chosen = {**table.get("readings", {}), **_mine(table, readings, source)}
    taken = {k: v for k, v in chosen.items() if v != table.get("readings", {}).get(k)}
    options = take(chosen, source)
    published = load_published(table["published"]) if table.get("published") else None
    cells = _cells(table, options, source)
    derived = frozenset(table.get("derived", ()))
    if published is not None and not table.get("only"):
        _check_shape(source, published, cells, derived)
    report = next((o.report for o in options if o.report), table.get("report", "last"))
    cells = [_scaled(c, table, scale, source) for c in cells]
    return Recipe(
        name=name, title=table["title"], paper=table["paper"], kind=table["kind"], cells=tuple(cells),
        seeds=int(table.get("seeds", 1)) if scale == "full" else 1, report=report, readings=chosen, published=published,
        derived=derived, figures=tuple(table.get("figures", ())), noise=dict(table.get("noise", {})),
        note=table.get("note", ""), scale=scale, taken=taken,
    )  # fmt: skip


def _mine(table: Mapping[str, Any], readings: Mapping[str, str] | None, source: str) -> dict[str, str]:
    known = table.get("readings", {})
    for name in readings or {}:
        if name not in known:
            raise ConfigError(f"{source} has no reading '{name}'; {nearest(name, known)}")
    return {k: str(v) for k, v in (readings or {}).items()}


def _cells(table: Mapping[str, Any], options: list[Option], source: str) -> list[Cell]:
    base = config.override(Experiment(), _flat(table.get("base", {})), source)
    axes = [axis["value"] for axis in table.get("axis", [])]
    cells = []
    for values in itertools.product(*axes):
        at: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        model = "global"
        for value in values:
            at |= value["at"]
            changes |= _flat(value.get("set", {}))
            model = value.get("model", model)
        experiment = config.override(base, {"name": "cell", **changes}, source)
        for option in options:
            if (option.set or option.needs) and _applies(option, experiment, at):
                own = set(changes) if not option.when else set()
                new = {k: v for k, v in option.set.items() if k not in own}
                new |= {k: v for k, v in option.needs.items() if not config.get(experiment, k)}
                if "fusion.options" in new:  # a rule's options add up
                    new["fusion.options"] = [*experiment.fusion.options, *new["fusion.options"]]
                experiment = config.override(experiment, new, source)
        cells.append(Cell(place(at), experiment, model))
    kept = [c for c in cells if _wanted(c, table.get("only", [{}]))]
    if not kept:
        raise ConfigError(f"{source}: 'only' leaves no cell.")
    return kept


def _wanted(cell: Cell, only: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a cell fits one of the alternatives of ``only``, each a table of coordinates and their allowed values."""
    at = dict(cell.at)
    return any(all(at.get(k) in [str(x) for x in v] for k, v in choice.items()) for choice in only)


def _applies(option: Option, experiment: Experiment, at: Mapping[str, Any]) -> bool:
    for key, value in option.when.items():
        if key.startswith("@"):
            if str(value) not in str(at.get(key[1:], "")):
                return False
        elif config.get(experiment, key) != value:
            return False
    return True


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return flat


def _check_shape(source: str, published: Published, cells: list[Cell], derived: frozenset[str]) -> None:
    """Refuse a grid whose cells are not exactly the places of the printed table."""
    ours, theirs = [c.at for c in cells], published.places(derived)
    if len(set(ours)) != len(ours):
        raise ConfigError(f"{source}: two cells stand at the same place.")
    missing, extra = theirs - set(ours), set(ours) - theirs
    if missing or extra:
        what, where = ("lacks the cell", min(missing)) if missing else ("has a cell that was not printed:", min(extra))
        words = " ".join(f"{k}={v}" for k, v in where)
        raise ConfigError(
            f"{source} does not match {published.where}: it {what} {words} "
            f"({len(ours)} cells here, {len(theirs)} printed)."
        )


# -- scales --------------------------------------------------------------------------------------------------------

SMOKE: dict[str, Any] = {
    "data.limit": 100, "data.test_limit": 40, "rounds": 1, "evaluation.samples": 2, "evaluation.every": 1,
    "partition.minimum": 2, "partition.minor_examples": 1, "local.epochs": 1, "local.epochs_max": 0,
    "distill.epochs": 2, "distill.swa_start": 0, "distill.swa_cycle": 1, "distill.samples": 1, "distill.batch_size": 16,
    "pretrain.epochs": 1, "engine.lanes": 1,
}  # fmt: skip
SMOKE_CLIENTS = 5
QUICK: dict[str, Any] = {"data.limit": 2000, "data.test_limit": 500, "evaluation.samples": 5}


def _scaled(cell: Cell, table: Mapping[str, Any], scale: str, source: str) -> Cell:
    """Shrink a cell: the rules of the scale, then the recipe's own ``[scale.NAME]``."""
    if scale == "full":
        return cell
    e = cell.experiment
    if scale == "smoke":
        clients = min(e.partition.clients, SMOKE_CLIENTS)
        fraction = min(1.0, e.participation.fraction * e.partition.clients / clients)
        changes = SMOKE | {
            "partition.clients": clients, "participation.fraction": fraction, "local.batch_size": min(e.local.batch_size, 20),
        }  # fmt: skip
    else:
        rounds = max(1, min(e.rounds, 10))
        changes = {**QUICK, "rounds": rounds, "local.epochs": min(e.local.epochs, 2)}
        changes["local.epochs_max"] = min(e.local.epochs_max, 3)  # two on average, as without
        changes["evaluation.every"] = 1 if e.evaluation.every == 1 else 2
        changes |= {"pretrain.epochs": min(e.pretrain.epochs, 10), "schedule.silent": min(e.schedule.silent, rounds)}
        if e.distill.enabled:
            changes |= {"distill.epochs": min(e.distill.epochs, 10), "distill.swa_start": 20, "distill.swa_cycle": 5}
            changes |= {"distill.samples": min(e.distill.samples, 5)}
    own = _flat(table.get("scale", {}).get(scale, {}))
    return Cell(cell.at, config.override(e, {**changes, **own}, f"{source}, scale {scale}"), cell.model)
