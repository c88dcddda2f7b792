"""The plain loop on several processes: the numbers of the plain loop with one thread, and errors that come home."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes.cohort import Assignment
from fedbayes.data import Examples, Transform
from fedbayes.engine import LocalCohort, choice
from fedbayes.engine.lanes import LaneLoop
from fedbayes.errors import ConfigError, RunError
from fedbayes.experiment import Engine, Local
from fedbayes.nn import build, posterior_of

SIZES = (3, 20, 9, 14)


def cohort(workers: int, model: nn.Module, local: Local | None = None, lanes: int = 1) -> LocalCohort:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES), 5)).astype(np.float32))
    examples = Examples(x, torch.from_numpy(rng.integers(0, 3, len(x))))
    shards = np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1])
    transform = Transform(torch.ones(1), torch.zeros(1, 5))
    engine = Engine(device="cpu", lanes=lanes, workers=workers)
    return LocalCohort(model, examples, shards, transform, local or Local(epochs=2, batch_size=4), engine)


def work(model: nn.Module, round: int = 1) -> list[Assignment]:
    start = posterior_of(model)
    return [Assignment(c, round, start, seed=5, learning_rate=0.01, epochs=2, divisor=46.0) for c in range(len(SIZES))]


def network(kind: str = "flipout") -> nn.Module:
    return build("mlp", kind, classes=3, input_shape=(5,), width=8)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_any_number_of_processes_gives_the_bits_of_the_plain_loop(workers: int) -> None:
    model = network()
    alone = {u.client: u for u in cohort(1, model).train(work(model))}
    shared = cohort(workers, model)
    found = {u.client: u for u in shared.train(work(model))}
    assert found.keys() == alone.keys() == set(range(len(SIZES)))
    for client, update in found.items():
        assert update.posterior.same_bits(alone[client].posterior)
        assert {k: v for k, v in update.metrics.items() if k != "seconds"} == {
            k: v for k, v in alone[client].metrics.items() if k != "seconds"
        }
    assert shared.statistics()["steps"] == sum(2 * -(-n // 4) for n in SIZES)


def test_optimisers_that_persist_come_home() -> None:
    model, local = network("deterministic"), Local(epochs=2, batch_size=4, keep_state=True)
    sides = [cohort(n, model, local) for n in (1, 2)]
    ends = []
    for side in sides:
        for round in (1, 2):
            updates = {u.client: u.posterior for u in side.train(work(model, round))}
        ends.append(updates)
    assert all(ends[0][c].same_bits(ends[1][c]) for c in ends[0])


class Failing(nn.Linear):
    """A network that cannot be run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")


class Dying(nn.Linear):
    """A network whose process is killed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_childs_error_is_raised_here() -> None:
    model = Failing(5, 3)
    with pytest.raises(ValueError, match="no such luck"):
        list(cohort(2, model).train(work(model)))


def test_a_killed_process_is_noticed() -> None:
    model = Dying(5, 3)
    with pytest.raises(RunError, match="without answering for clients"):
        list(cohort(2, model).train(work(model)))


def test_processes_end_when_nobody_listens_any_more() -> None:
    model = network()
    updates = cohort(2, model).train(work(model))
    next(updates)
    updates.close()
    assert not multiprocessing.active_children()


def test_processes_stay_for_the_next_round_and_go_with_their_cohort() -> None:
    model = network()
    side = cohort(2, model)
    numbers = []
    for round in (1, 2):
        list(side.train(work(model, round)))
        numbers.append(sorted(p.pid for p in multiprocessing.active_children()))
    assert len(numbers[0]) == 2
    assert numbers[0] == numbers[1]
    del side
    gc.collect()
    assert not multiprocessing.active_children()


ABANDONED = """
import os, time, torch, fedbayes
from fedbayes import config
parent = os.getpid()
class Slow(torch.nn.Linear):
    def forward(self, x):
        if os.getpid() != parent:
            os.write(1, b"at work\\n")
            time.sleep(600)
        return super().forward(x)
