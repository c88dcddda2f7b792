"""Example inputs with the spread of the M predictions for each class: surest right, surest wrong, least sure."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import FedBayesError
from . import style
from .figures import short_names
from .pictures import Picture, drawing, matplotlib_modules
from .runs import Predictions, Run

GROUPS = {
    "surest-right": "Surest and right",
    "surest-wrong": "Surest and wrong",
    "least-sure": "Least sure",
}
PER_GROUP = 3
MOST_CLASSES = 10


@dataclass(frozen=True)
class Inputs:
    """The test inputs a run was judged on, or the reason why they cannot be shown."""

    values: np.ndarray | None
    columns: dict[str, np.ndarray]
    problem: str = ""
    labels: np.ndarray | None = None


@lru_cache(maxsize=4)
def _load(path: str, _configuration: str) -> Inputs:
    """Load the run's test inputs through its configuration; every reason not to is a sentence, never an error.

    The configuration is in the key, since another run may have taken the place of one at the same path.
    """
    from pathlib import Path

    try:
        from .. import config
        from ..data import load

        experiment = config.read(Path(path) / "config.toml")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of files left out: the run has said so
            data = load(experiment.data, sonar=experiment.sonar, data_dir=None, seed=experiment.seed)
    except (FedBayesError, OSError, ImportError) as error:
        return Inputs(None, {}, f"The inputs themselves cannot be shown: {error}")
    return Inputs(data.test.inputs.cpu().numpy(), dict(data.test.columns), labels=data.test.labels.cpu().numpy())


def test_inputs(run: Run) -> Inputs:
    """Test inputs of a run in the order of its stored predictions' ``indices``; none where the data are other ones now."""
    inputs, test = _load(str(run.path.resolve()), repr(run.config)), run.predictions("test")
    if test is None or inputs.labels is None:
        return inputs
    inside = test.indices < len(inputs.labels)
    if inside.all() and np.array_equal(inputs.labels[test.indices], test.labels):
        return inputs
    return Inputs(
        None, {}, "The inputs themselves cannot be shown: the data found now are not those the run was judged on."
    )


def pick(test: Predictions, count: int = PER_GROUP) -> dict[str, np.ndarray]:
    """Rows of the surest right, surest wrong and least sure inputs, by predictive entropy."""
    entropy, correct = test.per_example["entropy"], test.per_example["correct"]
    order = np.argsort(entropy, kind="stable")
    return {
        "surest-right": order[correct[order]][:count],
        "surest-wrong": order[~correct[order]][:count],
        "least-sure": order[::-1][:count],
    }


def pictures(run: Run) -> dict[str, list[Picture]]:
    """One picture per example, by group; empty where the run stored no test predictions."""
    test = run.predictions("test")
    if test is None:
        return {}
    inputs = test_inputs(run)
    chosen = pick(test)
    return {
        g: [tile(run, test, inputs, int(row), f"example-{g}-{k}") for k, row in enumerate(rows, 1)]
        for g, rows in chosen.items()
    }


def tile(run: Run, test: Predictions, inputs: Inputs, row: int, name: str) -> Picture:
    """One input beside its M predictions: a dot per sample and class, the mean as a ring."""
    p = test.probabilities[:, row]
    mean, label = test.mean[row], int(test.labels[row])
    answer = int(test.per_example["prediction"][row])
    shown = np.arange(p.shape[1])
    if len(shown) > MOST_CLASSES:
        shown = np.sort(np.union1d(np.argsort(mean)[::-1][: MOST_CLASSES - 1], [label]))
    names = short_names(run.classes, 12)
    with drawing():
        figure = matplotlib_modules().figure.Figure(figsize=(4.3, 2.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
        _draw_input(left, inputs, int(test.indices[row]))
        y = np.arange(len(shown))
        for sample in p[:, shown]:
            right.plot(
                sample * 100,
                y,
                "o",
                color=style.SERIES[0],
                alpha=max(0.12, 1 / len(p)),
                markersize=5,
                markeredgewidth=0,
            )
        right.plot(
            mean[shown] * 100,
            y,
            "o",
            markerfacecolor="none",
            markeredgecolor=style.INK,
            markersize=6.5,
            markeredgewidth=1,
        )
        right.set(xlim=(-4, 104), ylim=(len(shown) - 0.4, -0.6), xlabel="probability, %")
        right.set_xticks([0, 50, 100])
        right.set_yticks(y, [names[c] for c in shown], fontsize=9)
        for c, tick in zip(shown, right.get_yticklabels()):
            if c in (label, answer):
                tick.set_color(style.SERIES[0] if c == label else style.SERIES[1])
                tick.set_fontweight("bold")
    values = test.per_example
    verdict = "right" if answer == label else f"in truth {run.classes[label]}"
    caption = (
        f"{run.classes[answer]} with {values['confidence'][row] * 100:.1f} %: {verdict}. "
        f"Entropy {_short(values['entropy'][row])}, aleatoric {_short(values['aleatoric'][row])}, "
        f"epistemic {_short(values['epistemic'][row])}. Test input {int(test.indices[row])}."
    )
    table = [(run.classes[c], m, float(p[m, c])) for c in range(p.shape[1]) for m in range(len(p))]
    return Picture(name, f"Example: {caption}", caption, figure, ("class", "sample", "probability"), table)


def _short(value: float) -> str:
    """A share in three decimals; "0" only where it is exactly that."""
    return "0" if value == 0 else ("below 0.001" if value < 0.001 else f"{value:.3f}")


def _draw_input(axes: Any, inputs: Inputs, index: int) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    value = inputs.values[index] if inputs.values is not None and index < len(inputs.values) else None
    if value is None:
        axes.text(0.5, 0.5, "input\nnot at hand", ha="center", va="center", color=style.MUTED, transform=axes.transAxes)
    elif value.ndim == 3:
        image = value.transpose(1, 2, 0).astype(float)
        low, high = (0.0, 255.0) if value.dtype == np.uint8 and image.max() > 16 else (image.min(), image.max())
        image = np.clip((image - low) / max(high - low, 1e-12), 0, 1)
        if image.shape[2] == 3:
            axes.imshow(image)
        else:
            axes.imshow(image[..., 0], cmap="gray", aspect="auto" if image.shape[0] != image.shape[1] else "equal",
                        origin="lower" if value.dtype != np.uint8 and image.shape[0] != image.shape[1] else "upper")  # fmt: skip
    elif value.ndim == 2:
        axes.plot(value[0], color=style.INK, linewidth=0.6)
    else:
        lines = [f"{k}: {v[index]}" for k, v in list(inputs.columns.items())[:3]]
        text = "\n".join([f"row {index}", *lines])
        axes.text(0.5, 0.5, text, ha="center", va="center", color=style.MUTED, fontsize=9, transform=axes.transAxes)
