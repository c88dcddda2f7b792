"""The accountant against closed forms, numerical integration and the exact Gaussian mechanism."""

import math

import numpy as np
import pytest

from fedbayes.errors import ConfigError
from fedbayes.privacy import Accountant, epsilon_of, rdp_gaussian, rdp_sampled_gaussian

scipy = pytest.importorskip("scipy")
from scipy import integrate, optimize, stats  # noqa: E402


def exact_epsilon(noise, rounds, delta):
    """Balle & Wang 2018, Theorem 8: T releases with multiplier z are one with z / sqrt(T); solve delta(eps) = delta."""
    s = noise / math.sqrt(rounds)

    def excess(eps):
        first = stats.norm.cdf(1 / (2 * s) - eps * s)
        second = stats.norm.logcdf(-1 / (2 * s) - eps * s)
        return first - math.exp(eps + second) - delta

    return optimize.brentq(excess, 0, 1e4) if excess(0) > 0 else 0.0


def renyi_by_integration(p, q, order):
    """log of the integral of q (p / q)^order over (order - 1)."""

    def f(x):
        return math.exp(order * p(x) + (1 - order) * q(x))

    return math.log(integrate.quad(f, -30, 60, limit=500)[0]) / (order - 1)


@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("order", [1.5, 2.0, 5.0])
def test_gaussian_divergence_by_integration(noise, order):
    def logpdf(mean):
        return lambda x: stats.norm.logpdf(x, mean, noise)

    assert rdp_gaussian(noise, order) == pytest.approx(renyi_by_integration(logpdf(1.0), logpdf(0.0), order), rel=1e-6)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("noise", [1.0, 2.0])
@pytest.mark.parametrize("order", [2, 3, 8])
def test_sampled_gaussian_divergence_by_integration(rate, noise, order):
    def plain(x):
        return stats.norm.logpdf(x, 0, noise)

    def mixed(x):
        return np.logaddexp(math.log1p(-rate) + plain(x), math.log(rate) + stats.norm.logpdf(x, 1, noise))

    assert rdp_sampled_gaussian(rate, noise, order) == pytest.approx(
        renyi_by_integration(mixed, plain, order), rel=1e-5
    )


def test_sampling_limits():
    assert rdp_sampled_gaussian(0.0, 1.0, 4) == 0
    assert rdp_sampled_gaussian(1.0, 1.3, 4) == rdp_gaussian(1.3, 4)
    assert rdp_sampled_gaussian(1 - 1e-12, 1.3, 4) == pytest.approx(rdp_gaussian(1.3, 4), rel=1e-6)
    with pytest.raises(ConfigError):
        rdp_sampled_gaussian(0.1, 1.0, 1)


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 8.0, 30.0])
@pytest.mark.parametrize("rounds", [1, 10, 200])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_epsilon_is_an_upper_bound_of_the_exact_one_and_not_far_above(noise, rounds, delta):
    accountant = Accountant(noise)
    for _ in range(rounds):
        accountant.release([0, 1])
    exact = exact_epsilon(noise, rounds, delta)
    found = accountant.epsilon(delta)
    assert exact <= found <= 1.25 * exact + 0.05


def test_only_the_releases_a_client_took_part_in_count():
    accountant = Accountant(2.0)
    for number in range(10):
        accountant.release([number % 5])
    twice = Accountant(2.0)
    twice.release([0])
    twice.release([0])
    assert accountant.epsilon(1e-5) == twice.epsilon(1e-5)


def test_no_release_costs_nothing_and_no_noise_everything():
    assert Accountant(1.0).epsilon(1e-5) == 0
    bare = Accountant(0.0)
    bare.release([0])
    assert bare.epsilon(1e-5) == math.inf
    with pytest.raises(ConfigError):
        epsilon_of([(2.0, 1.0)], 0.0)


def test_agrees_with_dp_accounting_where_it_is_installed():
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    reference = rdp.RdpAccountant()
    reference.compose(dp.GaussianDpEvent(1.3), 40)
    ours = Accountant(1.3)
    for _ in range(40):
        ours.release([0])
    assert ours.epsilon(1e-5) == pytest.approx(reference.get_epsilon(1e-5), rel=0.02)