changes = {"engine.lanes": 1, "engine.workers": 2, "engine.device": "cpu", "partition.clients": 2}
network = torch.nn.Sequential(torch.nn.Flatten(), Slow(64, 10))
fedbayes.run(config.override(config.read("digits"), changes), model=network, write=False)
"""


def test_processes_end_with_a_parent_that_is_killed() -> None:
    """In the middle of a job: they hold its open files, the lock of a run directory that is to be resumed among them."""
    command = [sys.executable, "-c", ABANDONED]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    try:
        assert [parent.stdout.readline(), parent.stdout.readline()] == ["at work\n"] * 2
        parent.kill()
        parent.communicate(timeout=60)  # until nobody holds the other end
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_failed_launch_leaves_the_next_one_whole() -> None:
    model = network()
    side = cohort(2, model)
    updates = side.train(work(model))
    next(updates)
    updates.close()  # the launch is given up; what its processes still said must not reach the next one
    alone = {u.client: u.posterior for u in cohort(1, model).train(work(model, 2))}
    found = {u.client: u.posterior for u in side.train(work(model, 2))}
    assert all(found[c].same_bits(alone[c]) for c in alone)


@pytest.mark.parametrize(
    ("asked", "seconds", "chosen"),
    [
        (0, {"plain": 1.0, "processes": 0.9, "lanes": 0.9}, (1, 1)),  # neither is clearly faster
        (0, {"plain": 1.0, "processes": 0.6, "lanes": 0.7}, (1, 2)),
        (0, {"plain": 1.0, "processes": 0.6, "lanes": 0.2}, (4, 1)),
        (1, {"plain": 1.0, "processes": 0.1, "lanes": 0.7}, (4, 1)),  # one process was asked for
        (2, {"plain": 1.0, "processes": 0.9, "lanes": 1.5}, (1, 2)),  # two were
        (2, {"plain": 1.0, "processes": 0.9, "lanes": 0.5}, (4, 1)),
    ],
)
def test_the_way_is_chosen_by_what_was_measured(monkeypatch, asked, seconds, chosen) -> None:
    measured = []

    def timed(loop, jobs, **_):
        name = {"PlainLoop": "plain", "ProcessLoop": "processes", "LaneLoop": "lanes"}[type(loop).__name__]
        measured.append(name)
        return seconds[name]

    monkeypatch.setattr(choice, "_known", {})
    monkeypatch.setattr(choice, "_seconds_per_step", timed)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    model = network()
    side = cohort(asked, model, lanes=0)
    assert side.resolve(work(model)) == chosen[0]
    assert (side.lanes, side.workers) == chosen
    assert ("processes" in measured) == (asked != 1)
    list(side.train(work(model)))
    assert (side.statistics()["lanes"], side.statistics()["workers"]) == chosen
    other = cohort(asked, model, lanes=0)
    other.restore(side.state())
    assert (other.lanes, other.workers) == chosen


@pytest.mark.parametrize(
    ("speeds", "measured", "chosen"),
    [
        ({8: 2.0, 20: 3.0}, [8, 20], 20),
        ({8: 2.0, 20: 1.9}, [8, 20], 20),  # nearly equal: no lanes left idle at the end
        ({8: 2.0, 20: 0.6}, [8, 20], 8),  # a processor's caches hold few lanes of a convolutional network
        ({8: 0.6}, [8], 1),  # more would cost minutes and gigabytes to say the same
        ({8: 2.0, 20: None}, [8, 20], 8),  # memory does not hold more
    ],
)
def test_few_lanes_are_tried_before_many(monkeypatch, speeds, measured, chosen) -> None:
    seen = []

    def timed(loop, jobs, **_):
        if not isinstance(loop, LaneLoop):
            return 1.0
        assert len(jobs) == loop.lanes
        seen.append(loop.lanes)
        if speeds[loop.lanes] is None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return 1 / speeds[loop.lanes]

    monkeypatch.setattr(choice, "_known", {})
    monkeypatch.setattr(choice, "_seconds_per_step", timed)
    side, model = cohort(1, network(), lanes=0), network()
    jobs = [side._job(work(model)[0])] * 20
    assert choice.choose(side.setting, jobs).lanes == chosen
    assert seen == measured


def test_what_a_process_does_once_is_not_measured(monkeypatch) -> None:
    """The first lanes of a process import what ``vmap`` needs; counted in, they would look hopeless."""
    side, launches, now = cohort(1, network()), [], [0.0]

    class Loop:
        setting = side.setting

        def train(self, jobs):
            launches.append(jobs[0].assignment.steps)
            now[0] += 1.0 if len(launches) == 1 else 0.05
            return []

    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    job = side._job(work(network())[0])
    assert choice._seconds_per_step(Loop(), [job], hopeless=0.01) == pytest.approx(0.01)  # type: ignore[arg-type]
    assert launches == [1, 5, 5, 5]


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.workers is -1"):
        cohort(-1, network())
    good = cohort(2, network())
    other = replace(good.setting, device=torch.device("cuda", 0))
    from fedbayes.engine.processes import ProcessLoop

    with pytest.raises(ConfigError, match="for the CPU"):
        ProcessLoop(other, 2)
