"""``Examples`` and ``Dataset``: the two values every source gives and everything else takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError

GROUP_COLUMN = "recording"
"""Examples that share a value of this column were cut from one recording: they are never parted by any split."""

VESSEL_COLUMN = "vessel"
"""Recordings that share a value of this column are of one ship: training and what it is judged on never share it."""


def as_text(names: np.ndarray, what: str) -> np.ndarray:
    """Return an array with its names as text, whether they were bytes or Python's own strings (as pandas keeps them)."""
    try:
        if names.dtype.kind == "S":
            return np.char.decode(names, "utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{what}: the names are bytes that are not UTF-8; give them as text.") from None
    if names.dtype.kind in "OT" and all(isinstance(name, str) for name in names.flat):
        return names.astype(str)
    return names


def is_missing(value: object) -> bool:
    """Whether a value stands for none: None, NaN, or pandas' NA, which does not even compare with itself."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True


def _as_column(values: np.ndarray, what: str) -> np.ndarray:
    """Return one comparable value per example: numbers, or text in which a missing name is empty."""
    values = np.atleast_1d(values)
    if values.dtype.kind == "O":
        missing = [is_missing(v) for v in values.flat]
        if any(isinstance(v, str) for v in values.flat):
            values = np.where(np.reshape(missing, values.shape), "", values)
    values = as_text(values, what)
    if values.ndim != 1 or values.dtype.kind == "O":
        kinds = ", ".join(sorted({type(v).__name__ for v in values.flat}))
        found = f"shape {values.shape}" if values.ndim != 1 else f"values of the types {kinds}"
        raise DataError(f"{what} has {found}; it needs one number, or one text, for each example.")
    return values


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs with their labels, and what is known about each: the hospital, the recording, the site.

    ``inputs`` are uint8 images (N, C, H, W), or floats: tables (N, features), pictures (N, C, H, W) or
    waveforms (N, C, samples). ``labels`` are int64. ``columns`` holds one array of length N per name.
    """

    inputs: Tensor
    labels: Tensor
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping):
            raise DataError(f"columns are of type {type(self.columns).__name__}; give a dictionary of arrays by name.")
        object.__setattr__(self, "columns", {n: _as_column(v, f"column '{n}'") for n, v in self.columns.items()})
        lengths = {"inputs": len(self.inputs), "labels": len(self.labels)}
        lengths |= {f"column '{name}'": len(values) for name, values in self.columns.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} {n}" for name, n in lengths.items())
            raise DataError(
                f"examples disagree in number ({counts}); each input needs one label and one of every column."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray | Tensor | Sequence[int]) -> Examples:
        """Return the examples at these positions, in this order."""
        chosen = torch.as_tensor(np.asarray(indices) if not isinstance(indices, Tensor) else indices, dtype=torch.int64)
        host = chosen.cpu().numpy()
        chosen = chosen.to(self.inputs.device)
        return Examples(
            self.inputs[chosen], self.labels[chosen], {name: values[host] for name, values in self.columns.items()}
        )

    def to(self, device: torch.device | str) -> Examples:
        """Return the same examples with inputs and labels on another device (columns stay on the host)."""
        return Examples(self.inputs.to(device), self.labels.to(device), self.columns)


RESERVED = ("test", "validation")
"""Names of splits: no out-of-distribution set may have one, for it would take the split's place in the run directory."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A learning task: what is trained on, what is judged on, and what the classes are called.

    ``unlabelled`` holds inputs without usable labels (for a server that distils), ``ood`` named sets of
    out-of-distribution examples, and ``notes`` one or more sentences on where the data come from and what
    was done to them.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    unlabelled: Examples | None = None
    ood: Mapping[str, Examples] = field(default_factory=dict)
    notes: str = ""

    def __post_init__(self) -> None:
        for name in self.ood:
            if name in RESERVED or not name or "/" in name:
                raise DataError(
                    f"an out-of-distribution set cannot be called '{name}': a run's files are named after it, so it must not "
                    f"be {' or '.join(RESERVED)}, and hold no '/'."
                )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: (channels, height, width), (channels, samples) or (features,)."""
        return tuple(self.train.inputs.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data set with every tensor on another device."""
        return Dataset(
            self.name,
            self.train.to(device),
            self.test.to(device),
            self.classes,
            None if self.unlabelled is None else self.unlabelled.to(device),
            {name: examples.to(device) for name, examples in self.ood.items()},
            self.notes,
        )
