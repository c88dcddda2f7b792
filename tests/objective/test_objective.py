"""The objective against torch.distributions, finite differences, closed-form posteriors and the evidence."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedbayes import nn, objective
from fedbayes.cohort import Assignment
from fedbayes.errors import ConfigError, PosteriorError
from fedbayes.posterior import Gaussian, Posterior, kl


def assignment(**fields) -> Assignment:
    return Assignment(client=0, round=1, start=Posterior(), seed=0, learning_rate=0.1, **fields)


def network(kind: str = "flipout", seed: int = 0) -> dict[str, Tensor]:
    module = nn.build("cnn", kind, input_shape=(1, 8, 8), init="tfp", bayesian_bias=seed == 1, seed=seed)
    return {n: p.detach().double() for n, p in module.named_parameters()}


def test_kl_is_torchs_summed_over_all_weights() -> None:
    parameters = network(seed=1)
    names = nn.gaussian_names(parameters)
    assert len(names) == 8  # biases too
    generator = torch.Generator().manual_seed(0)
    mean = {n: torch.randn(parameters[n].shape, generator=generator, dtype=torch.float64) for n in names}
    variance = {n: torch.rand(parameters[n].shape, generator=generator, dtype=torch.float64) + 0.1 for n in names}
    expected = sum(
        kl_divergence(
            Normal(parameters[n], F.softplus(parameters[n + "_rho"])), Normal(mean[n], variance[n].sqrt())
        ).sum()
        for n in names
    )
    assert objective.gaussian_kl(parameters, mean, variance).item() == pytest.approx(expected.item(), rel=1e-12)
    posterior = nn.to_posterior(parameters)
    prior = Posterior({n: Gaussian(mean[n], variance[n]) for n in names})
    assert kl(posterior, prior).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prior_std", [1e-3, 10.0])
def test_penalties_of_sixteen_bit_networks_are_summed_in_thirty_two(dtype: torch.dtype, prior_std: float) -> None:
    parameters = {n: t.to(dtype) for n, t in network().items()}
    wide = {n: t.double() for n, t in parameters.items()}
    fields = {"prior_std": prior_std, "l2": 0.1, "proximal": 0.2, "divisor": 7.0}
    terms = objective.make_terms(assignment(**fields), parameters)
    moved = {n: (t * 1.25).to(dtype) for n, t in wide.items()}
    exact_terms = objective.make_terms(assignment(**fields), wide)
    value = objective.penalty(moved, terms)
    assert value.dtype == torch.float32
    expected = objective.penalty({n: t.double() for n, t in moved.items()}, exact_terms)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_kl_of_the_prior_itself_is_zero_even_in_float32() -> None:
    parameters = {n: t.float() for n, t in network().items()}
    terms = objective.make_terms(assignment(prior=nn.to_posterior(parameters)), parameters)
    assert abs(objective.penalty(parameters, terms).item()) < 1e-4  # 13,000 weights


def test_kl_of_the_initial_tfp_weights_is_the_known_figure() -> None:
    """2.53 nats a weight under N(0, 1), 4.83 under N(0, 10²): computed independently of this project."""
    parameters = network()
    weights = sum(parameters[n].numel() for n in nn.gaussian_names(parameters))
    for std, nats in ((1.0, 2.53), (10.0, 4.83)):
        terms = objective.make_terms(assignment(prior_std=std), parameters)
        assert objective.penalty(parameters, terms).item() / weights == pytest.approx(nats, abs=0.01)


@pytest.mark.parametrize("sigma", [1e-30, 1e-12, 1e-9, 1e-3, 1.0, 1e3])
def test_kl_and_its_gradient_hold_in_float32_at_every_sigma(sigma: float) -> None:
    rho = nn.inverse_softplus(torch.tensor([sigma], dtype=torch.float64)).float().requires_grad_()
    mean = torch.tensor([0.3], requires_grad=True)
    prior = {"w": torch.tensor(0.0)}, {"w": torch.tensor(4.0)}
    value = objective.gaussian_kl({"w": mean, "w_rho": rho}, *prior)
    value.backward()
    exact_rho = rho.detach().double().requires_grad_()
    exact = kl_divergence(Normal(mean.detach().double(), F.softplus(exact_rho)), Normal(0.0, 2.0)).sum()
    exact.backward()
    assert value.item() == pytest.approx(exact.item(), rel=1e-5)
    assert rho.grad.item() == pytest.approx(exact_rho.grad.item(), rel=1e-4)
    assert mean.grad.item() == pytest.approx(0.3 / 4, rel=1e-6)


def test_penalty_gradient_is_the_finite_difference() -> None:
    torch.manual_seed(0)
    raw = {
        "a.weight": torch.randn(2, 3).double(),
        "a.weight_rho": torch.randn(2, 3).double(),
        "a.bias": torch.randn(2).double(),
        "b.weight": torch.randn(2, 2).double(),
    }
    anchor = {n: t + 0.3 * torch.randn_like(t) for n, t in raw.items()}
    terms = objective.Terms(
        kl=torch.tensor(0.7),
        prior_mean={"a.weight": torch.tensor(0.2)},
        prior_variance={"a.weight": torch.tensor(1.7)},
        l2=torch.tensor(0.05),
        proximal=torch.tensor(0.4),
        anchor=anchor,
        divisor=torch.tensor(3.0),
    )
    names = list(raw)

    def f(*tensors: Tensor) -> Tensor:
        return objective.penalty(dict(zip(names, tensors)), terms)

    assert torch.autograd.gradcheck(f, [raw[n].requires_grad_() for n in names])


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
def test_elbo_gradient_through_a_network_is_the_finite_difference(kind: str) -> None:
    """With the noise held fixed the whole negative ELBO is an ordinary function of the parameters."""
    module = nn.bayesianize(
        torch.nn.Sequential(torch.nn.Conv2d(1, 2, 2), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(8, 3)),
        kind,
        sigma=0.3,
        bayesian_bias=True,
    ).double()
    torch.manual_seed(1)
    x, y, w = torch.randn(4, 1, 3, 3).double(), torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 1, 1, 0]).double()
    parameters = dict(module.named_parameters())
    terms = objective.make_terms(assignment(divisor=40.0, prior_std=0.5), parameters)

    def loss(*tensors: Tensor) -> Tensor:
        state = dict(zip(parameters, tensors))
        torch.manual_seed(5)
        logits = objective.sampled_logits(lambda x: torch.func.functional_call(module, state, (x,)), x, samples=2)
        flat = F.cross_entropy(logits.flatten(0, 1), y.repeat(2), reduction="none").reshape(2, 4).mean(0)
        return (flat * w).sum() / w.sum() + objective.penalty(state, terms)

    assert torch.autograd.gradcheck(loss, list(parameters.values()), atol=1e-6)


def linear_gaussian(n: int = 60, noise: float = 0.5, prior_std: float = 1.3) -> dict[str, Tensor]:
    """A conjugate model y = x·w + noise: its exact posterior, evidence, and the best mean-field Gaussian."""
    generator = torch.Generator().manual_seed(2)
    x = (
        torch.randn(n, 3, generator=generator).double()
        @ torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, -0.4], [0.0, 0.0, 1.0]]).double()
    )
    y = x @ torch.tensor([0.7, -1.1, 0.2]).double() + noise * torch.randn(n, generator=generator).double()
    precision = x.T @ x / noise**2 + torch.eye(3).double() / prior_std**2
    mean = torch.linalg.solve(precision, x.T @ y / noise**2)
    covariance = prior_std**2 * x @ x.T + noise**2 * torch.eye(n).double()
    evidence = torch.distributions.MultivariateNormal(torch.zeros(n).double(), covariance).log_prob(y)
    return {"x": x, "y": y, "mean": mean, "precision": precision, "evidence": evidence}


def elbo(model: dict[str, Tensor], parameters: dict[str, Tensor], noise: float = 0.5, prior_std: float = 1.3) -> Tensor:
    """Expected log likelihood in closed form, minus the project's KL."""
    mean, sigma = parameters["w"], F.softplus(parameters["w_rho"])
    x, y = model["x"], model["y"]
    error = (y - x @ mean).square().sum() + (x.square() @ sigma.square()).sum()
    likelihood = -0.5 * error / noise**2 - len(y) * math.log(noise * math.sqrt(2 * math.pi))
    zero, variance = torch.tensor(0.0).double(), torch.tensor(prior_std**2, dtype=torch.float64)
    return likelihood - objective.gaussian_kl(parameters, {"w": zero}, {"w": variance})


