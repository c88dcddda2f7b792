"""``load``: limits, excluded classes, out-of-distribution sets, the embedded sets, and the user's own arrays."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedbayes.data import Examples, from_arrays, load, load_inputs, match
from fedbayes.data.arrays import read_numpy
from fedbayes.data.embedded.heart import FEATURES, read_heart
from fedbayes.data.loading import concatenate
from fedbayes.errors import DataError
from fedbayes.experiment import Data


def test_digits_are_the_uci_digits_split_once_and_for_all():
    a, b = load(Data(), seed=0), load(Data(), seed=1)
    assert torch.equal(a.train.inputs, b.train.inputs)
    assert (len(a.train), len(a.test), a.input_shape) == (1437, 360, (1, 8, 8))
    everything = concatenate([a.train, a.test])
    oracle = load_digits()
    key = [(int(y), x.tobytes()) for x, y in zip(everything.inputs.numpy(), everything.labels)]
    stretched = np.round(oracle.images * 255 / 16).astype(np.uint8)[:, None]
    assert sorted(key) == sorted((int(y), x.tobytes()) for x, y in zip(stretched, oracle.target))
    share = a.test.labels.bincount() / everything.labels.bincount()
    assert (share - 0.2).abs().max() < 0.01


def test_heart_is_four_hospitals_without_gaps():
    dataset = load(Data(name="heart"))
    assert (len(dataset.train), len(dataset.test)) == (736, 184)
    assert dataset.train.inputs.shape[1] == len(FEATURES) == len(set(FEATURES))
    assert torch.isfinite(dataset.train.inputs).all()
    _, diagnosis, hospitals = read_heart()
    both = concatenate([dataset.train, dataset.test])
    for name, n in (("cleveland", 303), ("hungarian", 294), ("switzerland", 123), ("va", 200)):
        assert (hospitals == name).sum() == (both.columns["hospital"] == name).sum() == n
        ill = (diagnosis[hospitals == name] > 0).mean()
        mine = dataset.test.labels.numpy()[dataset.test.columns["hospital"] == name]
        assert abs(mine.mean() - ill) < 0.03  # the test part is stratified within each hospital
        assert abs(len(mine) - n / 5) <= 1
    assert both.labels.sum() == (diagnosis > 0).sum() == 509


def test_hearts_gaps_are_filled_by_training_medians_and_flagged():
    dataset = load(Data(name="heart"))
    column = {name: i for i, name in enumerate(FEATURES)}
    for part in (dataset.train, dataset.test):
        x = part.inputs
        for name in ("chol", "ca", "oldpeak", "fbs"):
            gap = x[:, column[f"{name} missing"]] == 1
            known = dataset.train.inputs[:, column[name]][dataset.train.inputs[:, column[f"{name} missing"]] == 0]
            assert (x[gap, column[name]] == float(np.median(known.numpy()))).all()
        one_hot = x[:, [i for n, i in column.items() if n.startswith("thal=")]].sum(1)
        assert torch.equal(one_hot, 1 - x[:, column["thal missing"]])
        assert (x[:, column["chol"]] > 0).all()
    swiss = dataset.train.columns["hospital"] == "switzerland"
    assert dataset.train.inputs[torch.from_numpy(swiss), column["chol missing"]].all()
    # Fully recorded patients keep their numbers.
    features, _, _ = read_heart()
    ages = concatenate([dataset.train, dataset.test]).inputs[:, column["age"]].sort().values
    assert torch.equal(ages, torch.from_numpy(features[:, 0]).float().sort().values)


def test_limits_are_balanced_and_by_seed():
    a = load(Data(limit=100, test_limit=50), seed=1)
    assert a.train.labels.bincount().tolist() == [10] * 10
    assert a.test.labels.bincount().tolist() == [5] * 10
    b, c = load(Data(limit=100), seed=1), load(Data(limit=100), seed=2)
    assert torch.equal(a.train.inputs, b.train.inputs)
    assert not torch.equal(a.train.inputs, c.train.inputs)
    assert len(load(Data(limit=10**6)).train) == 1437
    with pytest.raises(DataError, match="limit of -1"):
        load(Data(limit=-1))


def test_excluded_classes_become_out_of_distribution():
    whole, cut = load(Data()), load(Data(exclude_classes=(3, 7)))
    assert cut.classes == ("0", "1", "2", "4", "5", "6", "8", "9")
    assert cut.train.labels.unique().tolist() == list(range(8))
    gone = cut.ood["excluded"]
    assert set(gone.labels.tolist()) == {3, 7}
    assert set(gone.columns["class"]) == {"3", "7"}
    assert len(cut.train) + len(cut.test) + len(gone) == 1797
    for c, name in enumerate(cut.classes):
        mine, theirs = cut.train.labels == c, whole.train.labels == int(name)
        assert torch.equal(cut.train.inputs[mine], whole.train.inputs[theirs])


@pytest.mark.parametrize(
    ("excluded", "sentence"), [((10,), "classes 0 to 9, not 10"), (tuple(range(9)), "at least two must remain")]
)
def test_classes_that_cannot_be_excluded(excluded, sentence):
    with pytest.raises(DataError, match=sentence):
        load(Data(exclude_classes=excluded))


def images(n, c, h, w, value=None) -> Examples:
    rng = np.random.default_rng(0)
    raw = (
        rng.integers(0, 256, (n, c, h, w), dtype=np.uint8) if value is None else np.full((n, c, h, w), value, np.uint8)
    )
    return Examples(torch.from_numpy(raw), torch.zeros(n, dtype=torch.int64))


def test_grey_and_colour_are_converted():
    grey = match(images(3, 1, 8, 8), images(1, 3, 8, 8), "x")
    assert torch.equal(grey.inputs[:, 0], grey.inputs[:, 2])
    colour = images(5, 3, 8, 8)
    luma = match(colour, images(1, 1, 8, 8), "x").inputs[:, 0].numpy()
    expected = colour.inputs.numpy().astype(float)
    expected = expected[:, 0] * 0.299 + expected[:, 1] * 0.587 + expected[:, 2] * 0.114
    assert np.abs(luma - expected).max() <= 0.51
    assert luma.dtype == np.uint8


def test_sizes_are_converted():
    flat = match(images(2, 1, 28, 28, value=77), images(1, 3, 32, 32), "x")
    assert flat.inputs.shape == (2, 3, 32, 32)
    assert (flat.inputs == 77).all()
    blocks = torch.tensor([[0, 100], [200, 255]], dtype=torch.uint8).repeat_interleave(4, 0).repeat_interleave(4, 1)
    small = match(Examples(blocks[None, None], torch.zeros(1, dtype=torch.int64)), images(1, 1, 2, 2), "x")
    assert (small.inputs[0, 0].int() - torch.tensor([[0, 100], [200, 255]])).abs().max() <= 45  # antialiased edges


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(
        DataError, match="'heart' as out-of-distribution set for 'digits': its inputs are floating-point"
    ):
        load(Data(ood="heart"))
    with pytest.raises(DataError, match="images of 2 channels cannot become images of 3"):
        match(images(1, 2, 8, 8), images(1, 3, 8, 8), "x")


def test_own_arrays_from_a_file(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8),
        "Y_train": np.array(["cat", "dog"] * 10),
        "x_test": rng.integers(0, 256, (4, 6, 5, 3), dtype=np.uint8),
        "y_test": np.array(["dog", "cat", "cat", "dog"]),
        "owner": np.arange(20) % 3,
    }
    np.savez(tmp_path / "pets.npz", **arrays)
    dataset = load(Data(name=str(tmp_path / "pets.npz")))
    assert dataset.name == "pets"
    assert dataset.classes == ("cat", "dog")
    assert dataset.input_shape == (3, 6, 5)
    assert np.array_equal(dataset.train.inputs[3, 2].numpy(), arrays["x_train"][3, :, :, 2])
    assert dataset.test.labels.tolist() == [1, 0, 0, 1]
    assert dataset.train.columns["owner"].tolist() == arrays["owner"].tolist()


def test_own_arrays_without_a_test_part(tmp_path):
    np.savez(tmp_path / "t.npz", inputs=np.random.default_rng(0).normal(size=(50, 3)), labels=np.arange(50) % 2)
    dataset = load(Data(name=str(tmp_path / "t.npz")))
    assert (len(dataset.train), len(dataset.test)) == (40, 10)
    assert dataset.classes == ("0", "1")
    assert "10 of 50 examples were set aside" in dataset.notes
    assert dataset.train.inputs.dtype == torch.float32


def test_inputs_alone_serve_for_ood_and_for_the_server(tmp_path):
    path = tmp_path / "strange.npz"
    np.savez(path, inputs=np.random.default_rng(0).integers(0, 256, (9, 16, 16), dtype=np.uint8))
    dataset = load(Data(ood=str(path)))
    assert dataset.ood["strange"].inputs.shape == (9, 1, 8, 8)
    assert load_inputs(str(path), dataset.train).inputs.shape == (9, 1, 8, 8)
    assert len(load_inputs("digits", dataset.train)) == 1437
    with pytest.raises(DataError, match="has no labels: it needs an array called 'labels'"):
        load(Data(name=str(path)))


@pytest.mark.parametrize("name", ["test", "validation", "excluded"])
def test_an_outlier_file_never_takes_the_place_of_another_split(tmp_path, name):
    path = tmp_path / f"{name}.npz"
    np.savez(path, inputs=np.zeros((9, 8, 8), dtype=np.uint8))
    dataset = load(Data(ood=str(path), exclude_classes=(9,)))
    assert sorted(dataset.ood) == sorted({"excluded", f"{name}-2"})
    assert len(dataset.ood[f"{name}-2"]) == 9


@pytest.mark.parametrize("name", ["test", "validation", "svhn/cropped", ""])
def test_outliers_that_would_take_the_place_of_a_split_are_refused(name):
    data = load(Data())
    with pytest.raises(DataError, match=f"cannot be called '{name}'"):
        replace(data, ood={name: data.test})


def test_numbers_of_classes_are_never_closed_up():
    """An owner without class 1 must agree with the others on what class 2 is."""
    dataset = from_arrays(X, np.array([0, 2, 2, 0, 2, 0]), X, Y)
    assert dataset.train.labels.tolist() == [0, 2, 2, 0, 2, 0]
    assert from_arrays(X[:4], [2, 0, 2, 0], X[:2], [0, 2]).classes == ("0", "1", "2")


def test_recordings_of_own_arrays_stay_whole():
    recording = np.repeat(np.arange(20), 5)
    dataset = from_arrays(np.zeros((100, 2)), recording % 2, columns={"recording": recording})
    assert not set(dataset.train.columns["recording"]) & set(dataset.test.columns["recording"])


X, Y = np.zeros((6, 4)), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"labels": Y}, "has no inputs"),
        ({"inputs": X, "labels": Y[:4]}, "inputs 6, labels 4"),
        ({"inputs": X, "labels": Y / 2}, "not fractions"),
        ({"inputs": X, "labels": np.zeros(6)}, "at least two classes"),
        ({"inputs": X, "labels": Y * 2 - 1}, "from -1 to 3; number at least two classes 0, 1, 2"),
        ({"inputs": X, "labels": Y * 10**6}, "from 0 to 2000000; number at least two classes 0, 1, 2"),
        (
            {"inputs": np.where(X == 0, np.nan, X), "labels": Y},
            "6 example.s. hold NaN or infinity, the first at position 0",
        ),
        ({"inputs": np.zeros(6), "labels": Y}, "is not one of"),
        ({"inputs": X, "x": X, "labels": Y}, "both 'inputs' and 'x' could be the inputs"),
        ({"inputs": X, "labels": Y, "test_inputs": X}, "belong together"),
        ({"inputs": X, "labels": Y, "test_inputs": X[:, :2], "test_labels": Y}, "must be alike"),
        ({"inputs": X, "labels": Y, "classes": np.array(["a", "b"])}, "run from 0 to 2, but 2 classes"),
        ({"inputs": X, "labels": Y, "site": np.zeros(3)}, "'site' has shape"),
        ({"inputs": np.array([{}] * 6), "labels": Y}, "not an .npz or .npy file of plain arrays"),
        ({"inputs": X, "labels": Y.astype(str).astype(object)}, r"save text as array\.astype\(str\)"),
        ({"inputs": X, "labels": np.where(Y == 2, np.nan, Y)}, "the label at position 2 is missing"),
        ({"inputs": X, "labels": Y, "classes": np.array(["a", "a", "b"])}, "two classes are called 'a'"),
        ({"inputs": X, "labels": Y, "classes": np.array("abc")}, "'classes' is a single value"),
        ({"inputs": np.float32(1), "labels": Y}, "'inputs' is a single value"),
        ({"inputs": X, "labels": np.array([b"a", b"\xff"] * 3)}, "labels: the names are bytes that are not UTF-8"),
        ({"inputs": X + 1e300, "labels": Y}, "6 example.s. hold numbers beyond 3.4e38, float32's largest"),
        ({"inputs": X * 1j, "labels": Y}, "complex numbers"),
        ({"inputs": X.astype(str), "labels": Y}, "inputs are of type <U32"),
        ({"inputs": X.astype("datetime64[s]"), "labels": Y}, "inputs are of type datetime64"),
        ({"inputs": np.zeros(6, [("a", "f4")]), "labels": Y}, "inputs are of type .*'a'"),
    ],
)
def test_own_arrays_that_do_not_fit(tmp_path, arrays, sentence):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=sentence):
        load(Data(name=str(tmp_path / "a.npz")))


class NotAvailable:
    """As pandas' NA: a comparison with it is neither true nor false."""

    def __ne__(self, other: object) -> NotAvailable:  # type: ignore[override]
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


