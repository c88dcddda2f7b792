"""A run on the sea, from the configuration to the operator's queue in the page."""

import base64
import io
import re
import warnings

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("matplotlib", reason="figures need the report extra")


from fedbayes import config  # noqa: E402
from fedbayes.data import load  # noqa: E402
from fedbayes.report import sonar as module  # noqa: E402
from fedbayes.report.runs import Run  # noqa: E402
from fedbayes.report.sonar import AUDIO_BUDGET, queue  # noqa: E402

TOML = """
name = "sea"
[data]
name = "{name}"
[sonar]
sites = 2
recordings = 3
length = 3.0
sample_rate = 4000
seconds = 1.0
bands = 8
frames = 16
picture = "{picture}"
cache = false
[evaluation]
draws = "per_pass"
"""


def finished(tmp_path, name="sonar-synthetic", picture="logmel"):
    """Lay down a run directory with predictions of known quality for the real data of its configuration."""
    (tmp_path / "config.toml").write_text(TOML.format(name=name, picture=picture))
    experiment = config.read(tmp_path / "config.toml")
    data = load(experiment.data, sonar=experiment.sonar, seed=experiment.seed)
    classes = ", ".join(f'"{c}"' for c in data.classes)
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "start", "schema": 1, "name": "sea", "classes": [{classes}]}}\n')  # fmt: skip
    rng = np.random.default_rng(0)
    for part, examples in (("test", data.test), *data.ood.items()):
        right = np.eye(len(data.classes))[examples.labels.numpy()]
        noise = rng.dirichlet(np.ones(len(data.classes)), (4, len(examples)))
        p = (0.45 * right + 0.55 * noise).astype(np.float32)
        np.savez(tmp_path / f"predictions-{part}.npz", probabilities=p, labels=examples.labels.numpy(), indices=np.arange(len(examples)))  # fmt: skip
    return data


@pytest.mark.parametrize("picture", ["logmel", "demon", "waveform"])
def test_the_queue_shows_and_lets_listen(tmp_path, picture, monkeypatch):
    monkeypatch.setattr(module, "SHOWN", 2)
    data = finished(tmp_path, picture=picture)
    page = queue(Run(tmp_path))
    assert page is not None
    recordings = np.unique(data.test.columns["recording"])
    assert f"Of {len(recordings)} test recordings" in page
    named = re.findall(r"Recording ([a-z]+-\d+-[ab]) at site-0\d", page)
    assert named
    assert set(named) <= set(recordings) | set(data.ood["unseen"].columns["recording"])
    sounds = re.findall(r'src="data:audio/flac;base64,([^"]+)"', page)
    assert len(sounds) == 2 + module.STRANGERS
    assert sum(map(len, sounds)) <= 1.5 * AUDIO_BUDGET
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(sounds[0])))
    assert rate == 8000
    assert 1.0 <= len(samples) / rate <= 6.0
    assert 0.6 < np.abs(samples).max() <= 0.7001
    saved = {f.name for f in (tmp_path / "figures").iterdir()}
    assert {
        f"{name}.{ending}" for name in ("queue-1", "queue-2", "unseen-1") for ending in ("png", "svg", "csv")
    } <= saved
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]+"|<!DOCTYPE[^>]+>', "", page)


def test_the_queue_begins_with_the_least_sure(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHOWN", 4)
    monkeypatch.setattr(module, "STRANGERS", 0)
    finished(tmp_path)
    page = queue(Run(tmp_path))
    entropies = [float(v) for v in re.findall(r"<figcaption>Recording [^<]*Entropy (\d\.\d+)", page.split("Of classes never heard")[0])]  # fmt: skip
    assert len(entropies) == module.SHOWN
    assert entropies == sorted(entropies, reverse=True)


def test_other_runs_have_no_queue(tmp_path):
    (tmp_path / "config.toml").write_text('name = "x"\n[data]\nname = "digits"\n')
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start"}\n')
    assert queue(Run(tmp_path)) is None


def test_a_run_that_took_another_s_place_is_shown_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHOWN", 1)
    finished(tmp_path)
    assert queue(Run(tmp_path))
    finished(tmp_path, picture="demon")
    page = queue(Run(tmp_path))
    module._load.cache_clear()
    assert queue(Run(tmp_path)) == page


def test_a_folder_that_has_gone_is_said(tmp_path):
    finished(tmp_path)
    text = (tmp_path / "config.toml").read_text().replace("sonar-synthetic", "deepship")
    (tmp_path / "config.toml").write_text(text)
    module._load.cache_clear()
    page = queue(Run(tmp_path))
    assert page is not None
    assert "not at hand" in page


def test_a_folder_of_one_s_own_that_has_gone_is_said_too(tmp_path, write, make_tone):
    for label in ("low", "high"):
        for i in range(3):
            write(tmp_path / "heard" / label / f"{i}.wav", make_tone(2.0, 8000, seed=i + 9 * (label == "low")), 8000)
    write(tmp_path / "heard" / "low" / "silent.wav", np.zeros(8000), 8000)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.warns(UserWarning, match=r"silent\.wav"):
        finished(run, tmp_path / "heard")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was left out is said when the run is made, not again by its report
        assert "The queue" in (queue(Run(run)) or "")
    (run / "predictor.json").write_text('{"input_shape": [1, 8, 16]}')
    (tmp_path / "heard").rename(tmp_path / "elsewhere")
    module._load.cache_clear()
    assert "not at hand" in (queue(Run(run)) or "")
    (run / "predictor.json").write_text('{"input_shape": [1, 28, 28]}')
    assert queue(Run(run)) is None
