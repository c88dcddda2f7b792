"""Between parameters and posteriors nothing is lost, from sigma 1e-9 to 1e3 in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn as tnn

from fedbayes import nn
from fedbayes.errors import PosteriorError
from fedbayes.posterior import Gaussian, Posterior

SIGMAS = torch.logspace(-9, 3, 241, dtype=torch.float64)


def test_inverse_softplus_against_exact_arithmetic() -> None:
    for sigma in (1e-12, 1e-9, 1e-5, 0.02, 0.6931471805599453, 1.0, 30.0, 500.0):
        rho = nn.inverse_softplus(torch.tensor(sigma, dtype=torch.float64)).item()
        expected = math.log(math.expm1(sigma)) if sigma < 700 else sigma
        assert rho == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_variances_survive_the_way_through_rho_in_float32() -> None:
    before = Posterior({"w": Gaussian(torch.linspace(-3, 3, 241), SIGMAS.square().float())})
    state = nn.from_posterior(before)
    assert state["w_rho"].dtype == torch.float32
    after = nn.to_posterior(state)
    assert torch.equal(after.gaussians["w"].mean, before.gaussians["w"].mean)
    ratio = after.gaussians["w"].variance.double() / SIGMAS.square()
    assert (ratio - 1).abs().max() < 4e-6  # two units of float32's last place of rho at -20


def test_forward_of_a_layer_uses_the_posterior_sigma() -> None:
    torch.manual_seed(0)
    layer = nn.SampleLinear(1, 4, bias=False)
    for sigma in (1e-6, 0.1, 50.0):
        nn.load_posterior(layer, Posterior({"weight": Gaussian(torch.zeros(4, 1), torch.full((4, 1), sigma**2))}))
        draws = torch.stack([layer(torch.ones(1, 1)) for _ in range(500)])
        assert draws.std().item() == pytest.approx(sigma, rel=0.06)


def test_a_thousand_round_trips_do_not_drift() -> None:
    start = torch.linspace(-21, 900, 2001)
    state = {"w": torch.zeros(2001), "w_rho": start}
    for _ in range(1000):
        state = nn.from_posterior(nn.to_posterior(state))
    assert ((state["w_rho"] - start) / start.abs().clamp_min(1)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_of_sixteen_bits_keep_their_scales(dtype: torch.dtype) -> None:
    layer = nn.FlipoutLinear(40, 3, dtype=dtype)
    with torch.no_grad():
        layer.weight_rho.copy_(torch.linspace(-20, 8.3, 120).view(3, 40))
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    posterior = nn.posterior_of(layer)
    assert (posterior.gaussians["weight"].variance > 0).all()
    nn.load_posterior(layer, posterior)
    for name, tensor in layer.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.allclose(tensor, before[name], rtol=0, atol=1e-6), (
            name
        )  # about zero rho has finer steps than sigma


def test_points_buffers_and_counters_travel() -> None:
    module = nn.build("resnet20", "flipout")
    module.train()(torch.randn(2, 3, 32, 32))
    posterior = nn.posterior_of(module)
    assert posterior.points["bn1.num_batches_tracked"].dtype == torch.int64
    assert len(posterior.gaussians) == 20
    assert "fc.bias" in posterior.points
    other = nn.load_posterior(nn.build("resnet20", "flipout", seed=1), posterior)
    for name, tensor in nn.state_of(module).items():
        # the double way through the variance may move rho by a last place
        assert torch.allclose(nn.state_of(other)[name], tensor, rtol=1e-6, atol=1e-6), name


def test_nothing_is_shared_with_the_posterior() -> None:
    module = nn.build("mlp", "flipout", input_shape=(1, 8, 8))
    posterior = nn.posterior_of(module)
    mean = posterior.gaussians["fc1.weight"].mean.clone()
    state = nn.from_posterior(posterior)
    with torch.no_grad():
        module.get_parameter("fc1.weight").add_(1)
        state["fc1.weight"].add_(1)
        state["fc3.bias"].add_(1)
    assert torch.equal(posterior.gaussians["fc1.weight"].mean, mean)
    assert not posterior.points["fc3.bias"].any()


def test_stacked_tensors_become_stacked_posteriors() -> None:
    modules = [nn.build("cnn", "flipout", input_shape=(1, 8, 8), seed=s, sigma=0.1 * (s + 1)) for s in range(3)]
    states = [nn.state_of(m) for m in modules]
    stacked = nn.to_posterior({n: torch.stack([s[n] for s in states]) for n in states[0]})
    for lane, module in enumerate(modules):
        alone = nn.posterior_of(module)
        for name, g in alone.gaussians.items():
            assert torch.equal(stacked.gaussians[name].variance[lane], g.variance)


def test_zero_variance_is_minus_infinity_and_comes_back() -> None:
    state = nn.from_posterior(Posterior({"w": Gaussian(torch.ones(2), torch.zeros(2))}))
    assert torch.isneginf(state["w_rho"]).all()
    assert torch.equal(nn.to_posterior(state).gaussians["w"].variance, torch.zeros(2))


def test_draw_gives_one_weight_sample_of_the_right_spread_and_no_noise_after() -> None:
    module = nn.build("mlp", "flipout", input_shape=(64,), sigma=0.3)
    generator = torch.Generator().manual_seed(3)
    state = nn.draw(nn.state_of(module), generator)
    moved = (state["fc1.weight"] - module.get_parameter("fc1.weight")) / 0.3
    assert moved.std().item() == pytest.approx(1, abs=0.03)
    x = torch.randn(5, 64)
    first = torch.func.functional_call(module, state, (x,))
    assert torch.equal(first, torch.func.functional_call(module, state, (x,)))


def test_a_scale_without_its_mean_is_refused() -> None:
    with pytest.raises(PosteriorError, match="'b_rho' is the scale of 'b', which is missing"):
        nn.to_posterior({"a": torch.zeros(1), "b_rho": torch.zeros(1)})


def test_loading_what_does_not_fit_says_what() -> None:
    linear = tnn.Linear(2, 3)
    with pytest.raises(PosteriorError, match="'bias' is in the network alone"):
        nn.load_posterior(linear, Posterior(points={"weight": torch.zeros(3, 2)}))
    with pytest.raises(PosteriorError, match=r"'weight' has shape \(2, 2\) in the posterior and \(3, 2\)"):
        nn.load_posterior(linear, Posterior(points={"weight": torch.zeros(2, 2), "bias": torch.zeros(3)}))
    with pytest.raises(PosteriorError, match="takes a Posterior, not an object of type OrderedDict"):
        nn.load_posterior(linear, linear.state_dict())  # type: ignore[arg-type]
    layer = nn.FlipoutLinear(2, 1, bias=False)
    before = layer.weight_rho.clone()
    with pytest.raises(PosteriorError, match="'weight' has a negative variance"):
        nn.load_posterior(layer, Posterior({"weight": (torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]))}))
    assert torch.equal(layer.weight_rho, before)
