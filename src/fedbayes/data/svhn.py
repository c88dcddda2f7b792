"""SVHN, street-view house numbers, from its canonical cropped MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..errors import DataError
from .arrays import read_npz
from .examples import Dataset, Examples
from .files import find, need
from .mat5 import read_mat5
from .sources import Remote, Request, register_source

_BASE = "http://ufldl.stanford.edu/housenumbers/"
_NPZ = ("svhn-test.npz", "svhn/svhn-test.npz")


def _mat(path: Path) -> Examples:
    arrays = read_mat5(path)
    if "X" not in arrays or "y" not in arrays:
        raise DataError(f"{path} is not a cropped SVHN file: it lacks X or y.")
    images = np.ascontiguousarray(arrays["X"].transpose(3, 2, 0, 1), dtype=np.uint8)
    labels = arrays["y"].reshape(-1).astype(np.int64) % 10  # the publisher calls the digit 0 "10"
    return Examples(torch.from_numpy(images), torch.from_numpy(labels))


def _test(request: Request) -> Examples:
    packed = find(request.data_dir, _NPZ)
    if packed is None or find(request.data_dir, ("svhn/test_32x32.mat", "test_32x32.mat")) is not None:
        return _mat(need(request.data_dir, "svhn", ("svhn/test_32x32.mat", "test_32x32.mat")))
    arrays = read_npz(packed)
    if not {"images", "labels"} <= arrays.keys() or arrays["images"].shape[1:] != (3, 32, 32):
        raise DataError(f"{packed} should hold 'images' (N, 3, 32, 32) and 'labels'.")
    return Examples(
        torch.from_numpy(arrays["images"].astype(np.uint8)), torch.from_numpy(arrays["labels"].astype(np.int64))
    )


def _remote(name: str, size: int, checksum: str) -> Remote:
    return Remote(f"svhn/{name}", (_BASE + name,), size, checksum, also=(name,))


@register_source(
    "svhn",
    summary="house numbers from the street, 32x32 colour",
    examples="73,257 + 26,032",
    classes=10,
    licence="non-commercial use",
    files=(
        _remote("train_32x32.mat", 182040794, "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
        _remote("test_32x32.mat", 64275384, "md5:eb5a983be6a315427106f1b164d9cef3"),
    ),
    partial=_NPZ,
)
def svhn(request: Request) -> Dataset:
    """Load SVHN from ``train_32x32.mat`` and ``test_32x32.mat`` (for OOD use also from a ``svhn-test.npz``)."""
    test = _test(request)
    train = (
        test.take([])
        if request.test_only
        else _mat(need(request.data_dir, "svhn", ("svhn/train_32x32.mat", "train_32x32.mat")))
    )
    return Dataset("svhn", train, test, tuple("0123456789"), notes="SVHN, cropped digits (Y. Netzer et al., 2011).")
