"""The fixed-width step that a GPU compiles and captures, run eagerly here; on a GPU also as it is meant to run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbayes import nn as fnn
from fedbayes.engine import LocalCohort
from fedbayes.engine.graph import GraphLoop, Program, lanes_as_channels, pieces
from fedbayes.engine.lane_layers import with_lane_layers
from fedbayes.engine.packing import pack
from fedbayes.experiment import Engine, Local

from .conftest import MakeCohort, assign, distance, norm_net, split, start_of, train

UNEQUAL = [40, 1, 33, 5, 16, 64, 90]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def fixed(make: MakeCohort, lanes: int, local: Local, shape: tuple[int, int, int], **options) -> LocalCohort:
    cohort = make(norm_net(), split(UNEQUAL), lanes, local, **options)
    loop = GraphLoop(cohort.setting, lanes, compiled=False)
    loop.shape = shape
    cohort._loops[lanes] = loop
    return cohort


@pytest.mark.parametrize("shape", [(3, 1, 256), (3, 4, 256), (7, 2, 4), (10, 3, 6)], ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_masked_steps_change_nothing(make: MakeCohort, shape: tuple[int, int, int], optimizer: str):
    local = Local(batch_size=16, optimizer=optimizer, weight_decay=1e-2, keep_state=True)  # type: ignore[arg-type]
    work = assign(start_of(norm_net()), len(UNEQUAL))
    work = [replace(a, epochs=1 + a.client % 3, l2=1e-3 * a.client, proximal=0.1) for a in work]
    plain, stacked = make(norm_net(), split(UNEQUAL), 1, local), fixed(make, shape[0], local, shape)
    for round in (1, 2):
        rounds = [replace(a, round=round) for a in work]
        expected, found = train(plain, rounds), train(stacked, rounds)
        assert expected.keys() == found.keys()
        for key, update in expected.items():
            assert distance(update.posterior, found[key].posterior) < 1e-4
            for name in ("loss", "nll", "kl", "steps"):
                assert update.metrics[name] == pytest.approx(found[key].metrics[name], rel=1e-4), name
    s = stacked.statistics()
    assert s["real_lane_steps"] == sum(a.epochs * -(-n // 16) for a, n in zip(work, UNEQUAL, strict=True))
    assert s["lane_steps"] >= s["real_lane_steps"]


@pytest.mark.slow
def test_the_compiled_step_is_one_graph_and_gives_the_eager_numbers(make: MakeCohort):
    """What a GPU captures: a network of our own layers, all penalties, the second moment, without a break in the graph."""
    work = [replace(a, epochs=1, l2=1e-3, proximal=0.1) for a in assign(start_of(norm_net()), 3)]
    found = []
    for compiled in (False, True):
        cohort = make(norm_net(), split([40, 1, 33]), 2, capture_moment=True)
        loop = cohort._loops[2] = GraphLoop(cohort.setting, 2, compiled=compiled, shape=(2, 1, 8))
        with_lane_layers(loop.model.model)
        found.append(train(cohort, work))
    for key, update in found[0].items():
        assert distance(update.posterior, found[1][key].posterior) < 1e-4
        assert update.metrics["nll"] == pytest.approx(found[1][key].metrics["nll"], rel=1e-5)


def test_the_captured_moment_of_fixed_lanes(make: MakeCohort):
    local = Local(batch_size=16)
    work = assign(start_of(norm_net()), len(UNEQUAL), epochs=3)
    plain = train(make(norm_net(), split(UNEQUAL), 1, local, capture_moment=True), work)
    found = train(fixed(make, 3, local, (3, 4, 256), capture_moment=True), work)
    for key, update in plain.items():
        for name, g in update.posterior.gaussians.items():
            torch.testing.assert_close(found[key].posterior.gaussians[name].variance, g.variance, rtol=2e-3, atol=1e-9)


def test_a_part_of_unequal_clients_each_round(make: MakeCohort, monkeypatch):
    """One program for all rounds, of a width at which nine tenths of the steps of such rounds do real work."""
    built = []
    real = Program.__init__
    monkeypatch.setattr(Program, "__init__", lambda self, *a: (built.append(a[2]), real(self, *a))[1])
    rng = np.random.default_rng(4)
    sizes = np.maximum(1, rng.dirichlet(np.full(100, 0.3)) * 3000).astype(int)
    shards = [np.arange(n) % 300 for n in sizes]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    local = Local(batch_size=16)
    cohort = make(model, shards, 10, local)
    cohort._loops[10] = GraphLoop(cohort.setting, 10, compiled=False, clients=sizes.tolist())
    done = real_steps = 0
    for round in range(1, 13):
        chosen = np.random.default_rng(round).choice(100, 10, replace=False)
        work = [
            replace(a, client=int(c), round=round) for a, c in zip(assign(start_of(model), 10), chosen, strict=True)
        ]
        found = train(cohort, [replace(a, epochs=1) for a in work])
        assert {client for _, client in found} == set(chosen)
        done += cohort.statistics()["lane_steps"]
        real_steps += cohort.statistics()["real_lane_steps"]
    assert len(built) == 1
    assert 1 < built[0] < 10
    assert real_steps >= 0.85 * done  # 0.9 is of 20 launches drawn beforehand
    assert cohort.statistics()["lanes"] == built[0]


def test_pieces_keep_every_step():
    segments = pack([13, 7, 9, 2], 2, block=1, compact=False)
    for capacity in (1, 4, 5, 100):
        cut = list(pieces(segments, capacity))
        assert all(sum(s.steps for s in piece) <= capacity for piece in cut)
        flat = [
            (job, first + i)
            for piece in cut
            for s in piece
            for i in range(s.steps)
            for job, first in zip(s.jobs, s.begins, strict=True)
            if job >= 0
        ]
        whole = [
            (job, first + i)
            for s in segments
            for i in range(s.steps)
            for job, first in zip(s.jobs, s.begins, strict=True)
            if job >= 0
        ]
        assert flat == whole


def test_lanes_as_channels_changes_the_layout_only():
    x = torch.randn(3, 5, 2, 4, 4)
    y = lanes_as_channels(x)
    assert torch.equal(x, y)
    assert y.transpose(0, 1).reshape(5, 6, 4, 4).is_contiguous(memory_format=torch.channels_last)


@cuda
@pytest.mark.parametrize("kind", ["deterministic", "flipout", "dropout"])
def test_compiled_and_captured(kind: str, transform, examples):
    torch.manual_seed(0)
    model = fnn.build("mlp", kind=kind, classes=10, in_channels=1, input_shape=(1, 8, 8))
    work = assign(start_of(model), len(UNEQUAL))
    shards, local = split(UNEQUAL), Local(batch_size=16)
    plain = train(LocalCohort(model, examples, shards, transform, local, Engine("cuda", 1)), work)
    cohort = LocalCohort(model, examples, shards, transform, local, Engine("cuda", 4, compile=True))
    for _ in range(2):
        found = train(cohort, work)
    again = train(cohort, work)
    for key, update in plain.items():
        assert found[key].posterior.same_bits(again[key].posterior)  # seeded by address
        if kind == "deterministic":
            assert distance(update.posterior, found[key].posterior) < 1e-4
        else:
            assert np.isclose(update.metrics["nll"], found[key].metrics["nll"], rtol=0.5)
