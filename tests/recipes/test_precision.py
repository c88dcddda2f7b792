"""Precision weighting end to end: every way of reaching the clients fuses the same moments, under both signs."""

import pytest
import torch

from fedbayes import config, runner

SMALL = {
    "rounds": 2, "data.limit": 120, "data.test_limit": 40, "data.validation": 0.0, "data.mean": "none",
    "partition.clients": 5, "partition.scheme": "shards", "partition.classes_per_client": 2, "model.name": "mlp",
    "model.kind": "deterministic", "fusion.rule": "precision", "local.batch_size": 16, "local.epochs": 2,
    "engine.device": "cpu", "engine.lanes": 1,
}  # fmt: skip


def experiment(**changes):
    return config.override(config.read("digits"), {**SMALL, **changes})


def run_over_flower(e):
    pytest.importorskip("flwr")
    from fedbayes.flower.client import client_app
    from fedbayes.flower.inprocess import InProcessGrid
    from fedbayes.flower.server import cohort_of

    setup = runner.prepare(e)
    clients = e.partition.clients
    grid = InProcessGrid(client_app, [{"partition-id": i, "num-partitions": clients} for i in range(clients)])
    federation = runner.make_federation(setup, cohort_of(grid, setup), None)
    return federation.run(), federation.history


@pytest.mark.parametrize("sign", ["inverse", "fisher"])
def test_lanes_loop_and_flower_fuse_the_same_moments(sign):
    options = {"fusion.options": [f"sign={sign}"]}
    loop = runner.run(experiment(**options), write=False, report=False).posterior
    lanes = runner.run(experiment(**options, **{"engine.lanes": 5}), write=False, report=False).posterior
    flower, history = run_over_flower(experiment(**options))
    assert loop.gaussians  # every trained tensor carries its estimate
    for name, g in loop.gaussians.items():
        assert torch.equal(g.mean, flower.gaussians[name].mean)
        assert torch.equal(g.variance, flower.gaussians[name].variance)
        torch.testing.assert_close(lanes.gaussians[name].mean, g.mean, rtol=1e-3, atol=1e-4)
    last = [e for e in history if e["kind"] == "round"][-1]["fusion"]["moments"]
    assert set(last) == {"0", "1", "2", "3", "4"}
    assert set(last["0"]) == set(loop.gaussians)


def test_the_two_signs_part_on_clients_that_differ():
    found = {}
    for sign in ("inverse", "fisher"):
        e = experiment(**{"fusion.options": [f"sign={sign}"]})
        found[sign] = runner.run(e, write=False, report=False).posterior
    assert any(
        not torch.allclose(g.mean, found["fisher"].gaussians[name].mean, atol=1e-3)
        for name, g in found["inverse"].gaussians.items()
    )
