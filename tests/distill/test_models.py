"""Distributions over models, against closed forms and brute force."""

import numpy as np
import pytest
import torch

from fedbayes.distill import Round, dirichlet_weights, distributions, draw, ensemble, gaussian_moments
from fedbayes.errors import ConfigError
from fedbayes.experiment import Distill
from fedbayes.posterior import Gaussian, Posterior

WEIGHTS = [0.5, 0.3, 0.2]


def client(k: int) -> Posterior:
    g = torch.Generator().manual_seed(k)
    return Posterior(
        points={
            "layer.weight": torch.randn(3, 2, generator=g),
            "bn.running_var": torch.rand(4, generator=g) + 0.1,
            "bn.num_batches_tracked": torch.tensor(7 + k),
        }
    )


@pytest.fixture
def round_() -> Round:
    clients = [client(k) for k in range(3)]
    mean = sum(w * c.points["layer.weight"] for w, c in zip(WEIGHTS, clients))
    fused = Posterior(
        points={
            "layer.weight": mean,
            "bn.running_var": torch.full((4,), 0.5),
            "bn.num_batches_tracked": torch.tensor(8),
        }
    )
    return Round(fused, clients, WEIGHTS, client(99), frozenset({"bn.running_var", "bn.num_batches_tracked"}))


def test_gaussian_moments_are_the_posters_sums_written_as_a_loop(round_):
    moments = gaussian_moments(round_.clients, WEIGHTS)
    for i in range(3):
        for j in range(2):
            w = [float(c.points["layer.weight"][i, j]) for c in round_.clients]
            mu = sum(p * x for p, x in zip(WEIGHTS, w))
            var = sum(p * (x - mu) ** 2 for p, x in zip(WEIGHTS, w))
            assert float(moments["layer.weight"].mean[i, j]) == pytest.approx(mu, rel=1e-12)
            assert float(moments["layer.weight"].variance[i, j]) == pytest.approx(var, rel=1e-12)
    assert "bn.num_batches_tracked" not in moments


def test_gaussian_moments_ignore_the_scale_of_the_weights(round_):
    a = gaussian_moments(round_.clients, WEIGHTS)["layer.weight"].variance
    b = gaussian_moments(round_.clients, [50.0, 30.0, 20.0])["layer.weight"].variance
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_gaussian_moments_do_not_cancel_when_clients_nearly_agree():
    clients = [Posterior(points={"w": torch.tensor([1.0 + d], dtype=torch.float64)}) for d in (-1e-9, 1e-9)]
    assert float(gaussian_moments(clients, [1, 1])["w"].variance) == pytest.approx(1e-18, rel=1e-6)


def test_gaussian_samples_have_the_moments_they_are_drawn_from(round_):
    settings = Distill(distribution="gaussian", samples=4000)
    drawn = torch.stack([m.points["layer.weight"].double() for m in draw(round_, settings, (0, "distill", 1))])
    want = gaussian_moments(round_.clients, WEIGHTS)["layer.weight"]
    error = (drawn.mean(0) - want.mean).abs() / (want.variance.sqrt() / 4000**0.5)
    assert float(error.max()) < 4.5
    torch.testing.assert_close(drawn.var(0), want.variance, rtol=0.12, atol=0)


def test_samples_keep_fixed_and_integer_tensors_of_the_average(round_):
    for name in ("gaussian", "dirichlet"):
        for m in draw(round_, Distill(distribution=name, samples=2), (0,)):
            assert torch.equal(m.points["bn.running_var"], round_.fused.points["bn.running_var"])
            assert int(m.points["bn.num_batches_tracked"]) == 8


def test_dirichlet_samples_are_convex_combinations_with_the_right_mean():
    draws = np.array([dirichlet_weights([1, 1, 1, 1], 2.0, torch.Generator().manual_seed(s)) for s in range(4000)])
    assert np.allclose(draws.sum(1), 1)
    assert (draws >= 0).all()
    # Dirichlet(2,2,2,2): mean 1/4, variance a(A - a) / (A²(A + 1)) = 2·6/(64·9)
    assert np.allclose(draws.mean(0), 0.25, atol=0.01)
    assert np.allclose(draws.var(0), 12 / 576, rtol=0.1)


def test_dirichlet_weights_follow_sizes_by_brute_force():
    sizes = np.array([1.0, 2.0, 7.0])
    ours = np.array([dirichlet_weights(list(sizes), 1.0, torch.Generator().manual_seed(s)) for s in range(4000)])
    gamma = np.random.default_rng(0).dirichlet([1, 1, 1], size=200_000)
    brute = gamma * sizes / (gamma * sizes).sum(1, keepdims=True)
    assert np.allclose(ours.mean(0), brute.mean(0), atol=0.012)
    assert np.allclose(ours.std(0), brute.std(0), atol=0.012)


