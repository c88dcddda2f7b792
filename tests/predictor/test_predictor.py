"""Prediction from a run directory: what is loaded, what is answered, what is refused."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes
from fedbayes import config, predict_files, predictor, runner, uncertainty
from fedbayes.data import load as load_data
from fedbayes.errors import FedBayesError
from fedbayes.experiment import Data, Engine, Evaluation, Experiment, Local, Model


def experiment(**changes) -> Experiment:
    base = Experiment(
        name="small", rounds=2, data=Data(limit=300, test_limit=60), model=Model(width=16), local=Local(epochs=1),
        evaluation=Evaluation(samples=5), engine=Engine(device="cpu", lanes=1),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    runner.run(experiment(), out, report=False)
    return out


@pytest.fixture(scope="module")
def inputs():
    e = experiment()
    return load_data(e.data, seed=e.seed).test


def test_it_predicts_as_the_run_did(run, inputs):
    """Same posterior, same transform, enough samples: the mean prediction is the one the run itself stored."""
    ready = fedbayes.load(run, device="cpu")
    found = ready(inputs.inputs, samples=200)
    stored = uncertainty.predictive_mean(np.load(run / "predictions-test.npz")["probabilities"])
    assert found.samples.shape == (200, 60, 10)
    assert float((found.probabilities - stored).abs().max()) < 0.1
    assert float((found.probabilities - stored).abs().mean()) < 0.01
    assert found.names == [ready.classes[i] for i in found.probabilities.argmax(-1)]
    values = uncertainty.per_example(found.samples)
    for name in ("confidence", "entropy", "aleatoric", "epistemic", "mutual_information"):
        torch.testing.assert_close(getattr(found, name), values[name])


def test_same_seed_same_answers(run, inputs):
    ready = fedbayes.load(run, device="cpu")
    assert torch.equal(ready(inputs.inputs).samples, ready(inputs.inputs).samples)
    assert not torch.equal(ready(inputs.inputs).samples, ready(inputs.inputs, seed=1).samples)


def test_a_run_directory_alone_suffices(run, inputs, tmp_path, monkeypatch):
    """Whoever predicts has no training data: nothing is loaded but the run directory."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(run, copy)
    monkeypatch.setattr("fedbayes.data.loading.load_source", lambda *a, **k: pytest.fail("training data were loaded"))
    assert len(fedbayes.load(copy, device="cpu")(inputs.inputs)) == 60


def test_final_and_best(run, inputs):
    best, final = fedbayes.load(run, device="cpu"), fedbayes.load(run, "final", device="cpu")
    assert best.posterior.same_bits(fedbayes.Posterior.load(run / "best.safetensors"))
    assert final.posterior.same_bits(fedbayes.Posterior.load(run / "final.safetensors"))


def test_deterministic_networks_have_one_sample(tmp_path, inputs):
    e = experiment(
        rounds=1, model=Model(width=8, kind="deterministic"), fusion=fedbayes.experiment.Fusion(rule="fedavg")
    )
    runner.run(e, tmp_path / "run", report=False)
    found = fedbayes.load(tmp_path / "run", device="cpu")(inputs.inputs, samples=9)
    assert found.samples.shape[0] == 1
    assert float(found.epistemic.max()) == 0


def test_precision_weighted_point_models(tmp_path, inputs):
    """Their posterior carries Adam's moments as variances: no uncertainty, and no obstacle to prediction."""
    rule = fedbayes.experiment.Fusion(rule="precision")
    runner.run(
        experiment(rounds=1, model=Model(width=8, kind="deterministic"), fusion=rule), tmp_path / "run", report=False
    )
    found = fedbayes.load(tmp_path / "run", device="cpu")(inputs.inputs)
    stored = np.load(tmp_path / "run" / "predictions-test.npz")["probabilities"]
    np.testing.assert_allclose(found.samples.numpy(), stored, atol=1e-6)
    run = pytest.importorskip("fedbayes.report.runs").Run(tmp_path / "run")
    assert run.sigma == {}
    assert run.spreads == []


