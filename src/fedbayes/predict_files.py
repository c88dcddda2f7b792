"""The command ``fedbayes predict``: inputs from files, answers as CSV or JSON lines."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from . import uncertainty
from .data.arrays import as_labels, read_numpy
from .data.sonar.recordings import Skipped
from .errors import ConfigError, DataError
from .overrides import Parser
from .predict_sound import hears, sound_files
from .predictor import Prediction, Predictor, check_rejection, interval, load

INPUT_KEYS = ("inputs", "images", "x", "X", "x_test", "data")
LABEL_KEYS = ("labels", "y", "y_test", "targets")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
VALUES = ("confidence", "entropy", "aleatoric", "epistemic", "mutual_information")


@dataclass(frozen=True)
class Batch:
    """Inputs read from a file or folder: their names, values, and labels where the file has them.

    Of recordings: the segments that each one's answer is made of, and the files that could not be used.
    """

    names: Sequence[str]
    values: np.ndarray | None = None
    labels: np.ndarray | None = None
    segments: np.ndarray | None = None
    skipped: Sequence[Skipped] = ()


def read_inputs(path: str | Path, shape: tuple[int, ...]) -> Batch:
    """Read inputs from an ``.npz`` or ``.npy`` file, one image, or a folder of images (in order of their names)."""
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"{path} is not there; give an .npz or .npy file, an image, a recording, or a folder of images or recordings."
        )
    if path.is_dir():
        files = _pictures(path)
        if not files:
            raise DataError(f"{path} holds no image ({', '.join(PICTURES[:4])} ...) and no recording.")
        return Batch([str(f.relative_to(path)) for f in files], np.stack([read_image(f, shape) for f in files]))
    if path.suffix.lower() in (".npz", ".npy"):
        return _read_arrays(path)
    if path.suffix.lower() in PICTURES:
        return Batch([path.name], read_image(path, shape)[None])
    raise DataError(f"{path}: a file named *{path.suffix} is not understood; .npz, .npy, images and recordings are.")


def _pictures(folder: Path) -> list[Path]:
    """Return the images at any depth of a folder; what begins with a point is none (macOS: ._a.png)."""
    return sorted(f for f in folder.rglob("*") if f.suffix.lower() in PICTURES and f.name[0] != ".")


def _read_arrays(path: Path) -> Batch:
    found = read_numpy(path)
    arrays = {"inputs": found} if isinstance(found, np.ndarray) else found
    key = next((k for k in INPUT_KEYS if k in arrays), None)
    others = [k for k in arrays if k not in LABEL_KEYS]
    if key is None and len(others) == 1:
        key = others[0]
    if key is None:
        raise DataError(
            f"{path} holds {', '.join(arrays) or 'nothing'}; the inputs must be called 'inputs' or 'images'."
        )
    values = arrays[key]
    if values.ndim == 0:
        raise DataError(f"{path}: '{key}' is a single value, not an array of inputs.")
    labels = next((arrays[k] for k in LABEL_KEYS if k in arrays), None)
    if labels is not None and labels.shape[:1] != values.shape[:1]:
        raise DataError(
            f"{path}: {len(values)} inputs and labels of shape {labels.shape}; one label per input is needed."
        )
    return Batch([str(i) for i in range(len(values))], values, labels)


def read_image(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read one image as (C, H, W) bytes, in grey or colour as the network takes it; its size must be the network's."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError(
            "reading image files needs Pillow: pip install pillow brings it (or give the images as an .npz file)."
        ) from None
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(f"the network takes inputs of shape {shape}, not images; give them as an .npz file.")
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):  # Pillow clips them at 255
                raise DataError(f"{file} is a 16-bit or float image; save it with 8 bits.")
            pixels = np.asarray(image.convert("L" if shape[0] == 1 else "RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{file} is no image that can be read ({error}).") from None
    if pixels.shape[:2] != shape[1:]:
        raise DataError(
            f"{file} is {pixels.shape[1]} x {pixels.shape[0]} pixels; the network takes {shape[2]} x {shape[1]}."
        )
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def rows(batch: Batch, found: Prediction, rejected: torch.Tensor | None) -> Iterator[dict[str, Any]]:
    """Yield one dictionary per input: its name, class, uncertainties, whether it is for a human, probabilities."""
    values = {name: getattr(found, name).tolist() for name in VALUES}
    codes = class_numbers(batch.labels, found.classes)
    for i, (name, answer, p) in enumerate(zip(batch.names, found.names, found.probabilities.tolist())):
        row: dict[str, Any] = {"input": name, "class": answer} | {k: v[i] for k, v in values.items()}
        if batch.segments is not None:
            row["segments"] = int(batch.segments[i])
        if rejected is not None:
            row["reject"] = bool(rejected[i])
        if batch.labels is not None:
            row["label"] = found.classes[codes[i]] if codes[i] >= 0 else str(batch.labels[i])
        yield row | {"probabilities": dict(zip(found.classes, p))}


def class_numbers(labels: np.ndarray | None, classes: Sequence[str]) -> np.ndarray:
    """Return the class of each label in any form that training accepts, -1 where it is none."""
    if labels is None:
        return np.empty(0, dtype=np.int64)
    try:
        y = as_labels(labels, "labels")
    except DataError:  # fractions, say: the answers do not need them
        return np.full(len(labels), -1)
    if y.dtype.kind == "U":
        number = {name: i for i, name in enumerate(classes)}
        return np.array([number.get(name, -1) for name in y.tolist()])
    return np.where((y >= 0) & (y < len(classes)), y, -1)


def write_csv(table: Iterator[dict[str, Any]], out: TextIO) -> None:
    """Write rows as CSV: one column per class (``p_NAME``) after the others."""
    writer = None
    for row in table:
        flat = {k: _text(v) for k, v in row.items() if k != "probabilities"}
        flat |= {f"p_{name}": _text(p) for name, p in row["probabilities"].items()}
        if writer is None:
            writer = csv.DictWriter(out, flat, lineterminator="\n")
            writer.writeheader()
        writer.writerow(flat)


def write_jsonl(table: Iterator[dict[str, Any]], out: TextIO) -> None:
    """Write rows as JSON, one line each."""
    for row in table:
        out.write(json.dumps(row) + "\n")


WRITERS = {"csv": write_csv, "jsonl": write_jsonl}


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def command(arguments: Sequence[str]) -> int:
    """Run ``fedbayes predict``; the answers go to standard output or ``--output``, remarks to standard error."""
    p = Parser(
        prog="fedbayes predict", allow_abbrev=False,
        description="Predict with a run's posterior and say how sure: class, probabilities, entropy, aleatoric and epistemic uncertainty per input.",
    )  # fmt: skip
    p.add_argument("run", help="run directory")
    p.add_argument(
        "--input",
        required=True,
        help=".npz or .npy file, image, recording, or folder of images or recordings: raw, as before training",
    )
    p.add_argument("--output", help="file to write (default: standard output)")
    p.add_argument("--format", choices=list(WRITERS), help="csv or jsonl (default: by the output's ending, else csv)")
    p.add_argument("--reject", type=float, help="mark this share of least sure inputs for a human")
    p.add_argument(
        "--by", default="entropy", help="uncertainty to reject by: entropy, aleatoric, epistemic, mutual_information"
    )
    p.add_argument(
        "--model", choices=["best", "final"], default="best", help="posterior of the best round, or the final one"
    )
    p.add_argument("--samples", type=int, help="networks drawn (default: as in the run's evaluation)")
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    p.add_argument("--seed", type=int, default=0, help="seed of the draws")
    o = p.parse_args(list(arguments))
    if o.reject is not None and not 0 <= o.reject < 1:
        raise ConfigError(f"--reject is {o.reject:g}; it must be a share: at least 0 and below 1.")
    check_rejection(o.reject or 0, o.by)
    if o.output and Path(o.output).exists() and Path(o.output).resolve() == Path(o.input).resolve():
        raise ConfigError(f"--output is {o.output}, the input itself; name another file for the answers.")
    predictor = load(o.run, o.model, o.device)
    if sound_files(Path(o.input)) and (hears(predictor) or not _pictures(Path(o.input))):
        heard = predictor.listen(o.input, o.samples, o.seed)
        batch, found = Batch(heard.names, segments=heard.segments, skipped=heard.skipped), heard.prediction
    else:
        batch = read_inputs(o.input, predictor.input_shape)
        found = predictor(batch.values, o.samples, seed=o.seed)
    rejected = found.rejected(o.reject, o.by) if o.reject is not None else None
    chosen = o.format or ("jsonl" if str(o.output or "").endswith((".jsonl", ".json", ".ndjson")) else "csv")
    said = list(remarks(predictor, batch, found, rejected, o.reject, o.by))  # may fail, so before anything is written
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(o.output, "w", newline="", encoding="utf-8")) if o.output else sys.stdout
        WRITERS[chosen](rows(batch, found, rejected), out)
    for line in said:
        print(line, file=sys.stderr)
    return 0


def _tied(scores: torch.Tensor, rejected: torch.Tensor) -> int:
    """Count the inputs of which some are marked and some not, though they are equally unsure (all, in a point model)."""
    if not rejected.any() or rejected.all() or scores[rejected].min() > scores[~rejected].max():
        return 0
    return int((scores == scores[rejected].min()).sum())


def remarks(
    predictor: Predictor, batch: Batch, found: Prediction, rejected: torch.Tensor | None, share: float | None, by: str
) -> Iterator[str]:
    """Yield what is to be said beside the answers: how many are for a human, and the accuracy to expect on the rest."""
    for left in batch.skipped:
        yield f"Left out: {left}."
    codes = torch.as_tensor(class_numbers(batch.labels, found.classes))
    known = codes >= 0
    right = found.prediction == codes if bool(known.any()) else None
    if not bool(known.all()):
        yield f"{int((~known).sum())} of {len(found)} labels are none of the run's classes and are left out."
    if right is not None:
        yield f"{len(found)} inputs, {float(right[known].double().mean()) * 100:.1f} % right by the file's own labels."
    if rejected is None or share is None:
        return
    yield f"{int(rejected.sum())} of {len(found)} inputs are marked for a human, the least sure by {by.replace('_', ' ')}."
    scores = uncertainty.ranking_scores({name: getattr(found, name) for name in uncertainty.UNCERTAINTIES})
    if tied := _tied(scores[by], rejected):
        yield f"But {tied} inputs are equally unsure by that: of these the later ones are marked, which says nothing of them."
    if right is not None and bool((kept := known & ~rejected).any()):
        yield f"On the rest {float(right[kept].double().mean()) * 100:.1f} % are right by the file's own labels."
    expected = predictor.expected_accuracy(share, by)
    if expected is None:
        yield "The run kept no validation set, so no accuracy to expect on the rest can be given."
    else:
        accuracy, _, count = expected
        low, high = interval(accuracy, count)
        what = "segments, each judged by itself" if batch.segments is not None else "examples"
        yield (
            f"Accuracy to expect on the rest: {accuracy * 100:.1f} % (95 % interval {low * 100:.1f} to {high * 100:.1f}; "
            f"from {count} validation {what}, for inputs like those it was trained on)."
        )
