"""The TensorBoard listener: what it writes is what ``metrics.jsonl`` says."""

import json

import pytest

from fedbayes.errors import ConfigError, RunError
from fedbayes.track import replay, scalars, tracker

ROUND = {
    "kind": "round", "round": 1, "seconds": 0.5, "learning_rate": 0.1, "examples": 30, "clients": [0, 1],
    "train": {"loss": 2.0, "nll": 1.5, "kl": None},
    "fusion": {"rule": "nwa", "weights": {"0": 0.5}, "refused": [{}], "repaired": 0.0,
               "sigma": {"mean": 0.2, "q50": 0.1, "layers": {"a.weight": 0.3}}},
    "engine": {"lanes": 2}, "bytes": {"up": 10, "down": 20},
}  # fmt: skip
JUDGED = {
    "kind": "evaluation",
    "round": 1,
    "split": "test",
    "model": "global",
    "metrics": {"accuracy": 0.9, "auroc_error_entropy": None},
}


def test_scalars():
    found = dict(scalars(ROUND))
    assert found["train/loss"] == 2.0
    assert found["sigma/q50"] == 0.1
    assert found["sigma by layer/a.weight"] == 0.3
    assert found["round/learning_rate"] == 0.1
    assert found["fusion/refused"] == 1
    assert found["bytes/down"] == 20
    assert "train/kl" not in found
    assert dict(scalars(JUDGED)) == {"test/accuracy": 0.9}
    assert dict(scalars({**JUDGED, "model": "ensemble"})) == {"test (ensemble)/accuracy": 0.9}
    assert dict(scalars({"kind": "start"})) == {}


def test_a_run_is_written_and_read_back(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = [{"kind": "start"}, ROUND, JUDGED, {**JUDGED, "round": 2, "metrics": {"accuracy": 0.95}}, {"kind": "end"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    reader = accumulator.EventAccumulator(str(replay(tmp_path)))
    reader.Reload()
    found = [(s.step, s.value) for s in reader.Scalars("test/accuracy")]
    assert found == [(1, pytest.approx(0.9)), (2, pytest.approx(0.95))]
    assert [s.value for s in reader.Scalars("sigma/q50")] == [pytest.approx(0.1)]


def test_wrong_names_get_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        tracker("tensorbord", tmp_path)
    with pytest.raises(ConfigError, match="--out"):
        tracker("tensorboard", None)
    with pytest.raises(RunError, match="no run"):
        replay(tmp_path)
