"""Readers of canonical files, on small files of the same format and on the real ones where they are."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from fedbayes.data import check, load, load_source
from fedbayes.data.cifar import read_batch
from fedbayes.data.idx import read_idx
from fedbayes.data.mat5 import read_mat5
from fedbayes.errors import DataError
from fedbayes.experiment import Data

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the folder of real data is not beside the repository")
RNG = np.random.default_rng(0)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def mnist_like(tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = {}
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for prefix, n in (("train", 30), ("t10k", 12)):
        arrays[prefix] = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"{prefix}-labels"] = (np.arange(n) % 10).astype(np.uint8)
        folder = tmp_path / "MNIST" / "raw"
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(arrays[prefix]))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(arrays[f"{prefix}-labels"])))
    return tmp_path, arrays


def test_idx_in_torchvisions_layout_compressed_or_not(mnist_like):
    root, arrays = mnist_like
    dataset = load_source("mnist", data_dir=root)
    assert np.array_equal(dataset.train.inputs[:, 0].numpy(), arrays["train"])
    assert np.array_equal(dataset.test.labels.numpy(), arrays["t10k-labels"])
    assert dataset.train.inputs.dtype == torch.uint8
    assert dataset.train.labels.dtype == torch.int64


def test_the_environment_names_the_folder(mnist_like, monkeypatch):
    monkeypatch.setenv("FEDBAYES_DATA", str(mnist_like[0]))
    assert len(load(Data(name="mnist"), seed=0).train) == 30


def test_a_missing_file_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"'mnist' needs mnist/t10k-images-idx3-ubyte\.gz.*fedbayes data fetch mnist"):
        load(Data(name="mnist"), data_dir=tmp_path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda b: b[:-3], "announces"),
        (lambda b: b"\0\0\x0d" + b[3:], "not an IDX file"),
        (lambda b: b"", "not an IDX file"),
        (lambda b: gzip.compress(b)[:-20], "is damaged"),
        (lambda b: b[:6], "announces"),
    ],
)
def test_damaged_idx_files(tmp_path, damage, sentence):
    path = tmp_path / "x"
    path.write_bytes(damage(idx_bytes(np.zeros((4, 2), np.uint8))))
    with pytest.raises(DataError, match=sentence):
        read_idx(path)


def cifar_batch(n: int, key: bytes, classes: int, **extra) -> tuple[bytes, np.ndarray, list[int]]:
    data = RNG.integers(0, 256, (n, 3072), dtype=np.uint8)
    labels = [int(v) for v in RNG.integers(0, classes, n)]
    return (
        pickle.dumps({key: labels, b"data": data, **{k.encode(): v for k, v in extra.items()}}, protocol=2),
        data,
        labels,
    )


def cifar10_files() -> tuple[dict[str, bytes], np.ndarray]:
    files, first = {}, np.empty(0)
    for name in ["test_batch", *(f"data_batch_{i}" for i in range(1, 6))]:
        files[name], data, _ = cifar_batch(4, b"labels", 10)
        first = data if name == "data_batch_1" else first
    files["batches.meta"] = pickle.dumps({b"label_names": [f"class {i}".encode() for i in range(10)]}, protocol=2)
    return files, first


def test_cifar10_unpacked_and_packed_are_the_same(tmp_path):
    files, first = cifar10_files()
    folder = tmp_path / "a" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, blob in files.items():
        (folder / name).write_bytes(blob)
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b" / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, blob in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(blob)
            archive.addfile(info, io.BytesIO(blob))
    one, other = (load_source("cifar10", data_dir=tmp_path / d) for d in "ab")
    assert torch.equal(one.train.inputs, other.train.inputs)
    assert torch.equal(one.test.labels, other.test.labels)
    assert np.array_equal(one.train.inputs[:4].numpy(), first.reshape(4, 3, 32, 32))
    assert one.classes[3] == "class 3"
    assert len(load_source("cifar10", data_dir=tmp_path / "b", test_only=True).train) == 0
    blob = (tmp_path / "b" / "cifar-10-python.tar.gz").read_bytes()
    (tmp_path / "b" / "cifar-10-python.tar.gz").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(DataError, match="is damaged"):
        load_source("cifar10", data_dir=tmp_path / "b")


def test_cifar100_keeps_the_coarse_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).write_bytes(cifar_batch(6, b"fine_labels", 100, coarse_labels=[1, 2, 3, 4, 5, 6])[0])
    (folder / "meta").write_bytes(
        pickle.dumps({b"fine_label_names": [f"c{i}".encode() for i in range(100)]}, protocol=2)
    )
    dataset = load_source("cifar100", data_dir=tmp_path)
    assert len(dataset.classes) == 100
    assert dataset.train.columns["coarse"].tolist() == [1, 2, 3, 4, 5, 6]


class _Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code was run')",))


def test_a_pickle_with_code_is_refused_and_not_run():
    blob = pickle.dumps({b"data": _Evil(), b"labels": [0]}, protocol=2)
    with pytest.raises(DataError, match=r"asks for (__builtin__|builtins)\.exec"):
        read_batch(blob, "batch")
    with pytest.raises(DataError, match="is damaged"):
        read_batch(b"\x80\x02garbage", "batch")


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_of_every_pickle_protocol_are_read(protocol):
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = read_batch(pickle.dumps({"data": array, "labels": [1, 2, 3]}, protocol=protocol), "batch")
    assert np.array_equal(content[b"data"], array)


@pytest.mark.parametrize("compressed", [False, True])
def test_mat5_agrees_with_scipy(tmp_path, compressed):
    arrays = {
        "X": RNG.integers(0, 256, (4, 5, 3, 7), dtype=np.uint8),
        "y": np.array([[1], [10], [3]], dtype=np.uint8),
        "small": np.array([[1.0, 2.0]]),
        "wide": RNG.normal(size=(3, 4)).astype(np.float32),
        "ints": RNG.integers(-5000, 5000, (2, 3, 2), dtype=np.int16),
        "one": np.array([[7]], dtype=np.int8),
    }
    others = {"text": "words", "complex": np.array([[1 + 2j]]), "cell": np.array([1, "a"], dtype=object)}
    scipy.io.savemat(tmp_path / "f.mat", {**arrays, **others}, do_compression=compressed)
    oracle = scipy.io.loadmat(tmp_path / "f.mat")
    found = read_mat5(tmp_path / "f.mat")
    assert found.keys() == arrays.keys()
    for name in arrays:
        assert np.array_equal(found[name], oracle[name])
        assert found[name].dtype.itemsize == oracle[name].dtype.itemsize


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_mat5(tmp_path, compressed):
    path = tmp_path / "f.mat"
    scipy.io.savemat(path, {"X": np.arange(999)}, do_compression=compressed)
    blob = path.read_bytes()
    path.write_bytes(blob[:-40])
    with pytest.raises(DataError, match="is damaged"):
        read_mat5(path)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(500))
    with pytest.raises(DataError, match="not a MATLAB 5 file"):
        read_mat5(path)


def test_svhn_from_mat_files(tmp_path):
    (tmp_path / "svhn").mkdir()
    for name, n in (("train", 9), ("test", 5)):
        x = RNG.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
        y = np.arange(1, n + 1, dtype=np.float64)[:, None]
        y[-1] = 10
        scipy.io.savemat(tmp_path / "svhn" / f"{name}_32x32.mat", {"X": x, "y": y}, do_compression=True)
    dataset = load_source("svhn", data_dir=tmp_path)
    assert dataset.test.labels.tolist() == [1, 2, 3, 4, 0]
    assert np.array_equal(dataset.test.inputs[2, 1].numpy(), x[:, :, 1, 2])


def test_svhn_packed_test_part_serves_for_ood_only(tmp_path):
    np.savez(
        tmp_path / "svhn-test.npz", images=RNG.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8), labels=np.arange(6)
    )
    dataset = load(Data(name="digits", ood="svhn", limit=20, test_limit=20), data_dir=tmp_path)
    assert dataset.ood["svhn"].inputs.shape == (6, 1, 8, 8)
    with pytest.raises(DataError, match=r"svhn/train_32x32\.mat"):
        load(Data(name="svhn"), data_dir=tmp_path)


@needs_shared
def test_real_mnist_and_fashion_mnist():
    for name, first in (("mnist", [5, 0, 4, 1, 9]), ("fashion-mnist", [9, 0, 0, 3, 0])):
        dataset = load_source(name, data_dir=SHARED)
        assert dataset.train.inputs.shape == (60000, 1, 28, 28)
        assert len(dataset.test) == 10000
        assert dataset.train.labels[:5].tolist() == first
        assert all(row.sound for row in check(name, SHARED))


@needs_shared
def test_real_sonar_rocks():
    dataset = load_source("sonar-rocks", data_dir=SHARED)
    labels = torch.cat([dataset.train.labels, dataset.test.labels])
    assert labels.bincount().tolist() == [97, 111]
    assert dataset.train.inputs.shape[1:] == (60,)