@pytest.mark.parametrize("cls", [nn.LocalLinear, nn.FlipoutLinear])
def test_training_reaches_the_closed_form_mean_field_posterior(cls: type[torch.nn.Module]) -> None:
    """By the ELBO's noisy gradients through the project's layer: mean exact, variance 1 / diagonal of the precision."""
    model = linear_gaussian()
    layer = cls(3, 1, bias=False, sigma=0.3).double()
    parameters = dict(layer.named_parameters())
    terms = objective.make_terms(assignment(divisor=60.0, prior_std=1.3), parameters)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.997)
    for _ in range(1500):
        optimizer.zero_grad()
        prediction = layer(model["x"])[:, 0]
        loss = 0.5 * (model["y"] - prediction).square().mean() / 0.5**2 + objective.penalty(parameters, terms)
        loss.backward()
        optimizer.step()
        schedule.step()
    sigma = F.softplus(layer.weight_rho.detach())[0]
    expected = model["precision"].diagonal().rsqrt()
    assert ((layer.weight.detach()[0] - model["mean"]) / expected).abs().max() < 0.1
    assert (sigma / expected - 1).abs().max() < 0.05


def test_elbo_is_below_the_evidence_and_meets_it_at_the_optimum() -> None:
    model = linear_gaussian()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        parameters = {
            "w": torch.randn(3, generator=generator).double(),
            "w_rho": torch.randn(3, generator=generator).double() * 2 - 2,
        }
        assert elbo(model, parameters) < model["evidence"]
    # mean-field optimum of correlated inputs: strictly below, by exactly the KL to the true posterior
    sigma2 = 1 / model["precision"].diagonal()
    best = {"w": model["mean"], "w_rho": nn.inverse_softplus(sigma2.sqrt())}
    gap = 0.5 * (torch.log(model["precision"].diagonal()).sum() - torch.logdet(model["precision"]))
    assert (model["evidence"] - elbo(model, best)).item() == pytest.approx(gap.item(), rel=1e-9)
    assert gap > 0.01
    # orthogonal inputs: the posterior factorises, the bound is the evidence
    model["x"] = torch.linalg.qr(model["x"])[0] * 5
    noise, prior_std = 0.5, 1.3
    precision = 25 / noise**2 + 1 / prior_std**2
    mean = model["x"].T @ model["y"] / noise**2 / precision
    covariance = prior_std**2 * model["x"] @ model["x"].T + noise**2 * torch.eye(60).double()
    evidence = torch.distributions.MultivariateNormal(torch.zeros(60).double(), covariance).log_prob(model["y"])
    rho = nn.inverse_softplus(torch.full((3,), precision**-0.5, dtype=torch.float64))
    assert elbo(model, {"w": mean, "w_rho": rho}).item() == pytest.approx(evidence.item(), rel=1e-10)


