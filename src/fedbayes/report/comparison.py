"""Figures of several runs, overlaid: one line per group of runs that differ only in their seed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import uncertainty
from . import prose, style
from .figures import (
    FEW,
    METRICS,
    WORDS,
    _plain_log,
    _whole_rounds,
    metric_values,
    percent_axis,
    short_count,
    short_names,
    thin,
)
from .pictures import Picture, drawing, panel
from .runs import Run
from .tables import Group, blocks

Curve = tuple[np.ndarray, np.ndarray]

MOST = 10
"""Lines of one figure that have a colour and a name; more could not be told apart."""

BANDS = 5
"""Lines of one figure that get a band; those of more would hide one another."""

ZERO = 1e-6
"""A mean epistemic uncertainty below this is drawn as 0: the sampled networks differ by less than a thousandth."""


def coloured(groups: Sequence[Group]) -> set[int]:
    """Numbers of the groups that are drawn in colour: all, or of many the ``MOST`` of highest mean accuracy."""
    if len(groups) <= MOST:
        return {g.number for g in groups}

    def accuracy(g: Group) -> float:
        found = [a for r in g.runs if (a := r.headline.get("accuracy")) is not None]
        return float(np.mean(found)) if found else -1.0

    return {g.number for g in sorted(groups, key=accuracy, reverse=True)[:MOST]}


def shown_words(groups: Sequence[Group]) -> str:
    """What has to be said of all figures at once: which lines are named, and what a band is."""
    words = []
    if any(len(g.runs) > 1 for g in groups):
        words.append("Lines are means over the runs of a setting")
        if any(len(block) <= BANDS for _, block in blocks(groups)):
            words[0] += ", bands go from the lowest run to the highest"
        words[0] += "; the CSV files have every setting's range."
    if any(len(block) > MOST for _, block in blocks(groups)):
        words.append(f"The {MOST} settings of highest accuracy are in colour, the others grey.")
    return " ".join(words)


def _mean_curve(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Every x of some run, and the runs' values there (runs, x): NaN before a run's first point and after its last."""
    x = np.unique(np.concatenate([cx for cx, _ in curves]))
    return x, np.stack([np.interp(x, cx, cy, left=np.nan, right=np.nan) for cx, cy in curves])


def _overlay(
    groups: Sequence[Group], curves: Callable[[Group], Sequence[Curve]], draw: Callable[[Any], None], name: str, title: str,
    caption: str, header: Sequence[str], scale: float = 1.0,
) -> Picture | None:  # fmt: skip
    """Draw one line per group: the mean over its curves, with their range as a band."""
    lines = [(g, [c for c in curves(g) if len(c[0])]) for g in groups]
    lines = [line for line in lines if line[1]]
    if not lines:
        return None
    named, rows = coloured(groups), []
    with drawing():
        figure, axes = panel((4.3, 2.75 + _legend_height([g.label for g, _ in lines if g.number in named])))
        for g, found in sorted(lines, key=lambda line: line[0].number in named):
            x, ys = _mean_curve(found)
            mean, low, high = np.nanmean(ys, 0), np.nanmin(ys, 0), np.nanmax(ys, 0)
            if g.number in named:
                look = {"color": style.colour(g.number), "linestyle": style.dash(g.number), "label": g.label}
            else:
                look = {"color": style.MUTED, "alpha": 0.35, "linewidth": 1.0}
            axes.plot(x, mean * scale, marker="o" if len(x) == 1 else None, **look)
            if len(ys) > 1 and len(lines) <= BANDS:
                axes.fill_between(x, low * scale, high * scale, color=look["color"], alpha=0.13, linewidth=0)
            count = np.isfinite(ys).sum(0)
            rows += [(g.label, float(a), float(m), float(lo), float(hi), int(n)) for a, m, lo, hi, n in zip(x, mean, low, high, count)]  # fmt: skip
        axes.set_title(title)
        draw(axes)
        _legend(figure, axes)
    return Picture(name, title, caption, figure, ("group", *header, "mean", "lowest", "highest", "runs"), rows)


def _columns(labels: Sequence[str]) -> int:
    return 2 if labels and max(map(len, labels)) < 22 else 1


def _legend_height(labels: Sequence[str]) -> float:
    """Inches that the names below a figure take."""
    return 0.12 + 0.185 * -(-len(labels) // _columns(labels)) if labels else 0.0


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i]) if len(labels) > MOST else range(len(labels))
    figure.legend([handles[i] for i in order], short_names([labels[i] for i in order], 52), loc="outside lower left",
                  ncols=_columns(labels), handlelength=2.2, columnspacing=1.2, labelspacing=0.25, borderpad=0.1)  # fmt: skip


