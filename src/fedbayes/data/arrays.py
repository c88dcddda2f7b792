"""The user's own arrays: from Python (``from_arrays``) or from an ``.npz`` file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, nearest
from ..numeric import as_numbers
from ..seeds import numpy_rng
from .examples import Dataset, Examples, as_text, is_missing
from .sources import Request, register_source
from .splits import group_of, stratified_order

Array = np.ndarray | Tensor | Sequence

KEYS = {
    "inputs": ("inputs", "train_inputs", "x_train", "train_x", "train_images", "images", "x", "data"),
    "labels": ("labels", "train_labels", "y_train", "train_y", "targets", "y"),
    "test_inputs": ("test_inputs", "x_test", "test_x", "test_images"),
    "test_labels": ("test_labels", "y_test", "test_y", "test_targets"),
    "classes": ("classes", "class_names", "label_names"),
}
"""Accepted spellings in an ``.npz`` file (upper or lower case), the documented one first."""

TEST_SHARE = 0.2


def from_arrays(
    inputs: Array,
    labels: Array,
    test_inputs: Array | None = None,
    test_labels: Array | None = None,
    *,
    classes: Sequence[str] | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    test_columns: Mapping[str, np.ndarray] | None = None,
    name: str = "arrays",
) -> Dataset:
    """Make a data set of your own arrays.

    ``inputs``: images (N, C, H, W), (N, H, W, C) or (N, H, W), kept as they are when 8-bit; tables (N, features);
    waveforms (N, channels, samples) with at most 4 channels. Anything but 8-bit images becomes float32. ``labels``:
    whole numbers from 0 (kept as they are, so that owners who lack a class agree with those who have it), names
    (numbered in alphabetical order, or in that of ``classes``), or one-hot rows. Without a test part a fifth is set aside, stratified, always the same
    (whole recordings, where there is a column ``recording``); ``dataset.notes`` says so.
    """
    x, y = as_inputs(inputs, f"{name}: inputs"), as_labels(labels, f"{name}: labels")
    if test_inputs is None or test_labels is None:
        if test_inputs is not None or test_labels is not None:
            raise DataError(f"{name}: test inputs and test labels belong together, but only one of them is given.")
        codes, names = _classes([y], classes, name)
        return _with_test_part(Examples(x, codes[0], columns or {}), names, name)
    tx, ty = as_inputs(test_inputs, f"{name}: test inputs"), as_labels(test_labels, f"{name}: test labels")
    if x.shape[1:] != tx.shape[1:] or x.dtype != tx.dtype:
        raise DataError(
            f"{name}: training inputs are {x.dtype} of shape {tuple(x.shape[1:])} and test inputs {tx.dtype} of shape "
            f"{tuple(tx.shape[1:])}; they must be alike."
        )
    codes, names = _classes([y, ty], classes, name)
    return Dataset(name, Examples(x, codes[0], columns or {}), Examples(tx, codes[1], test_columns or {}), names)


def _with_test_part(everything: Examples, classes: tuple[str, ...], name: str) -> Dataset:
    """Set a fifth aside for testing: always the same, stratified, recordings kept whole."""
    groups = group_of(everything)
    units = np.arange(len(everything)) if groups is None else groups
    first = np.unique(units, return_index=True)[1]
    order = stratified_order(everything.labels.numpy()[first], numpy_rng("arrays", "test split"))
    chosen = order[: max(1, round(TEST_SHARE * len(order)))]
    if len(chosen) >= len(order):
        raise DataError(f"{name}: {len(order)} example(s) are too few to set some aside for testing.")
    test = np.isin(units, chosen)
    notes = f"No test part given: {test.sum()} of {len(test)} examples were set aside for testing, stratified by class."
    return Dataset(
        name, everything.take(np.flatnonzero(~test)), everything.take(np.flatnonzero(test)), classes, notes=notes
    )


def as_inputs(array: Array, what: str) -> Tensor:
    """Bring inputs to the house's form: uint8 images (N, C, H, W), or float32 with channels (or features) second."""
    x = as_numbers(array, what, DataError)
    if x.ndim < 2 or x.ndim > 4 or 0 in x.shape[1:]:
        raise DataError(
            f"{what}: shape {tuple(x.shape)} is not one of (N, features), (N, channels, samples), (N, H, W), "
            "(N, C, H, W), (N, H, W, C)."
        )
    if x.dtype != torch.uint8 or x.ndim == 2:
        x = as_float(x, what)
    if x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]:
        x = x.permute(0, 3, 1, 2)
    if x.ndim == 3 and (x.dtype == torch.uint8 or x.shape[1] > 4):
        x = x[:, None]
    return x.contiguous()