def test_clients_means_stay_with_them(tmp_path):
    """With a mean per client only the server's row of the transform is kept in the run directory."""
    e = experiment(rounds=1, data=Data(limit=300, test_limit=60, mean="client"))
    result = runner.run(e, tmp_path / "run", report=False)
    ready = fedbayes.load(tmp_path / "run", device="cpu")
    assert ready.transform.shift.shape[0] == 1
    assert result.setup.transform.shift.shape[0] == 11
    raw = result.setup.dataset.test.inputs
    torch.testing.assert_close(ready.transform(raw, client=-1), result.setup.transform(raw, client=-1))


def test_inputs_in_the_forms_people_have(run, inputs):
    ready = fedbayes.load(run, device="cpu")
    raw = inputs.inputs[:4]
    shape = ready.input_shape
    expected = ready(raw).samples
    own = raw.numpy()
    odd = (own.astype(">i2"), own.astype("longdouble"), own[::-1].copy()[::-1], raw.float().requires_grad_())
    for form in (own, raw.to(torch.int32), raw.double(), own.tolist(), *odd):
        assert torch.equal(ready(form).samples, expected)
    if len(shape) == 3:
        assert torch.equal(ready(raw[:, 0]).samples, expected)
        assert torch.equal(ready(raw.permute(0, 2, 3, 1)).samples, expected)
    assert len(ready(raw[0])) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.float() / 255, "raw images"),
        (lambda x: x[:, :, :5], "the network takes"),
        (lambda x: x[:0], "no inputs"),
        (lambda x: x.float() - 3, "raw images"),
        (lambda x: -x.int(), "not whole numbers 0..255"),
        (lambda x: x * 1j, "complex numbers"),
        (lambda x: x.numpy().astype(str), "inputs are of type <U3"),
        (lambda x: x.numpy().astype("datetime64[s]"), "inputs are of type datetime64"),
        (lambda x: [[1.0], [1.0, 2.0]], "inputs are of type list"),
        (lambda x: None, "inputs are of type NoneType"),
    ],
)
def test_wrong_inputs_get_one_sentence(run, inputs, make, words):
    with pytest.raises(FedBayesError, match=words):
        fedbayes.load(run, device="cpu")(make(inputs.inputs))


def test_rejection_marks_the_least_sure(run, inputs):
    found = fedbayes.load(run, device="cpu")(inputs.inputs)
    marked = found.rejected(0.25)
    assert int(marked.sum()) == 15
    assert float(found.entropy[marked].min()) >= float(found.entropy[~marked].max())
    assert int(found.rejected(0.0).sum()) == 0
    assert float(found.epistemic[found.rejected(0.5, "epistemic")].min()) >= float(
        found.epistemic[~found.rejected(0.5, "epistemic")].max()
    )
    ready = fedbayes.load(run, device="cpu")
    for ask in (found.rejected, ready.expected_accuracy):
        for share in (1.0, 1.5, -0.1, "x"):
            with pytest.raises(FedBayesError, match=f"the share to reject is {share!r}; it must be"):
                ask(share)
        with pytest.raises(FedBayesError, match="no uncertainty"):
            ask(0.1, "mood")
    for wrong in ({"samples": 2.5}, {"batch_size": "x"}, {"seed": 0.5}):
        with pytest.raises(FedBayesError, match=f"{next(iter(wrong))} is .*; a whole number is needed"):
            ready(inputs.inputs, **wrong)


def test_rounding_sets_nobody_aside():
    """The same votes in another order are equally unsure: the later inputs are marked."""
    votes = torch.eye(5)[torch.tensor([0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 0, 1, 2])]
    p = torch.stack([votes.roll(shift, 0) for shift in range(12)], 1)
    assert len(uncertainty.per_example(p)["epistemic"].unique()) > 1
    for by in uncertainty.UNCERTAINTIES:
        assert predictor.Prediction(p, tuple("abcde")).rejected(0.5, by).tolist() == [False] * 6 + [True] * 6


