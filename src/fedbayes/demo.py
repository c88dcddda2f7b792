"""``make demo``: the main job on embedded data, in under two minutes on two cores."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import compare, config
from .progress import Progress
from .runner import write_report

BASELINES: tuple[tuple[str, dict[str, str]], ...] = (
    ("FedAvg, deterministic", {"model.kind": "deterministic", "fusion.rule": "fedavg"}),
    ("FedAvg, MC-dropout", {"model.kind": "dropout", "fusion.rule": "fedavg"}),
)
RULES = ("nwa", "lp", "aalv", "ws", "conflation")
"""Averaging rules first, product-like rules after them."""
SHRINKING = ("ws", "conflation")


def run_demo(out: Path, rounds: int | None = None) -> int:
    """Run the demo into ``out`` (a previous demo there is replaced) and print its table; returns an exit status."""
    base = config.read("digits")
    if rounds is not None:
        base = config.override(base, {"rounds": rounds}, "demo")
    variants = [*BASELINES, *((f"Flipout, {rule}", {"fusion.rule": rule}) for rule in RULES)]
    cells = []
    for label, changes in variants:
        experiment = config.override(base, {**changes, "name": label.replace(", ", "-").replace(" ", "-")}, "demo")
        cells.append(compare.Cell(label, changes, base.seed, experiment, out / experiment.name))
    for cell in cells:
        if (cell.path / "config.toml").exists():
            shutil.rmtree(cell.path)
    p = base.partition
    print(
        f"{p.clients} clients with unequal class mixes (Dirichlet {p.alpha:g}) of real handwritten digits; {len(cells)} "
        f"federations of {base.rounds} rounds:"
    )
    bar = Progress(base.rounds * len(cells), "demo")
    compare.run_grid(cells, listeners=lambda cell: [partial(bar, run=cell.label)])
    bar.close()
    rows = compare.rows(cells)
    print(compare.render(rows, heading="rule"))
    print("\n" + verdict(rows))
    compare.write_csv(rows, out / "table.csv")
    page = write_report(*(c.path for c in cells), out=out / "report.html")
    print(f"\nreport: {page}" if page else "")
    print(f"run files: {out}/ (config.toml, metrics.jsonl, final.safetensors of each run)")
    return 0


def verdict(rows: Sequence[compare.Row]) -> str:
    """Say in one sentence what the table shows, with its own numbers."""
    by_rule = {r.label.removeprefix("Flipout, "): r for r in rows}
    alive = {name: r for name, r in by_rule.items() if name in RULES and name not in SHRINKING}
    shrunk = {name: by_rule[name] for name in SHRINKING if name in by_rule}
    point = next(r for r in rows if "deterministic" in r.label)
    best = max(alive, key=lambda n: alive[n].mean("accuracy"))
    smallest = min(shrunk, key=lambda n: shrunk[n].mean("sigma"))
    ratio = alive[best].mean("sigma") / max(shrunk[smallest].mean("sigma"), 1e-300)
    ending = "they end as a point model that knows" if ratio > 1000 else "on the way to a point model, which knows"
    return (
        f"Averaging rules keep the posterior alive ({best}: {100 * alive[best].mean('accuracy'):.1f} % right beside "
        f"{100 * point.mean('accuracy'):.1f} % for the point model, mean sigma {alive[best].mean('sigma'):.2g}, epistemic "
        f"uncertainty {alive[best].mean('epistemic'):.2g}), while {' and '.join(shrunk)} shrink sigma round after round "
        f"({smallest}: {shrunk[smallest].mean('sigma'):.2g}, {ratio:.3g} times less): {ending} nothing of what it does not "
        "know."
    )
