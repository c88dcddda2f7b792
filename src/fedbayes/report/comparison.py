"""Figures of several runs, overlaid: one line per group of runs that differ only in their seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import uncertainty
from . import prose, style
from .figures import METRICS, WORDS, _plain_log, _whole_rounds, metric_values, percent_axis, short_names, thin
from .pictures import Picture, drawing, panel
from .runs import Run
from .tables import Group

Curve = tuple[np.ndarray, np.ndarray]


def _overlay(
    groups: Sequence[Group], curve: Callable[[Run], Curve | None], draw: Callable[[Any], None], name: str, title: str,
    caption: str, header: Sequence[str], scale: float = 1.0,
) -> Picture | None:  # fmt: skip
    """Draw one line per group: the mean over its runs, with the range of the runs as a band."""
    lines = [(i, g, [c for run in g.runs if (c := curve(run)) is not None and len(c[0])]) for i, g in enumerate(groups)]
    lines = [line for line in lines if line[2]]
    if not lines:
        return None
    rows: list[tuple[Any, ...]] = []
    with drawing():
        figure, axes = panel((4.3, 3.0 + 0.19 * -(-len(lines) // 2)))
        for i, g, curves in lines:
            x = curves[0][0]
            ys = np.stack([np.interp(x, cx, cy) for cx, cy in curves])
            axes.plot(
                x,
                ys.mean(0) * scale,
                color=style.colour(i),
                linestyle=style.dash(i),
                label=short_names([g.label], 30)[0],
            )
            if len(ys) > 1:
                axes.fill_between(
                    x, ys.min(0) * scale, ys.max(0) * scale, color=style.colour(i), alpha=0.15, linewidth=0
                )
            rows += [
                (g.label, float(a), float(m), float(lo), float(hi))
                for a, m, lo, hi in zip(x, ys.mean(0), ys.min(0), ys.max(0))
            ]
        axes.set_title(title)
        draw(axes)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2 if max(len(g.label) for _, g, _ in lines) < 27 else 1,
                      handlelength=1.6, columnspacing=1.2, fontsize=8.5)  # fmt: skip
    return Picture(name, title, caption, figure, ("group", *header, "mean", "lowest", "highest"), rows)


def learning_curve(groups: Sequence[Group], metric: str) -> Picture | None:
    """A test metric against round."""
    title, axis, scale = METRICS[metric]

    def curve(run: Run) -> Curve:
        return metric_values(run.evaluations("test"), metric)

    last = max((e["round"] for g in groups for r in g.runs for e in r.evaluations("test")), default=1)

    def draw(axes: Any) -> None:
        axes.set(xlabel="round", ylabel=axis)
        _whole_rounds(axes, last)

    return _overlay(
        groups, curve, draw, f"compare-{metric}", title, f"{title} on the test data by round.", ("round",), scale
    )


def sigma(groups: Sequence[Group]) -> Picture | None:
    """Median posterior sigma against round."""

    def curve(run: Run) -> Curve | None:
        found = [(number, s.get("q50") or s.get("mean")) for number, s in run.spreads]
        pairs = np.asarray([p for p in found if p[1]], float).reshape(-1, 2)
        return (pairs[:, 0], pairs[:, 1]) if len(pairs) else None

    def draw(axes: Any) -> None:
        axes.set(xlabel="round", ylabel="median sigma", yscale="log")
        _plain_log(axes)
        _whole_rounds(axes, max((e["round"] for g in groups for r in g.runs for e in r.rounds), default=1))

    caption = (
        "Median standard deviation of the weights after fusion. A line that dives is a posterior turning into a point."
    )
    return _overlay(groups, curve, draw, "compare-sigma", "Spread of the posterior", caption, ("round",))


def retained(groups: Sequence[Group], name: str) -> Picture | None:
    """Accuracy against data retained, by one uncertainty (Fischer, Figs. 2, 4, 6, 7)."""

    def curve(run: Run) -> Curve | None:
        test = run.predictions("test")
        if test is None:
            return None
        c = uncertainty.retained_curve(test.per_example[name], test.per_example["correct"])
        return thin(c.x.numpy(), c.y.numpy())

    def draw(axes: Any) -> None:
        shown = [line.get_ydata()[len(line.get_ydata()) // 20 :] for line in axes.lines]
        low, high = min(float(y.min()) for y in shown), max(float(y.max()) for y in shown)
        pad = max(high - low, 1.0) * 0.08
        axes.set(
            xlabel="share of inputs answered, %",
            ylabel="accuracy, %",
            xlim=(1, 0),
            ylim=(low - pad, min(high + pad, 100.6)),
        )
        percent_axis(axes)

    caption = f"The least sure inputs by {WORDS[name]} are set aside from left to right."
    return _overlay(
        groups, curve, draw, f"compare-retained-{name}", f"Retained by {WORDS[name]}", caption, ("retained",), 100
    )


def reliability(groups: Sequence[Group]) -> Picture | None:
    """Reliability curves."""

    def curve(run: Run) -> Curve | None:
        test = run.predictions("test")
        if test is None:
            return None
        v = test.per_example
        t = uncertainty.tabulate(torch.as_tensor(v["confidence"]), torch.as_tensor(v["correct"]), bins=run.bins)
        filled = (t.count >= 0.01 * t.count.sum()).numpy()
        return t.confidence.numpy()[filled], t.accuracy.numpy()[filled]

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=style.MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.set(xlabel="confidence, %", ylabel="came true, %", xlim=(0, 1), ylim=(0, 1.02))
        percent_axis(axes)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])

    return _overlay(
        groups,
        curve,
        draw,
        "compare-reliability",
        "Reliability",
        "Below the dashed line too sure, above it too modest. Bins of less than 1 % of the inputs are left out.",
        ("confidence",),
    )


def alive(groups: Sequence[Group]) -> Picture | None:
    """Accuracy against epistemic uncertainty: who is accurate, and who still knows what it does not know."""
    points = [(i, g, [r.headline for r in g.runs if r.headline]) for i, g in enumerate(groups)]
    points = [(i, g, h) for i, g, h in points if h]
    if len(points) < 2:
        return None
    floor = 1e-12
    rows = []
    with drawing():
        figure, axes = panel((4.3, 3.0 + 0.19 * -(-len(points) // 2)))
        for i, g, heads in points:
            x = [max(h["epistemic"], floor) for h in heads]
            y = [h["accuracy"] * 100 for h in heads]
            axes.plot(x, y, "o", color=style.colour(i), markersize=7, alpha=0.85, label=short_names([g.label], 30)[0],
                      markerfacecolor="none" if (i // len(style.SERIES)) % 2 else style.colour(i))  # fmt: skip
            rows += [(g.label, h["epistemic"], h["accuracy"]) for h in heads]
        axes.set(title="Accurate, and still unsure?", xlabel="mean epistemic uncertainty (0 drawn at the left edge)",
                 ylabel="accuracy, %", xscale="log")  # fmt: skip
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2 if max(len(g.label) for _, g, _ in points) < 27 else 1,
                      handlelength=1.2, fontsize=8.5)  # fmt: skip
    caption = "Each point is a run. Far left: point models, whatever their name; top right is where one wants to be."
    return Picture(
        "compare-alive",
        "Accuracy against epistemic uncertainty",
        caption,
        figure,
        ("group", "epistemic", "accuracy"),
        rows,
    )


def pictures(groups: Sequence[Group]) -> dict[str, list[Picture]]:
    """All figures of a comparison by section."""
    made = {
        "learning": [learning_curve(groups, m) for m in METRICS] + [sigma(groups)],
        "knowing": [retained(groups, n) for n in ("entropy", "aleatoric", "epistemic")],
        "trust": [reliability(groups), alive(groups)],
    }
    return {section: [p for p in found if p is not None] for section, found in made.items()}


def opening(groups: Sequence[Group]) -> str:
    """What was compared, in a sentence or two."""
    runs = [r for g in groups for r in g.runs]
    seeds = sorted({len(g.runs) for g in groups})
    each = prose.plural(seeds[0], "run") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} runs"
    unfinished = [r for r in runs if r.end is None]
    text = (
        f"{prose.plural(len(runs), 'run')} in {prose.plural(len(groups), 'setting')}, {each} of each with its own seed."
    )
    names = sorted({str(r.setting("data.name", "?")) for r in runs})
    text += f" Data: {', '.join(names)}."
    if unfinished:
        text += f" {prose.plural(len(unfinished), 'run').capitalize()} did not come to the end and {'is' if len(unfinished) == 1 else 'are'} shown as far as logged."
    return text[:1].upper() + text[1:]