def test_scalings_of_the_kl_are_what_they_claim_in_a_federation() -> None:
    """Three clients of a conjugate model: averaging rules want `federation`, product rules want `shared`."""
    sizes, prior_variance = [20, 50, 130], 2.0
    total, clients = sum(sizes), 3
    assert objective.kl_divisor("client", 20, total, clients) == 20
    assert objective.kl_divisor("shared", 20, total, clients) == 20
    assert objective.kl_divisor("federation", 20, total, clients) == total
    # federation: the size-weighted mean of the clients' KL terms is KL / N, the pooled objective's
    mean_of_terms = sum(n / total * 1 / objective.kl_divisor("federation", n, total, clients) for n in sizes)
    assert mean_of_terms == pytest.approx(1 / total)
    by_client = sum(n / total * 1 / objective.kl_divisor("client", n, total, clients) for n in sizes)
    assert by_client == pytest.approx(clients / total)  # the prior counted once per client
    # shared: the product of the clients' exact posteriors holds likelihood and prior once
    std, none = objective.client_prior("shared", math.sqrt(prior_variance), None, clients)
    assert none is None
    likelihood = [float(n) for n in sizes]  # precisions of unit-noise observations of one weight
    product = sum(p + 1 / std**2 for p in likelihood)
    assert product == pytest.approx(sum(likelihood) + 1 / prior_variance)
    # the optimum of the client's objective is that posterior
    sigma = (likelihood[0] + 1 / std**2) ** -0.5
    rho = nn.inverse_softplus(torch.tensor([sigma], dtype=torch.float64)).requires_grad_()
    w = {"w": torch.zeros(1).double(), "w_rho": rho}
    zero, variance = torch.tensor(0.0).double(), torch.tensor(std**2, dtype=torch.float64)
    loss = 0.5 * F.softplus(rho).square().sum() + objective.gaussian_kl(w, {"w": zero}, {"w": variance}) / 20
    assert torch.autograd.grad(loss, rho)[0].abs().item() < 1e-9


