"""kill -9 at any moment, then --resume: on the CPU the same bits as a run that was never interrupted."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from fedbayes import Posterior
from fedbayes.rundir import read_events

OVERRIDES = [
    "--rounds", "6", "--partition.clients", "4", "--evaluation.samples", "3", "--local.epochs", "2",
    "--data.limit", "400",
]  # fmt: skip


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # bits are those of a number of threads


def start(out, *more):
    command = [sys.executable, "-m", "fedbayes", "run", "digits", "--out", str(out), "--quiet", *OVERRIDES, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ONE_THREAD)


def finish(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def without_times(path):
    def clean(value):
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in ("seconds", "time", "why", "compile_seconds")}
        return value

    return [clean(e) for e in read_events(path)]


@pytest.mark.parametrize("settings", [("--engine.lanes", "1"), ("--engine.lanes", "3", "--local.keep-state")])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, settings):
    finish(start(tmp_path / "whole", *settings))
    rng = random.Random(settings[1])
    killed = tmp_path / "killed"
    kills = 0
    process = start(killed, *settings)
    while kills < 4 and process.poll() is None:
        metrics = killed / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        # wait until this attempt has written something, then a random moment more: mid-round, mid-checkpoint
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= size):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.3)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            process.stdout.close()
            process = start(killed, "--resume", *settings)
    finish(process)
    assert kills > 0
    for name in ("final.safetensors", "best.safetensors"):
        assert Posterior.load(killed / name).same_bits(Posterior.load(tmp_path / "whole" / name))
    assert without_times(killed) == without_times(tmp_path / "whole")
    assert list(killed.glob("*.part")) == []


def test_killed_inside_the_checkpoint_leaves_the_last_one_whole(tmp_path):
    code = """
import os, signal, sys
from fedbayes import rundir
real, calls = rundir.os.replace, [0]
def replace(a, b):
    calls[0] += str(b).endswith("checkpoint.safetensors")
    if calls[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    real(a, b)
rundir.os.replace = replace
from fedbayes.cli import main
main(sys.argv[1:])
"""
    settings = ("--engine.lanes", "1")
    out = tmp_path / "torn"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "digits", "--out", str(out), "--quiet", *OVERRIDES, *settings],
        capture_output=True,
        env=ONE_THREAD,
    )
    assert done.returncode == -signal.SIGKILL
    assert list(out.glob("*.part"))
    finish(start(out, "--resume", *settings))
    finish(start(tmp_path / "whole", *settings))
    assert Posterior.load(out / "final.safetensors").same_bits(Posterior.load(tmp_path / "whole" / "final.safetensors"))
