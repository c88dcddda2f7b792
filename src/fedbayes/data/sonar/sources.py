"""The sonar sources: a folder or CSV of recordings, DeepShip, ShipsEar, Watkins, and the synthetic sea."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, DataError
from ...experiment import Sonar
from ..examples import Dataset, Examples
from ..sources import Request, data_directory, register_source
from . import sea
from .extraction import Features, cache_file, cached, extract, picture_blocks
from .layouts import catalogue
from .pictures import Picture, make_picture
from .recordings import Recording, Skipped, facts
from .splits import check_disjoint, choose_test, groups_of, joined
from .vessels import KNOWN, UNSEEN

UNSEEN_NAME = "unseen"
"""Name of the sounds of classes kept out of training, among the out-of-distribution sets."""


def cache_folder(sonar: Sonar) -> Path | None:
    """Return where pictures are kept: ``FEDBAYES_CACHE``, else ``sonar-pictures`` in the data directory; None for no cache."""
    if not sonar.cache:
        return None
    given = os.environ.get("FEDBAYES_CACHE")
    return (Path(given).expanduser() if given else data_directory()) / "sonar-pictures"


def picturing_device() -> torch.device:
    """Return where pictures are computed: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_recordings(source: str | Path, sonar: Sonar, seed: int, name: str = "") -> Dataset:
    """Load recordings of a folder or CSV as a data set of pictures.

    Segments become examples with the columns ``recording``, ``vessel``, ``site``, ``start`` (seconds), ``file`` and ``picture``.
    Training and test share no recording and no known vessel, and the same sound under two names is one recording.
    Files that cannot be used are named in a warning and in the notes, classes that the test does not hold in the notes.
    """
    listed = catalogue(source, sonar.layout)
    picture = make_picture(sonar)
    known, classes = _sort_classes(listed, sonar)
    outside = [r for r in listed if r.label in sonar.unseen]
    features = extract(
        known + outside,
        picture,
        overlap=sonar.overlap,
        channel=sonar.channel,
        cache=cache_folder(sonar),
        device=picturing_device(),
    )
    everything = joined(known + outside, features)
    known = everything[: len(known)]
    inside = features.owner < len(known)
    classes, lost = _classes_heard(known, features, classes, sonar)
    examples = _examples(features, everything, classes, sonar.picture)
    test = _test_mask(known, features, classes, sonar, seed)
    mask = np.zeros(len(features.owner), dtype=bool)
    mask[inside] = test[features.owner[inside]]
    return _dataset(
        name or Path(source).resolve().name,
        train=examples.take(np.flatnonzero(inside & ~mask)),
        test=examples.take(np.flatnonzero(inside & mask)),
        outside=examples.take(np.flatnonzero(~inside)),
        classes=classes,
        notes=_notes(str(source), sonar, features.skipped)
        + lost
        + _narrow(everything, features, picture, sonar)
        + _untested(known, test, classes, sonar),
    )


def _untested(known: Sequence[Recording], test: np.ndarray, classes: tuple[str, ...], sonar: Sonar) -> str:
    """Say which classes the test does not hold; with folds that is as it must be."""
    missing = [c for c in classes if not any(t and r.label == c for r, t in zip(known, test, strict=True))]
    if not missing or sonar.folds or sonar.test == 0:
        return ""
    return f" The test holds no recording of class {', '.join(missing)}: what hangs together as one recording or ship is not parted."


def read_site(source: str | Path, sonar: Sonar, seed: int = 0) -> Dataset:
    """Load the recordings of one site, all of them for training: what a node of a federation does with its own folder.

    The server judges, so nothing is set aside but what the site's own list marks as ``test``; the test part is the
    training part. ``sonar.classes`` must list the classes, because a site may lack some and every node has to number
    them alike.
    """
    if not sonar.classes:
        raise ConfigError(
            "'sonar.classes' is empty; nodes that read their own folders need it to number classes alike."
        )
    listed = [r for r in catalogue(source, sonar.layout) if r.label not in sonar.unseen and r.split != "test"]
    if not listed:
        raise DataError(
            f"{source} holds no recording to train on: all are of 'sonar.unseen' classes or marked as test."
        )
    known, classes = _sort_classes(listed, replace(sonar, unseen=()))
    picture = make_picture(sonar)
    features = extract(
        known, picture, overlap=sonar.overlap, channel=sonar.channel,
        cache=cache_folder(sonar), device=picturing_device(),
    )  # fmt: skip
    examples = _examples(features, known, classes, sonar.picture)
    notes = _notes(str(source), sonar, features.skipped) + _narrow(known, features, picture, sonar)
    return Dataset(Path(source).resolve().name, examples, examples, classes, notes=notes)