def test_a_shared_posterior_prior_is_widened() -> None:
    prior = Posterior({"w": Gaussian(torch.ones(2), torch.full((2,), 0.5))}, {"b": torch.ones(1)})
    _, widened = objective.client_prior("shared", 1.0, prior, 4)
    assert torch.equal(widened.gaussians["w"].variance, torch.full((2,), 2.0))
    assert torch.equal(widened.gaussians["w"].mean, torch.ones(2))
    assert objective.client_prior("federation", 1.0, prior, 4) == (1.0, prior)


def test_annealing_rises_linearly_to_full() -> None:
    weights = [objective.annealed(0.5, r, 5) for r in range(1, 8)]
    assert weights == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    assert objective.annealed(0.5, 1, 0) == 0.5


def test_l2_counts_deterministic_weight_matrices_only() -> None:
    parameters = network("flipout") | {"bn.weight": torch.ones(5).double()}
    parameters["plain.weight"] = torch.full((2, 3), 2.0).double()
    parameters["plain.bias"] = torch.ones(3).double()
    assert objective.squared_weights(parameters).item() == 24
    others = {
        "rnn.weight_ih_l0": torch.ones(2, 2),
        "rnn.bias_ih_l0": torch.ones(4),
        "kernel": torch.ones(3, 1),
        "b.bias": torch.ones(2, 1),
    }
    assert objective.squared_weights(others).item() == 7  # whatever its name, a bias excepted
    deterministic = network("deterministic")
    terms = objective.make_terms(assignment(l2=1e-2), deterministic)
    expected = sum(t.square().sum().item() for n, t in deterministic.items() if t.dim() > 1)
    assert objective.penalty(deterministic, terms).item() == pytest.approx(1e-2 * expected, rel=1e-6)


def test_proximal_term_is_fedprox_for_points_and_a_kl_for_gaussians() -> None:
    start, now = network(seed=0), network(seed=0)
    generator = torch.Generator().manual_seed(0)
    now = {n: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in now.items()}
    terms = objective.make_terms(assignment(proximal=0.3, kl_weight=0.0, divisor=50.0), start)
    names = nn.gaussian_names(now)
    points = [n for n in now if n not in names and not n.endswith("_rho")]
    assert points
    expected = 0.3 / 2 * sum((now[n] - start[n]).square().sum() for n in points)
    expected = expected + 0.3 * kl(nn.to_posterior(now), nn.to_posterior(start)) / 50
    assert objective.penalty(now, terms).item() == pytest.approx(expected.item(), rel=1e-5)
    assert objective.penalty(start, terms).item() == pytest.approx(0, abs=1e-9)