def test_expected_accuracy_is_measured_on_validation_data(run, tmp_path):
    stored = np.load(run / "predictions-validation.npz")
    mean = stored["probabilities"].astype(float).mean(0)
    entropy = -(mean * np.log(np.maximum(mean, 1e-300))).sum(1)
    right = (mean.argmax(1) == stored["labels"])[np.argsort(entropy, kind="stable")]
    kept = round(0.8 * len(right))
    accuracy, error, count = fedbayes.load(run, device="cpu").expected_accuracy(0.2)
    assert (count, accuracy) == (kept, pytest.approx(right[:kept].mean()))
    assert error == pytest.approx((accuracy * (1 - accuracy) / kept) ** 0.5, rel=0.2)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "predictions-validation.npz").unlink()
    assert fedbayes.load(copy, device="cpu").expected_accuracy(0.2) is None


def test_all_right_in_a_small_sample_is_no_certainty():
    """Wilson (1927), as tabulated: 10 of 10 is 72.2 to 100 %, 7 of 10 is 39.7 to 89.2 %."""
    assert predictor.interval(1.0, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    assert predictor.interval(0.7, 10) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    assert predictor.interval(0.0, 10) == pytest.approx((0, 0.2775), abs=1e-4)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x)


def test_own_network(tmp_path, inputs):
    e = experiment(rounds=1)
    runner.run(e, tmp_path / "run", model=fedbayes.bayesianize(Own(), "flipout"), report=False)
    with pytest.raises(FedBayesError, match=r"^The run was trained with .*network="):
        fedbayes.load(tmp_path / "run", device="cpu")
    ready = fedbayes.load(tmp_path / "run", device="cpu", network=fedbayes.bayesianize(Own(), "flipout"))
    assert len(ready(inputs.inputs)) == 60


