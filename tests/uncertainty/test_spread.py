"""Sigma, signal-to-noise and Reyes' reliability index against NumPy and the published tables."""

import math

import numpy as np
import pytest
import torch

from fedbayes import uncertainty as u
from fedbayes.posterior import Gaussian, Posterior


def posterior():
    g = torch.Generator().manual_seed(0)
    return Posterior(
        {
            "a.weight": Gaussian(torch.randn(30, 20, generator=g), torch.rand(30, 20, generator=g) + 0.01),
            "b.weight": Gaussian(torch.tensor([0.0, 1.0, -2.0]), torch.tensor([0.0, 0.0, 4.0])),
        },
        {"b.bias": torch.zeros(3)},
    )


def test_sigma_by_layer_equals_numpy():
    found = u.sigma_by_layer(posterior().gaussians)
    sigma = posterior().gaussians["a.weight"].variance.double().sqrt().numpy()
    assert found["a.weight"]["mean"] == pytest.approx(sigma.mean())
    for key, q in (("q05", 0.05), ("q50", 0.5), ("q95", 0.95)):
        assert found["a.weight"][key] == pytest.approx(np.quantile(sigma, q))
    assert list(found) == ["a.weight", "b.weight"]
    assert u.sigma_by_layer({}) == {}


def test_signal_to_noise():
    found = u.signal_to_noise(posterior().gaussians)
    g = posterior().gaussians["a.weight"]
    ratio = (g.mean.double().abs() / g.variance.double().sqrt()).numpy()
    assert found["a.weight"]["q50"] == pytest.approx(np.median(ratio))
    assert found["a.weight"]["db"] == pytest.approx(10 * math.log10(np.median(ratio)))
    assert found["a.weight"]["below_1"] == pytest.approx((ratio < 1).mean())
    b = found["b.weight"]  # 0/0 counts as 0, 1/0 as infinite, 2/2 as 1
    assert b["q50"] == 1.0
    assert b["db"] == 0.0
    assert b["below_1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("mean", "sd", "published"), [(0.98, 0.026, 97.34), (0.97, 0.029, 97.02), (0.85, 0.028, 96.71)]
)
def test_reliability_index_gives_reyes_table_4(mean, sd, published):
    """Their Table 2 prints mean ± sd of the accuracy, Table 4 the index: two numbers with that mean and sd."""
    assert u.reliability_index([mean - sd, mean + sd]) == pytest.approx(published, abs=0.03)


def test_overall_reliability_is_the_mean():
    assert u.overall_reliability([[0.9, 0.9], [0.8, 1.0]]) == pytest.approx((100 + (1 - 0.1 / 0.9) * 100) / 2)
    assert u.reliability_index([0.8, 1.0], ddof=1) == pytest.approx((1 - math.sqrt(0.02) / 0.9) * 100)
    with pytest.raises(u.UncertaintyError, match="too few"):
        u.reliability_index([0.9], ddof=1)
    with pytest.raises(u.UncertaintyError, match="positive"):
        u.reliability_index([0.0, 0.0])
    with pytest.raises(u.UncertaintyError, match="no groups"):
        u.overall_reliability([])


def test_arrays_and_lists_will_do():
    held = {"w": (torch.tensor([1.0, 2.0]), torch.tensor([0.25, 4.0]))}
    plain = {"w": ([1.0, 2.0], np.array([0.25, 4.0]))}
    assert u.sigma_by_layer(plain) == u.sigma_by_layer(held)
    assert u.signal_to_noise(plain) == u.signal_to_noise(held)