def as_float(x: Tensor, what: str) -> Tensor:
    """Return inputs as float32, or say which of them are no real numbers of its range."""
    if x.is_complex():
        raise DataError(f"{what}: complex numbers; give magnitudes, or real and imaginary parts as channels.")
    single = x.float()
    bad = torch.nonzero(~torch.isfinite(single).flatten(1).all(1)).flatten()
    if len(bad):
        first = int(bad[0])
        words = "numbers beyond 3.4e38, float32's largest" if bool(x[first].isfinite().all()) else "NaN or infinity"
        raise DataError(f"{what}: {len(bad)} example(s) hold {words}, the first at position {first}.")
    return single


def as_labels(array: Array, what: str) -> np.ndarray:
    """Return one label per example: whole numbers or names; one-hot rows become numbers."""
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = array.float() if array.dtype == torch.bfloat16 else array  # NumPy has no bfloat16
    try:
        y = as_text(np.asarray(array), what)
    except ValueError:
        raise DataError(f"{what}: a nested list of unequal rows is not one label per example.") from None
    if y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "biuf" and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        y = y.argmax(1)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(f"{what}: shape {y.shape} is not one label per example.")
    absent = next((i for i, label in enumerate(y) if is_missing(label)), None) if y.dtype.kind in "Of" else None
    if absent is not None:
        raise DataError(f"{what}: the label at position {absent} is missing; leave out examples without one.")
    if y.dtype.kind == "f":
        if not (np.isfinite(y).all() and (y == np.round(y)).all()):
            raise DataError(f"{what}: classes must be whole numbers or names, not fractions.")
        y = y.astype(np.int64)
    if y.dtype.kind not in "iubU":
        raise DataError(f"{what}: {y.dtype} cannot be class labels; give whole numbers or names.")
    return y if y.dtype.kind == "U" else y.astype(np.int64)