def test_dirichlet_with_a_huge_concentration_is_the_average(round_):
    (m,) = draw(round_, Distill(distribution="dirichlet", samples=1, dirichlet_alpha=1e9), (1,))
    torch.testing.assert_close(m.points["layer.weight"], round_.fused.points["layer.weight"], rtol=1e-3, atol=1e-4)


def test_a_tiny_concentration_still_gives_a_combination():
    p = dirichlet_weights([1, 1], 1e-3, torch.Generator().manual_seed(0))
    assert sum(p) == pytest.approx(1)
    assert max(p) > 0.99


def test_posterior_samples_have_the_fused_moments_and_next_to_no_sigma():
    fused = Posterior({"w": Gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.04, 4.0]))})
    models = draw(Round(fused, [fused], [1.0], None), Distill(distribution="posterior", samples=4000), (3,))
    drawn = torch.stack([m.gaussians["w"].mean for m in models])
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.15, rtol=0)
    torch.testing.assert_close(drawn.var(0), torch.tensor([0.04, 4.0]), rtol=0.12, atol=0)
    assert float(models[0].gaussians["w"].variance.max()) <= 1e-12


def test_posterior_needs_variational_clients(round_):
    with pytest.raises(ConfigError, match="Gaussian"):
        draw(round_, Distill(distribution="posterior"), (0,))


def test_gaussian_tensors_keep_the_fused_variance():
    def q(m):
        return Posterior({"w": Gaussian(torch.tensor([m]), torch.tensor([0.5]))})

    models = draw(Round(q(2.0), [q(1.0), q(3.0)], [1, 1], None), Distill(samples=3), (0,))
    assert all(float(m.gaussians["w"].variance) == 0.5 for m in models)
    assert len({float(m.gaussians["w"].mean) for m in models}) == 3


def test_released_gaussian_is_the_released_arithmetic(round_):
    settings = Distill(distribution="gaussian-released", samples=4000, released_scale=0.1)
    drawn = torch.stack([m.points["layer.weight"].double() for m in draw(round_, settings, (5,))])
    before = round_.previous.points["layer.weight"].double()
    moves = [c.points["layer.weight"].double() - before for c in round_.clients]
    norms = [float(m.pow(2).sum().sqrt()) for m in moves]
    directions = [m / n for m, n in zip(moves, norms)]
    mean = sum(directions) / 3
    var = (sum((d - mean) ** 2 for d in directions) / 3).clamp_min(1e-5)
    length = sum(norms) / 3
    sd = length * var.sqrt() * 0.1
    assert float(((drawn.mean(0) - before - length * mean).abs() / (sd / 4000**0.5)).max()) < 4.5
    torch.testing.assert_close(drawn.std(0), sd, rtol=0.1, atol=0)


def test_released_gaussian_survives_a_tensor_no_client_moved(round_):
    still = Round(round_.fused, [round_.previous] * 3, WEIGHTS, round_.previous)
    (m,) = draw(still, Distill(distribution="gaussian-released", samples=1), (0,))
    assert torch.equal(m.points["layer.weight"], round_.previous.points["layer.weight"])


def test_ensemble_is_average_clients_and_samples(round_):
    members = ensemble(round_, Distill(distribution="gaussian", samples=4), (0,))
    assert len(members) == 1 + 3 + 4
    assert members[0] is round_.fused
    assert members[1] is round_.clients[0]
    assert ensemble(round_, Distill(distribution="clients", samples=4), (0,)) == list(round_.clients)


@pytest.mark.parametrize("name", ["gaussian", "dirichlet", "gaussian-released"])
def test_models_have_addresses(round_, name):
    settings = Distill(distribution=name, samples=3)
    a, b = draw(round_, settings, (7, "distill", 2)), draw(round_, settings, (7, "distill", 2))
    assert all(x.same_bits(y) for x, y in zip(a, b))
    fewer = draw(round_, Distill(distribution=name, samples=1), (7, "distill", 2))
    assert fewer[0].same_bits(a[0])
    assert not draw(round_, settings, (7, "distill", 3))[0].same_bits(a[0])


def test_an_unknown_distribution_names_the_nearest():
    q = client(0)
    with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
        draw(Round(q, [q], [1], None), Distill(distribution="dirichlett"), (0,))  # type: ignore[arg-type]
    assert set(distributions()) == {"gaussian", "dirichlet", "posterior", "gaussian-released", "clients"}


def test_weights_must_fit_the_clients(round_):
    with pytest.raises(ConfigError, match="3 client models"):
        gaussian_moments(round_.clients, [0.5, 0.5])
