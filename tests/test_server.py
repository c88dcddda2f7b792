"""FedAvgM's step against the recursion written out."""

import pytest
import torch

from fedbayes.errors import ConfigError
from fedbayes.posterior import Gaussian, Posterior
from fedbayes.server import server_step


def model(x: float) -> Posterior:
    return Posterior(
        {"w": Gaussian(torch.tensor([x, 2 * x]), torch.tensor([0.1, 0.2]) * abs(x))},
        {"b": torch.tensor([x]), "bn.running_var": torch.tensor([1.0 + x]), "bn.num_batches_tracked": torch.tensor(3)},
    )


def test_no_momentum_and_unit_rate_give_the_fused_model_back():
    fused = model(0.3)
    out, state = server_step(model(1.0), fused, None)
    assert out is fused
    assert state == {}


def test_three_rounds_of_momentum_by_hand():
    lr, beta = 0.5, 0.9
    global_, state = model(1.0), None
    w, v = 1.0, 0.0
    for fused in (0.8, 0.9, 0.2):
        global_, state = server_step(global_, model(fused), state, lr, beta)
        v = beta * v + (w - fused)
        w = w - lr * v
        assert float(global_.gaussians["w"].mean[0]) == pytest.approx(w, rel=1e-5)
        assert float(global_.gaussians["w"].mean[1]) == pytest.approx(2 * w, rel=1e-5)
        assert float(global_.points["b"]) == pytest.approx(w, rel=1e-5)


def test_variances_and_running_statistics_are_the_fused_ones():
    fused = model(0.5)
    out, state = server_step(model(5.0), fused, None, 1.0, 0.9)
    out, state = server_step(out, fused, state, 1.0, 0.9)
    assert torch.equal(out.gaussians["w"].variance, fused.gaussians["w"].variance)
    assert torch.equal(out.points["bn.running_var"], fused.points["bn.running_var"])
    assert set(state) == {"w", "b"}


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="server_momentum"):
        server_step(model(1), model(2), None, 1.0, 1.0)
    with pytest.raises(ConfigError, match="server_learning_rate"):
        server_step(model(1), model(2), None, 0.0, 0.5)
