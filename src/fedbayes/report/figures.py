"""Figures of one run: each function takes a ``Run`` and returns a ``Picture``, or None where the run has no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import uncertainty
from . import prose, style
from .pictures import Picture, drawing, panel
from .runs import Run

WORDS = {
    "entropy": "entropy",
    "aleatoric": "aleatoric",
    "epistemic": "epistemic",
    "mutual_information": "mutual information",
}
MEANING = {
    "entropy": "How unsure in all, from 0 (sure of one class) to 1 (all classes alike).",
    "aleatoric": "Unsure because the input is ambiguous, whichever network is asked.",
    "epistemic": "Unsure because the sampled networks disagree: 0 for a point model.",
    "mutual_information": "The networks' disagreement again, in nats of information.",
}
METRICS = {
    "accuracy": ("Accuracy", "accuracy, %", 100.0),
    "nll": ("Negative log likelihood", "NLL, nats", 1.0),
    "ece": ("Calibration error", "ECE, %", 100.0),
    "epistemic": ("Epistemic uncertainty", "mean epistemic variance", 1.0),
}


FEW = 10
"""Inputs below which the accuracy of a bin says next to nothing."""


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]], gap: float = 0.075) -> None:
    """Write a name at the right end of each line, pushed apart so that names never overlap.

    ``ends`` are (x, y, name, colour) in data coordinates; the axes must have their final limits.
    """
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"

    def place(y: float) -> float:
        if log:
            return float((np.log(max(y, 1e-300)) - np.log(low)) / (np.log(high) - np.log(low)))
        return (y - low) / (high - low)

    order = sorted(range(len(ends)), key=lambda i: place(ends[i][1]))
    spots = [min(max(place(ends[i][1]), 0.0), 1.0) for i in order]
    for k in range(1, len(spots)):
        spots[k] = max(spots[k], spots[k - 1] + gap)
    if spots and spots[-1] > 1.02:
        spots[-1] = 1.02
        for k in range(len(spots) - 2, -1, -1):
            spots[k] = min(spots[k], spots[k + 1] - gap)
    for i, spot in zip(order, spots):
        _, _, name, hue = ends[i]
        axes.annotate(
            name, (1.015, spot), xycoords="axes fraction", color=hue, va="center", fontsize=9.5, annotation_clip=False
        )


def top_labels(axes: Any, labels: Sequence[tuple[str, str]]) -> None:
    """Name the series in their colours in one row between title and plot, where nothing can lie under the names."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    words: list[Any] = [TextArea(name, textprops={"color": hue, "fontsize": 9.5}) for name, hue in labels]
    row = HPacker(children=[*words], pad=0, sep=9)
    box = AnchoredOffsetbox("lower left", child=row, frameon=False, pad=0, borderpad=0,
                            bbox_to_anchor=(0, 1.02), bbox_transform=axes.transAxes)  # fmt: skip
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=22)
    axes.add_artist(box)


def percent_axis(axes: Any) -> None:
    """Write a share axis (0 to 1) as percent."""
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0", "20", "40", "60", "80", "100"])


