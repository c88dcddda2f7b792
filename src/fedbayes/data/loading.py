"""``load``: from the ``data`` section of an experiment to a ``Dataset`` ready to be shared out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import DataError
from ..seeds import numpy_rng
from .arrays import npz_inputs
from .examples import RESERVED, Dataset, Examples
from .matching import match
from .sources import PATH_SOURCES, Request, data_directory, get_source
from .splits import balanced_subset

if TYPE_CHECKING:
    from ..experiment import Data, Sonar

EXCLUDED = "excluded"
"""Name under which the examples of excluded classes appear among the out-of-distribution sets."""


def load_source(
    name: str,
    *,
    sonar: Sonar | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    test_only: bool = False,
) -> Dataset:
    """Load a whole data set by name, ``.npz`` file or folder of recordings, as its source gives it.

    With ``test_only`` the training part may be empty: a set wanted for its test inputs need not be there whole.
    """
    return get_source(name).read(Request(name, data_directory(data_dir), seed, sonar, test_only))


def load_inputs(
    name: str,
    like: Examples,
    *,
    sonar: Sonar | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    limit: int = 0,
) -> Examples:
    """Load the training inputs of another set, made to fit ``like``: a server's unlabelled inputs (FedBE).

    An ``.npz`` file needs no labels for it. Labels, where there are any, are those of the other set. A ``limit`` is drawn
    like that of the clients' training set.
    """
    source = get_source(name)
    if source.name == "npz":
        part = npz_inputs(Path(name).expanduser())
    else:
        dataset = source.read(Request(name, data_directory(data_dir), seed, sonar))
        part = dataset.train if len(dataset.train) else dataset.test
    return match(limited(part, limit, seed, "unlabelled"), like, f"'{name}' as unlabelled inputs")


def load(
    data: Data, *, sonar: Sonar | None = None, data_dir: str | os.PathLike[str] | None = None, seed: int = 0
) -> Dataset:
    """Load the data of an experiment: the named set, without excluded classes, limited, with its OOD sets.

    ``data_dir`` is where canonical files lie (default: ``FEDBAYES_DATA``, else the user's cache folder). Limits
    are class-balanced draws at the addresses (seed, "limit", split). Excluded classes leave training and test
    and become ``dataset.ood["excluded"]``; the remaining classes are renumbered in their order.
    """
    dataset = load_source(data.name, sonar=sonar, data_dir=data_dir, seed=seed)
    if len(dataset.train) == 0 or len(dataset.test) == 0:
        empty = "training" if len(dataset.train) == 0 else "test"
        raise DataError(f"'{data.name}' has no {empty} examples, so nothing can be learned and judged on it.")
    if data.exclude_classes:
        dataset = exclude_classes(dataset, data.exclude_classes)
    if data.ood:
        other = load_source(data.ood, sonar=sonar, data_dir=data_dir, seed=seed, test_only=True).test
        found = match(other, dataset.train, f"'{data.ood}' as out-of-distribution set for '{data.name}'")
        dataset = replace(dataset, ood={**dataset.ood, _free_name(short_name(data.ood), dataset): found})
    return replace(
        dataset,
        train=limited(dataset.train, data.limit, seed, "train"),
        test=limited(dataset.test, data.test_limit, seed, "test"),
        ood={name: limited(part, data.test_limit, seed, f"ood:{name}") for name, part in dataset.ood.items()},
    )


def short_name(name: str) -> str:
    """Return a data set's name as it appears in records and file names: of a path, the last part without ending."""
    source = get_source(name)
    return Path(name).stem if source.name in PATH_SOURCES else source.name


def _free_name(name: str, dataset: Dataset) -> str:
    """Return the name, numbered where a split or another out-of-distribution set has it: a file may be called ``test.npz``."""
    taken = {*RESERVED, *dataset.ood}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)


def limited(examples: Examples, limit: int, seed: int, split: str) -> Examples:
    """Return at most ``limit`` examples, a class-balanced draw by seed (0: all)."""
    if limit < 0:
        raise DataError(f"a limit of {limit} examples makes no sense: give a positive number, or 0 for all.")
    if limit == 0 or limit >= len(examples):
        return examples
    return examples.take(balanced_subset(examples.labels.cpu().numpy(), limit, numpy_rng(seed, "limit", split)))


def exclude_classes(dataset: Dataset, excluded: tuple[int, ...]) -> Dataset:
    """Move the examples of some classes from training and test into ``ood["excluded"]`` and renumber the rest.

    The moved examples keep their original class number as label and its name in the column ``class``.
    """
    unknown = [c for c in excluded if not 0 <= c < len(dataset.classes)]
    if unknown:
        raise DataError(
            f"data.exclude_classes: '{dataset.name}' has classes 0 to {len(dataset.classes) - 1}, not {unknown[0]}."
        )
    kept = [c for c in range(len(dataset.classes)) if c not in excluded]
    if len(kept) < 2:
        raise DataError(
            f"data.exclude_classes leaves {len(kept)} of {len(dataset.classes)} classes; at least two must remain."
        )
    renumber = torch.full((len(dataset.classes),), -1, dtype=torch.int64)
    renumber[kept] = torch.arange(len(kept))

    def keep(part: Examples) -> Examples:
        part = part.take(np.flatnonzero(np.isin(part.labels.numpy(), kept)))
        return Examples(part.inputs, renumber[part.labels], part.columns)

    def drop(part: Examples) -> Examples:
        return part.take(np.flatnonzero(np.isin(part.labels.numpy(), excluded)))

    outside = concatenate([drop(dataset.train), drop(dataset.test)])
    names = np.array(dataset.classes)[outside.labels.numpy()] if len(outside) else np.array([], dtype=str)
    outside = Examples(outside.inputs, outside.labels, {**outside.columns, "class": names})
    return replace(
        dataset,
        train=keep(dataset.train),
        test=keep(dataset.test),
        classes=tuple(dataset.classes[c] for c in kept),
        ood={**dataset.ood, EXCLUDED: outside},
    )


def concatenate(parts: list[Examples]) -> Examples:
    """Join examples one after the other; only columns that all parts have survive."""
    shared = set.intersection(*(set(part.columns) for part in parts))
    return Examples(
        torch.cat([part.inputs for part in parts]),
        torch.cat([part.labels for part in parts]),
        {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns if name in shared},
    )
