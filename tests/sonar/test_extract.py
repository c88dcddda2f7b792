"""Segments, batches, the cache: the same pictures however the stream is cut."""

import os

import numpy as np
import pytest
import torch

from fedbayes.data.sonar import extraction as module
from fedbayes.data.sonar.extraction import extract, picture_blocks, segments
from fedbayes.data.sonar.pictures import make_picture
from fedbayes.data.sonar.recordings import Recording
from fedbayes.errors import DataError
from fedbayes.experiment import Sonar

SONAR = Sonar(sample_rate=4000, seconds=1.0, bands=16, frames=16)


def cut(x, size, stride, sizes, batch=3):
    blocks, i = [], 0
    while i < len(x):
        n = sizes[len(blocks) % len(sizes)]
        blocks.append(x[i : i + n])
        i += n
    found = list(segments(blocks, size, stride, batch))
    return np.concatenate([s for s, _ in found]), np.concatenate([p for _, p in found])


@pytest.mark.parametrize("sizes", [[1], [7, 50, 3], [10_000]])
@pytest.mark.parametrize("length", [100, 101, 149, 150, 174, 175, 326])
def test_segments_equal_slices(length, sizes):
    x = np.arange(length, dtype=np.float32)
    got, starts = cut(x, 100, 50, sizes)
    wanted = list(range(0, length - 99, 50))
    if length - (wanted[-1] + 100) >= 25:
        wanted.append(length - 100)
    assert starts.tolist() == wanted
    for piece, start in zip(got, starts, strict=True):
        assert np.array_equal(piece, x[start : start + 100])


def test_a_short_recording_is_repeated_to_fill_a_segment():
    got, starts = cut(np.arange(30, dtype=np.float32), 100, 50, [8])
    assert starts.tolist() == [0]
    assert np.array_equal(got[0], np.resize(np.arange(30), 100))


def test_memory_stays_bounded(monkeypatch):
    monkeypatch.setattr(module, "BATCH_SAMPLES", 20_000)
    held = []

    def endless():
        for i in range(200):
            held.append(0)
            yield np.full(4000, float(i % 7) + 1, dtype=np.float32) * np.sin(np.arange(4000)).astype(np.float32)

    seen = []
    picture = make_picture(SONAR)
    batches = segments(endless(), picture.samples, 2000, 5)
    for samples, _ in batches:
        assert len(samples) <= 5
        seen.append(len(held))
    assert len(seen) > 50  # batches come out while the stream goes on, not after its end
    assert seen[0] < 6


def test_silent_segments_are_left_out(make_tone):
    x = np.concatenate([make_tone(2, 4000), np.zeros(8000, np.float32), make_tone(2, 4000)])
    pictures, starts = picture_blocks([x], make_picture(SONAR), 0.0)
    assert starts.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert len(pictures) == 4


def folder(tmp_path, write, make_tone, n=3):
    return [
        Recording(write(tmp_path / "a" / f"{i}.wav", make_tone(2.5, 8000, 300 + 200 * i), 8000), "a", f"a/{i}")
        for i in range(n)
    ]


def test_broken_and_silent_files_are_named_and_the_rest_is_used(tmp_path, write, make_tone):
    recordings = folder(tmp_path, write, make_tone)
    silent = Recording(write(tmp_path / "b" / "silent.wav", np.zeros(9000), 8000), "b", "b/silent")
    short = Recording(write(tmp_path / "b" / "short.wav", make_tone(0.1, 8000), 8000), "b", "b/short")
    (tmp_path / "b" / "broken.flac").write_bytes(b"fLaC nonsense")
    broken = Recording(tmp_path / "b" / "broken.flac", "b", "b/broken")
    features = extract([*recordings, silent, short, broken], make_picture(SONAR))
    assert np.unique(features.owner).tolist() == [0, 1, 2]
    assert features.start[features.owner == 1].tolist() == [0.0, 0.5, 1.0, 1.5]
    reasons = {s.path.name: s.reason for s in features.skipped}
    assert set(reasons) == {"silent.wav", "short.wav", "broken.flac"}
    assert "silent" in reasons["silent.wav"]
    assert "0.10 s" in reasons["short.wav"]
    with pytest.raises(DataError, match="none of the 2 recordings can be used"):
        extract([silent, broken], make_picture(SONAR))


