"""The accountant against the library called by itself, the exact Gaussian mechanism and the most a client can add."""

import math
import sys

import pytest

from fedbayes.errors import ConfigError
from fedbayes.privacy import Accountant, epsilon_of

scipy = pytest.importorskip("scipy")
from scipy import optimize, stats  # noqa: E402

dp_accounting = pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")


def exact_epsilon(noise, rounds, delta):
    """Balle & Wang 2018, Theorem 8: T releases with multiplier z are one with z / sqrt(T); solve delta(eps) = delta."""
    s = noise / math.sqrt(rounds)

    def excess(eps):
        first = stats.norm.cdf(1 / (2 * s) - eps * s)
        second = stats.norm.logcdf(-1 / (2 * s) - eps * s)
        return first - math.exp(eps + second) - delta

    return optimize.brentq(excess, 0, 1e4) if excess(0) > 0 else 0.0


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


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.3, 40, 1e-5), (0.6, 3, 1e-3), (12.0, 500, 1e-7)])
def test_epsilon_is_the_librarys_whichever_of_its_accountants_counts(noise, rounds, delta):
    """Equal to its Rényi accountant for that many Gaussian releases; never below its (nearly exact) PLD accountant."""
    from dp_accounting import pld, rdp

    ours = Accountant(noise)
    for _ in range(rounds):
        ours.release([7])
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), rounds)
    assert ours.epsilon(delta) == rdp.RdpAccountant().compose(event).get_epsilon(delta)
    tight = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(delta)
    assert tight * (1 - 1e-3) <= ours.epsilon(delta) <= 1.25 * tight + 0.05


def test_flowers_own_accountant_says_the_same():
    flower = pytest.importorskip("flwr.supercore.privacy_accounting")
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    rule, sampling = flower.NeighboringRelation.ADD_OR_REMOVE_ONE, flower.SamplingMethod.NO_AMPLIFICATION
    theirs = RdpAccountant(flower.PrivacyConfig(1e-5, 10, rule, sampling))
    theirs.compose(flower.GaussianPrivacyEvent(1.1, 10, 10), 25)
    assert epsilon_of(1.1, 25, 1e-5) == theirs.get_epsilon(1e-5)


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
    with pytest.raises(ConfigError, match="between 0 and 1"):
        epsilon_of(1.0, 1, 0.0)


def test_a_missing_library_is_named_before_the_first_round(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"dp-accounting.*pip install 'fedbayes\[privacy\]'"):
        Accountant(1.0)
    Accountant(0.0)  # clipping alone needs no account
