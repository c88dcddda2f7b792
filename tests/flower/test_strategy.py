"""``FusionStrategy`` in a Flower app that knows nothing else of ours."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_cases import grid_of
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbayes.errors import ConfigError, RunError
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


def app_sending(states, said=None):
    """An ordinary client app: node i answers with the i-th state and 10 (i + 1) examples (or what it is to say)."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        i = context.node_config["partition-id"]
        metrics = MetricRecord(said[i] if said else {"num-examples": 10 * (i + 1), "loss": float(i), "partition-id": i})
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


def told(examples):
    """Have client 1 report this number of examples."""
    return lambda state, said: said.update({"num-examples": examples})


@pytest.mark.parametrize("weighting", ["size", "max-discrepancy"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda state, said: state["fc.weight"].fill_(float("nan")), "NaN"),
        (lambda state, said: state.update(extra=torch.zeros(2)), "not a tensor of this model"),
        (lambda state, said: state.pop("bn.running_mean"), "missing"),
        (lambda state, said: state.pop("fc.weight"), "no means"),
        (lambda state, said: state.update({"fc.weight": torch.zeros(2, 2)}), "shape"),
        (told(0), "'num-examples' is 0"),
        (told(-5), "'num-examples' is -5"),
        (told(float("nan")), "'num-examples' is nan"),
        (told([1, 2]), "is [1, 2]"),
        (lambda state, said: said.pop("num-examples"), "is None"),
    ],
)
def test_a_bad_client_is_refused_by_name_and_the_others_are_fused(spoil, reason, weighting):
    states = [tensors(i) for i in range(3)]
    said = [{"num-examples": 10, "loss": 1.0, "partition-id": i} for i in range(3)]
    spoil(states[1], said[1])
    strategy = FusionStrategy("nwa", weighting, fraction_evaluate=0.0)
    result = strategy.start(grid_of(3, app_sending(states, said)), record(tensors(9)), 1)
    (refused,) = strategy.record["refused"]
    assert refused["client"] == 1
    assert reason in f"{refused['tensor']} {refused['reason']}"
    assert set(strategy.record["weights"]) == {"0", "2"}
    assert result.train_metrics_clientapp[1]["loss"] == 1.0


def test_where_no_client_is_fit_the_model_stays():
    said = [{"num-examples": 0, "partition-id": i} for i in range(3)]
    strategy = FusionStrategy("nwa", fraction_evaluate=0.0)
    result = strategy.start(grid_of(3, app_sending([tensors(i) for i in range(3)], said)), record(tensors(9)), 2)
    assert len(result.arrays) == 0
    assert [r["client"] for r in strategy.record["refused"]] == [0, 1, 2]


def test_clients_that_report_one_number_all_count_whoever_answers_first():
    said = [{"num-examples": 10 * (i + 1), "partition-id": 0} for i in range(3)]
    expected = {f"0 (node {1000 + i})": pytest.approx((i + 1) / 6) for i in range(3)}
    for step in (1, -1):
        grid = grid_of(3, app_sending([tensors(i) for i in range(3)], said))
        pull = grid.pull_messages
        grid.pull_messages = lambda ids, pull=pull, step=step: list(pull(ids))[::step]
        strategy = FusionStrategy("ws", "size", fraction_evaluate=0.0)
        strategy.start(grid, record(tensors(9)), 1)
        assert strategy.record["weights"] == expected


@pytest.mark.parametrize(("dtype", "rho"), [(torch.float16, -9.0), (torch.float16, -8.0), (torch.float32, -60.0)])
def test_small_sigmas_survive_in_the_models_own_type(dtype, rho):
    state = {"w": torch.ones(3, dtype=dtype), "w_rho": torch.full((3,), rho, dtype=dtype)}
    strategy = FusionStrategy("nwa", fraction_evaluate=0.0)
    result = strategy.start(grid_of(3, app_sending([state] * 3)), record(state), 2)
    for name, tensor in state.items():
        assert np.array_equal(result.arrays[name].numpy(), tensor.numpy())
        assert result.arrays[name].dtype == str(tensor.numpy().dtype)


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
    done = run(3)
    assert len(seen) == 9
    assert all(np.array_equal(a.numpy(), done.arrays[n].numpy()) for n, a in resumed.arrays.items())
    strategy = FusionStrategy("ws", "size", fraction_evaluate=0.0, checkpoint=tmp_path / "c.safetensors")
    for other in (tensors(9, "other.weight", "other.weight_rho"), tensors(9) | {"bn.running_mean": torch.zeros(6)}):
        with pytest.raises(RunError, match="holds another model"):
            strategy.start(grid_of(3, spying), record(other), 4)


def test_evaluations_and_results_of_a_continued_run_have_their_own_rounds(tmp_path):
    seen = []
    app = app_sending([tensors(i) for i in range(2)])

    @app.evaluate()
    def evaluate(message, context):
        seen.append(message.content["config"]["server-round"])
        metrics = MetricRecord({"num-examples": 1, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def run(rounds):
        file = tmp_path / "not" / "there yet" / "c.safetensors"
        strategy = FusionStrategy("nwa", checkpoint=file)
        judge = lambda round, arrays: MetricRecord({"round": round})  # noqa: E731
        return strategy.start(grid_of(2, app), record(tensors(9)), rounds, evaluate_fn=judge)

    run(2)
    resumed = run(4)
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4]
    assert set(resumed.train_metrics_clientapp) == set(resumed.evaluate_metrics_clientapp) == {3, 4}
    assert {r: m["round"] for r, m in resumed.evaluate_metrics_serverapp.items()} == {2: 2, 3: 3, 4: 4}


def test_a_checkpoint_that_cannot_be_written_is_said_before_the_first_round(tmp_path):
    (tmp_path / "file").write_text("in the way")
    strategy = FusionStrategy("nwa", checkpoint=tmp_path / "file" / "c.safetensors")
    with pytest.raises(RunError, match="cannot be written"):
        strategy.start(grid_of(2, lambda *_: pytest.fail("a node was asked")), record(tensors(9)), 1)


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