def learning_curve(groups: Sequence[Group], metric: str) -> Picture | None:
    """A test metric against round."""
    title, axis, scale = METRICS[metric]

    def curves(g: Group) -> list[Curve]:
        return [metric_values(run.evaluations("test"), metric) for run in g.runs]

    last = max((e["round"] for g in groups for r in g.runs for e in r.evaluations("test")), default=1)

    def draw(axes: Any) -> None:
        axes.set(xlabel="round", ylabel=axis)
        _whole_rounds(axes, last)
        if metric != "accuracy":
            axes.set_ylim(bottom=0)

    return _overlay(
        groups, curves, draw, f"compare-{metric}", title, f"{title} on the test data by round.", ("round",), scale
    )


def effort(groups: Sequence[Group]) -> Picture | None:
    """Accuracy against the examples trained on, where a round is not the same work in every setting."""
    rates = [seen[-1] / numbers[-1] for g in groups for r in g.runs for numbers, seen in [r.samples_seen()] if seen[-1]]
    if not rates or max(rates) < 1.01 * min(rates):
        return None

    def curves(g: Group) -> list[Curve]:
        found = []
        for run in g.runs:
            x, y = metric_values(run.evaluations("test"), "accuracy")
            found.append((np.interp(x, *run.samples_seen()), y))
        return found

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes.set(xlabel="examples trained on", ylabel="accuracy, %")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short_count(v)))

    caption = (
        "Accuracy on the test data by the examples trained on, every epoch counted: the work behind it, not its rounds."
    )
    return _overlay(
        groups,
        curves,
        draw,
        "compare-effort",
        "Accuracy for the work",
        caption,
        ("examples_seen",),
        METRICS["accuracy"][2],
    )


def sigma(groups: Sequence[Group]) -> Picture | None:
    """Median posterior sigma against round."""

    def curves(g: Group) -> list[Curve]:
        found = [[(n, v) for n, s in run.spreads if (v := s.get("q50") or s.get("mean"))] for run in g.runs]
        pairs = [np.asarray(f, float).reshape(-1, 2) for f in found]
        return [(p[:, 0], p[:, 1]) for p in pairs]

    def draw(axes: Any) -> None:
        axes.set(xlabel="round", ylabel="median sigma", yscale="log")
        _plain_log(axes)
        _whole_rounds(axes, max((e["round"] for g in groups for r in g.runs for e in r.rounds), default=1))

    caption = (
        "Median standard deviation of the weights after fusion. A line that dives is a posterior turning into a point."
    )
    return _overlay(groups, curves, draw, "compare-sigma", "Spread of the posterior", caption, ("round",))


def retained(groups: Sequence[Group], name: str) -> Picture | None:
    """Accuracy against data retained, by one uncertainty (Fischer, Figs. 2, 4, 6, 7)."""

    def curves(g: Group) -> list[Curve]:
        tests = [test for run in g.runs if (test := run.predictions("test")) is not None]
        found = [uncertainty.retained_curve(t.per_example[name], t.per_example["correct"]) for t in tests]
        return [thin(c.x.numpy(), c.y.numpy()) for c in found]

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
        groups, curves, draw, f"compare-retained-{name}", f"Retained by {WORDS[name]}", caption, ("retained",), 100
    )


def reliability(groups: Sequence[Group]) -> Picture | None:
    """Reliability curves, the predictions of a group's runs taken together."""

    def curves(g: Group) -> list[Curve]:
        tests = [test.per_example for run in g.runs if (test := run.predictions("test")) is not None]
        if not tests:
            return []
        confidence, correct = (np.concatenate([v[k] for v in tests]) for k in ("confidence", "correct"))
        t = uncertainty.tabulate(torch.as_tensor(confidence), torch.as_tensor(correct), bins=g.runs[0].bins)
        enough = (t.count >= max(FEW, 0.01 * float(t.count.sum()))).numpy()
        return [(t.confidence.numpy()[enough], t.accuracy.numpy()[enough])]

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=style.MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.set(xlabel="confidence, %", ylabel="came true, %", xlim=(0, 1), ylim=(0, 1.02))
        percent_axis(axes)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])

    return _overlay(
        groups,
        curves,
        draw,
        "compare-reliability",
        "Reliability",
        f"Below the dashed line too sure, above it too modest. Bins of fewer than {FEW} inputs, or of less than 1 %, are left out.",
        ("confidence",),
    )