def test_lanes_of_different_terms_equal_lanes_alone() -> None:
    lanes = [{n: t.float() for n, t in network(seed=s).items()} for s in (0, 2, 3)]
    jobs = [
        assignment(divisor=100.0, prior_std=1.0),
        assignment(divisor=30.0, kl_weight=0.5, prior=nn.to_posterior(lanes[2]), l2=0.1),
        assignment(divisor=7.0, prior_std=10.0, proximal=0.2),
    ]
    anchors = [{n: t + 0.01 for n, t in lane.items()} for lane in lanes]
    terms = [objective.make_terms(job, anchor) for job, anchor in zip(jobs, anchors)]
    together = torch.vmap(objective.penalty)(
        {n: torch.stack([lane[n] for lane in lanes]) for n in lanes[0]}, objective.stack_terms(terms)
    )
    alone = torch.stack([objective.penalty(lane, t) for lane, t in zip(lanes, terms)])
    assert torch.allclose(together, alone, rtol=1e-5)
    assert (alone > 0).all()


def test_terms_that_are_not_there_cost_nothing() -> None:
    parameters = network()
    terms = objective.make_terms(assignment(), parameters)
    assert terms.anchor == {}
    assert terms.l2.numel() == 0
    forced = objective.make_terms(assignment(), parameters, l2=True, proximal=True)
    assert forced.l2.item() == 0
    assert objective.penalty(parameters, forced) == objective.penalty(parameters, terms)


def test_priors_by_layer() -> None:
    parameters = network()
    terms = objective.make_terms(assignment(prior_std=1.0), parameters, prior_std={"fc*": 10.0})
    assert terms.prior_variance["fc1.weight"].item() == 100
    assert terms.prior_variance["conv1.weight"].item() == 1
    terms = objective.make_terms(assignment(), parameters, prior_std={"fc1": 3.0, "conv?.weight": 0.5, "fc*": 10.0})
    assert {n: v.item() for n, v in terms.prior_variance.items()} == {
        "conv1.weight": 0.25, "conv2.weight": 0.25, "fc1.weight": 9.0, "fc2.weight": 100.0,
    }  # fmt: skip
    names = nn.gaussian_names(parameters)
    expected = sum(
        kl_divergence(
            Normal(parameters[n], F.softplus(parameters[n + "_rho"])),
            Normal(0.0, terms.prior_variance[n].double().sqrt()),
        ).sum()
        for n in names
    )
    assert objective.penalty(parameters, terms).item() == pytest.approx(expected.item(), rel=1e-6)


def test_priors_by_layer_as_text_make_a_posterior_with_the_same_kl() -> None:
    parameters = network()
    start = nn.to_posterior(parameters)
    assert objective.layered_prior(start, 2.0, ()) is None
    prior = objective.layered_prior(start, 2.0, ("fc1=10", "fc*=0.5"))
    assert prior is not None
    by_text = objective.penalty(parameters, objective.make_terms(assignment(prior=prior), parameters))
    by_layer = objective.make_terms(assignment(prior_std=2.0), parameters, prior_std={"fc1": 10.0, "fc*": 0.5})
    assert by_text.item() == pytest.approx(objective.penalty(parameters, by_layer).item(), rel=1e-6)
    for text, sentence in {
        "fc1": "'fc1' must be pattern=standard",
        "x=1": "matches 'x'",
        "fc1=0": "fc1.weight' is 0.0",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            objective.layered_prior(start, 1.0, (text,))


def test_cross_entropy_weighs_examples_and_averages_losses_of_samples() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 4), torch.tensor([0, 1, 2, 3, 0])
    weights = torch.tensor([1.0, 1, 1, 0, 0])
    expected = torch.stack([F.cross_entropy(s[:3], labels[:3]) for s in logits]).mean()
    assert torch.allclose(objective.cross_entropy(logits, labels, weights), expected)
    assert torch.allclose(objective.cross_entropy(logits[0], labels), F.cross_entropy(logits[0], labels))
    assert objective.cross_entropy(logits[0].bfloat16(), labels).dtype == torch.float32
    padded = torch.cat([logits[0], torch.full((1, 4), 1e4)])
    whole = objective.cross_entropy(padded, torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([1.0, 1, 1, 1, 1, 0]))
    assert torch.allclose(whole, F.cross_entropy(logits[0], labels))