def _sort_classes(listed: Sequence[Recording], sonar: Sonar) -> tuple[list[Recording], tuple[str, ...]]:
    known = [r for r in listed if r.label not in sonar.unseen]
    found = {r.label for r in known}
    missing = set(sonar.unseen) - {r.label for r in listed}
    if missing and not sonar.classes:
        raise DataError(f"'sonar.unseen' names '{sorted(missing)[0]}', which no recording has; the classes are: {', '.join(sorted(found))}.")  # fmt: skip
    classes = sonar.classes or tuple(sorted(found))
    extra = found - set(classes)
    if extra:
        raise DataError(f"there are recordings of class '{sorted(extra)[0]}', which 'sonar.classes' does not list; list it there or in 'sonar.unseen'.")  # fmt: skip
    if len(set(classes)) < 2:
        raise DataError(f"the recordings are all of one class ({', '.join(classes)}); at least two are needed, or name all in 'sonar.classes'.")  # fmt: skip
    return known, tuple(classes)


def _classes_heard(
    known: Sequence[Recording], features: Features, classes: tuple[str, ...], sonar: Sonar
) -> tuple[tuple[str, ...], str]:
    """Leave out classes of which no recording can be used, unless ``sonar.classes`` lists them, and say so."""
    heard = {known[i].label for i in np.unique(features.owner) if i < len(known)} | set(sonar.classes)
    lost = ", ".join(c for c in classes if c not in heard)
    if len(heard) < 2:
        raise DataError(f"no recording of {lost} can be used: {'; '.join(map(str, features.skipped[:3]))}.")
    return tuple(c for c in classes if c in heard), f" No recording of class {lost} can be used." if lost else ""


def _test_mask(
    known: Sequence[Recording], features: Features, classes: tuple[str, ...], sonar: Sonar, seed: int
) -> np.ndarray:
    """Return which recordings are the test's: as the CSV says, else by seed."""
    if any(r.split for r in known):
        mask = np.array([r.split == "test" for r in known])
        if not mask.any():
            raise DataError("the column 'split' marks no recording as test; mark some, or leave the column out.")
        return mask
    counts = np.bincount(features.owner, minlength=len(known))[: len(known)]
    used = np.flatnonzero(counts)
    chosen = [known[int(i)] for i in used]
    labels = np.array([classes.index(r.label) for r in chosen])
    mask = np.zeros(len(known), dtype=bool)
    mask[used] = choose_test(
        groups_of(chosen), labels, counts[used].astype(float),
        share=sonar.test, folds=sonar.folds, fold=sonar.fold, seed=seed,
    )  # fmt: skip
    return mask


def _examples(features: Features, recordings: Sequence[Recording], classes: tuple[str, ...], kind: str) -> Examples:
    def column(values: list[str]) -> np.ndarray:
        return np.array(values, dtype=str)[features.owner]

    labels = np.array([classes.index(r.label) if r.label in classes else -1 for r in recordings])
    return Examples(
        features.inputs,
        torch.from_numpy(labels[features.owner]),
        {
            "recording": column([r.recording for r in recordings]),
            "vessel": column([r.vessel for r in recordings]),
            "site": column([r.site for r in recordings]),
            "class": column([r.label for r in recordings]),
            "start": features.start.astype(np.float64),
            "file": column([str(r.path) for r in recordings]),
            "picture": np.full(len(features.owner), kind),
        },
    )


