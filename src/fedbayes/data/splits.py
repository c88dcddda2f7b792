"""Draws that keep proportions: a stratified order, held-out parts, class-balanced subsets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import DataError
from ..seeds import numpy_rng
from .examples import GROUP_COLUMN, VESSEL_COLUMN, Examples


def stratified_order(strata: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random order of all positions in which every stretch has the strata's overall proportions.

    The i-th example of a stratum of n (shuffled) gets the position (i + u)/n with one u in [0, 1) per stratum;
    all are sorted by position. Any stretch of length m then holds m·n/N examples of the stratum, give or take one.
    """
    position = np.empty(len(strata))
    for value in np.unique(strata):
        members = np.flatnonzero(strata == value)
        position[rng.permutation(members)] = (np.arange(len(members)) + rng.random()) / len(members)
    return np.argsort(position, kind="stable")


def group_codes(values: np.ndarray) -> np.ndarray:
    """Number the distinct values 0, 1, ... in sorted order and return each example's number."""
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def _cross(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Number the combinations that occur of several columns."""
    table = np.stack([group_codes(a) for a in arrays], axis=1)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)


def group_of(examples: Examples, group: str | None = None) -> np.ndarray | None:
    """Return the number of each example's group, or None when every example stands alone.

    ``group`` names a column; without it the recordings are the groups where the examples have them.
    """
    if group is None:
        group = GROUP_COLUMN if GROUP_COLUMN in examples.columns else ""
    if not group:
        return None
    if group not in examples.columns:
        raise DataError(
            f"there is no column '{group}' to split by; the columns are: {', '.join(examples.columns) or 'none'}."
        )
    return group_codes(examples.columns[group])


def linked(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Number the groups that hang together by any of the columns: recordings of one ship, and so on through the chain.

    An empty value means "not known" and links nothing. Labels spread to the smallest until nothing changes.
    """
    count = len(columns[0])
    number = np.arange(count)
    while True:
        before = number
        for values in columns:
            codes, known = group_codes(values), np.asarray(values).astype(str) != ""
            lowest = np.full(codes.max(initial=-1) + 1, count)
            np.minimum.at(lowest, codes[known], number[known])
            number = np.where(known, np.minimum(number, lowest[codes]), number)
        if (number == before).all():
            return group_codes(number)


def held_together(examples: Examples, group: str | None = None) -> np.ndarray | None:
    """As ``group_of``, but recordings of one vessel, where vessels are known, are one group: what splits go by."""
    if group is None and GROUP_COLUMN in examples.columns and VESSEL_COLUMN in examples.columns:
        return linked([examples.columns[GROUP_COLUMN], examples.columns[VESSEL_COLUMN]])
    return group_of(examples, group)


def _held(strata: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Choose round(share·N) units, stratified, never the last one of a stratum; at least one if that can be."""
    wanted = max(1, round(share * len(strata)))
    order = stratified_order(strata, rng)
    last = {int(strata[i]): int(i) for i in order}
    eligible = np.array([i for i in order if last[int(strata[i])] != i], dtype=np.int64)
    return eligible[:wanted]


def _part(
    train: Examples, share: float, address: tuple[int | str, ...], group: str | None, columns: Sequence[str]
) -> tuple[Examples, Examples]:
    if not 0 <= share < 1:
        raise DataError(f"the share held out must be at least 0 and below 1, not {share}.")
    if share == 0 or len(train) == 0:
        return train, train.take([])
    rng = numpy_rng(*address)
    strata = _cross([train.labels.cpu().numpy(), *(train.columns[c] for c in columns if c in train.columns)])
    groups = held_together(train, group)
    if groups is None:
        held = _held(strata, share, rng)
        mask = np.zeros(len(train), dtype=bool)
        mask[held] = True
    else:
        first = np.unique(groups, return_index=True)[1]
        mask = np.isin(groups, _held(strata[first], share, rng))
    return train.take(np.flatnonzero(~mask)), train.take(np.flatnonzero(mask))


def split_validation(
    train: Examples, share: float, seed: int, *, group: str | None = None, columns: Sequence[str] = ()
) -> tuple[Examples, Examples]:
    """Part the training examples into (rest, validation), stratified by class and by ``columns``.

    Examples cut from one recording, or heard from one vessel where vessels are known, stay together (or those that
    share a value of the column ``group``), so the
    validation examples never come from something trained on. The last example or recording of a class always
    stays in the training part. Both parts keep the original order. The draw has the address (seed, "split").
    """
    return _part(train, share, (seed, "split"), group, columns)


def hold_out(
    train: Examples, fraction: float, seed: int, *, group: str | None = None, columns: Sequence[str] = ()
) -> tuple[Examples, Examples]:
    """Part the training examples into (clients', server's): for pre-training or distillation on the server.

    As ``split_validation``, with a draw of its own at the address (seed, "hold-out").
    """
    return _part(train, fraction, (seed, "hold-out"), group, columns)


def balanced_subset(labels: np.ndarray, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Choose ``limit`` positions with equally many of each class as far as the classes go round, in ascending order."""
    if limit <= 0 or limit >= len(labels):
        return np.arange(len(labels))
    order = rng.permutation(len(labels))
    rank = np.empty(len(labels), dtype=np.int64)  # how many of its class come before it in the random order
    for value in np.unique(labels):
        members = order[labels[order] == value]
        rank[members] = np.arange(len(members))
    by_rank = order[np.argsort(rank[order], kind="stable")]
    return np.sort(by_rank[:limit])
