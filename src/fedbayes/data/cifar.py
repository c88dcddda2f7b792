"""CIFAR-10 and CIFAR-100 from their canonical Python batches, unpacked or in the tar.gz."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DataError
from .examples import Dataset, Examples
from .files import find, need
from .sources import Remote, Request, register_source

_ALLOWED = {
    (module, name)
    for core in ("numpy.core", "numpy._core")
    for module, name in ((f"{core}.multiarray", "_reconstruct"), (f"{core}.numeric", "_frombuffer"))
} | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
"""All that pickled arrays need; anything else in a pickle could run code and is refused."""


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which arrays do not need")


def read_batch(blob: bytes, where: str) -> dict[bytes, Any]:
    """Unpickle one batch: dictionaries, lists, numbers, strings and arrays; code is never run."""
    try:
        content = _ArrayUnpickler(io.BytesIO(blob), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{where} is not a CIFAR batch or is damaged ({error}).") from None
    if not isinstance(content, dict):
        raise DataError(f"{where} is not a CIFAR batch: it holds a {type(content).__name__}, not a dictionary.")
    return {k.encode() if isinstance(k, str) else k: v for k, v in content.items()}


def _members(request: Request, folder: str, archive: str, names: Iterable[str]) -> dict[str, dict[bytes, Any]]:
    """Read batches from the unpacked folder where it is, else from the archive."""
    names = list(names)
    unpacked = find(request.data_dir, (folder, f"{request.name}/{folder}"))
    if unpacked is not None:
        batches = {}
        for name in names:
            path = need(unpacked, request.name, (name,))
            batches[name] = read_batch(path.read_bytes(), str(path))
        return batches
    path = need(request.data_dir, request.name, (archive, f"{request.name}/{archive}"))
    return {name: read_batch(blob, f"{path}:{name}") for name, blob in _from_tar(path, folder, names).items()}


def _from_tar(path: Path, folder: str, names: list[str]) -> dict[str, bytes]:
    wanted = {f"{folder}/{name}": name for name in names}
    blobs: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                if member.name.removeprefix("./") in wanted and (file := archive.extractfile(member)) is not None:
                    blobs[wanted[member.name.removeprefix("./")]] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and fetch it again.") from None
    missing = [name for name in names if name not in blobs]
    if missing:
        raise DataError(f"{path} does not contain {folder}/{missing[0]}; it is not the canonical archive.")
    return blobs


def _examples(batches: list[dict[bytes, Any]], label_key: bytes, extra: dict[str, bytes], name: str) -> Examples:
    try:
        images = np.concatenate([np.asarray(b[b"data"], dtype=np.uint8) for b in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([np.asarray(b[label_key], dtype=np.int64) for b in batches])
        columns = {c: np.concatenate([np.asarray(b[key], dtype=np.int64) for b in batches]) for c, key in extra.items()}
    except (KeyError, ValueError) as error:
        raise DataError(f"a batch of '{name}' lacks its images or labels ({error}).") from None
    return Examples(torch.from_numpy(images), torch.from_numpy(labels), columns)


def _names(meta: dict[bytes, Any], key: bytes) -> tuple[str, ...]:
    return tuple(n.decode() if isinstance(n, bytes) else str(n) for n in meta[key])


def _addresses(name: str) -> tuple[str, ...]:
    return (f"https://www.cs.toronto.edu/~kriz/{name}", f"https://cave.cs.toronto.edu/kriz/{name}")


_LICENCE = "free for research"


@register_source(
    "cifar10",
    summary="photographs of 10 kinds of things, 32x32 colour",
    examples="50,000 + 10,000",
    classes=10,
    licence=_LICENCE,
    files=(
        Remote(
            "cifar-10-python.tar.gz",
            _addresses("cifar-10-python.tar.gz"),
            170498071,
            "md5:c58f30108f718f92721af3b95e74349a",
            also=("cifar10/cifar-10-python.tar.gz",),
        ),
    ),
    alternatives=("cifar-10-batches-py", "cifar10/cifar-10-batches-py"),
)
def cifar10(request: Request) -> Dataset:
    """Load CIFAR-10 from ``cifar-10-batches-py/`` or ``cifar-10-python.tar.gz``."""
    training = [] if request.test_only else [f"data_batch_{i}" for i in range(1, 6)]
    names = [*training, "test_batch", "batches.meta"]
    batches = _members(request, "cifar-10-batches-py", "cifar-10-python.tar.gz", names)
    test = _examples([batches["test_batch"]], b"labels", {}, "cifar10")
    train = _examples([batches[n] for n in training], b"labels", {}, "cifar10") if training else test.take([])
    classes = _names(batches["batches.meta"], b"label_names")
    return Dataset("cifar10", train, test, classes, notes="CIFAR-10 (A. Krizhevsky, 2009).")


@register_source(
    "cifar100",
    summary="photographs of 100 kinds of things, 32x32 colour",
    examples="50,000 + 10,000",
    classes=100,
    licence=_LICENCE,
    files=(
        Remote(
            "cifar-100-python.tar.gz",
            _addresses("cifar-100-python.tar.gz"),
            169001437,
            "md5:eb9058c3a382ffc7106e4002c42a8d85",
            also=("cifar100/cifar-100-python.tar.gz",),
        ),
    ),
    alternatives=("cifar-100-python", "cifar100/cifar-100-python"),
)
def cifar100(request: Request) -> Dataset:
    """Load CIFAR-100 (fine labels; the 20 coarse ones in the column ``coarse``)."""
    names = ["test", "meta"] if request.test_only else ["train", "test", "meta"]
    batches = _members(request, "cifar-100-python", "cifar-100-python.tar.gz", names)
    extra = {"coarse": b"coarse_labels"}
    test = _examples([batches["test"]], b"fine_labels", extra, "cifar100")
    train = test.take([]) if request.test_only else _examples([batches["train"]], b"fine_labels", extra, "cifar100")
    classes = _names(batches["meta"], b"fine_label_names")
    return Dataset("cifar100", train, test, classes, notes="CIFAR-100 (A. Krizhevsky, 2009).")
