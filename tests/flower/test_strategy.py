"""``FusionStrategy`` in a Flower app that knows nothing else of ours."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_cases import grid_of
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbayes.errors import ConfigError
from fedbayes.flower import FusionStrategy
from fedbayes.fusion import fuse
from fedbayes.posterior import Gaussian, Posterior

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_fusion_strategy"
TO_SIGMA = {
    "softplus": lambda t: torch.log1p(torch.exp(t)),
    "log_sigma": torch.exp,
    "log_variance": lambda t: torch.exp(t / 2),
    "sigma": lambda t: t,
    "variance": torch.sqrt,
}


def tensors(seed, mean="fc.weight", scale="fc.weight_rho", positive=False):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(3, 4, generator=g) - 2
    return {
        mean: torch.randn(3, 4, generator=g),
        scale: wide.exp() if positive else wide,
        "bn.running_mean": torch.randn(5, generator=g),
        "bn.num_batches_tracked": torch.tensor(10 * seed),
    }


def record(state):
    return ArrayRecord({n: Array(t.numpy()) for n, t in state.items()})


def app_sending(states):
    """An ordinary client app: node i answers with the i-th state and 10 (i + 1) examples."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        i = context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": 10 * (i + 1), "loss": float(i), "partition-id": i})
        return Message(RecordDict({"arrays": record(states[i]), "metrics": metrics}), reply_to=message)

    return app


def expected(states, rule, previous, form, mean, scale):
    """Fuse by hand with the posterior's own arithmetic, in float64 sigma."""
    sizes = {i: 10 * (i + 1) for i in range(len(states))}

    def posterior(state):
        sigma = TO_SIGMA[form](state[scale].double())
        points = {n: t for n, t in state.items() if n not in (mean, scale)}
        return Posterior({mean: Gaussian(state[mean], (sigma**2).float())}, points)

    total = sum(sizes.values())
    return fuse(
        {i: posterior(s) for i, s in enumerate(states)}, rule=rule, weights={i: n / total for i, n in sizes.items()},
        previous=posterior(previous),
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["nwa", "conflation", "lp", "dwc"])
@pytest.mark.parametrize("form", list(TO_SIGMA))
@pytest.mark.parametrize(
    ("mean", "scale", "names"),
    [("*", "*_rho", ("fc.weight", "fc.weight_rho")), ("mu_*", "rho_*", ("fc.mu_weight", "fc.rho_weight")), ("*_mu", "*_rho", ("fc.weight_mu", "fc.weight_rho"))],
)  # fmt: skip
def test_fuses_as_by_hand_whatever_the_tensors_are_called(rule, form, mean, scale, names):
    positive = form in ("sigma", "variance")
    start, states = tensors(9, *names, positive), [tensors(i, *names, positive) for i in range(3)]
    strategy = FusionStrategy(rule, "size", mean=mean, scale=scale, parameterisation=form, fraction_evaluate=0.0)
    result = strategy.start(grid_of(3, app_sending(states)), record(start), 1)
    by_hand = expected(states, rule, start, form, *names)
    got = {n: torch.from_numpy(a.numpy().copy()) for n, a in result.arrays.items()}
    assert list(got) == list(start)
    assert torch.isfinite(got[names[1]]).all()
    sigma = by_hand.gaussians[names[0]].variance.double().sqrt()
    assert torch.allclose(got[names[0]], by_hand.gaussians[names[0]].mean, rtol=1e-5, atol=1e-6)
    assert torch.allclose(TO_SIGMA[form](got[names[1]].double()), sigma, rtol=1e-5)
    assert torch.allclose(got["bn.running_mean"], by_hand.points["bn.running_mean"])
    assert got["bn.num_batches_tracked"] == by_hand.points["bn.num_batches_tracked"]
    assert got["bn.num_batches_tracked"].dtype == torch.int64
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(np.average([0, 1, 2], weights=[10, 20, 30]))


def test_a_bad_client_is_refused_and_the_others_are_fused():
    states = [tensors(i) for i in range(3)]
    states[1]["fc.weight"][0, 0] = float("nan")
    strategy = FusionStrategy("nwa", "equal", fraction_evaluate=0.0)
    strategy.start(grid_of(3, app_sending(states)), record(tensors(9)), 1)
    assert [r["client"] for r in strategy.record["refused"]] == [1]
    assert set(strategy.record["weights"]) == {"0", "2"}


def test_continues_from_its_checkpoint_with_the_round_counted_on(tmp_path):
    seen = []
    app = app_sending([tensors(i) for i in range(3)])

    def spying(message, context):
        seen.append(message.content["config"]["server-round"])
        return app(message, context)

    def run(rounds):
        strategy = FusionStrategy("ws", "size", fraction_evaluate=0.0, checkpoint=tmp_path / "c.safetensors")
        return strategy.start(grid_of(3, spying), record(tensors(9)), rounds)

    run(2)
    resumed = run(3)
    assert seen == [1] * 3 + [2] * 3 + [3] * 3
    whole = FusionStrategy("ws", "size", fraction_evaluate=0.0).start(grid_of(3, app), record(tensors(9)), 3)
    for name, array in whole.arrays.items():
        assert np.allclose(array.numpy(), resumed.arrays[name].numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rule": "conflatoin"}, "conflation"),
        ({"weighting": "sise"}, "size"),
        ({"parameterisation": "softmax"}, "softplus"),
        ({"mean": "mu", "scale": "rho_*"}, r"one \*"),
    ],
)
def test_wrong_settings_are_refused_with_the_nearest_right_one(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        FusionStrategy(**arguments)


def test_scales_without_means_are_said():
    strategy = FusionStrategy("nwa", mean="mu_*", scale="rho_*", fraction_evaluate=0.0)
    with pytest.raises(ConfigError, match="no means"):
        strategy.posterior(record({"fc.rho_weight": torch.zeros(2)}))


def test_the_example_app_learns(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from bayesian_flower import app as example

    grid = grid_of(3, example.client_app)
    strategy = FusionStrategy("conflation", "size", fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(example.model.state_dict()), 2, evaluate_fn=example.evaluate)
    assert result.evaluate_metrics_serverapp[2]["accuracy"] > 0.85
    sys.modules.pop("bayesian_flower.app", None)