@pytest.mark.parametrize("gap", [None, float("nan"), NotAvailable()])
def test_a_missing_label_is_refused_and_a_missing_owner_is_called_nothing(gap):
    names = np.array(["a", "b", gap, "b"], object)
    with pytest.raises(DataError, match="the label at position 2 is missing"):
        from_arrays(np.zeros((4, 2)), names)
    dataset = from_arrays(X[:4], Y[:4] % 2, X[:2], Y[:2], columns={"site": names})
    assert dataset.train.columns["site"].tolist() == ["a", "b", "", "b"]


def test_names_as_pandas_keeps_them_are_names_and_missing_ones_are_empty():
    labels = np.array(["cat", "dog"] * 5, object)
    sites = {"site": np.array(["a", None, float("nan"), "b", "a"] * 2, object), "ward": np.array([b"x", b"y"] * 5)}
    inputs = np.arange(20.0).reshape(10, 2)
    dataset = from_arrays(inputs, labels, inputs, labels, columns=sites)
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.labels.tolist() == [0, 1] * 5
    assert dataset.train.columns["site"].tolist() == ["a", "", "", "b", "a"] * 2
    assert dataset.train.columns["ward"].tolist() == ["x", "y"] * 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"inputs": None}, "inputs are of type NoneType"),
        ({"inputs": [[1.0, 2.0], [3.0]]}, "inputs are of type list"),
        ({"inputs": np.array([["a", None]] * 6, object)}, "inputs are of type object"),
        ({"labels": [[1], [1, 2]]}, "not one label per example"),
        ({"classes": 5}, "classes is 5; give a list of names"),
        ({"classes": "abc"}, "classes is 'abc'; give a list of names"),
        ({"columns": [1]}, "columns are of type list; give a dictionary"),
        ({"columns": {"site": 3}}, "column 'site' 1"),
        ({"columns": {"site": np.array([1, "a"] * 3, object)}}, "column 'site' has values of the types int, str"),
        ({"columns": {"site": np.zeros((6, 2))}}, r"column 'site' has shape \(6, 2\)"),
        ({"labels": np.array([1, "a"] * 3, object)}, "object cannot be class labels"),
    ],
)
def test_arguments_that_are_no_arrays(arguments, sentence):
    with pytest.raises(DataError, match=sentence):
        from_arrays(**{"inputs": X, "labels": Y, "test_inputs": X, "test_labels": Y} | arguments)