def _classes(parts: list[np.ndarray], given: Sequence[str] | None, name: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Number the classes 0, 1, ... and name them."""
    if len({part.dtype.kind == "U" for part in parts}) > 1:
        raise DataError(f"{name}: training labels and test labels are not of one kind (numbers or names).")
    values = np.unique(np.concatenate(parts))
    if given is None and values.dtype.kind == "U":
        if len(values) < 2:
            raise DataError(
                f"{name}: the labels have {len(values)} distinct value(s); at least two classes are needed."
            )
        return [torch.from_numpy(np.searchsorted(values, p).astype(np.int64)) for p in parts], tuple(map(str, values))
    if given is None:
        # Numbers are kept as they are, never closed up: the owners of a federation may each lack another class.
        given = [str(c) for c in range(_count(values, name))]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DataError(f"{name}: classes is {given!r}; give a list of names.")
    names = tuple(str(c) for c in given)
    if twice := next((c for i, c in enumerate(names) if c in names[:i]), None):
        raise DataError(f"{name}: two classes are called '{twice}'; each needs a name of its own.")
    if values.dtype.kind == "U":
        unknown = [v for v in values if v not in names]
        if unknown:
            raise DataError(
                f"{name}: the label '{unknown[0]}' is not among the classes; {nearest(str(unknown[0]), names)}"
            )
        number = {c: i for i, c in enumerate(names)}
        return [torch.tensor([number[v] for v in p], dtype=torch.int64) for p in parts], names
    if values.size and (values[0] < 0 or values[-1] >= len(names)):
        raise DataError(f"{name}: labels run from {values[0]} to {values[-1]}, but {len(names)} classes are named.")
    return [torch.from_numpy(p) for p in parts], names


def _count(values: np.ndarray, name: str) -> int:
    """Return how many classes numbered labels stand for: the largest and one more."""
    if len(values) < 2 or values[0] < 0 or values[-1] > max(1000, 10 * len(values)):
        raise DataError(
            f"{name}: the labels have {len(values)} distinct value(s) from {values.min(initial=0)} to "
            f"{values.max(initial=0)}; number at least two classes 0, 1, 2, ..., or give names as labels."
        )
    return int(values[-1]) + 1


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read an ``.npz`` file's arrays by name."""
    found = read_numpy(path)
    if isinstance(found, np.ndarray):
        raise DataError(f"{path} holds one array without a name; numpy.savez(..., inputs=..., labels=...) names them.")
    return found


def read_numpy(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """Read the array of an ``.npy`` file or those of an ``.npz`` file, whatever it is called.

    Pickled objects are refused, since they could run code.
    """
    try:
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            return found if isinstance(found, np.ndarray) else {key: np.asarray(found[key]) for key in found.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except Exception as error:  # a damaged file fails wherever its reader stumbles: zlib, tokenize, memory, ...
        why = " ".join(str(error).split())
        if "Object arrays" in why:
            why = "it holds Python objects: save text as array.astype(str), numbers as array.astype(float)"
        raise DataError(f"{path} is not an .npz or .npy file of plain arrays ({why}).") from None


def _find(arrays: dict[str, np.ndarray], role: str, path: Path) -> np.ndarray | None:
    """Take the array that plays a role out of the file's arrays."""
    names = [key for key in arrays if key.lower() in KEYS[role]]
    if len(names) > 1:
        raise DataError(f"{path}: both '{names[0]}' and '{names[1]}' could be the {role}; keep one.")
    found = arrays.pop(names[0]) if names else None
    if found is not None and found.ndim == 0:
        raise DataError(f"{path}: '{names[0]}' is a single value, not an array.")
    return found


@register_source("npz", summary="your own arrays, by the path of an .npz file")
def npz(request: Request) -> Dataset:
    """Load the user's arrays; keys: inputs, labels, test_inputs, test_labels, classes, and columns.

    Any other array as long as the training part is a column of it; one called ``test_NAME`` is the test part's.
    When only inputs are there they serve as out-of-distribution or unlabelled inputs (``test_only``).
    """
    path = Path(request.name).expanduser()
    arrays = read_npz(path)
    found = {role: _find(arrays, role, path) for role in KEYS}
    inputs, labels = found["inputs"], found["labels"]
    if request.test_only and (found["test_inputs"] is not None or labels is None):
        return _inputs_only(
            found["test_inputs"] if found["test_inputs"] is not None else inputs, found["test_labels"], path
        )
    if inputs is None or labels is None:
        role, rest = ("inputs" if inputs is None else "labels"), ", ".join(arrays) or "nothing else"
        raise DataError(f"{path} has no {role}: it needs an array called '{role}' (it has, unused: {rest}).")
    test_columns = {k[5:]: v for k, v in arrays.items() if k.startswith("test_")}
    columns = {k: v for k, v in arrays.items() if not k.startswith("test_")}
    stray = [k for k, v in columns.items() if v.shape != (len(labels),)]
    if stray:
        raise DataError(
            f"{path}: '{stray[0]}' has shape {columns[stray[0]].shape}; a column needs one value for each of the {len(labels)} examples."
        )
    classes = found["classes"]
    return from_arrays(
        inputs,
        labels,
        found["test_inputs"],
        found["test_labels"],
        classes=None if classes is None else as_text(classes, f"{path}: classes").tolist(),
        columns=columns,
        test_columns=test_columns,
        name=path.stem,
    )


def npz_inputs(path: Path) -> Examples:
    """Return the training inputs of an .npz file (its test inputs where it has no others); labels are not needed or kept."""
    arrays = read_npz(path)
    found = {role: _find(arrays, role, path) for role in ("inputs", "test_inputs")}
    inputs = found["inputs"] if found["inputs"] is not None else found["test_inputs"]
    return _inputs_only(inputs, None, path).test


def _inputs_only(inputs: np.ndarray | None, labels: np.ndarray | None, path: Path) -> Dataset:
    if inputs is None:
        raise DataError(f"{path} has no inputs: it needs an array called 'inputs' or 'test_inputs'.")
    x = as_inputs(inputs, f"{path}: inputs")
    codes = (
        torch.full((len(x),), -1)
        if labels is None
        else _classes([as_labels(labels, f"{path}: labels")], None, str(path))[0][0]
    )
    test = Examples(x, codes)
    return Dataset(path.stem, test.take([]), test, ())