def test_the_cache_gives_the_same_and_is_keyed_by_content_and_settings(tmp_path, write, make_tone, monkeypatch):
    recordings = folder(tmp_path, write, make_tone)
    cache, picture = tmp_path / "cache", make_picture(SONAR)
    plain = extract(recordings, picture)
    first = extract(recordings, picture, cache=cache)
    assert torch.equal(plain.inputs, first.inputs)
    assert len(list(cache.iterdir())) == 3

    decoded = []
    original = module.stream
    monkeypatch.setattr(module, "stream", lambda r, *a, **k: decoded.append(r.recording) or original(r, *a, **k))
    again = extract(recordings, picture, cache=cache)
    assert decoded == []
    assert torch.equal(again.inputs, plain.inputs)
    assert np.array_equal(again.start, plain.start)

    write(recordings[1].path, make_tone(2.5, 8000, 999, seed=4), 8000)
    extract(recordings, picture, cache=cache)
    assert decoded == ["a/1"]
    for other in ({"overlap": 0.0}, {"channel": 0}):
        decoded.clear()
        extract(recordings, picture, cache=cache, **other)
        assert len(decoded) == 3
    decoded.clear()
    extract(
        recordings, make_picture(Sonar(sample_rate=4000, seconds=1.0, bands=16, frames=16, high=900.0)), cache=cache
    )
    assert len(decoded) == 3


def test_a_shared_cache_is_readable_by_whom_the_umask_lets(tmp_path, write, make_tone):
    before = os.umask(0o022)
    try:
        extract(folder(tmp_path, write, make_tone, 1), make_picture(SONAR), cache=tmp_path / "cache")
    finally:
        os.umask(before)
    assert [f.stat().st_mode & 0o777 for f in (tmp_path / "cache").iterdir()] == [0o644]


def test_a_torn_cache_file_is_made_anew(tmp_path, write, make_tone):
    recordings = folder(tmp_path, write, make_tone, 1)
    picture = make_picture(SONAR)
    whole = extract(recordings, picture, cache=tmp_path / "cache")
    file = next((tmp_path / "cache").iterdir())
    good = file.read_bytes()
    method = bytearray(good)
    method[good.index(b"PK\x01\x02") + 10] = 99  # a way of packing that nobody knows
    for content in (b"", good[:300], b"nonsense", bytes(method)):
        file.write_bytes(content)
        assert torch.equal(extract(recordings, picture, cache=tmp_path / "cache").inputs, whole.inputs)
        assert file.read_bytes() == good


def test_what_a_killed_run_left_in_the_cache_is_swept_away(tmp_path, write, make_tone):
    old, new = tmp_path / "cache" / "old.part", tmp_path / "cache" / "new.part"
    old.parent.mkdir()
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    extract(folder(tmp_path, write, make_tone, 1), make_picture(SONAR), cache=tmp_path / "cache")
    assert new.exists()
    assert not old.exists()


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, write, make_tone):
    (tmp_path / "file").write_text("in the way")
    recordings = folder(tmp_path, write, make_tone, 1)
    assert len(extract(recordings, make_picture(SONAR), cache=tmp_path / "file" / "cache").inputs) == 4


@pytest.mark.parametrize("kind", ["logmel", "lofar", "demon", "waveform"])
def test_the_units_of_a_recording_do_not_matter(kind):
    """Pascal, counts, volts: what float files hold; neither do squares overflow nor logarithms reach their floor."""
    x = np.random.default_rng(0).standard_normal(8000).astype(np.float32)
    picture = make_picture(Sonar(picture=kind, sample_rate=4000, seconds=1.0))
    wanted, starts = picture_blocks([x], picture, 0.5)
    for unit in (1e30, 1e-5):
        got, at = picture_blocks([x * np.float32(unit)], picture, 0.5)
        assert starts.tolist() == at.tolist()
        assert float((got.float() - wanted.float()).abs().max()) <= (0.01 if kind == "waveform" else 1)
        assert float(got.float().std()) > 0.5
