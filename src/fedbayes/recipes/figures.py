"""The figures of a recipe's page, drawn from its finished runs (or, for Ozer's two, from the rules alone)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..fusion import fuse
from ..posterior import Gaussian, Posterior
from ..rundir import read_events
from ..uncertainty import per_example, retained_curve
from . import measures
from .grid import Recipe
from .plot import chart
from .published import Coordinates

Runs = Mapping[Coordinates, tuple[Sequence[Path], str]]
Figure = Callable[[Recipe, Runs], "list[str]"]
FIGURES: dict[str, Figure] = {}


def figure(name: str) -> Callable[[Figure], Figure]:
    """Register a figure by the name recipes use for it."""

    def add(function: Figure) -> Figure:
        FIGURES[name] = function
        return function

    return add


def draw(recipe: Recipe, runs: Runs) -> list[str]:
    """Return every figure of a recipe as SVG; those whose runs are not there are left out."""
    return [svg for name in recipe.figures if name in FIGURES for svg in FIGURES[name](recipe, runs) if svg]


def _panels(runs: Runs) -> dict[str, list[tuple[str, Sequence[Path], str]]]:
    """Group cells by their partition and data set (one panel each), naming what differs within it."""
    outer = ("partition", "dataset")
    vary = {k for k in {k for at in runs for k, _ in at} if len({dict(at).get(k) for at in runs}) > 1}
    panels: dict[str, list[tuple[str, Sequence[Path], str]]] = {}
    for at, (paths, model) in runs.items():
        if not paths:
            continue
        panel = ", ".join(v for k, v in at if k in outer)
        label = " ".join(v for k, v in at if k in vary and k not in outer) or panel or "run"
        panels.setdefault(panel, []).append((label, paths, model))
    return panels


@figure("learning-curve")
def learning_curve(recipe: Recipe, runs: Runs) -> list[str]:
    """Test accuracy against round, one panel a partition."""
    charts = []
    for panel, cells in _panels(runs).items():
        lines = {}
        for label, paths, model in cells:
            lines[label] = [(r, 100 * m["accuracy"]) for r, m in measures.series(paths[0], model)]
        charts.append(chart(lines, f"Test accuracy, {panel}".strip(", "), "round", "accuracy %"))
    return charts


def _retention(name: str) -> Figure:
    def draw_retention(recipe: Recipe, runs: Runs) -> list[str]:
        charts = []
        for panel, cells in _panels(runs).items():
            lines = {}
            for label, paths, _ in cells:
                file = paths[0] / "predictions-test.npz"
                if not file.exists():
                    continue
                with np.load(file) as data:
                    p, y = torch.from_numpy(data["probabilities"]), torch.from_numpy(data["labels"])
                values = per_example(p)
                curve = retained_curve(values[name], values["prediction"] == y)
                step = max(1, len(curve.x) // 100)
                lines[label] = [
                    (float(a), 100 * float(b)) for a, b in zip(curve.x[::step], curve.y[::step], strict=True)
                ]
            charts.append(chart(lines, f"By {name}, {panel}".strip(", "), "share of data retained", "accuracy %"))
        return charts

    return draw_retention


for _name in ("entropy", "aleatoric", "epistemic"):
    FIGURES[f"retention-{_name}"] = _retention(_name)


@figure("by-batch")
def by_batch(recipe: Recipe, runs: Runs) -> list[str]:
    """Test accuracy against batch size, one panel a data set (Reyes 2021, Figure 5)."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for at, (paths, model) in runs.items():
        where = dict(at)
        found = measures.read(paths, "accuracy", recipe.report, model) if paths else None
        if found is not None:
            lines = panels.setdefault(where["dataset"], {})
            lines.setdefault(where["rule"], []).append((float(where["batch"]), 100 * found.value))
    return [
        chart({n: sorted(p) for n, p in lines.items()}, d, "batch size", "accuracy %") for d, lines in panels.items()
    ]


def _spread_against(metric: str, words: str) -> Figure:
    def draw_spread(recipe: Recipe, runs: Runs) -> list[str]:
        charts = []
        for panel, cells in _panels(runs).items():
            lines = {}
            for label, paths, model in cells:
                found = measures.read(paths, metric, "last", model)
                sigma = sum(measures.sigma_of(p) for p in paths) / len(paths)
                if found is not None and sigma > 0:
                    lines[label] = [(sigma, 100 * found.value)]
            charts.append(
                chart(lines, f"{words}, {panel}".strip(", "), "mean sigma of the global posterior", f"{words} %",
                      marks=True, x_log=True)
            )  # fmt: skip
        return charts

    return draw_spread