def alive(groups: Sequence[Group]) -> Picture | None:
    """Accuracy against epistemic uncertainty: who is accurate, and who still knows what it does not know."""
    named = coloured(groups)
    points = [
        (g, r.headline["epistemic"], r.headline["accuracy"], _test_size(r))
        for g in groups
        for r in g.runs
        if r.headline
    ]
    points = [p for p in points if np.isfinite(p[1:3]).all()]
    if len({p[0].number for p in points}) < 2:
        return None
    place, ticks = _zero_and_logs([p[1] for p in points])
    zeros = [i for i, p in enumerate(points) if p[1] < ZERO]
    labels = [g.label for g in groups if g.number in named]
    seen: set[int] = set()
    with drawing():
        figure, axes = panel((4.3, 2.75 + _legend_height(labels)))
        for i, (g, epistemic, accuracy, n) in enumerate(points):
            x = place(epistemic, (zeros.index(i) + 1) / (len(zeros) + 1) if i in zeros else 0)
            hue = style.colour(g.number) if g.number in named else style.MUTED
            if n and len(points) <= MOST:
                half = 196 * np.sqrt(accuracy * (1 - accuracy) / n)
                axes.plot([x, x], [accuracy * 100 - half, accuracy * 100 + half], color=hue, alpha=0.4, linewidth=1.2)
            axes.plot(x, accuracy * 100, style.marker(g.number), color=hue, markersize=7, markerfacecolor="none",
                      markeredgewidth=1.6, linestyle="none", label=g.label if g.number in named and g.number not in seen else None)  # fmt: skip
            seen.add(g.number)
        axes.set(title="Accurate, and still unsure?", xlabel="mean epistemic uncertainty", ylabel="accuracy, %")
        axes.set_xlim(left=place(0, -0.05) if zeros else None)
        axes.set_xticks(*ticks)
        if zeros:
            axes.axvline(place(0, 1.12), color=style.MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
        axes.yaxis.get_major_locator().set_params(nbins=6)
        _legend(figure, axes)
    caption = "Each point is a run" + (
        f"; bars: 95 % sampling interval of {points[0][3]:,} test inputs. "
        if len(points) <= MOST and points[0][3]
        else ". "
    )
    if zeros:
        caption += f"Left of the dashed line (below {ZERO:f}): point models, whatever their name. "
    caption += "Top right is where one wants to be."
    rows = [(g.label, e, a, n) for g, e, a, n in points]
    header = ("group", "epistemic", "accuracy", "test_inputs")
    return Picture("compare-alive", "Accuracy against epistemic uncertainty", caption, figure, header, rows)


def _test_size(run: Run) -> int:
    evaluations = run.evaluations("test")
    return int(evaluations[-1].get("examples", 0)) if evaluations else 0


def _zero_and_logs(values: Sequence[float]) -> tuple[Callable[[float, float], float], tuple[list[float], list[str]]]:
    """A logarithmic axis with a place for 0 at its left: (place of a value, ticks).

    A value of 0 goes into a band of its own, ``beside`` (0 to 1) of the way through it, so that equals lie side by side.
    """
    logs = [float(np.log10(v)) for v in values if v >= ZERO]
    low, high = (min(logs), max(logs)) if logs else (-2.0, -1.0)
    gap = max(high - low, 1.0) * 0.45 if len(logs) < len(values) else 0.0

    def place(value: float, beside: float) -> float:
        return float(np.log10(value)) if value >= ZERO else low - gap * 1.25 + gap * beside

    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    marks = [m * 10.0**e for e in range(int(np.floor(low)) - 1, int(np.ceil(high)) + 1) for m in steps]
    marks = [m for m in marks if low - 0.15 <= np.log10(m) <= high + 0.3]
    marks = marks[:: max(1, -(-len(marks) // 6))]
    ticks, names = [float(np.log10(m)) for m in marks], [f"{m:g}" for m in marks]
    return place, ([place(0, 0.5), *ticks], ["≈ 0", *names]) if gap else (ticks, names)


def pictures(groups: Sequence[Group]) -> dict[str, dict[str, list[Picture]]]:
    """All figures of a comparison, by problem (see ``tables.blocks``) and section.

    Where there are several problems, the figures' names end in the problem's.
    """
    return {problem: _pictures(block, slug(problem)) for problem, block in blocks(groups)}


def slug(problem: str) -> str:
    """A problem's text as the end of a file name."""
    return "".join("-" + word for word in re.findall(r"[A-Za-z0-9.]+", problem))


def _pictures(groups: Sequence[Group], ending: str) -> dict[str, list[Picture]]:
    made = {
        "learning": [*(learning_curve(groups, m) for m in METRICS), sigma(groups), effort(groups)],
        "knowing": [retained(groups, n) for n in ("entropy", "aleatoric", "epistemic")],
        "trust": [reliability(groups), alive(groups)],
    }
    return {
        section: [dataclasses.replace(p, name=p.name + ending) for p in found if p is not None]
        for section, found in made.items()
    }


def opening(groups: Sequence[Group]) -> str:
    """What was compared, in a sentence or two."""
    runs = [r for g in groups for r in g.runs]
    counts = sorted({len(g.runs) for g in groups})
    each = prose.plural(counts[0], "run") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
    unfinished = [r for r in runs if r.end is None]
    text = f"{prose.plural(len(runs), 'run')} in {prose.plural(len(groups), 'setting')}"
    if len(groups) > 1:
        text += f", {each} of each" + (", with different seeds" if counts[-1] > 1 else "")
    elif counts[-1] > 1:
        text += " with different seeds"
    text += "."
    names = sorted({str(r.setting("data.name", "?")) for r in runs})
    text += f" Data: {', '.join(names)}."
    if unfinished:
        text += f" {prose.plural(len(unfinished), 'run').capitalize()} did not come to the end and {'is' if len(unfinished) == 1 else 'are'} shown as far as logged."
    return text[:1].upper() + text[1:]
