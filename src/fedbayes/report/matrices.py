"""Figures that are tables of squares: confusion matrix, and who held what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import style
from .figures import short_names
from .pictures import Picture, drawing, panel
from .runs import Run


def confusion(run: Run) -> Picture | None:
    """Confusion matrix of the test answers, rows normalised."""
    test = run.predictions("test")
    if test is None or len(run.classes) > 40:
        return None
    n = test.probabilities.shape[2]
    counts = np.zeros((n, n), int)
    np.add.at(counts, (test.labels, test.per_example["prediction"]), 1)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    names = short_names(run.classes)
    with drawing():
        figure, axes = panel((4.3, 3.9))
        shade(axes, share)
        if n <= 12:
            for i, j in zip(*np.nonzero(counts)):
                axes.text(
                    j,
                    i,
                    str(counts[i, j]),
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=style.PAPER if share[i, j] > 0.55 else style.INK,
                )
        ticks(axes, names, names)
        axes.set(title="What is taken for what", xlabel="answered", ylabel="true")
    rows = [(run.classes[i], run.classes[j], int(counts[i, j])) for i in range(n) for j in range(n)]
    return Picture(
        "confusion",
        "Confusion matrix",
        "Test inputs by true class (rows) and answer (columns).",
        figure,
        ("true", "answered", "count"),
        rows,
    )


def shade(axes: Any, values: np.ndarray, hue: str = style.SERIES[0]) -> None:
    """Draw a matrix of shares in [0, 1] as squares of one colour with that opacity, so that it follows the page's scheme."""
    from matplotlib.patches import Rectangle

    if values.size > 2500:  # too many squares for a page: an image with an alpha channel
        rgba = np.zeros((*values.shape, 4))
        rgba[..., :3] = [int(hue[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        rgba[..., 3] = values
        axes.imshow(rgba, aspect="auto")
        return
    for (i, j), value in np.ndenumerate(values):
        if value > 0:
            axes.add_patch(Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, facecolor=hue, alpha=float(value), linewidth=0))
    axes.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))


def ticks(axes: Any, rows: Sequence[str], columns: Sequence[str], most: int = 30) -> None:
    """Name rows and columns of a matrix; with very many only every n-th."""
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    step = max(1, -(-len(rows) // most))
    axes.set_yticks(range(0, len(rows), step), [rows[i] for i in range(0, len(rows), step)], fontsize=9)
    step = max(1, -(-len(columns) // most))
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if max(map(len, columns)) > 3 else {}
    axes.set_xticks(
        range(0, len(columns), step), [columns[i] for i in range(0, len(columns), step)], fontsize=9, **turned
    )


def partition(run: Run) -> Picture | None:
    """Who held what: clients by classes."""
    record = run.partition
    if not record or not record.get("clients"):
        return None
    clients = record["clients"]
    counts = np.asarray([c["counts"] for c in clients], float)
    names = [str(c.get("name") or f"client {c['id']}") for c in clients]
    if not counts.size:  # nodes with data of their own tell how much they hold, not of what
        sizes = np.asarray([[c["examples"]] for c in clients], float)
        return partition_picture(
            sizes, ["all"], names, "Training examples at each client; of which classes was not told;"
        )
    return partition_picture(counts, run.classes or [str(i) for i in range(counts.shape[1])], names)


def partition_picture(
    counts: np.ndarray,
    classes: Sequence[str],
    names: Sequence[str],
    what: str = "Training examples of each class at each client;",
) -> Picture:
    """Picture of clients × classes from a table of counts; ``what`` begins its caption."""
    counts = np.asarray(counts, float)
    share = np.sqrt(counts / max(counts.max(), 1))  # the eye judges area: small holdings stay visible
    height = min(9.0, max(3.0, 1.3 + 0.24 * len(names)))
    sizes = counts.sum(1).astype(int)
    with drawing():
        figure, axes = panel((6.2, height))
        shade(axes, share)
        if counts.size <= 400:
            for (i, j), n in np.ndenumerate(counts):
                if n:
                    axes.text(
                        j,
                        i,
                        f"{int(n)}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color=style.PAPER if share[i, j] > 0.62 else style.INK,
                    )
        labels = [f"{n}  ({s:,})" for n, s in zip(short_names(names, 18), sizes)]
        ticks(axes, labels, short_names(classes), most=40)
        axes.set(title="Who held what", xlabel="class")
    rows = [(n, c, int(counts[i, j])) for i, n in enumerate(names) for j, c in enumerate(classes)]
    spread = f"{sizes.min():,} to {sizes.max():,}" if sizes.min() != sizes.max() else f"{sizes.min():,}"
    caption = f"{what} {len(names)} clients of {spread} examples (in brackets)."
    return Picture("partition", "Who held what", caption, figure, ("client", "class", "examples"), rows, wide=True)
