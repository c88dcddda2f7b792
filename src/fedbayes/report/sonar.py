"""The operator's section of a sonar run: recordings in the order in which someone should listen to them."""

from __future__ import annotations

import base64
import html
import io
import json
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import config, uncertainty
from ..data import Dataset, Examples, load
from ..data.sonar.pictures import Picture as SoundPicture
from ..data.sonar.pictures import axes_of, make_picture
from ..data.sonar.pooling import Pooled, confusion, pool
from ..data.sonar.recordings import Recording, Unreadable, libraries, read
from ..data.sources import get_source
from ..errors import FedBayesError
from ..experiment import Experiment
from ..rundir import reading
from . import style
from .figures import percent_axis, short_names, top_labels
from .pictures import drawing, inline_figure, matplotlib_modules, panel
from .runs import Predictions, Run

SOUND = ("sonar-synthetic", "deepship", "shipsear", "watkins", "folder")
"""Sources whose examples are cut from recordings."""
SHOWN = 8
"""Recordings in the queue."""
STRANGERS = 2
"""Recordings of unseen classes shown below it."""
AUDIO_RATE = 8000
AUDIO_SECONDS = 6.0
AUDIO_BUDGET = 1_500_000
"""Bytes of sound in a page: about ten clips; a page stays small enough for a mail."""


@dataclass(frozen=True, eq=False)
class _Material:
    """What the section is made of: the run, its experiment and data, the test pooled by recording."""

    run: Run
    experiment: Experiment
    dataset: Dataset
    picture: SoundPicture
    pooled: Pooled
    test: Predictions