def test_damaged_and_misnamed_files(tmp_path):
    """One byte flipped anywhere in a file is an error of one sentence, or is in no byte that counts."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, inputs=np.arange(600.0).reshape(60, 10), labels=np.arange(60) % 3)
    whole, said = path.read_bytes(), []
    for place in range(30, len(whole), 31):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            read_numpy(path)
        except DataError as error:
            said.append(str(error))
    assert len(said) > 10
    assert all(str(path) in words and "\n" not in words for words in said)
    np.save(tmp_path / "b.npy", X)
    (tmp_path / "b.npy").rename(path)
    with pytest.raises(DataError, match="holds one array without a name"):
        load(Data(name=str(path)))


@pytest.mark.parametrize("kind", [">f4", ">i2", "longdouble", "reversed"])
def test_inputs_of_every_kind_of_numpy(kind):
    values = np.arange(24).reshape(6, 4)
    given = values[::-1].copy()[::-1] if kind == "reversed" else values.astype(kind)
    assert from_arrays(given, Y, given, Y).train.inputs.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.eye(3)[[0, 1, 2, 0, 1, 2]], ("0", "1", "2")),
        (Y[:, None], ("0", "1", "2")),
        (Y.astype(np.float64), ("0", "1", "2")),
        (np.array([b"a", b"b", b"c", b"a", b"b", b"c"]), ("a", "b", "c")),
        (torch.tensor(Y), ("0", "1", "2")),
        (torch.tensor(Y, dtype=torch.bfloat16), ("0", "1", "2")),
        (torch.tensor(Y, dtype=torch.float32, requires_grad=True), ("0", "1", "2")),
    ],
)
def test_labels_in_every_usual_form(labels, classes):
    dataset = from_arrays(X, labels, X, labels)
    assert dataset.classes == classes
    assert dataset.train.labels.tolist() == Y.tolist()


@pytest.mark.parametrize(
    ("shape", "dtype", "stored"),
    [
        ((6, 28, 28), np.uint8, (1, 28, 28)),
        ((6, 28, 28), np.float64, (1, 28, 28)),
        ((6, 28, 28, 1), np.uint8, (1, 28, 28)),
        ((6, 3, 32, 32), np.float32, (3, 32, 32)),
        ((6, 1, 800), np.float32, (1, 800)),
        ((6, 11), np.uint8, (11,)),
    ],
)
def test_inputs_in_every_usual_form(shape, dtype, stored):
    inputs = from_arrays(np.ones(shape, dtype), Y, np.ones(shape, dtype), Y).train.inputs
    assert tuple(inputs.shape[1:]) == stored
    assert inputs.dtype == (torch.uint8 if dtype == np.uint8 and len(shape) > 2 else torch.float32)


def test_take_keeps_inputs_labels_and_columns_together():
    examples = Examples(torch.arange(5.0)[:, None], torch.arange(5), {"n": np.arange(5)})
    for chosen in ([4, 0, 4], np.array([4, 0, 4]), torch.tensor([4, 0, 4])):
        part = examples.take(chosen)
        assert part.inputs[:, 0].tolist() == part.labels.tolist() == part.columns["n"].tolist() == [4, 0, 4]
    assert len(examples.take([])) == 0


def test_unknown_names_get_the_nearest():
    with pytest.raises(DataError, match="no data set is called 'digit': did you mean 'digits'"):
        load(Data(name="digit"))


def test_digits_load_without_any_extra():
    """The core needs torch, numpy and safetensors alone."""
    code = (
        "import sys; import fedbayes.data as d; from fedbayes.experiment import Data; d.load(Data());"
        "print([m for m in ('tyro', 'scipy', 'soundfile', 'soxr', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
