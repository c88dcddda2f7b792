"""The papers' tables and figures as experiments by name, with the printed numbers beside them.

``fedbayes recipes`` lists them, ``fedbayes reproduce NAME`` runs one. A recipe is a TOML file in ``books``, its
printed table one in ``published``; ``readings`` names what the papers leave open.
"""

from __future__ import annotations

from pathlib import Path

from .grid import Cell, Recipe, load_recipe, parse_recipe, recipe_names
from .measures import Outcome, Verdict, judge
from .published import Published, load_published, parse_published, published_names
from .readings import READINGS
from .runner import Reproduction, reproduce

__all__ = [
    "READINGS",
    "Cell",
    "Outcome",
    "Published",
    "Recipe",
    "Reproduction",
    "Verdict",
    "judge",
    "list_recipes",
    "load_published",
    "load_recipe",
    "parse_published",
    "parse_recipe",
    "published_names",
    "recipe_names",
    "reproduce",
]


def list_recipes(data_dir: str | Path | None = None, budget: float = 10.0) -> str:
    """Return the recipes as a table: what each needs, its runs and rounds, and its projected time on this machine.

    The time comes from a measurement of about ``budget`` seconds (0: none) of plain training steps; lanes on a GPU are
    faster than that. Recipes that share cells (figures and their tables) are listed with the whole time each.
    """
    from ..data.fetch import describe_sources
    from . import timing

    books = [(load_recipe(n, "full"), load_recipe(n, "quick")) for n in recipe_names()]
    works = {timing.work_of(c.experiment) for pair in books for r in pair for c in r.cells if r.trains}
    speeds = timing.measure(works, budget) if budget > 0 else {}
    there = {row.name for row in describe_sources(data_dir) if row.present in ("yes", "built in")}
    rows: list[tuple[str, ...]] = [("recipe", "paper", "needs", "runs", "rounds", "full", "quick", "what")]
    for full, quick in books:
        needs = (
            " ".join(n + ("" if n in there or Path(n).is_file() else " (absent)") for n in full.needs())
            if full.trains
            else "nothing"
        )
        times = [timing.duration(timing.seconds(r, speeds)) if speeds and r.trains else "–" for r in (full, quick)]
        runs = str(len(full.cells) * full.seeds) if full.trains else "0"
        rounds = str(max(c.experiment.rounds for c in full.cells)) if full.trains else "0"
        rows.append((full.name, full.paper, needs, runs, rounds, *times, full.title))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(r, widths)), r[-1]]) for r in rows]
    return "\n".join(
        [*lines, "", "Times: one client after the other on this machine; lanes share the work and are faster."]
    )
