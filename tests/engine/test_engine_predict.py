"""Predictions: shapes, addresses, what a pass shares."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedbayes import nn as fnn
from fedbayes.data import Examples, Transform
from fedbayes.engine import predict
from fedbayes.errors import ConfigError, PosteriorError
from fedbayes.experiment import Engine
from fedbayes.nn.state import posterior_of, to_posterior
from fedbayes.posterior import Gaussian, Posterior

from .conftest import norm_net, start_of

CPU = Engine("cpu")
KINDS = ["flipout", "local", "sample", "dropout"]


def network(kind: str, name: str = "mlp", **fields) -> nn.Module:
    torch.manual_seed(0)
    return fnn.build(name, kind=kind, classes=10, in_channels=1, input_shape=(1, 8, 8), width=16, sigma=0.3, **fields)


def run(model: nn.Module, inputs: torch.Tensor, transform: Transform, **options):
    about = {"samples": 4, "batch_size": 64, "seed_address": (1, "test"), "engine": CPU} | options
    return predict(model, posterior_of(model), inputs, transform, **about)


def test_a_deterministic_network_is_the_module_in_evaluation_mode(examples: Examples, transform: Transform):
    model = norm_net()
    with torch.no_grad():
        model.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
    p = predict(model, start_of(model), examples.inputs, transform, samples=3, batch_size=77, engine=CPU)
    with torch.no_grad():
        expected = model.eval()(transform(examples.inputs, client=-1)).softmax(-1)
    assert p.shape == (3, 300, 10)
    assert p.dtype == torch.float32
    for one in p:
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("draws", ["per_example", "per_pass"])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_has_an_address_and_touches_nothing(kind: str, draws: str, examples: Examples, transform: Transform):
    model, x = network(kind), examples.inputs[:100]
    state = torch.get_rng_state()
    a = run(model, x, transform, draws=draws)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(a, run(model, x, transform, draws=draws))
    assert not torch.equal(a, run(model, x, transform, draws=draws, seed_address=(2, "test")))
    assert a.shape == (4, 100, 10)
    torch.testing.assert_close(a.sum(-1), torch.ones(4, 100))
    assert (a[0] - a[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_one_network_or_many(kind: str, transform: Transform):
    """Equal inputs get equal answers under per_pass, within and across batches, and different ones under per_example."""
    model = network(kind)
    x = torch.full((96, 1, 8, 8), 130, dtype=torch.uint8)
    shared = run(model, x, transform, draws="per_pass", batch_size=32)
    torch.testing.assert_close(shared, shared[:, :1].expand_as(shared), rtol=1e-4, atol=1e-6)
    assert (shared[0] - shared[1]).abs().max() > 1e-3
    own = run(model, x, transform, draws="per_example", batch_size=32)
    assert len(torch.unique(own[0, :, 0])) > 60
    assert not torch.equal(own[:, :32], own[:, 32:64])


@pytest.mark.parametrize("draws", ["per_example", "per_pass"])
def test_the_spread_is_the_posterior_s(draws: str, transform: Transform):
    """A linear network's logit has variance sum x² sigma²: checked through the log odds of two classes."""

    class Odds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = fnn.layers.FlipoutLinear(64, 1, bias=False, sigma=0.05)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.layer(x.flatten(1))
            return torch.cat([z, torch.zeros_like(z)], 1)

    model = Odds()
    x = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)
    p = run(model, x, transform, samples=400, draws=draws).double()
    odds = (p[..., 0] / p[..., 1]).log()
    expected = 0.05**2 * transform(x, client=-1).flatten(1).square().sum(1).double()
    assert float((odds.var(0) / expected).mean()) == pytest.approx(1, abs=0.1)


def test_several_posteriors(examples: Examples, transform: Transform):
    model = norm_net()
    posteriors = [start_of(norm_net(seed)) for seed in range(3)]
    p = predict(model, posteriors, examples.inputs[:20], transform, samples=2, batch_size=8, engine=CPU)
    assert p.shape == (3, 2, 20, 10)
    for one, posterior in zip(p, posteriors, strict=True):
        alone = predict(model, posterior, examples.inputs[:20], transform, samples=2, batch_size=8, engine=CPU)
        assert torch.equal(one, alone)


def test_a_gaussian_over_a_point_is_used_at_its_mean(examples: Examples, transform: Transform):
    model = norm_net()
    point = start_of(model)
    weight = point.points["head.weight"]
    captured = Posterior(
        {"head.weight": Gaussian(weight, weight.square())},
        {n: t for n, t in point.points.items() if n != "head.weight"},
    )
    a = predict(model, point, examples.inputs[:9], transform, samples=1, batch_size=9, engine=CPU)
    assert torch.equal(a, predict(model, captured, examples.inputs[:9], transform, samples=1, batch_size=9, engine=CPU))


def test_a_recurrent_network_with_sampled_weights_is_evaluated_pass_by_pass(
    examples: Examples, transform: Transform
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x.squeeze(1))[0][:, -1])

    with pytest.warns(UserWarning, match="LSTM"):
        model = fnn.bayesianize(Recurrent(), "sample")
    with pytest.raises(ConfigError, match=r"lstm.*'evaluation\.draws' to per_pass"):
        run(model, examples.inputs[:5], transform)
    assert run(model, examples.inputs[:5], transform, draws="per_pass").shape == (4, 5, 10)


def test_refusals(examples: Examples, transform: Transform):
    model = norm_net()
    with pytest.raises(ConfigError, match="at least one sample"):
        run(model, examples.inputs, transform, samples=0)
    with pytest.raises(ConfigError, match="per_example and per_pass"):
        run(model, examples.inputs, transform, draws="each")
    with pytest.raises(ConfigError, match="no inputs"):
        run(model, examples.inputs[:0], transform)
    other = to_posterior({"head.weight": torch.zeros(2, 2)})
    with pytest.raises(PosteriorError, match=r"lacks|shape"):
        predict(model, other, examples.inputs, transform, samples=1, batch_size=9, engine=CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="0 CUDA devices"):
            run(model, examples.inputs, transform, engine=Engine("cuda"))
    assert math.isfinite(run(model, examples.inputs[:1], transform).sum())
