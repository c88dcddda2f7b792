from pathlib import Path

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile", reason="reading audio needs the sonar extra")
pytest.importorskip("soxr", reason="resampling needs the sonar extra")

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"


@pytest.fixture
def shared():
    if not SHARED.is_dir():
        pytest.skip("real recordings are not at hand (../shared/data)")
    return SHARED


def tone(seconds=1.0, rate=16000, hertz=440.0, amplitude=0.3, seed=0):
    t = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(t))
    return (amplitude * np.sin(2 * np.pi * hertz * t) + 0.01 * noise).astype(np.float32)


@pytest.fixture
def write():
    """Write samples to a file, making its folder."""

    def _write(path, samples, rate=16000, **kwargs):
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(str(path), samples, rate, **kwargs)
        return path

    return _write


@pytest.fixture
def make_tone():
    return tone
