"""MNIST and Fashion-MNIST from their canonical IDX files, compressed or not."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from ..errors import DataError
from .examples import Dataset, Examples
from .files import need
from .sources import Remote, Request, register_source


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes: two zero bytes, type 8, number of axes, sizes (big-endian), the bytes."""
    blob = path.read_bytes()
    try:
        blob = gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and fetch it again.") from None
    if len(blob) < 4 or blob[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an IDX file of bytes (it should begin with 00 00 08).")
    axes = blob[3]
    shape = tuple(int(n) for n in np.frombuffer(blob, ">u4", count=axes, offset=4)) if len(blob) >= 4 + 4 * axes else ()
    wanted = 4 + 4 * axes + int(np.prod(shape, dtype=np.int64))
    if len(shape) != axes or len(blob) != wanted:
        raise DataError(f"{path} is damaged: {len(blob):,} bytes where its header announces {wanted:,}.")
    return np.frombuffer(blob, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _candidates(folders: tuple[str, ...], name: str) -> tuple[list[str], list[str]]:
    """Every place where a file is found in practice (here, torchvision's, older spelling): compressed, and plain."""
    plain = [f"{folder}/{spelling}" for folder in folders for spelling in (name, name.replace("-idx", ".idx"))]
    return [f"{path}.gz" for path in plain], plain


def _anywhere(folders: tuple[str, ...], name: str) -> list[str]:
    packed, plain = _candidates(folders, name)
    return [*packed, *plain]


def _read(request: Request, folders: tuple[str, ...], classes: tuple[str, ...], notes: str) -> Dataset:
    def part(prefix: str) -> Examples:
        image_file = need(request.data_dir, request.name, _anywhere(folders, f"{prefix}-images-idx3-ubyte"))
        label_file = need(request.data_dir, request.name, _anywhere(folders, f"{prefix}-labels-idx1-ubyte"))
        images, labels = read_idx(image_file), read_idx(label_file)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(
                f"{image_file} and {label_file} do not fit together: shapes {images.shape} and {labels.shape}."
            )
        if labels.max(initial=0) >= len(classes):
            raise DataError(
                f"{label_file} has a label {labels.max()}, but '{request.name}' has {len(classes)} classes."
            )
        return Examples(torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64)))

    test = part("t10k")
    return Dataset(request.name, test.take([]) if request.test_only else part("train"), test, classes, notes=notes)


_MNIST_FOLDERS = ("mnist", "MNIST/raw")
_FASHION_FOLDERS = ("fashion-mnist", "FashionMNIST/raw")


def _remotes(
    folders: tuple[str, ...], bases: tuple[str, ...], facts: tuple[tuple[str, int, str], ...]
) -> tuple[Remote, ...]:
    remotes = []
    for name, size, digest in facts:
        packed, plain = _candidates(folders, name)
        urls = tuple(f"{base}{name}.gz" for base in bases)
        remotes.append(Remote(packed[0], urls, size, f"sha256:{digest}", also=tuple(packed[1:]), forms=tuple(plain)))
    return tuple(remotes)


_MNIST = _remotes(
    _MNIST_FOLDERS,
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    (
        ("train-images-idx3-ubyte", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)
_FASHION = _remotes(
    _FASHION_FOLDERS,
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    (
        ("train-images-idx3-ubyte", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
)


@register_source(
    "mnist",
    summary="handwritten digits, 28x28 grey",
    examples="60,000 + 10,000",
    classes=10,
    licence="CC BY-SA 3.0",
    files=_MNIST,
)
def mnist(request: Request) -> Dataset:
    """Load MNIST from ``mnist/`` or torchvision's ``MNIST/raw/``."""
    return _read(request, _MNIST_FOLDERS, tuple("0123456789"), "MNIST (Y. LeCun, C. Cortes, C. Burges).")


@register_source(
    "fashion-mnist",
    summary="photographs of clothes, 28x28 grey",
    examples="60,000 + 10,000",
    classes=10,
    licence="MIT",
    files=_FASHION,
)
def fashion_mnist(request: Request) -> Dataset:
    """Load Fashion-MNIST from ``fashion-mnist/`` or torchvision's ``FashionMNIST/raw/``."""
    classes = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    return _read(
        request,
        _FASHION_FOLDERS,
        classes,
        "Fashion-MNIST (H. Xiao, K. Rasul, R. Vollgraf, Zalando, 2017).",
    )
