"""Run directories: one process at a time, nothing overwritten, nothing torn."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from fedbayes import config, rundir
from fedbayes.checkpoint import pack
from fedbayes.errors import RunError
from fedbayes.experiment import Experiment
from fedbayes.rundir import RunDirectory, fresh_directory, read_events

EXPERIMENT = Experiment(name="x")


def test_a_second_process_is_refused(tmp_path):
    code = f"from fedbayes.rundir import RunDirectory as R; from fedbayes.experiment import Experiment as E; R({str(tmp_path)!r}, E(name='x'), resume=True)"
    with RunDirectory(tmp_path, EXPERIMENT):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode != 0
        assert f"in use by another process (pid {os.getpid()})" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_an_existing_run_is_not_overwritten(tmp_path):
    RunDirectory(tmp_path, EXPERIMENT).close()
    with pytest.raises(RunError, match="--resume"):
        RunDirectory(tmp_path, EXPERIMENT)
    RunDirectory(tmp_path, EXPERIMENT, resume=True).close()


def test_another_configuration_is_not_resumed(tmp_path):
    RunDirectory(tmp_path, EXPERIMENT).close()
    with pytest.raises(RunError, match=r"partition\.alpha"):
        RunDirectory(tmp_path, config.override(EXPERIMENT, {"partition.alpha": 9}), resume=True)
    RunDirectory(tmp_path, config.override(EXPERIMENT, {"rounds": 99}), resume=True).close()  # more rounds are fine


def test_a_finished_run_is_neither_shortened_nor_erased(tmp_path):
    three = config.override(EXPERIMENT, {"rounds": 3})
    with RunDirectory(tmp_path, three) as d:
        d.save_checkpoint({}, {"round": 3})
        d.log({"kind": "end", "rounds": 3})
    with pytest.raises(RunError, match=r"finished run of 3 rounds.*cannot take any back"):
        RunDirectory(tmp_path, config.override(EXPERIMENT, {"rounds": 2}), resume=True)
    assert config.read(tmp_path / "config.toml").rounds == 3
    RunDirectory(tmp_path, three, resume=True).close()
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match=r"no checkpoint\.safetensors to resume from"):
        RunDirectory(tmp_path, config.override(EXPERIMENT, {"rounds": 4}), resume=True)
    assert [e["rounds"] for e in read_events(tmp_path)] == [3]


def test_an_unfinished_run_is_not_shortened_either(tmp_path):
    with RunDirectory(tmp_path, config.override(EXPERIMENT, {"rounds": 6})) as d:
        d.save_checkpoint(*pack({"round": 4}))
    with pytest.raises(RunError, match=r"a run of 4 rounds.*cannot take any back"):
        RunDirectory(tmp_path, config.override(EXPERIMENT, {"rounds": 3}), resume=True)
    assert config.read(tmp_path / "config.toml").rounds == 6


def test_metrics_shorter_than_the_checkpoint_knows_are_not_stretched(tmp_path):
    with RunDirectory(tmp_path, EXPERIMENT) as d:
        d.log({"kind": "a"})
        with pytest.raises(RunError, match=r"metrics\.jsonl is shorter"):
            d.truncate_metrics(d.metrics_size() + 1)
        assert [e["kind"] for e in d.events()] == ["a"]


def test_only_its_own_leftovers_are_swept(tmp_path):
    (tmp_path / "config.toml.123.part").write_bytes(b"torn")
    (tmp_path / "holiday.mp4.part").write_bytes(b"somebody's download")
    RunDirectory(tmp_path, EXPERIMENT).close()
    assert sorted(p.name for p in tmp_path.glob("*.part")) == ["holiday.mp4.part"]


def test_files_are_readable_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o022)
    try:
        RunDirectory(tmp_path, EXPERIMENT).close()
    finally:
        os.umask(before)
    assert (tmp_path / "config.toml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("place", ["file", "file/inside"])
def test_a_place_that_cannot_be_a_directory_is_named(tmp_path, place):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=f"{place} cannot be written"):
        RunDirectory(tmp_path / place, EXPERIMENT)


def test_metrics_are_written_line_by_line_and_torn_lines_left_out(tmp_path):
    with RunDirectory(tmp_path, EXPERIMENT) as d:
        d.log({"kind": "a", "value": torch.tensor(1.5), "nan": float("nan")})
        size = d.metrics_size()
        d.log({"kind": "b"})
        assert [e["kind"] for e in d.events()] == ["a", "b"]
        d.truncate_metrics(size)
        with open(tmp_path / "metrics.jsonl", "ab") as f:
            f.write(b'{"kind": "to\xc3')  # within the letter
        assert list(read_events(tmp_path)) == [{"kind": "a", "value": 1.5, "nan": None}]


def test_checkpoint_round_trip(tmp_path):
    with RunDirectory(tmp_path, EXPERIMENT) as d:
        assert d.load_checkpoint() is None
        d.save_checkpoint({"a/b": torch.arange(3)}, {"round": 2})
        tensors, state = d.load_checkpoint()
    assert torch.equal(tensors["a/b"], torch.arange(3))
    assert state == {"round": 2}


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    with RunDirectory(tmp_path, EXPERIMENT) as d:
        d.save_checkpoint({"x": torch.zeros(2)}, {"round": 1})

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        def full_open(*_):
            full(_)

        monkeypatch.setattr(rundir.os, "fsync", full)
        with pytest.raises(RunError, match="disk is full"):
            d.save_checkpoint({"x": torch.ones(2)}, {"round": 2})
        monkeypatch.undo()
        monkeypatch.setattr("builtins.open", full_open)
        with pytest.raises(RunError, match=r"metrics\.jsonl: the disk is full"):
            d.log({"kind": "a"})
        monkeypatch.undo()
        assert d.load_checkpoint()[1] == {"round": 1}
        assert list(tmp_path.glob("*.part")) == []


def test_a_damaged_checkpoint_is_named(tmp_path):
    with RunDirectory(tmp_path, EXPERIMENT) as d:
        (tmp_path / "checkpoint.safetensors").write_bytes(b"rubbish")
        with pytest.raises(RunError, match=r"checkpoint\.safetensors"):
            d.load_checkpoint()


def test_fresh_directories_never_collide(tmp_path):
    assert [fresh_directory(tmp_path, "a").name for _ in range(3)] == ["a-001", "a-002", "a-003"]
