"""The estimators against closed forms: mean, variance, variance after pooling, between examples, and at sigma = 0."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import nn as tnn

from fedbayes import nn
from fedbayes.errors import ConfigError
from fedbayes.nn.layers import LAYERS

DRAWS = 3000
CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "padded": {"kernel_size": 3, "padding": "same"},
    "grouped": {"kernel_size": 3, "groups": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "reflected": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "one-sided": {
        "kernel_size": (2, 4),
        "padding": "same",
        "padding_mode": "circular",
    },  # more on one side than the other
    "all": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "groups": 2, "dilation": (2, 1)},
}


def conv2d(kind: str, options: dict, **more) -> tnn.Module:
    torch.manual_seed(0)
    layer = LAYERS[kind][tnn.Conv2d](4, 8, sigma=0.3, **options, **more)
    with torch.no_grad():
        layer.weight_rho.add_(torch.randn_like(layer.weight_rho) * 0.5)  # scales that differ between weights
    return layer


def draws(layer: tnn.Module, x: Tensor, n: int = DRAWS) -> Tensor:
    """(n, N, C, ...) outputs under n independent passes."""
    torch.manual_seed(1)
    with torch.no_grad():
        return torch.vmap(lambda _: layer(x), randomness="different", chunk_size=500)(torch.zeros(n))


def exact_moments(layer: tnn.Module, x: Tensor, reduce) -> tuple[Tensor, Tensor]:
    """Mean and variance of reduce(output) for sampled weights, from the Jacobian: reduce is linear in the output."""
    names = [n for n in ("weight", "bias") if hasattr(layer, n + "_rho") and getattr(layer, n + "_rho") is not None]
    means = {n: p.detach() for n, p in layer.named_parameters()}

    def output(chosen: dict[str, Tensor]) -> Tensor:
        both = {**means, **chosen}
        if isinstance(layer, tnn.Linear):
            return reduce(F.linear(x, both["weight"], both.get("bias")))
        return reduce(layer._conv_forward(x, both["weight"], both.get("bias")))

    chosen = {n: means[n] for n in names}
    jacobian = torch.func.jacrev(output)(chosen)
    mean = output(chosen)
    variance = torch.zeros_like(mean)
    for n in names:
        sigma2 = F.softplus(means[n + "_rho"]).square()
        variance = variance + (jacobian[n].square() * sigma2).flatten(mean.dim()).sum(-1)
    return mean, variance


def pooled(y: Tensor) -> Tensor:
    return y.flatten(2).mean(-1)


def ratio(sample: Tensor, exact: Tensor) -> float:
    """Measured over exact variance, all units together."""
    return (sample.var(0).sum() / exact.sum()).item()


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
@pytest.mark.parametrize("one_call", [False, True])
def test_flipout_convolution_has_the_moments_of_sampled_weights(options: dict, one_call: bool) -> None:
    layer = conv2d("flipout", options, bayesian_bias=True)
    layer.one_call = one_call
    x = torch.randn(2, 4, 7, 6) + 0.5
    y = draws(layer, x)
    for reduce in (lambda t: t, pooled):
        mean, variance = exact_moments(layer, x, reduce)
        seen = torch.stack([reduce(t) for t in y])
        assert (seen.mean(0) - mean).div(variance.sqrt()).abs().max() < 5.5 / DRAWS**0.5
        assert ratio(seen, variance) == pytest.approx(1, abs=0.1)
        assert (seen.var(0) / variance - 1).abs().max() < 0.25  # every unit


def test_signs_per_pixel_would_fail_the_pooling_test() -> None:
    """The method that destroys epistemic uncertainty, so that the tests above are known to catch it."""
    layer = conv2d("flipout", {"kernel_size": 3, "padding": 1, "bias": False})
    x = torch.randn(1, 4, 16, 16) + 0.5

    def per_pixel(x: Tensor) -> Tensor:
        delta = F.softplus(layer.weight_rho) * torch.randn_like(layer.weight)
        flipped = x * torch.randn_like(x).sign()
        y = layer.apply_map(flipped, delta, None)
        return layer.apply_map(x, layer.weight, None) + y * torch.randn_like(y).sign()

    with torch.no_grad():
        y = torch.vmap(lambda _: pooled(per_pixel(x)), randomness="different")(torch.zeros(1000))
    assert ratio(y, exact_moments(layer, x, pooled)[1]) < 0.05
    assert ratio(pooled(draws(layer, x, 1000).flatten(0, 1)), exact_moments(layer, x, pooled)[1]) > 0.85


def test_local_convolution_has_right_marginals_and_too_small_a_pooled_variance() -> None:
    layer = conv2d("local", {"kernel_size": 3, "padding": 1}, bayesian_bias=True)
    x = torch.randn(1, 4, 16, 16) + 0.5
    y = draws(layer, x, 1000)
    assert ratio(y, exact_moments(layer, x, lambda t: t)[1]) == pytest.approx(1, abs=0.05)
    after_pooling = ratio(torch.stack([pooled(t) for t in y]), exact_moments(layer, x, pooled)[1])
    assert after_pooling < 0.05  # measured 0.02


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
@pytest.mark.parametrize("bayesian_bias", [False, True])
def test_linear_layers_have_the_moments_of_sampled_weights(kind: str, bayesian_bias: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind][tnn.Linear](6, 5, sigma=0.4, bayesian_bias=bayesian_bias)
    x = torch.randn(3, 6)
    y = draws(layer, x)
    mean, variance = exact_moments(layer, x, lambda t: t)
    assert (y.mean(0) - mean).div(variance.sqrt()).abs().max() < 5 / DRAWS**0.5
    assert (y.var(0) / variance - 1).abs().max() < 0.2


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
def test_layers_in_double_precision_stay_there(kind: str) -> None:
    torch.manual_seed(0)
    for base, args, x in (
        (tnn.Linear, (4, 3), torch.randn(5, 4)),
        (tnn.Conv1d, (4, 3, 3), torch.randn(5, 4, 8)),
        (tnn.Conv2d, (4, 3, 3), torch.randn(5, 4, 8, 8)),
    ):
        layer = LAYERS[kind][base](*args, sigma=1e-9, bayesian_bias=True, dtype=torch.float64)
        y = layer(x.double())
        noise = y - base.forward(layer, x.double())
        assert y.dtype == layer.weight_rho.dtype == torch.float64
        assert 0 < noise.abs().max() < 1e-7  # float32 would have lost it


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
def test_conv1d_has_the_moments_of_sampled_weights(kind: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind][tnn.Conv1d](4, 6, 5, stride=2, padding=3, dilation=2, groups=2, sigma=0.3)
    x = torch.randn(2, 4, 23)
    y = draws(layer, x)
    mean, variance = exact_moments(layer, x, lambda t: t)
    assert (y.mean(0) - mean).div(variance.sqrt()).abs().max() < 5.5 / DRAWS**0.5
    assert ratio(y, variance) == pytest.approx(1, abs=0.08)


def test_linear_layers_over_sequences_keep_one_sign_per_example_and_feature() -> None:
    torch.manual_seed(0)
    layer = nn.FlipoutLinear(4, 3, sigma=0.5)
    x = torch.randn(2, 9, 4) + 1
    y = draws(layer, x)
    mean, variance = exact_moments(layer, x, lambda t: t.mean(1))
    assert ratio(y.mean(2), variance) == pytest.approx(1, abs=0.08)
    assert y.shape[1:] == mean.new_empty(2, 9, 3).shape


@pytest.mark.parametrize(("kind", "correlated"), [("flipout", False), ("local", False), ("sample", True)])
def test_examples_of_a_pass_share_a_draw_only_with_direct_sampling(kind: str, correlated: bool) -> None:
    layer = conv2d(kind, {"kernel_size": 3, "bias": False})
    x = (torch.randn(1, 4, 5, 5) + 1).expand(2, -1, -1, -1)
    y = draws(layer, x)[:, :, 0, 0, 0]
    correlation = torch.corrcoef(y.T)[0, 1].item()
    assert abs(correlation - (1 if correlated else 0)) < 0.1


def test_flipout_signs_are_fair_and_constant_over_space() -> None:
    layer = nn.FlipoutConv2d(50, 60, 3)
    sign_in, sign_out = layer._signs(torch.randn(400, 50, 2, 2))
    assert sign_in.shape == (400, 50, 1, 1)
    assert sign_out.shape == (400, 60, 1, 1)
    assert set(sign_in.unique().tolist()) == {-1.0, 1.0}
    assert abs(sign_in.mean().item()) < 0.03
    assert abs(sign_out.mean().item()) < 0.03
    assert abs((sign_in[:, :, 0, 0] * sign_out[:, :50, 0, 0]).mean().item()) < 0.03


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
@pytest.mark.parametrize("rho", [float("-inf"), -200.0])
def test_without_sigma_every_estimator_is_exactly_the_torch_layer(kind: str, rho: float) -> None:
    for base, args, x in (
        (tnn.Linear, (4, 3), torch.randn(5, 4)),
        (tnn.Conv1d, (4, 3, 3), torch.randn(5, 4, 8)),
        (tnn.Conv2d, (4, 3, 3), torch.randn(5, 4, 8, 8)),
    ):
        torch.manual_seed(0)
        plain = base(*args)
        layer = nn.bayesianize(plain, kind, bayesian_bias=True)
        with torch.no_grad():
            layer.weight_rho.fill_(rho)
            layer.bias_rho.fill_(rho)
        assert torch.equal(layer(x), plain(x))
        assert torch.equal(layer.eval()(x), plain(x))


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
def test_gradients_stay_finite_where_the_variance_is_zero(kind: str) -> None:
    for rho in (-3.0, -60.0, -200.0, float("-inf")):
        layer = conv2d(kind, {"kernel_size": 3, "padding": 1}, bayesian_bias=False)
        with torch.no_grad():
            layer.weight_rho.fill_(rho)
        x = torch.zeros(2, 4, 6, 6, requires_grad=True)
        layer(x).square().sum().backward()
        for tensor in (x, *layer.parameters()):
            assert torch.isfinite(tensor.grad).all(), (kind, rho)


@pytest.mark.parametrize("kind", ["flipout", "local", "sample", "dropout"])
def test_inputs_without_a_batch_axis_are_taken_as_torch_takes_them(kind: str) -> None:
    for base, args, x in (
        (tnn.Linear, (4, 3), torch.randn(4)),
        (tnn.Conv1d, (4, 3, 3), torch.randn(4, 8)),
        (tnn.Conv2d, (4, 3, 3), torch.randn(4, 8, 8)),
    ):
        plain = base(*args)
        assert nn.bayesianize(plain, kind)(x).shape == plain(x).shape


def test_dropout_is_on_in_evaluation_and_keeps_the_mean() -> None:
    x = torch.ones(64, 3, 10, 10)
    for per_pass in (False, True):
        layer = nn.Dropout(0.2, per_pass).eval()
        torch.manual_seed(0)
        y = torch.stack([layer(x) for _ in range(30)])
        assert y.mean().item() == pytest.approx(1, abs=0.02 if not per_pass else 0.03)
        assert (y == 0).float().mean().item() == pytest.approx(0.2, abs=0.02)
        shared = all(torch.equal(pass_[0], pass_[i]) for pass_ in y for i in (1, 63))
        assert shared == per_pass


def test_sharing_masks_reaches_every_dropout_layer() -> None:
    network = nn.share_masks(nn.build("resnet20", "dropout"))
    x = torch.randn(1, 3, 32, 32).expand(3, -1, -1, -1)
    y = network.eval()(x)
    assert torch.allclose(y[0], y[1], atol=1e-6)
    assert not torch.allclose(y[0], network(x)[0])
    assert not torch.allclose(*nn.share_masks(network, False)(x)[:2])


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
def test_a_pass_in_evaluation_still_draws(kind: str) -> None:
    network = nn.build("cnn", kind, input_shape=(1, 8, 8), sigma=0.2).eval()
    x = torch.randn(2, 1, 8, 8)
    assert not torch.allclose(network(x), network(x))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="sigma is 0"):
        nn.FlipoutLinear(2, 2, sigma=0)
    with pytest.raises(ConfigError, match="sigma is 'a'"):
        nn.FlipoutLinear(2, 2, sigma="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sigma is -1"):  # it made every rho NaN
        nn.initialize(nn.FlipoutLinear(2, 2), sigma=-1)
    nn.initialize(nn.FlipoutLinear(2, 2), "tfp", sigma=-1)  # not used there
    with pytest.raises(ConfigError, match="dropout is 1"):
        nn.Dropout(1.0)