def metric_values(events: Sequence[dict[str, Any]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and values of a metric; missing and undefined values are left out."""
    found = [(e["round"], e["metrics"].get(metric)) for e in events if e.get("metrics", {}).get(metric) is not None]
    pairs = np.asarray(found, float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def learning_curve(run: Run, metric: str) -> Picture | None:
    """A metric against round (below) and examples seen (above), on test and validation data and for other models."""
    title, axis, scale = METRICS[metric]
    series = [("test", run.evaluations("test"))]
    series += [("validation", run.evaluations("validation"))]
    series += [(m, run.evaluations("test", m)) for m in run.models if m != "global"]
    lines = [(name, *metric_values(events, metric)) for name, events in series]
    lines = [line for line in lines if len(line[1])]
    if not lines:
        return None
    with drawing():
        figure, axes = panel()
        for i, (_, x, y) in enumerate(lines):
            axes.plot(x, y * scale, color=style.colour(i), linestyle="-" if i != 1 else style.DASHES[1],
                      marker="o" if len(x) < 12 else None, markersize=3.2)  # fmt: skip
        axes.set(title=title, xlabel="round", ylabel=axis)
        _whole_rounds(axes, max(float(x.max()) for _, x, _ in lines))
        if metric != "accuracy":
            axes.set_ylim(bottom=0 if min(y.min() for _, _, y in lines) >= 0 else None)
        _samples_axis(axes, run)
        label_ends(axes, [(x[-1], y[-1] * scale, n, style.colour(i)) for i, (n, x, y) in enumerate(lines)])
    seen = dict(zip(*run.samples_seen()))
    rows = [(n, int(r), seen.get(r, ""), v) for n, x, y in lines for r, v in zip(x, y)]
    return Picture(
        f"learning-{metric}",
        title,
        "",
        figure,
        ("series", "round", "examples_seen", metric),
        rows,
    )


def _whole_rounds(axes: Any, last: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlim(left=min(0.0, last - 1) if last <= 1 else 0, right=max(last, 1) * 1.01)


def _samples_axis(axes: Any, run: Run) -> None:
    """Add the examples seen as a second axis on top."""
    rounds, seen = run.samples_seen()
    if len(rounds) < 2 or not np.all(np.diff(seen) > 0):
        return
    step = (rounds[-1] - rounds[0]) / (seen[-1] - seen[0])

    def forward(x: Any) -> Any:
        return np.interp(x, rounds, seen) + (np.maximum(x - rounds[-1], 0) + np.minimum(x - rounds[0], 0)) / step

    def backward(s: Any) -> Any:
        return np.interp(s, seen, rounds) + (np.maximum(s - seen[-1], 0) + np.minimum(s - seen[0], 0)) * step

    from matplotlib.ticker import FuncFormatter, MaxNLocator

    top = axes.secondary_xaxis("top", functions=(forward, backward))
    top.xaxis.set_major_locator(MaxNLocator(nbins=5))
    top.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short_count(v)))
    top.tick_params(labelsize=9, pad=1)
    top.spines["top"].set_visible(False)
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=27)
    axes.annotate("examples seen", (0, 1.095), xycoords="axes fraction", fontsize=9, color=style.MUTED)


def short_count(value: float) -> str:
    """1234567 as 1.2M, 2500 as 2.5k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def reliability(run: Run) -> Picture | None:
    """Reliability diagram: accuracy against confidence, with the share of examples in each bin below."""
    test = run.predictions("test")
    if test is None:
        return None
    values = test.per_example
    table = uncertainty.tabulate(
        torch.as_tensor(values["confidence"]), torch.as_tensor(values["correct"]), bins=run.bins
    )
    count, confidence, accuracy = (t.numpy() for t in (table.count, table.confidence, table.accuracy))
    middle, width = ((table.low + table.high) / 2).numpy(), float(table.high[0] - table.low[0])
    filled = count > 0
    with drawing():
        figure, axes = panel()
        axes.plot([0, 1], [0, 1], color=style.MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.bar(middle[filled], count[filled] / count.sum(), width=width * 0.92, color=style.MUTED, alpha=0.22)
        axes.plot(confidence[filled], accuracy[filled], color=style.SERIES[0], marker="o", markersize=4, linewidth=1.2)
        low, high = wilson(accuracy[filled] * count[filled], count[filled])
        axes.vlines(confidence[filled], low, high, color=style.SERIES[0], alpha=0.45, linewidth=1.6)
        axes.set(title="Reliability", xlabel="confidence, %", ylabel="came true, %", xlim=(0, 1), ylim=(0, 1.02))
        percent_axis(axes)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
        axes.annotate(
            f"ECE {table.error() * 100:.1f} %",
            (0.03, 0.93),
            xycoords="axes fraction",
            color=style.SERIES[0],
            fontweight="bold",
        )
    rows = list(zip(table.low.tolist(), table.high.tolist(), count.tolist(), confidence.tolist(), accuracy.tolist()))
    caption = (
        "How often the answer was right, against how sure the network was. On the dashed line its confidence can be taken "
        "at its word; below it is too sure, above too modest. Thin lines: 95 % interval (Wilson) of what came true, wide where "
        "inputs are few. Grey bars: share of the test inputs."
    )
    return Picture(
        "reliability", "Reliability diagram", caption, figure, ("low", "high", "count", "confidence", "accuracy"), rows
    )


def wilson(hits: np.ndarray, n: np.ndarray, z: float = 1.96) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's interval of a share, of ``hits`` among ``n``: sensible at 0, at 1 and for small n."""
    share = hits / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return np.maximum(middle - half, 0), np.minimum(middle + half, 1)


def thin(x: np.ndarray, y: np.ndarray, points: int = 240) -> tuple[np.ndarray, np.ndarray]:
    """At most ``points`` points of a curve, ends kept: a drawing needs no more."""
    if len(x) <= points:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, points).round().astype(int))
    return x[chosen], y[chosen]


def retained(run: Run) -> Picture | None:
    """Accuracy against the share of data retained, by entropy, aleatoric and epistemic uncertainty (Fischer, Fig. 2)."""
    test = run.predictions("test")
    if test is None:
        return None
    values = test.per_example
    rows, ends = [], []
    with drawing():
        figure, axes = panel()
        for name in ("entropy", "aleatoric", "epistemic"):
            curve = uncertainty.retained_curve(values[name], values["correct"])
            x, y = thin(curve.x.numpy(), curve.y.numpy())
            hue = style.UNCERTAINTY_COLOURS[name]
            axes.plot(x, y * 100, color=hue, linestyle={"aleatoric": style.DASHES[1]}.get(name, "-"))
            ends.append((x, y * 100, f"{WORDS[name]} {float(curve.y.mean()) * 100:.1f}", hue))
            rows += [(name, a, b) for a, b in zip(x, y)]
        whole = ends[0][1][-1]
        axes.axhline(whole, color=style.MUTED, linewidth=1, linestyle=(0, (3, 3)))
        top = max(float(y[len(y) // 20 :].max()) for _, y, _, _ in ends)
        low = min(float(y[len(y) // 20 :].min()) for _, y, _, _ in ends)
        pad = max(top - low, 1.0) * 0.12
        axes.set(title="Accuracy on what it is sure of", xlabel="share of inputs answered, %", ylabel="accuracy, %",
                 xlim=(1, 0), ylim=(low - pad, min(top + pad, 100.6)))  # fmt: skip
        percent_axis(axes)
        top_labels(axes, [(n, hue) for _, _, n, hue in ends])
    caption = (
        "From left to right the least sure inputs are set aside. The more a curve rises, the better that uncertainty finds "
        "the errors; a flat or falling one does not. Dashed: accuracy on all inputs. With the mean height of each curve, in %."
    )
    return Picture(
        "retained", "Accuracy against data retained", caption, figure, ("uncertainty", "retained", "accuracy"), rows
    )


def finding_errors(run: Run) -> Picture | None:
    """ROC curves: share of the errors caught against share of right answers questioned, by each uncertainty."""
    test = run.predictions("test")
    if test is None or test.per_example["correct"].all() or not test.per_example["correct"].any():
        return None
    values, rows, names = test.per_example, [], []
    with drawing():
        figure, axes = panel()
        axes.plot([0, 100], [0, 100], color=style.MUTED, linewidth=1, linestyle=(0, (3, 3)))
        for name in ("entropy", "aleatoric", "epistemic"):
            curve = uncertainty.roc_curve(values[name], ~values["correct"])
            hue = style.UNCERTAINTY_COLOURS[name]
            x, y = thin(curve.x.numpy(), curve.y.numpy())
            axes.plot(x * 100, y * 100, color=hue, linestyle={"aleatoric": style.DASHES[1]}.get(name, "-"))
            names.append((f"{WORDS[name]} {uncertainty.auroc(values[name], ~values['correct']):.2f}", hue))
            rows += [(name, a, b) for a, b in zip(x, y)]
        axes.set(title="Finding its own errors", xlabel="right answers questioned, %", ylabel="errors caught, %",
                 xlim=(0, 100), ylim=(0, 101))  # fmt: skip
        top_labels(axes, names)
    caption = "With the area under each curve: 1 finds every error first, 0.5 (dashed) is chance."
    header = ("uncertainty", "right_questioned", "errors_caught")
    return Picture("finding-errors", "Finding errors by uncertainty", caption, figure, header, rows)


def histogram(run: Run, name: str) -> Picture | None:
    """Distribution of an uncertainty for right and wrong answers and for out-of-distribution inputs."""
    test = run.predictions("test")
    if test is None:
        return None
    values, correct = test.per_example[name], test.per_example["correct"]
    groups = [("right", values[correct], style.SERIES[0]), ("wrong", values[~correct], style.SERIES[1])]
    hues = (style.SERIES[3], style.SERIES[2], style.SERIES[4], style.SERIES[7])
    groups += [(f"unknown: {n}", p.per_example[name], hue) for (n, p), hue in zip(run.outliers.items(), hues)]
    groups = [g for g in groups if len(g[1])]
    top = 1.0 if name == "entropy" else max(float(np.quantile(g[1], 0.995)) for g in groups)
    from matplotlib.ticker import MaxNLocator

    beyond = max(float(g[1].max()) for g in groups) > top > 0
    title = WORDS[name].capitalize()
    rows: list[tuple[Any, ...]] = []
    with drawing():
        figure, axes = panel()
        if top <= 0:
            axes.annotate("exactly 0 for every input:\nthe samples of the network do not differ", (0.5, 0.5),
                          xycoords="axes fraction", ha="center", va="center", color=style.MUTED)  # fmt: skip
            axes.set(title=title, xticks=[], yticks=[])
            rows = [(g[0], 0.0, 0.0, 1.0) for g in groups]
        else:
            edges = np.linspace(0, top, 33)
            for label, group, hue in groups:
                share = np.histogram(np.minimum(group, top), edges)[0] / len(group)
                axes.stairs(share * 100, edges, color=hue, linewidth=1.6)
                axes.stairs(share * 100, edges, color=hue, fill=True, alpha=0.16)
                rows += [(label, a, b, s) for a, b, s in zip(edges[:-1], edges[1:], share)]
            axes.set(
                title=title,
                xlabel=f"{WORDS[name]} (larger is less sure)",
                ylabel="share of the group, %",
                xlim=(0, top),
            )
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
            top_labels(axes, [(f"{label} ({len(group):,})", hue) for label, group, hue in groups])
    caption = MEANING[name] + (" The last bar holds all that is larger." if beyond else "")
    if len(run.outliers) > len(hues):
        caption += f" Unknown sets beyond the first {len(hues)} are not drawn."
    header = ("group", "low", "high", "share")
    return Picture(f"histogram-{name}", f"{title} of right and wrong answers", caption, figure, header, rows)


def short_names(names: Sequence[str], length: int = 14) -> list[str]:
    """Names cut to a length that fits a tick."""
    return [n if len(n) <= length else n[: length - 1] + "…" for n in names]


def sigma(run: Run) -> Picture | None:
    """Mean posterior sigma of each layer over the rounds, on a logarithmic axis."""
    rounds, layers = [], {}
    for number, spread in run.spreads:
        rounds.append(number)
        for name, value in (spread.get("layers") or {"all": spread.get("mean")}).items():
            layers.setdefault(name, []).append(np.nan if value is None else value)
    if not rounds:
        return None
    names = list(layers)
    with drawing():
        figure, axes = panel()
        direct = len(names) <= 8
        for i, name in enumerate(names):
            y = np.asarray(layers[name], float)
            x = rounds[-len(y) :]
            if direct:
                axes.plot(x, y, color=style.colour(i), marker="o" if len(x) < 12 else None, markersize=3)
            else:  # from the first layer (faint) to the last
                axes.plot(x, y, color=style.SERIES[0], alpha=0.3 + 0.7 * i / (len(names) - 1), linewidth=1.2)
        axes.set_yscale("log")
        _plain_log(axes)
        axes.set(title="Spread, layer by layer", xlabel="round", ylabel="mean sigma")
        _whole_rounds(axes, max(rounds))
        gone = prose.collapse_round(run)
        if gone is not None:
            axes.axvline(gone, color=style.SERIES[6], linewidth=1, linestyle=(0, (3, 3)))
            right = gone > max(rounds) * 0.6
            axes.annotate(f"collapsed by round {gone}", (gone, 0.95), xycoords=("data", "axes fraction"), fontsize=9.5,
                          xytext=(-4 if right else 4, 0), textcoords="offset points", ha="right" if right else "left",
                          color=style.SERIES[6])  # fmt: skip
        if direct:
            label_ends(
                axes, [(rounds[-1], layers[n][-1], short_layer(n), style.colour(i)) for i, n in enumerate(names)]
            )
        else:
            label_ends(
                axes, [(rounds[-1], layers[n][-1], short_layer(n), style.SERIES[0]) for n in (names[0], names[-1])]
            )
    rows = [(n, r, v) for n in names for r, v in zip(rounds[-len(layers[n]) :], layers[n])]
    caption = "Mean standard deviation of each layer's weights after fusion." + (
        "" if direct else " Faint: first layers; strong: last."
    )
    return Picture("sigma", "Posterior sigma by layer and round", caption, figure, ("layer", "round", "sigma"), rows)


def _plain_log(axes: Any) -> None:
    """Write a log axis with plain numbers, and with enough of them when it spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    if high / low < 30:
        axes.set_ylim(low / 1.15, high * 1.15)
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 3, 5) if high / low > 5 else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8))
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def short_layer(name: str) -> str:
    """A layer's name without the ending every one has."""
    return short_names([name.removesuffix(".weight")], 16)[0]
