"""The variance analysis's numbers."""

from types import SimpleNamespace

import pytest
import torch

from fedbayes import config, runner
from fedbayes.moments import moment_summary, section
from fedbayes.posterior import Gaussian, Posterior


def test_means_of_v_and_of_its_inverse():
    q = Posterior({"w": Gaussian(torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]))}, {"b": torch.ones(2)})
    assert moment_summary(q) == {"w": {"moment": pytest.approx(7 / 3), "inverse": pytest.approx((1 + 0.5 + 0.25) / 3)}}


def test_a_dead_unit_has_a_finite_inverse():
    q = Posterior({"w": Gaussian(torch.zeros(1), torch.zeros(1))})
    assert moment_summary(q)["w"]["inverse"] == pytest.approx(1e16)


def test_precision_runs_log_them_by_client_and_layer():
    e = config.override(
        config.Experiment(),
        {
            "rounds": 1, "data.limit": 120, "data.test_limit": 40, "partition.clients": 3, "model.name": "mlp",
            "model.kind": "deterministic", "fusion.rule": "precision", "engine.device": "cpu", "engine.lanes": 1,
        },
    )  # fmt: skip
    events = runner.run(e, write=False).events
    moments = next(x["fusion"]["moments"] for x in events if x["kind"] == "round")
    assert set(moments) == {"0", "1", "2"}
    assert all(v["moment"] > 0 for layers in moments.values() for v in layers.values())
    plain = runner.run(config.override(e, {"fusion.rule": "fedavg"}), write=False).events
    assert "moments" not in next(x["fusion"] for x in plain if x["kind"] == "round")


def test_the_report_draws_them_only_where_they_are():
    rounds = [
        {"kind": "round", "round": r, "fusion": {"moments": {
            "0": {"a.weight": {"moment": 1.0, "inverse": 2.0 * r}, "b.weight": {"moment": 1.0, "inverse": 1.0}},
            "1": {"a.weight": {"moment": 2.0, "inverse": 0.5}, "b.weight": {"moment": 1.0, "inverse": 3.0}},
        }}}
        for r in (1, 2, 3)
    ]  # fmt: skip
    html = section(SimpleNamespace(events=rounds))
    assert html is not None
    assert html.count("<svg") == 2
    assert "client 2" in html
    assert "1 a.weight, 2 b.weight" in html
    assert section(SimpleNamespace(events=[{"kind": "round", "round": 1, "fusion": {"rule": "nwa"}}])) is None


def test_bias_correction_is_an_option_of_the_rule_and_reaches_the_clients():
    """Without it a client that took 8 steps seems to have a v of 1 - 0.999^8 = 0.8 % of the corrected one."""
    e = config.override(
        config.Experiment(),
        {
            "rounds": 1, "data.limit": 96, "data.test_limit": 40, "data.validation": 0.0, "partition.scheme": "iid",
            "partition.clients": 2, "model.name": "mlp", "model.kind": "deterministic", "fusion.rule": "precision",
            "local.epochs": 3, "local.batch_size": 16, "engine.device": "cpu", "engine.lanes": 1,
        },
    )  # fmt: skip
    moments = []
    for corrected in ("true", "false"):
        options = config.override(e, {"fusion.options": [f"bias_correction={corrected}"]})
        events = runner.run(options, write=False).events
        moments.append(next(x["fusion"]["moments"] for x in events if x["kind"] == "round"))
    steps = 3 * 3  # 48 images a client: three steps an epoch, the last two of nine are averaged
    scale = sum(1 - 0.999**t for t in (steps - 1, steps)) / 2
    for client in ("0", "1"):
        for layer, value in moments[0][client].items():
            assert moments[1][client][layer]["moment"] == pytest.approx(scale * value["moment"], rel=0.1), layer
