"""Client weights against Fischer eq. (18)-(21) computed pair by pair."""

import numpy as np
import pytest
import torch

from fedbayes import Posterior, kl
from fedbayes.errors import ConfigError
from fedbayes.fusion import client_weights, get_weighting, pairwise_kl

SIZES = {3: 10, 1: 30, 7: 60, 9: 100}


@pytest.fixture
def few(clients):
    return dict(zip(SIZES, clients))


def table(posteriors):
    return np.array([[float(kl(q, p)) for p in posteriors.values()] for q in posteriors.values()])


def shares(gamma):
    return pytest.approx(dict(zip(SIZES, np.array(gamma) / np.sum(gamma))), rel=1e-9)


def test_pairwise_kl_equals_pair_by_pair(few):
    np.testing.assert_allclose(pairwise_kl(few).numpy(), table(few), rtol=1e-12, atol=1e-12)


def test_pairwise_kl_with_means_far_from_zero_and_tiny_variances():
    rng = torch.Generator().manual_seed(0)
    few = {
        k: Posterior({"w": (1 + 1e-5 * torch.randn(500, generator=rng, dtype=torch.float64), torch.full((500,), 1e-10 * (k + 1), dtype=torch.float64))})
        for k in range(5)
    }  # fmt: skip
    np.testing.assert_allclose(pairwise_kl(few).numpy(), table(few), rtol=1e-9)


def test_named_weightings(few, previous):
    matrix = table(few)
    far = np.where(np.eye(4, dtype=bool), -np.inf, matrix).max(1)
    near = np.where(np.eye(4, dtype=bool), np.inf, matrix).min(1)
    assert client_weights("equal", SIZES) == shares([1, 1, 1, 1])
    assert client_weights("size", SIZES) == shares([10, 30, 60, 100])
    assert client_weights("max-discrepancy", SIZES, few) == shares(1 / far)
    assert client_weights("max-discrepancy-nearest", SIZES, few) == shares(1 / near)
    distance = [1 / float(kl(previous, q)) for q in few.values()]
    assert client_weights("distance", SIZES, few, previous) == shares(distance)
    assert client_weights({3: 1, 1: 1, 7: 2, 9: 0, 11: 5}, SIZES) == shares([1, 1, 2, 0])


def test_equal_posteriors_get_finite_equal_weights(clients):
    same = dict.fromkeys(SIZES, clients[0])
    for name in ("max-discrepancy", "max-discrepancy-nearest", "distance"):
        assert client_weights(name, SIZES, same, clients[0]) == shares([1, 1, 1, 1])
    assert client_weights("max-discrepancy", {3: 10}, {3: clients[0]}) == {3: 1.0}


def test_misuse_is_told_in_words(few):
    with pytest.raises(ConfigError, match="did you mean 'distance'"):
        client_weights("distanse", SIZES)
    with pytest.raises(ConfigError, match="needs every client's posterior"):
        client_weights("max-discrepancy", SIZES)
    with pytest.raises(ConfigError, match="previous global"):
        client_weights("distance", SIZES, few)
    with pytest.raises(ConfigError, match="client 9 has no weight"):
        client_weights({3: 1, 1: 1, 7: 1}, SIZES)
    with pytest.raises(ConfigError, match="not negative"):
        client_weights({3: 1, 1: -1, 7: 1, 9: 1}, SIZES)
    with pytest.raises(ConfigError, match="weight 0"):
        client_weights(dict.fromkeys(SIZES, 0), SIZES)
    assert get_weighting("max_discrepancy").uses_individuals
    assert not get_weighting("size").uses_individuals