def _dataset(
    name: str, *, train: Examples, test: Examples, outside: Examples, classes: tuple[str, ...], notes: str
) -> Dataset:
    check_disjoint({"training": train, "test": test})
    if len(train) == 0:
        raise DataError(f"{name}: no recording is left for training; lower 'sonar.test'.")
    # An out-of-distribution set has no labels in the network's classes; its class is in the column ``class``.
    ood = {UNSEEN_NAME: Examples(outside.inputs, torch.zeros(len(outside), dtype=torch.int64), outside.columns)}
    return Dataset(name, train, test, classes, ood=ood if len(outside) else {}, notes=notes)


def _notes(source: str, sonar: Sonar, skipped: Sequence[Skipped]) -> str:
    text = f"{source}: {sonar.picture} pictures of {sonar.seconds:g} s segments at {sonar.sample_rate} Hz; training and test share no recording."
    if skipped:
        named = "; ".join(str(s) for s in skipped)
        warnings.warn(f"{len(skipped)} recording(s) left out: {named}", SkippedRecordings, stacklevel=3)
        text += f" Left out: {named}."
    return text


class SkippedRecordings(UserWarning):
    """Recordings that could not be used, by name and reason."""


def _narrow(recordings: Sequence[Recording], features: Features, picture: Picture, sonar: Sonar) -> str:
    """Warn of recordings whose rate is too low to fill the picture's band: an empty top tells the recorder, not the class."""
    used = {recordings[i].path: recordings[i].recording for i in np.unique(features.owner)}
    rates = {path: facts(path).rate for path in used}
    narrow = [path for path, rate in rates.items() if rate / 2 < 0.95 * picture.high]
    if not narrow:
        return ""
    lowest = min(rates[path] for path in narrow)
    try:
        make_picture(replace(sonar, high=lowest / 2))
        advice = f"; sonar.high = {lowest / 2:g} would hear all alike"
    except ConfigError:  # hardly anything of the band is left below
        advice = ""
    text = (
        f"{len({used[p] for p in narrow})} of {len(set(used.values()))} recordings have sampling rates too low for the "
        f"picture's band to {picture.high:g} Hz (the lowest is {lowest} Hz: nothing above {lowest / 2:g} Hz), so that the "
        f"recorder can give the class away{advice}."
    )
    warnings.warn(text, NarrowRecordings, stacklevel=3)
    return f" {text}"


class NarrowRecordings(UserWarning):
    """Recordings whose sampling rate cannot fill the band of the pictures, which may tell a network the class."""


def _public_set(request: Request, layout: str) -> Dataset:
    folder = request.data_dir / request.name
    if not folder.is_dir():
        raise DataError(
            f"{request.name} is not in the data directory ({folder}); put its class folders there, or give the path of "
            "its folder as the data set's name."
        )
    sonar = replace(request.sonar or Sonar(), layout=layout)
    return read_recordings(folder, sonar, request.seed, request.name)


@register_source(
    "deepship",
    summary="ships in the Strait of Georgia, by hydrophone (Irfan et al. 2021)",
    examples="265 ships, 47 hours (public part: 21 recordings, 6 minutes)",
    classes=4,
    licence="from its authors, for research",
    hint="github.com/irfankamboh/DeepShip; put Cargo, Passengership, Tanker, Tug into DATA_DIR/deepship",
)
def deepship(request: Request) -> Dataset:
    """Load DeepShip: folders ``Cargo, Passengership, Tanker, Tug`` with numbered recordings."""
    return _public_set(request, "deepship")


@register_source(
    "shipsear",
    summary="vessels off north-west Spain, by hydrophone (Santos-Domínguez et al. 2016)",
    examples="90 recordings, 3 hours",
    classes=5,
    licence="from its authors, for research",
    hint="atlanttic.uvigo.es/underwaternoise; put the files and shipsEar.xlsx into DATA_DIR/shipsear",
)
def shipsear(request: Request) -> Dataset:
    """Load ShipsEar: files such as ``6__10_07_13_marDeCangas_Entra.wav`` with their table, or in folders A to E."""
    return _public_set(request, "shipsear")


@register_source(
    "watkins",
    summary="marine mammals, by many hydrophones over decades (Watkins database, WHOI)",
    examples="folders of clips by species",
    licence="free for personal and academic use (WHOI)",
    hint="whoicf2.whoi.edu/science/B/whalesounds; put the species' folders into DATA_DIR/watkins",
)
def watkins(request: Request) -> Dataset:
    """Load Watkins: folders by species; the first five characters of a file's name are the recording."""
    return _public_set(request, "watkins")


