"""Answering for recordings: cut and pictured as in training, answered segment by segment, pooled into one answer each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .data.sonar.extraction import extract
from .data.sonar.pictures import make_picture
from .data.sonar.pooling import pool
from .data.sonar.recordings import AUDIO_SUFFIXES, Recording, Skipped, audio_files
from .data.sonar.sources import picturing_device
from .errors import DataError
from .predictor import Prediction

if TYPE_CHECKING:
    from .predictor import Predictor


@dataclass(frozen=True, eq=False)
class Heard:
    """Answers for whole recordings: their names, one prediction each, how many segments it is made of, and what was left out."""

    names: Sequence[str]
    prediction: Prediction
    segments: np.ndarray
    skipped: Sequence[Skipped] = ()


def sound_files(path: Path) -> list[Path]:
    """Return the recordings that a path names: itself, or those at any depth of a folder."""
    if path.is_dir():
        return audio_files(path)
    return [path] if path.suffix.lower() in AUDIO_SUFFIXES and path.exists() else []


def hears(predictor: Predictor) -> bool:
    """Whether a network takes the pictures of sound that its experiment describes."""
    return make_picture(predictor.experiment.sonar).shape == predictor.input_shape


def listen(predictor: Predictor, path: str | Path, samples: int | None = None, seed: int = 0) -> Heard:
    """Answer for the recordings in ``path``, a sound file or a folder of some; every file is a recording of its own.

    Segments are pooled within each sampled network. Files that cannot be used are named in ``skipped``.
    """
    path = Path(path)
    files, base = sound_files(path), path if path.is_dir() else path.parent
    if not files:
        raise DataError(f"{path} " + ("holds no recording." if path.exists() else "is not there."))
    if not hears(predictor):
        raise DataError(
            f"{path} is sound, but the run was not trained on recordings: its network takes inputs of shape "
            f"{predictor.input_shape}."
        )
    sonar = predictor.experiment.sonar
    recordings = [Recording(f, "", str(f.relative_to(base))) for f in files]
    features = extract(
        recordings, make_picture(sonar), overlap=sonar.overlap, channel=sonar.channel, device=picturing_device()
    )
    found = predictor(features.inputs, samples, seed=seed)
    names = np.array([r.recording for r in recordings])[features.owner]
    pooled = pool(found.samples, names, shared_draws=predictor.experiment.evaluation.draws == "per_pass")
    prediction = Prediction(pooled.probabilities, found.classes, pooled.values)
    return Heard(pooled.names.tolist(), prediction, pooled.segments, features.skipped)
