"""A data folder of a few hundred real images in their canonical formats, made once a session."""

import gzip
import importlib.util
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TRAIN, TEST = 300, 100


def _idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes(), 1))


def _read_idx(path: Path, count: int) -> np.ndarray:
    with gzip.open(path) as f:
        _, _, dims = struct.unpack(">HBB", f.read(4))
        shape = struct.unpack(f">{dims}I", f.read(4 * dims))
        size = int(np.prod(shape[1:])) * count
        return np.frombuffer(f.read(size), np.uint8).reshape(count, *shape[1:])


def _shrink_mnist(name: str, out: Path) -> None:
    (out / name).mkdir()
    for split, count in (("train", TRAIN), ("t10k", TEST)):
        for what in ("images-idx3", "labels-idx1"):
            file = f"{split}-{what}-ubyte.gz"
            _idx(out / name / file, _read_idx(SHARED / name / file, count))


def _shrink_cifar(out: Path) -> None:
    """Write canonical batches made of the first images of the CIFAR-10 test part (the smallest to unpack)."""
    spec = importlib.util.spec_from_file_location("unpack", SHARED / "unpack.py")
    assert spec is not None
    assert spec.loader is not None
    unpack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unpack)
    images, labels = unpack.read(SHARED / "cifar10-test.mxz")
    flat, labels = np.asarray(images).reshape(len(labels), 3072), [int(x) for x in labels]
    folder = out / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for i, name in enumerate(names):
        part = slice(100 * i, 100 * (i + 1))
        batch = {b"data": flat[part].copy(), b"labels": labels[part], b"batch_label": name.encode()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    classes = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": classes, b"num_vis": 3072}, protocol=2))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    if not SHARED.exists():
        pytest.skip(f"real data are not there ({SHARED.name}/ beside the repository)")
    out = tmp_path_factory.mktemp("data")
    _shrink_mnist("mnist", out)
    _shrink_mnist("fashion-mnist", out)
    _shrink_cifar(out)
    return out