@register_source("folder", summary="your own recordings: class/recording folders, or a CSV")
def folder(request: Request) -> Dataset:
    """Load the folder or CSV whose path is the data set's name."""
    return read_recordings(request.name, request.sonar or Sonar(), request.seed)


@register_source("sonar-synthetic", summary="a synthetic sea: ships, sites and hydrophones by seed", classes=len(KNOWN))
def synthetic(request: Request) -> Dataset:
    """Make the synthetic sea: ten sites of different conditions, five classes of ship, two more never seen in training.

    Ships, not only recordings, are held out for the test.
    """
    sonar, seed = request.sonar or Sonar(), request.seed
    classes = sea_classes(sonar)[0]
    everything = passages(sonar, seed)
    known = sum(p.label in classes for p in everything)
    recordings = [_as_recording(p) for p in everything]
    features = _hear_features(everything, sonar, seed, make_picture(sonar))
    examples = _examples(features, recordings, classes, sonar.picture)
    inside = features.owner < known
    test = _test_mask(recordings[:known], features, classes, sonar, seed)
    mask = np.zeros(len(inside), dtype=bool)
    mask[inside] = test[features.owner[inside]]
    return _dataset(
        request.name,
        train=examples.take(np.flatnonzero(inside & ~mask)),
        test=examples.take(np.flatnonzero(inside & mask)),
        outside=examples.take(np.flatnonzero(~inside)),
        classes=classes,
        notes=_notes(f"synthetic sea, {sonar.sites} sites", sonar, ()),
    )


def sea_classes(sonar: Sonar) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the synthetic sea's classes: those trained on, and those never heard."""
    unseen = sonar.unseen or UNSEEN
    classes = sonar.classes or tuple(c for c in KNOWN if c not in unseen)
    wrong = set(classes + unseen) - set(KNOWN + UNSEEN)
    if wrong:
        raise ConfigError(f"the synthetic sea has no class '{sorted(wrong)[0]}'; it has: {', '.join(KNOWN + UNSEEN)}.")
    if len(classes) < 2 or set(classes) & set(unseen):
        raise ConfigError("the synthetic sea needs two classes or more, none of them in 'sonar.unseen' as well.")
    return classes, unseen


def passages(sonar: Sonar, seed: int) -> list[sea.Passage]:
    """Return every passage of the synthetic sea: of the classes trained on, then a third as many of each unseen one."""
    classes, unseen = sea_classes(sonar)
    return sea.plan(sonar, seed, classes) + sea.plan(sonar, seed, unseen, recordings=max(1, sonar.recordings // 3))


def _as_recording(passage: sea.Passage) -> Recording:
    return Recording(Path(""), passage.label, passage.recording, passage.site.name, passage.vessel.name)


def _hear_features(everything: list[sea.Passage], sonar: Sonar, seed: int, picture: Picture) -> Features:
    """Make and picture the sea's recordings, or take the whole sea from the cache."""
    folder = cache_folder(sonar)
    settings = (sonar.recordings, sonar.sites, sonar.length, sonar.traffic, sonar.snr, sonar.overlap)
    heard = [f"{p.recording} {p.site.name}" for p in everything]
    file = None if folder is None else cache_file(folder, "sea", sea.VERSION, seed, settings, heard, picture.key())

    def make() -> tuple[Tensor, np.ndarray]:
        device, parts, starts = picturing_device(), [], []
        sounds = sea.hear_all(everything, sonar.length, sonar.sample_rate, workers=min(4, os.cpu_count() or 1))
        for _, sound in _progress(sounds, len(everything)):
            pictures, at = picture_blocks([sound.samples], picture, sonar.overlap, device)
            parts.append(pictures)
            starts.append(at)
        return torch.cat(parts), np.concatenate(starts)

    pictures, starts = cached(file, make)
    # every recording has the same length, so the same number of segments
    return Features(pictures, np.repeat(np.arange(len(everything)), len(pictures) // len(everything)), starts)


def _progress(items, total: int):
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, total=total, desc="synthetic sea", unit=" passages", leave=False, disable=None)