@lru_cache(maxsize=4)
def _load(path: str, _configuration: str) -> tuple[Experiment, Dataset]:
    """Load a run's experiment and data; its configuration is in the key, since another run may have taken its place."""
    experiment = config.read(Path(path) / "config.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of files left out: the run has said so
        return experiment, load(experiment.data, sonar=experiment.sonar, seed=experiment.seed)


def queue(run: Run) -> str | None:
    """Return the section's HTML, or None for runs whose test examples were not cut from recordings."""
    test = run.predictions("test")
    if test is None or not _is_sonar(run):
        return None
    try:
        experiment, dataset = _load(str(run.path.resolve()), repr(run.config))
    except (FedBayesError, OSError) as error:
        return f'<p class="remark">The recordings are not at hand: {html.escape(str(error))}</p>'
    if "recording" not in dataset.test.columns:
        return None
    pooled = _pool(test, dataset.test, experiment)
    material = _Material(run, experiment, dataset, make_picture(experiment.sonar), pooled, test)
    return "".join([_opening(material), _figures(material), _queue(material), _strangers(material)])


def _is_sonar(run: Run) -> bool:
    """Whether a run learned from recordings: by its data set or, where a folder has gone, by the shape of its inputs."""
    try:
        return get_source(str(run.setting("data.name", ""))).name in SOUND
    except FedBayesError:
        card, toml = run.path / "predictor.json", run.path / "config.toml"
        if not (card.exists() and toml.exists()):
            return False
        with reading(card):
            shape = json.loads(card.read_text(encoding="utf-8"))["input_shape"]
        return shape == list(make_picture(config.read(toml).sonar).shape)


def _pool(predictions: Predictions, examples: Examples, experiment: Experiment, labelled: bool = True) -> Pooled:
    kept = examples.take(predictions.indices)
    return pool(
        torch.as_tensor(predictions.probabilities),
        kept.columns["recording"],
        kept.labels if labelled else None,
        shared_draws=experiment.evaluation.draws == "per_pass",
    )


def _outsiders(m: _Material) -> dict[str, tuple[Predictions, Examples, Pooled]]:
    found = {}
    for name, predictions in m.run.outliers.items():
        examples = m.dataset.ood.get(name)
        if examples is not None and "recording" in examples.columns:
            found[name] = (predictions, examples, _pool(predictions, examples, m.experiment, labelled=False))
    return found


def _opening(m: _Material) -> str:
    count, right = len(m.pooled), int(m.pooled.correct.sum())
    text = f"Segment by segment the network answers; recording by recording an operator listens. Of {count} test recordings {right} are named rightly ({100 * right / count:.0f} %)."
    if 0 < right < count:
        wrong = ~m.pooled.correct
        area = uncertainty.auroc(m.pooled.values["entropy"], wrong)
        first = m.pooled.order()[: max(1, round(count / 5))]
        caught = int(wrong[torch.from_numpy(first.copy())].sum())
        text += f" Listening to the {len(first)} least sure ones first finds {caught} of the {count - right} errors (area under the curve {area:.2f}; 0.5 is chance)."
    for name, (_, _, strange) in _outsiders(m).items():
        area = uncertainty.detection(m.pooled.values["entropy"], strange.values["entropy"])["auroc"]
        text += f" {len(strange)} recordings are of classes never heard in training ({name}); entropy tells them with {area:.2f}."
    return f'<p class="lead">{html.escape(text)}</p>'


def _figures(m: _Material) -> str:
    return f'<div class="figures">{_confusion(m)}{_retained(m)}</div>'


def _confusion(m: _Material) -> str:
    classes = m.run.classes
    labels = m.pooled.labels
    assert labels is not None
    counts = confusion(m.pooled.values["prediction"], labels, len(classes))
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    names = short_names(classes)
    from .matrices import shade, ticks

    with drawing():
        figure, axes = panel((4.3, 3.9))
        shade(axes, share)
        for i, j in zip(*np.nonzero(counts), strict=True):
            hue = style.PAPER if share[i, j] > 0.55 else style.INK
            axes.text(j, i, str(counts[i, j]), ha="center", va="center", fontsize=7.5, color=hue)
        ticks(axes, names, names)
        axes.set(title="Recordings: what is taken for what", xlabel="answered", ylabel="true")
    rows = [(classes[i], classes[j], int(counts[i, j])) for i in range(len(classes)) for j in range(len(classes))]
    return inline_figure(
        figure, name="recordings-confusion", title="Confusion matrix of recordings",
        caption="Whole recordings by true class (rows) and answer (columns).",
        header=("true", "answered", "count"), rows=rows, folder=m.run.path / "figures",
    )  # fmt: skip


def _retained(m: _Material) -> str:
    rows, names = [], []
    with drawing():
        figure, axes = panel()
        for by in ("entropy", "aleatoric", "epistemic"):
            curve = m.pooled.retained(by)
            x, y = np.asarray(curve.x), np.asarray(curve.y) * 100
            hue = style.UNCERTAINTY_COLOURS[by]
            axes.plot(x, y, color=hue, linestyle={"aleatoric": style.DASHES[1]}.get(by, "-"))
            names.append((by, hue))
            rows += [(by, a, b) for a, b in zip(x, y, strict=True)]
        axes.set(title="Recordings it is sure of", xlabel="share of recordings answered, %", ylabel="accuracy, %", xlim=(1, 0))  # fmt: skip
        percent_axis(axes)
        top_labels(axes, names)
    return inline_figure(
        figure, name="recordings-retained", title="Accuracy against recordings retained",
        caption="From left to right the least sure recordings are handed to the operator.",
        header=("uncertainty", "retained", "accuracy"), rows=rows, folder=m.run.path / "figures",
    )  # fmt: skip


def _queue(m: _Material) -> str:
    spent, items = 0, []
    for place, number in enumerate(m.pooled.order()[:SHOWN], 1):
        item, size = _item(m, m.test, m.dataset.test, m.pooled, int(number), f"queue-{place}", AUDIO_BUDGET - spent)
        items.append(item)
        spent += size
    silent = "" if spent else f'<p class="remark">{html.escape(_why_silent())}</p>'
    return f'<h3>The queue: least sure first</h3>{silent}<div class="figures">{"".join(items)}</div>'


def _why_silent() -> str:
    """Say why there is nothing to listen to."""
    try:
        libraries()
    except FedBayesError as error:
        return f"There is nothing to listen to: {error}"
    return "There is nothing to listen to: the recordings have gone from where they were read."


def _strangers(m: _Material) -> str:
    items = []
    for name, (predictions, examples, pooled) in _outsiders(m).items():
        for place, number in enumerate(pooled.order()[:STRANGERS], 1):
            items.append(_item(m, predictions, examples, pooled, int(number), f"{name}-{place}", AUDIO_BUDGET // 4)[0])
    if not items:
        return ""
    return f'<h3>Of classes never heard in training</h3><div class="figures">{"".join(items)}</div>'


def _item(
    m: _Material, predictions: Predictions, examples: Examples, pooled: Pooled, number: int, name: str, budget: int
) -> tuple[str, int]:
    """One recording: its least sure segment as a picture, the M predictions, and its sound; and the sound's bytes."""
    own = np.flatnonzero(pooled.index == number)
    worst = int(own[np.argmax(predictions.per_example["entropy"][own])])
    row = int(predictions.indices[worst])
    columns = {key: values[row] for key, values in examples.columns.items()}
    answer, sure = int(pooled.values["prediction"][number]), float(pooled.values["confidence"][number])
    truth = str(columns.get("class", ""))
    said = m.run.classes[answer]
    verdict = "right" if truth == said else f"in truth {truth}"
    place = f" at {columns['site']}" if columns.get("site") else ""
    caption = (
        f"Recording {columns['recording']}{place}: {said} with {100 * sure:.0f} %, {verdict}. "
        f"Entropy {float(pooled.values['entropy'][number]):.2f}, epistemic {float(pooled.values['epistemic'][number]):.2g}, "
        f"its {int(pooled.segments[number])} segments differ by {float(pooled.disagreement[number]):.2g}."
    )
    figure = _tile(m, examples.inputs[row].cpu(), pooled.probabilities[:, number].numpy(), truth)
    drawn = inline_figure(figure, name=name, title=caption, caption=caption, header=("class", "probability"),
                          rows=list(zip(m.run.classes, pooled.probabilities.mean(0)[number].tolist(), strict=True)),
                          folder=m.run.path / "figures")  # fmt: skip
    sound = _audio(m, columns)
    if not sound or len(sound) > budget:
        return f"<div>{drawn}</div>", 0
    player = f'<audio controls preload="none" src="data:audio/flac;base64,{sound}"></audio>'
    return f"<div>{drawn}{player}</div>", len(sound)


def _tile(m: _Material, stored: torch.Tensor, samples: np.ndarray, truth: str) -> Any:
    labels = axes_of(m.picture)
    classes = short_names(m.run.classes, 12)
    with drawing():
        figure = matplotlib_modules().figure.Figure(figsize=(4.3, 2.3), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
        left.grid(False)
        if m.picture.kind == "waveform":
            values = stored[0].float().numpy()
            left.plot(np.linspace(*labels.x_range, len(values)), values, color=style.INK, linewidth=0.4)
        else:
            grey = m.picture.decibels(stored[0]).numpy()
            low, high = np.quantile(grey, [0.02, 0.995])
            extent = (*labels.x_range, 0.0, float(grey.shape[0]))
            left.imshow(grey, cmap="viridis", aspect="auto", origin="lower", extent=extent, vmin=low, vmax=high)
            left.set_yticks([t for t, _ in labels.y_ticks], [t for _, t in labels.y_ticks], fontsize=7)
        left.set_xlabel(labels.x_label, fontsize=8)
        left.set_ylabel(labels.y_label, fontsize=8)
        y = np.arange(len(classes))
        for sample in samples:
            right.plot(100 * sample, y, "o", color=style.SERIES[0], alpha=max(0.12, 1 / len(samples)), markersize=5, markeredgewidth=0)  # fmt: skip
        right.plot(100 * samples.mean(0), y, "o", markerfacecolor="none", markeredgecolor=style.INK, markersize=6.5)
        right.set(xlim=(-4, 104), ylim=(len(classes) - 0.4, -0.6), xlabel="probability, %")
        right.set_xticks([0, 50, 100])
        right.set_yticks(y, classes, fontsize=8)
        for name, tick in zip(m.run.classes, right.get_yticklabels(), strict=True):
            if name == truth:
                tick.set_color(style.SERIES[0])
                tick.set_fontweight("bold")
    return figure


def _audio(m: _Material, columns: dict[str, Any]) -> str:
    """Return up to six seconds of the recording as base64 FLAC, 8 kHz mono; empty where it cannot be had."""
    try:
        soundfile, _ = libraries()
        samples = _sound(m, columns)
    except (FedBayesError, Unreadable, OSError):
        return ""
    samples = samples - samples.mean()
    peak = float(np.abs(samples).max()) if len(samples) else 0.0
    if peak == 0.0:
        return ""
    buffer = io.BytesIO()
    soundfile.write(buffer, 0.7 * samples / peak, AUDIO_RATE, format="FLAC", subtype="PCM_16")
    return base64.b64encode(buffer.getvalue()).decode()


def _sound(m: _Material, columns: dict[str, Any]) -> np.ndarray:
    start, sonar = float(columns["start"]), m.experiment.sonar
    if m.experiment.data.name == "sonar-synthetic":
        from ..data.sonar.sea import hear
        from ..data.sonar.sources import passages

        passage = next(p for p in passages(sonar, m.experiment.seed) if p.recording == columns["recording"])
        soxr = libraries()[1]
        whole = soxr.resample(hear(passage, sonar.length, sonar.sample_rate).samples, sonar.sample_rate, AUDIO_RATE)
        begin = int(start * AUDIO_RATE)
        return whole[begin : begin + int(AUDIO_SECONDS * AUDIO_RATE)]
    file = Path(str(columns["file"]))
    part = Recording(file, "", "", start=start, stop=start + AUDIO_SECONDS)
    return read(part, AUDIO_RATE, sonar.channel)