FIGURES["spread-accuracy"] = _spread_against("accuracy", "Accuracy")
FIGURES["spread-ece"] = _spread_against("ece", "ECE")


Moments = Sequence[tuple[int, Mapping[str, Mapping[str, Mapping[str, float]]]]]
"""By round: client, tensor, and the means of v and 1/v."""


def moment_charts(rounds: Moments) -> list[str]:
    """Mean inverse second moment by client over rounds, and by layer in the first round (Reyes 2021, Figures 7 and 8)."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for r, clients in rounds:
        for client, layers in clients.items():
            lines.setdefault(f"client {int(client) + 1}", []).append((r, _mean(layers, "inverse")))
    names = sorted({layer for layers in rounds[0][1].values() for layer in layers})
    first = {
        f"client {int(c) + 1}": [(i + 1.0, layers[n]["inverse"]) for i, n in enumerate(names) if n in layers]
        for c, layers in rounds[0][1].items()
    }
    key = ", ".join(f"{i + 1} {n}" for i, n in enumerate(names))
    by_layer = chart(_unit(first), "First round, by layer", "layer", "scaled to 0..1", marks=True)
    return [
        chart(_unit(lines), "Mean inverse second moment", "round", "scaled to 0..1"),
        f"{by_layer}<figcaption>Layers: {key}.</figcaption>",
    ]


@figure("moments")
def moments(recipe: Recipe, runs: Runs) -> list[str]:
    """The variance analysis of the first run that logged second moments."""
    found = _moments(runs)
    return moment_charts(found) if found else []


@figure("holdings")
def holdings(recipe: Recipe, runs: Runs) -> list[str]:
    """Examples of every class that each client of the first run holds (Reyes 2021, Figure 6)."""
    for paths, _ in runs.values():
        for path in paths:
            who = json.loads((path / "partition.json").read_text(encoding="utf-8"))["clients"]
            lines = {
                f"client {i + 1}": [(float(c), float(n)) for c, n in enumerate(w["counts"])] for i, w in enumerate(who)
            }
            return [chart(lines, "Who holds what", "class", "examples")]
    return []


def _moments(runs: Runs) -> Moments:
    for paths, _ in runs.values():
        for path in paths:
            found = [
                (e["round"], e["fusion"]["moments"])
                for e in read_events(path)
                if e["kind"] == "round" and e["fusion"].get("moments")
            ]
            if found:
                return found
    return []


def _mean(layers: Mapping[str, Mapping[str, float]], what: str) -> float:
    values = [v[what] for v in layers.values() if v.get(what) is not None]
    return sum(values) / len(values) if values else math.nan


def _unit(lines: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    ys = [y for points in lines.values() for _, y in points if math.isfinite(y)]
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    width = (high - low) or 1.0
    return {n: [(x, (y - low) / width) for x, y in points] for n, points in lines.items()}


PAIRS = (
    ((-1.0, 0.5), (1.0, 0.5), "means apart, equal variances"),
    ((-1.0, 0.25), (1.0, 1.0), "means apart, unequal variances"),
    ((0.0, 0.25), (0.0, 1.0), "equal means, unequal variances"),
    ((-3.0, 0.5), (3.0, 0.5), "means far apart"),
)
"""Mean and variance of two clients: four scenarios like those of Ozer's Figure 2, whose numbers are not printed."""


@figure("fused-densities")
def fused_densities(recipe: Recipe, runs: Runs) -> list[str]:
    """Densities of the five rules on pairs of Gaussians (Ozer 2022, Figures 1 and 2)."""
    names = {"EAA": "nwa", "GAA": "ws", "AALV": "aalv", "PPA": "ppa", "CF": "wc"}
    charts = []
    for a, b, words in PAIRS if recipe.name.endswith("2") else PAIRS[1:2]:
        clients = [Posterior({"w": Gaussian(torch.full((64,), m), torch.full((64,), v))}) for m, v in (a, b)]
        lines = {f"client {i + 1}": _density(*c) for i, c in enumerate((a, b))}
        for label, rule in names.items():
            g = fuse(clients, rule=rule, weights=[0.5, 0.5]).gaussians["w"]
            lines[label] = _density(float(g.mean.mean()), float(g.variance.mean()))
        charts.append(chart(lines, words, "weight", "density"))
    return charts


def _density(mean: float, variance: float) -> list[tuple[float, float]]:
    grid = np.linspace(-6, 6, 241)
    values = np.exp(-((grid - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    return [(float(x), float(y)) for x, y in zip(grid, values, strict=True)]
