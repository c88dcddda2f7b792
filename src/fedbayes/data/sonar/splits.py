"""Splits that don't lie: training and test never share a recording, nor a vessel where vessels are known."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...errors import ConfigError, DataError
from ...seeds import numpy_rng
from ..examples import Examples
from ..splits import linked
from .extraction import Features
from .recordings import Recording


class SameSound(UserWarning):
    """Recordings under different names that hold the same sound, by name; they count as one."""


def joined(recordings: Sequence[Recording], features: Features) -> list[Recording]:
    """Return the recordings, those that hold the same sound under different names renamed to one of them.

    A copy under another name (or as FLAC, or in another folder) would otherwise be trained on and tested. The same
    sound is a picture equal to the last bit, or overlapping parts of one file. Copies with another gain or bandwidth
    are not found: they differ in the last bits.
    """
    owner = features.owner
    if len(owner) == 0:
        return list(recordings)
    names = np.array([r.recording for r in recordings])[owner]
    group = linked([names, _stretches(recordings)[owner], _fingerprints(features)])
    first: dict[int, str] = {}
    found, renamed = list(recordings), []
    for number, kind in dict(zip(owner.tolist(), group.tolist(), strict=True)).items():
        name = first.setdefault(kind, recordings[number].recording)
        if name != recordings[number].recording:
            renamed.append(f"{recordings[number].path} (class {recordings[number].label}) is heard in '{name}' too")
            found[number] = replace(recordings[number], recording=name)
    if renamed:
        text = "; ".join(renamed[:10]) + (f"; and {len(renamed) - 10} more" if len(renamed) > 10 else "")
        warnings.warn(f"the same sound under different names counts as one recording: {text}.", SameSound, stacklevel=3)
    return found


def _stretches(recordings: Sequence[Recording]) -> np.ndarray:
    """Number the stretches of files that overlapping parts cover together."""
    keys = [(os.path.realpath(r.path), r.start, r.stop or math.inf, i) for i, r in enumerate(recordings)]
    number, end, file = -1, 0.0, ""
    out = np.empty(len(recordings), dtype=np.int64)
    for path, start, stop, i in sorted(keys):
        if path != file or start >= end:
            number, end, file = number + 1, stop, path
        out[i], end = number, max(end, stop)
    return out


def _fingerprints(features: Features) -> np.ndarray:
    """Return a text for each picture that equal pictures share; one without any contrast says nothing and has none."""
    flat = features.inputs.flatten(1)
    plain = (flat.amin(1) == flat.amax(1)).tolist()
    rows = flat.numpy()
    return np.array(
        ["" if p else hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest() for p, row in zip(plain, rows, strict=True)]
    )  # fmt: skip


def groups_of(recordings: Sequence[Recording]) -> np.ndarray:
    """Number the groups of files that belong together: by recording, and by vessel where it is known."""
    return linked([np.array([r.recording for r in recordings]), np.array([r.vessel for r in recordings])])


def _units(groups: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each group's class (that of most of its sound), its weight, and which classes it holds at all."""
    count, classes = groups.max() + 1, labels.max() + 1
    table = np.zeros((count, classes))
    np.add.at(table, (groups, labels), weights)
    return table.argmax(1), table.sum(1), table > 0


def choose_test(
    groups: np.ndarray, labels: np.ndarray, weights: np.ndarray, *, share: float, folds: int, fold: int, seed: int
) -> np.ndarray:
    """Return which files are the test's: whole groups, class by class.

    ``share``: of each class groups are drawn until its part of the segments (``weights``) is reached; a class with one
    group only stays in training, one with more has at least one in each part. ``folds``: all groups are dealt out,
    class by class in random order, and fold number ``fold`` is the test; with as many folds as recordings this is
    leave-one-recording-out.
    """
    kinds, sizes, holds = _units(groups, labels, weights)
    if folds:
        return _deal_folds(kinds, folds, fold, seed)[groups] == fold
    if not 0 <= share < 1:
        raise ConfigError(f"'sonar.test' is {share:g}; the share held out must be at least 0 and below 1.")
    held = np.zeros(len(kinds), dtype=bool)
    for kind in np.unique(kinds):
        members = numpy_rng(seed, "sonar", "test", int(kind)).permutation(np.flatnonzero(kinds == kind))
        wanted, got = share * sizes[members].sum(), 0.0
        for group in members[:-1]:
            if share == 0 or (got and got + sizes[group] / 2 > wanted):
                break
            if (holds[~held].sum(0)[holds[group]] < 2).any():  # the last that trains a class it holds beside its own
                continue
            held[group], got = True, got + sizes[group]
    return held[groups]


def _deal_folds(kinds: np.ndarray, folds: int, fold: int, seed: int) -> np.ndarray:
    if not 2 <= folds <= len(kinds):
        raise ConfigError(
            f"'sonar.folds' is {folds}; there are {len(kinds)} groups of recordings, so it must be 2 to {len(kinds)} (or 0: none)."
        )
    if not 0 <= fold < folds:
        raise ConfigError(f"'sonar.fold' is {fold}; with {folds} folds it must be 0 to {folds - 1}.")
    dealt, turn = np.empty(len(kinds), dtype=np.int64), 0
    for kind in np.unique(kinds):
        members = numpy_rng(seed, "sonar", "folds", int(kind)).permutation(np.flatnonzero(kinds == kind))
        dealt[members] = (turn + np.arange(len(members))) % folds  # the next class goes on where this one ended
        turn += len(members)
    return dealt


def check_disjoint(parts: Mapping[str, Examples], columns: Sequence[str] = ("recording", "vessel")) -> None:
    """Raise ``DataError`` when two parts share a recording or a known vessel: such a test would flatter."""
    names = list(parts)
    for column in columns:
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                both = _values(parts[first], column) & _values(parts[second], column)
                if both:
                    example = sorted(both)[0]
                    raise DataError(
                        f"{first} and {second} share {len(both)} {column}(s), '{example}' for one; "
                        f"put all that was heard of a {column} into one of them."
                    )


def _values(examples: Examples, column: str) -> set[str]:
    return {str(v) for v in np.unique(examples.columns[column])} - {""} if column in examples.columns else set()


def check_clients(shards: Sequence[np.ndarray], train: Examples) -> None:
    """Raise ``DataError`` when the segments of one recording lie on two clients."""
    if "recording" not in train.columns:
        return
    owner: dict[str, int] = {}
    for client, shard in enumerate(shards):
        for name in np.unique(train.columns["recording"][shard]):
            if owner.setdefault(str(name), client) != client:
                raise DataError(
                    f"recording '{name}' lies on the clients {owner[str(name)]} and {client}; its segments must stay together."
                )