def test_what_is_no_run_gets_one_sentence(run, tmp_path):
    with pytest.raises(FedBayesError, match="is not there"):
        fedbayes.load(tmp_path / "nothing")
    with pytest.raises(FedBayesError, match="no run directory"):
        fedbayes.load(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "best.safetensors").unlink()
    with pytest.raises(FedBayesError, match=r"best\.safetensors"):
        fedbayes.load(copy)
    with pytest.raises(FedBayesError, match="valid are best and final"):
        fedbayes.load(run, "worst")  # type: ignore[arg-type]
    with pytest.raises(FedBayesError, match=r"^model is of type Own; .*network=\.\.\.$"):
        fedbayes.load(run, model=Own())  # type: ignore[arg-type]
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(re.sub('name = "mlp"', 'name = "not_here:make"', config))
    shutil.copy(run / "best.safetensors", copy)
    with pytest.raises(FedBayesError, match=r"^the run's network cannot be built: .*'not_here' cannot be imported"):
        fedbayes.load(copy)


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "gone"])
@pytest.mark.parametrize(
    "name", ["predictor.json", "transform.safetensors", "config.toml", "best.safetensors", "predictions-validation.npz"]
)
def test_a_damaged_run_directory_gets_one_sentence(run, inputs, tmp_path, name, damage):
    file, copy = shutil.copytree(run, tmp_path / "run") / name, tmp_path / "answers.csv"
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "half": whole[: len(whole) // 2]}.get(damage, b"\xff{[" * 50))
    if damage == "gone":
        file.unlink()
    np.save(tmp_path / "in.npy", inputs.inputs[:3].numpy())
    asked = [tmp_path / "run", "--input", tmp_path / "in.npy", "--reject", "0.3", "--device", "cpu", "--output", copy]
    if (name, damage) == ("predictions-validation.npz", "gone"):  # a run may have none
        assert predictor.predict_command([str(a) for a in asked]) == 0
        return
    with pytest.raises(FedBayesError, match=name) as caught:
        predictor.predict_command([str(a) for a in asked])
    assert "\n" not in str(caught.value)
    assert not copy.exists()


@pytest.mark.parametrize("device", ["meta", "mps", "gpu7x", None])
def test_devices_are_cpu_and_cuda(run, device):
    with pytest.raises(FedBayesError, match="is not a device; valid are cpu, cuda"):
        fedbayes.load(run, device=device)


# -- the command -------------------------------------------------------------------------------------------------


def answer(arguments, capsys) -> tuple[str, str]:
    assert predictor.predict_command([str(a) for a in arguments]) == 0
    return capsys.readouterr()


def test_csv_and_json_lines_say_the_same(run, inputs, tmp_path, capsys):
    file = tmp_path / "in.npz"
    np.savez(file, images=inputs.inputs.numpy(), labels=inputs.labels.numpy())
    out, err = answer([run, "--input", file, "--device", "cpu", "--reject", "0.1"], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 60
    answer([run, "--input", file, "--device", "cpu", "--reject", "0.1", "--output", tmp_path / "o.jsonl"], capsys)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    for row, line in zip(rows, lines, strict=True):
        assert row["class"] == line["class"] == max(line["probabilities"], key=line["probabilities"].get)
        assert float(row["entropy"]) == pytest.approx(line["entropy"], rel=1e-5)
        assert row["reject"] == str(int(line["reject"]))
        assert sum(line["probabilities"].values()) == pytest.approx(1)
        assert float(row["p_3"]) == pytest.approx(line["probabilities"]["3"], rel=1e-4, abs=1e-9)
    assert sum(r["reject"] == "1" for r in rows) == 6
    assert "6 of 60 inputs are marked for a human" in err
    assert "Accuracy to expect on the rest" in err
    right = np.mean([r["class"] == r["label"] for r in rows])
    assert f"{right * 100:.1f} % right" in err


def test_ties_are_said_where_they_decide_who_is_marked(run, inputs, tmp_path, capsys):
    """One sampled network has no epistemic uncertainty: whichever inputs are marked, it says nothing of them."""
    np.save(tmp_path / "in.npy", inputs.inputs.numpy())
    asked = [run, "--input", tmp_path / "in.npy", "--device", "cpu", "--reject", "0.1", "--samples", "1"]
    assert "But 60 inputs are equally unsure by that" in answer([*asked, "--by", "epistemic"], capsys)[1]
    assert "equally unsure" not in answer(asked, capsys)[1]
    assert "equally unsure" not in answer([*asked, "--reject", "0", "--by", "epistemic"], capsys)[1]


def test_answers_never_replace_the_inputs(run, inputs, tmp_path):
    np.save(tmp_path / "in.npy", inputs.inputs[:3].numpy())
    before = (tmp_path / "in.npy").read_bytes()
    asked = [str(run), "--input", str(tmp_path / "in.npy"), "--device", "cpu"]
    with pytest.raises(FedBayesError, match="the input itself"):
        predictor.predict_command([*asked, "--output", str(tmp_path / "." / "in.npy")])
    assert (tmp_path / "in.npy").read_bytes() == before
    with pytest.raises(FedBayesError, match="'doubt' is no uncertainty"):
        predictor.predict_command([*asked, "--by", "doubt"])


def test_npy_and_unlabelled(run, inputs, tmp_path, capsys):
    np.save(tmp_path / "in.npy", inputs.inputs[:3].numpy())
    out, err = answer([run, "--input", tmp_path / "in.npy", "--device", "cpu"], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 3
    assert "reject" not in rows[0]
    assert "label" not in rows[0]
    assert err == ""


def test_files_are_known_by_what_they_hold(inputs, tmp_path):
    np.save(tmp_path / "a.npy", inputs.inputs[:3].numpy())
    np.savez(tmp_path / "b.npz", inputs=inputs.inputs[:3].numpy())
    for old, new in (("a.npy", "c.npz"), ("b.npz", "c.npy")):
        (tmp_path / old).rename(tmp_path / new)
        assert predict_files.read_inputs(tmp_path / new, (1, 8, 8)).values.shape == (3, 1, 8, 8)


def test_labels_in_the_forms_that_training_accepts(run, inputs, tmp_path, capsys):
    labels, file = inputs.labels.numpy(), tmp_path / "in.npz"
    said = []
    for form in (labels, labels.astype(float), labels.astype(str), labels[:, None], np.eye(10)[labels]):
        np.savez(file, inputs=inputs.inputs.numpy(), labels=form)
        out, err = answer([run, "--input", file, "--device", "cpu"], capsys)
        assert [row["label"] for row in csv.DictReader(io.StringIO(out))] == labels.astype(str).tolist()
        said.append(err)
    assert set(said) == {said[0]}
    assert "% right by the file's own labels" in said[0]
    np.savez(file, inputs=inputs.inputs.numpy(), labels=np.where(np.arange(60) < 6, labels + 30, labels))
    _, err = answer([run, "--input", file, "--device", "cpu"], capsys)
    assert err.startswith("6 of 60 labels are none of the run's classes")
    np.savez(file, inputs=inputs.inputs.numpy(), labels=labels / 3)
    assert answer([run, "--input", file, "--device", "cpu"], capsys)[1].count("\n") == 1


def test_folder_of_images(run, inputs, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    ready = fedbayes.load(run, device="cpu")
    if len(ready.input_shape) != 3:
        pytest.skip("the run's inputs are no pictures")
    for i in range(3):
        image.fromarray(inputs.inputs[i, 0].numpy()).save(tmp_path / f"{i}.png")
    out, _ = answer([run, "--input", tmp_path, "--device", "cpu"], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [r["input"] for r in rows] == ["0.png", "1.png", "2.png"]
    assert [r["class"] for r in rows] == ready(inputs.inputs[:3]).names
    (tmp_path / "._0.png").write_bytes(b"macOS keeps its own things in such files")
    assert len(predict_files.read_inputs(tmp_path, ready.input_shape).names) == 3
    for values in (np.full((8, 8), 40_000, np.uint16), np.full((8, 8), 0.5, np.float32)):
        image.fromarray(values).save(tmp_path / "deep.tif")
        with pytest.raises(FedBayesError, match=r"deep\.tif is a 16-bit or float image; save it with 8 bits"):
            predict_files.read_inputs(tmp_path / "deep.tif", ready.input_shape)
    image.new("L", (9, 9)).save(tmp_path / "3.png")
    with pytest.raises(FedBayesError, match="9 x 9 pixels"):
        predict_files.read_inputs(tmp_path, ready.input_shape)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "missing.npz", "is not there"),
        (lambda d: d, "no image"),
        (lambda d: (d / "a.txt").write_text("x") and d / "a.txt", "not understood"),
        (lambda d: (d / "a.npz").write_text("x") and d / "a.npz", "not an .npz or .npy"),
        (lambda d: (d / "a.npy").write_text("x") and d / "a.npy", "not an .npz or .npy"),
        (lambda d: np.savez(d / "b.npz", p=np.ones(2), q=np.ones(2)) or d / "b.npz", "'inputs' or 'images'"),
        (lambda d: np.savez(d / "d.npz", inputs=3.0) or d / "d.npz", "'inputs' is a single value"),
        (lambda d: np.savez(d / "c.npz", x=np.ones(2), y=np.ones(3)) or d / "c.npz", "one label per input"),
    ],
)
def test_unreadable_files_get_one_sentence(tmp_path, make, words):
    with pytest.raises(FedBayesError, match=words):
        predict_files.read_inputs(make(tmp_path), (1, 8, 8))


def test_card_is_plain_and_small(run):
    card = json.loads((run / "predictor.json").read_text())
    assert card["classes"] == [str(i) for i in range(10)]
    assert card["schema"] == 1
    assert config.read(run / "config.toml").name == "small"
    assert (run / "transform.safetensors").stat().st_size < 10_000
