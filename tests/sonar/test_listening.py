"""A finished run answers for new recordings: cut and pictured as in training, one answer per file."""

import csv

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes import config, predictor
from fedbayes.data import load
from fedbayes.data.sonar import pool
from fedbayes.errors import DataError

SETTINGS = {
    "sonar.sample_rate": 4000, "sonar.seconds": 1.0, "sonar.bands": 8, "sonar.frames": 16, "sonar.cache": False,
    "model.name": "mlp", "model.kind": "flipout", "partition.scheme": "iid", "partition.clients": 1, "rounds": 1,
    "data.scale": "none", "data.mean": "none", "data.validation": 0.3, "evaluation.samples": 3,
}  # fmt: skip


@pytest.fixture(params=["per_pass", "per_example"])
def run(request, tmp_path, write, make_tone):
    for label, hertz in (("low", 300.0), ("high", 900.0)):
        for i in range(4):
            write(tmp_path / "heard" / label / f"{i}.wav", make_tone(2.0, 8000, hertz, seed=i), 8000)
    settings = SETTINGS | {"data.name": str(tmp_path / "heard"), "evaluation.draws": request.param}
    experiment = config.override(fedbayes.Experiment(), settings)
    return fedbayes.run(experiment, tmp_path / "run", report=False).path, experiment


def test_an_answer_per_file_is_that_of_its_pooled_segments(run, tmp_path):
    path, experiment = run
    predict = fedbayes.load(path, device="cpu")
    heard = predict.listen(tmp_path / "heard")
    data = load(experiment.data, sonar=experiment.sonar, seed=experiment.seed)
    assert sorted(heard.names) == [f"{label}/{i}.wav" for label in ("high", "low") for i in range(4)]
    assert heard.segments.tolist() == [3] * 8

    files = np.concatenate([part.columns["file"] for part in (data.train, data.test)])
    inputs = torch.cat([data.train.inputs, data.test.inputs])
    order = np.argsort(files, kind="stable")
    names = np.array([str(f).removeprefix(f"{tmp_path}/heard/") for f in files[order]])
    shared = experiment.evaluation.draws == "per_pass"
    oracle = pool(predict(inputs[order]).samples, names, shared_draws=shared)
    assert oracle.names.tolist() == list(heard.names)
    torch.testing.assert_close(heard.prediction.samples, oracle.probabilities)
    torch.testing.assert_close(heard.prediction.epistemic, oracle.values["epistemic"])
    torch.testing.assert_close(heard.prediction.entropy, oracle.values["entropy"])


def test_the_command_takes_sound_and_names_what_it_cannot_use(run, tmp_path, write, make_tone, capsys):
    path, _ = run
    write(tmp_path / "new" / "ship.flac", make_tone(1.5, 8000), 8000)
    write(tmp_path / "new" / "quiet.wav", np.zeros(8000), 8000)
    (tmp_path / "new" / "ship.png").write_bytes(b"its spectrogram")
    asked = [path, "--input", tmp_path / "new", "--reject", "0.2", "--output", tmp_path / "out.csv"]
    assert predictor.predict_command([str(a) for a in asked]) == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [(r["input"], r["segments"], r["reject"]) for r in rows] == [("ship.flac", "2", "0")]
    said = capsys.readouterr().err
    assert "quiet.wav: is silent" in said
    assert "segments, each judged by itself" in said


def test_what_cannot_be_listened_to_is_said(run, tmp_path, write, make_tone):
    path, _ = run
    predict = fedbayes.load(path, device="cpu")
    with pytest.raises(DataError, match="holds no recording"):
        predict.listen(path)
    with pytest.raises(DataError, match="is not there"):
        predict.listen(tmp_path / "nowhere.wav")
    predict.input_shape = (1, 9, 9)
    with pytest.raises(DataError, match="was not trained on recordings"):
        predict.listen(write(tmp_path / "a.wav", make_tone(1.0, 8000), 8000))