def test_impossible_objectives_are_refused() -> None:
    parameters = {n: t.float() for n, t in network().items()}
    with pytest.raises(ConfigError, match="did you mean 'federation'"):
        objective.kl_divisor("federated", 10, 100, 2)
    with pytest.raises(ConfigError, match="at least one example"):
        objective.kl_divisor("client", 0, 100, 2)
    with pytest.raises(ConfigError, match="there are no parameters"):
        objective.make_terms(assignment(), {})
    with pytest.raises(ConfigError, match=r"prior_std of 'conv1\.weight' is 0"):
        objective.make_terms(assignment(prior_std=0.0), parameters)
    with pytest.raises(PosteriorError, match=r"no Gaussian 'conv1\.weight'"):
        objective.make_terms(assignment(prior=Posterior()), parameters)
    with pytest.raises(ConfigError, match=r"no Gaussian weight matches 'cf\*'; there are: conv1\.weight, "):
        objective.make_terms(assignment(), parameters, prior_std={"cf*": 1.0})
    with pytest.raises(ConfigError, match="no room"):
        objective.make_terms(assignment(prior=nn.to_posterior(parameters)), parameters, prior_std={"fc*": 1.0})
    points = {n: Gaussian(g.mean, torch.zeros_like(g.mean)) for n, g in nn.to_posterior(parameters).gaussians.items()}
    with pytest.raises(PosteriorError, match=r"'conv1\.weight' has a variance of 0;"):
        objective.make_terms(assignment(prior=Posterior(points)), parameters)
    for std in (1e-30, 1e30, 1e200, math.nan):
        with pytest.raises(ConfigError, match="between 1e-15 and 1e15"):
            objective.make_terms(assignment(prior_std=std), parameters)
    for field, value in {"divisor": 0.0, "kl_weight": math.nan, "l2": -1.0, "proximal": math.inf}.items():
        with pytest.raises(ConfigError, match=f"{field} .*is {value}"):
            objective.make_terms(assignment(**{field: value}), parameters)
    endless = {n: Gaussian(g.mean, torch.full_like(g.mean, math.inf)) for n, g in points.items()}
    with pytest.raises(PosteriorError, match=r"'conv1\.weight' has a variance of inf;"):
        objective.make_terms(assignment(prior=Posterior(endless)), parameters)
    with pytest.raises(ConfigError, match="did you mean 'shared'"):
        objective.client_prior("sharedd", 1.0, None, 2)
    wrong = nn.posterior_of(nn.build("cnn", input_shape=(1, 8, 8), width=8))
    with pytest.raises(PosteriorError, match=r"the prior's 'conv1.weight' has shape \(8, 1, 3, 3\)"):
        objective.make_terms(assignment(prior=wrong), parameters)


def test_a_deterministic_network_without_penalties_has_none_on_every_lane() -> None:
    lanes = [{n: t.float() for n, t in network("deterministic", seed=s).items()} for s in (0, 2)]
    terms = [objective.make_terms(assignment(), lane) for lane in lanes]
    stacked = {n: torch.stack([lane[n] for lane in lanes]) for n in lanes[0]}
    assert torch.vmap(objective.penalty)(stacked, objective.stack_terms(terms)).tolist() == [0.0, 0.0]
