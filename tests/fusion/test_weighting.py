"""Client weights against Fischer eq. (18)-(21) computed pair by pair."""

import numpy as np
import pytest
import torch

from fedbayes import Posterior, kl
from fedbayes.errors import ConfigError, PosteriorError
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
    for given in (few, list(few.values())):
        np.testing.assert_allclose(pairwise_kl(given).numpy(), table(few), rtol=1e-12, atol=1e-12)


def test_pairwise_kl_with_means_far_from_zero_and_tiny_variances():
    rng = torch.Generator().manual_seed(0)
    few = {
        k: Posterior({"w": (1 + 1e-5 * torch.randn(500, generator=rng, dtype=torch.float64), torch.full((500,), 1e-10 * (k + 1), dtype=torch.float64))})
        for k in range(5)
    }  # fmt: skip
    np.testing.assert_allclose(pairwise_kl(few).numpy(), table(few), rtol=1e-9)


@pytest.mark.parametrize("sigma", [1e-3, 1e-6])
def test_pairwise_kl_of_neighbours_far_from_the_rest(sigma):
    """Two clients within a thousandth of a sigma, and a third a million sigmas away."""
    rng = torch.Generator().manual_seed(0)
    near, far = torch.randn(2, 2000, generator=rng, dtype=torch.float64)
    means = near, near + 1e-3 * sigma * torch.randn(2000, generator=rng, dtype=torch.float64), far
    few = {k: Posterior({"w": (m, torch.full_like(m, sigma**2))}) for k, m in enumerate(means)}
    np.testing.assert_allclose(pairwise_kl(few).numpy(), table(few), rtol=1e-9)
    weights = client_weights("max-discrepancy-nearest", dict.fromkeys(few, 1), few)
    assert weights[0] == pytest.approx(weights[1], rel=1e-9)


def test_weights_of_any_size_are_normalised():
    assert client_weights({0: 1e308, 1: 1e308}, {0: 1, 1: 1}) == {0: 0.5, 1: 0.5}
    with pytest.raises(ConfigError, match="the weight of client 0 is inf"):
        client_weights("size", {0: 10**400, 1: 1})


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
    for given in ([1, 2], None, 3):
        with pytest.raises(ConfigError, match=f"not of type {type(given).__name__}"):
            client_weights(given, SIZES)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="sizes is of type list; give a mapping by client"):
        client_weights("size", [3, 4])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="posteriors is of type list; give a mapping by client"):
        client_weights("max-discrepancy", SIZES, [*few.values()])  # pyright: ignore[reportArgumentType]
    assert get_weighting("max_discrepancy").uses_individuals
    assert not get_weighting("size").uses_individuals


@pytest.mark.parametrize("name", ["max-discrepancy", "max-discrepancy-nearest", "distance"])
def test_point_models_have_no_divergence_to_weigh_by(name):
    points = {c: Posterior(points={"w": torch.tensor([float(c)])}) for c in SIZES}
    with pytest.raises(ConfigError, match=f"'{name}' compares distributions, and this network has none"):
        client_weights(name, SIZES, points, points[1])


def test_posteriors_that_do_not_match_are_told_in_words(clients):
    other = Posterior({"fc.weight": clients[0].gaussians["fc.weight"]})
    short = Posterior({n: (g.mean[:1], g.variance[:1]) for n, g in clients[0].gaussians.items()})
    for compare in (
        lambda p: kl(clients[0], p),
        lambda p: kl(p, clients[0]),
        lambda p: pairwise_kl({0: clients[0], 1: p}),
    ):
        with pytest.raises(PosteriorError, match=r"'conv\.weight' is Gaussian in one posterior and not in the other"):
            compare(other)
        with pytest.raises(PosteriorError, match=r"'conv\.weight' has shapes .* in the two posteriors"):
            compare(short)
    assert pairwise_kl({}).shape == (0, 0)


def test_kl_against_the_integrated_densities():
    x = np.linspace(-30, 30, 600_001)
    cases = [((0.3, 0.5), (-0.2, 1.7)), ((1.0, 4.0), (1.0, 0.25)), ((0.0, 1.0), (0.0, 1.0))]
    for (mq, vq), (mp, vp) in cases:
        log_q, log_p = (-0.5 * np.log(2 * np.pi * v) - (x - m) ** 2 / (2 * v) for m, v in ((mq, vq), (mp, vp)))
        want = (np.exp(log_q) * (log_q - log_p)).sum() * (x[1] - x[0])
        q, p = (
            Posterior({"w": (torch.tensor(m), torch.tensor(v))}).to(dtype=torch.float64)
            for m, v in ((mq, vq), (mp, vp))
        )
        assert float(kl(q, p)) == pytest.approx(want, abs=1e-7)


def test_a_weighting_of_ones_own_is_found_by_module(tmp_path, monkeypatch):
    (tmp_path / "my_trust.py").write_text(
        "from fedbayes.fusion import Weighting, register_weighting\n"
        "by = lambda sizes, posteriors, previous: {c: 1.0 + c for c in sizes if c != 9}\n"
        "register_weighting(Weighting('test-trusted', (), 'table', 'mine', 'known trust', False, False, by))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = get_weighting("my_trust:test-trusted")
    assert client_weights(own, {1: 5, 3: 5}) == {1: pytest.approx(1 / 3), 3: pytest.approx(2 / 3)}
    with pytest.raises(ConfigError, match="'test-trusted' gave client 9 no weight"):
        client_weights(own, SIZES)
    with pytest.raises(ConfigError, match="module 'no_such' of the weighting 'x' cannot be imported"):
        get_weighting("no_such:x")
    with pytest.raises(ConfigError, match="the weight of client 3 is 'many'; weights must be numbers"):
        client_weights({3: "many"}, {3: 1})  # pyright: ignore[reportArgumentType]
