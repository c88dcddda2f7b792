"""Every rule against its formula written independently in exact or NumPy arithmetic, and against its known limits."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import Posterior
from fedbayes.errors import PosteriorError
from fedbayes.fusion import Accumulator, fuse, get_rule, rules

SUMS = [r.name for r in rules() if not r.draws]


def one(mean, variance, dtype=torch.float64):
    return Posterior({"w": (torch.tensor(mean, dtype=dtype), torch.tensor(variance, dtype=dtype))})


def of(fused):
    return fused.gaussians["w"].mean.numpy(), fused.gaussians["w"].variance.numpy()


def exact(rule, means, variances, weights, m0, v0, copies=1):
    """The papers' formulas in rational arithmetic (log and roots: in NumPy), with normalised weights; each client ``copies`` times."""
    m, v = [Fraction(x) for x in means], [Fraction(x) for x in variances]
    total = copies * sum(Fraction(x) for x in weights)
    w = [Fraction(x) / total for x in weights]
    p = [1 / x for x in v]
    mean = copies * sum(a * b for a, b in zip(w, m))
    weighted = sum(a * b * c for a, b, c in zip(w, m, p)) / sum(a * b for a, b in zip(w, p))
    plain = sum(a * b for a, b in zip(m, p)) / sum(p)
    left = copies * sum(p) - (copies * len(m) - 1) / Fraction(v0)
    wf, vf = np.array([float(x) for x in w]), np.array([float(x) for x in v])
    table = {
        "nwa": lambda: (mean, copies * sum(a * b for a, b in zip(w, v))),
        "fedavg": lambda: (mean, copies * sum(a * b for a, b in zip(w, v))),
        "ws": lambda: (mean, copies * sum(a * a * b for a, b in zip(w, v))),
        "lp": lambda: (mean, copies * sum(a * (b + (c - mean) ** 2) for a, b, c in zip(w, v, m))),
        "aalv": lambda: (mean, np.exp(copies * (wf * np.log(vf)).sum())),
        "wasserstein": lambda: (mean, (copies * (wf * np.sqrt(vf)).sum()) ** 2),
        "conflation": lambda: (plain, 1 / (copies * sum(p))),
        "precision": lambda: (plain, 1 / (copies * sum(p))),
        "wc": lambda: (weighted, max(w) / copies / sum(a * b for a, b in zip(w, p))),
        "llp": lambda: (weighted, 1 / copies / sum(a * b for a, b in zip(w, p))),
        "dwc": lambda: (
            (copies * sum(a * b for a, b in zip(m, p)) - (copies * len(m) - 1) * Fraction(m0) / Fraction(v0)) / left,
            1 / left,
        ),
    }
    mu, var = table[rule]()
    return float(mu), float(var)


numbers = st.floats(-1e3, 1e3, allow_subnormal=False)
spreads = st.floats(-12, 6).map(lambda e: 10.0**e)
shares = st.floats(1e-3, 1e4)


@pytest.mark.parametrize("rule", SUMS)
@settings(max_examples=40, deadline=None)
@given(data=st.lists(st.tuples(numbers, spreads, shares), min_size=1, max_size=12), m0=numbers)
def test_formula(rule, data, m0):
    means, variances, weights = map(list, zip(*data))
    v0 = 2 * max(variances)
    fused = of(fuse([one(m, v) for m, v in zip(means, variances)], rule=rule, weights=weights, previous=one(m0, v0)))
    mu, var = exact(rule, means, variances, weights, m0, v0)
    scale = max([abs(x) for x in means] + [abs(m0) if rule == "dwc" else 0, 1e-200])
    assert abs(fused[0] - mu) <= 1e-11 * scale
    assert fused[1] == pytest.approx(var, rel=1e-11)


@pytest.mark.parametrize("rule", [r.name for r in rules()])
def test_order_never_matters_to_the_bit(rule, clients, previous):
    weights = [300, 7.5, 1e-3, 41, 5000, 2, 0.3]
    first = fuse(clients, rule=rule, weights=weights, previous=previous)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(clients))
        again = fuse([clients[i] for i in order], rule=rule, weights=[weights[i] for i in order], previous=previous)
        assert again.same_bits(first)


@pytest.mark.parametrize("rule", SUMS)
def test_weights_need_not_be_normalised(rule, clients, previous):
    counts = [300, 7, 100, 41, 5000, 2, 12]
    a = fuse(clients, rule=rule, weights=counts, previous=previous).to(dtype=torch.float64)
    b = fuse(clients, rule=rule, weights=[c / sum(counts) for c in counts], previous=previous)
    for name, g in a.gaussians.items():
        torch.testing.assert_close(b.gaussians[name].mean.double(), g.mean, rtol=2e-7, atol=1e-8)
        torch.testing.assert_close(b.gaussians[name].variance.double(), g.variance, rtol=2e-7, atol=0)


@pytest.mark.parametrize("rule", SUMS)
def test_one_client_comes_back(rule, clients, previous):
    assert fuse([clients[0]], rule=rule, weights=[123.4], previous=previous).same_bits(clients[0])


@pytest.mark.parametrize("rule", ["nwa", "fedavg", "lp", "aalv", "llp", "wasserstein"])
def test_equal_clients_are_a_fixed_point(rule, clients, previous):
    assert fuse([clients[0]] * 9, rule=rule, weights=range(1, 10), previous=previous).same_bits(clients[0])


def test_limits_and_inequalities(clients, previous):
    fused = {r: fuse(clients, rule=r, previous=previous).to(dtype=torch.float64).gaussians["conv.weight"] for r in SUMS}
    variance = {r: g.variance for r, g in fused.items()}
    torch.testing.assert_close(fused["wc"].mean, fused["conflation"].mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(variance["wc"], variance["conflation"], rtol=1e-6, atol=0)
    torch.testing.assert_close(variance["ws"], variance["nwa"] / 7, rtol=1e-6, atol=0)
    chain = ["conflation", "llp", "aalv", "wasserstein", "nwa", "lp"]
    for small, large in itertools.pairwise(chain):
        assert (variance[small] <= variance[large] * (1 + 1e-6)).all(), (small, large)
    assert (variance["ws"] >= variance["conflation"] * (1 - 1e-6)).all()


@pytest.mark.parametrize("reference", [None, 0.0, 5.0, -1e4])
def test_linear_pooling_of_tiny_variances_about_large_means(reference):
    """Moments about a distant pivot must not cancel: variances of 1e-10 with means 1."""
    means, variances, weights = [1.0, 1.0 + 3e-5, 1.0 - 1e-6], [1e-10, 2e-10, 5e-11], [0.1, 0.3, 0.77]
    previous = None if reference is None else one(reference, 1.0)
    fused = of(fuse([one(m, v) for m, v in zip(means, variances)], rule="lp", weights=weights, previous=previous))
    mu, var = exact("lp", means, variances, weights, 0, 1)
    assert fused[1] == pytest.approx(var, rel=1e-9)
    assert fused[0] == pytest.approx(mu, rel=1e-15)


@pytest.mark.parametrize("distance", [1.0, 1e3, 1e6])
def test_linear_pooling_keeps_the_smallest_variances_however_far_the_means_moved(distance):
    means, previous = [distance / 3, distance / 3 + 1e-6], one(0.0, 1.0)
    a, b = map(Fraction, means)
    want = Fraction(1e-12) + ((a - b) / 2) ** 2
    fused = of(fuse([one(m, 1e-12) for m in means], rule="lp", previous=previous))
    assert fused[1] == pytest.approx(float(want), rel=1e-10)


def test_linear_pooling_against_the_mixture_by_brute_force():
    means, sigmas, weights = np.array([-1.0, 0.4, 2.0]), np.array([0.3, 1.0, 0.05]), np.array([0.2, 0.5, 0.3])
    x = np.linspace(-12, 12, 400_001)
    density = (weights / sigmas * np.exp(-0.5 * ((x[:, None] - means) / sigmas) ** 2)).sum(1) / np.sqrt(2 * np.pi)
    step = x[1] - x[0]
    mean = (x * density).sum() * step
    fused = of(fuse([one(m, s * s) for m, s in zip(means, sigmas)], rule="lp", weights=list(weights)))
    assert fused[0] == pytest.approx(mean, abs=1e-9)
    assert fused[1] == pytest.approx(((x - mean) ** 2 * density).sum() * step, rel=1e-9)


def test_conflation_against_the_integrated_product_density():
    means, sigmas = np.array([-0.5, 0.4, 1.0]), np.array([0.7, 1.0, 0.4])
    x = np.linspace(-6, 6, 200_001)
    log = (-0.5 * ((x[:, None] - means) / sigmas) ** 2).sum(1)
    density = np.exp(log - log.max())
    density /= density.sum()
    mean = (x * density).sum()
    fused = of(fuse([one(m, s * s) for m, s in zip(means, sigmas)], rule="conflation"))
    assert fused[0] == pytest.approx(mean, abs=1e-9)
    assert fused[1] == pytest.approx(((x - mean) ** 2 * density).sum(), rel=1e-9)


def test_population_pooling_converges_to_linear_pooling(clients):
    weights = [0.1, 0.2, 0.05, 0.25, 0.2, 0.1, 0.1]
    target = fuse(clients, rule="lp", weights=weights).gaussians["conv.weight"]
    errors = []
    for population in (100, 10_000, 1_000_000):
        got = fuse(clients, rule="ppa", weights=weights, population=population, seed=1).gaussians["conv.weight"]
        errors.append(float((got.variance / target.variance - 1).abs().mean()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert errors[2] < 3e-3


def test_population_pooling_has_the_distribution_of_pooled_draws():
    """Mean and spread of the pooled variance over repetitions, against NumPy pooling single draws."""
    n, repeats = 40, 4000
    a, b = one([0.0] * repeats, [1.0] * repeats), one([2.0] * repeats, [0.25] * repeats)
    mean, variance = of(fuse({"a": a, "b": b}, rule="ppa", weights={"a": 0.25, "b": 0.75}, population=n, seed=5))
    rng = np.random.default_rng(0)
    draws = np.concatenate([rng.normal(0, 1, (repeats, 10)), rng.normal(2, 0.5, (repeats, 30))], axis=1)
    assert mean.mean() == pytest.approx(draws.mean(1).mean(), abs=0.02)
    assert mean.std() == pytest.approx(draws.mean(1).std(), rel=0.08)
    assert variance.mean() == pytest.approx(draws.var(1, ddof=1).mean(), rel=0.02)
    assert variance.std() == pytest.approx(draws.var(1, ddof=1).std(), rel=0.08)


def test_population_pooling_repeats_by_seed(clients):
    assert fuse(clients, rule="ppa", seed=3).same_bits(fuse(clients, rule="ppa", seed=3))
    assert not fuse(clients, rule="ppa", seed=3).same_bits(fuse(clients, rule="ppa", seed=4))


@pytest.mark.parametrize("k", [2, 3, 10, 100])
def test_dwc_is_exact_for_conjugate_regression_and_conflation_is_not(k):
    """Linear regression, orthogonal designs, unequal sizes and noise: fused clients = the posterior of all data."""
    rng = np.random.default_rng(k)
    d, prior_mean, prior_variance = 6, rng.normal(size=6), rng.uniform(0.5, 2.0, 6)
    truth = rng.normal(size=d)
    precision, shift, clients = 1 / prior_variance, prior_mean / prior_variance, []
    for _ in range(k):
        n, noise = int(rng.integers(8, 60)), rng.uniform(0.2, 2.0)
        x = np.linalg.qr(rng.normal(size=(n, d)))[0] * rng.uniform(0.5, 3.0, d)
        y = x @ truth + noise * rng.normal(size=n)
        gain, pull = np.diag(x.T @ x) / noise**2, x.T @ y / noise**2
        own = 1 / prior_variance + gain
        clients.append(one((prior_mean / prior_variance + pull) / own, 1 / own))
        precision, shift = precision + gain, shift + pull
    previous = one(prior_mean, prior_variance)
    mean, variance = of(fuse(clients, rule="dwc", previous=previous))
    np.testing.assert_allclose(variance, 1 / precision, rtol=1e-12)
    np.testing.assert_allclose(mean, shift / precision, rtol=1e-11, atol=1e-12)
    overcounted = of(fuse(clients, rule="conflation"))[1]
    assert (overcounted < (1 / precision) * (1 - 1e-3)).all()


def test_dwc_repairs_by_named_policy():
    previous, clients = one([0.5, 0.5], [1.0, 1.0]), [one([1.0, 1.0], [4.0, 0.5]), one([2.0, 2.0], [4.0, 0.5])]
    total = Accumulator("dwc", previous, previous)
    for k, q in enumerate(clients):
        total.absorb(q, 1, k)
    fused = total.conclude()
    mean, variance = of(fused.posterior)
    assert fused.record["repaired"] == 0.5
    assert (mean[0], variance[0]) == (0.5, 1.0)
    assert variance[1] == pytest.approx(1 / (2 + 2 - 1))
    assert mean[1] == pytest.approx((2 + 4 - 0.5) / 3)
    with pytest.warns(UserWarning, match=r"'dwc' gave 50 % of the weights no positive.*repair=floor, floor=0.25"):
        floored = fuse(clients, rule="dwc", previous=previous, repair="floor", floor="0.25")
    assert of(floored)[1][0] == pytest.approx(4.0)
    with pytest.raises(PosteriorError, match="1 of 2 weights"):
        fuse(clients, rule="dwc", previous=previous, repair="stop")
    with pytest.raises(PosteriorError, match="previous"):
        fuse(clients, rule="dwc")


def test_precision_weighting_reads_the_sign_both_ways():
    clients = [one([1.0, 1.0], [1e-4, 0.0]), one([3.0, 3.0], [3e-4, 0.0])]
    inverse = of(fuse(clients, rule="precision"))
    fisher = of(fuse(clients, rule="precision", sign="fisher"))
    assert inverse[0][0] == pytest.approx((1 * 3 + 3 * 1) / 4)
    assert fisher[0][0] == pytest.approx((1 * 1 + 3 * 3) / 4)
    assert inverse[0][1] == fisher[0][1] == 2.0  # no estimate anywhere: the plain mean
    points = [Posterior(points={"w": torch.tensor([1.0])}), Posterior(points={"w": torch.tensor([3.0])})]
    assert fuse(points, rule="precision", weights=[3, 1]).points["w"].item() == 1.5
    sized = of(fuse(clients, rule="precision", weights=[3, 1], by_size=True))
    assert sized[0][0] == pytest.approx((3 * 3 + 3 * 1) / 10)


def test_points_are_averaged_integers_stay_integers(clients):
    fused = fuse(clients, rule="conflation", weights=range(1, 8))
    w = np.arange(1, 8) / 28
    expected = sum(a * q.points["bn.running_var"].numpy().astype(float) for a, q in zip(w, clients))
    np.testing.assert_allclose(fused.points["bn.running_var"].numpy(), expected, rtol=1e-6)
    count = fused.points["bn.num_batches_tracked"]
    assert count.dtype == torch.int64
    assert count.item() == round(sum(a * (3 * k + 1) for k, a in enumerate(w)))
    assert (fused.points["bn.running_var"] > 0).all()


@pytest.mark.parametrize("rule", ["nwa", "ws", "lp", "wc", "conflation", "dwc"])
def test_ten_thousand_clients_of_extreme_variances(rule):
    """10,000 clients, 200 times each of 50, against rational arithmetic."""
    copies, rng = 200, np.random.default_rng(0)
    exponents = np.array([-12.0, 6.0, -3.0, 0.0, 3.0, -9.0, -6.0, 1.0])
    means = rng.normal(size=(50, 8))
    variances = 10.0 ** (exponents + rng.uniform(0, 0.5, (50, 8)))
    weights = rng.uniform(0.5, 2.0, 50)
    m0, v0 = rng.normal(size=8), 10.0 ** (exponents + 3)
    q, previous = [one(m, v) for m, v in zip(means, variances)], one(m0, v0)
    total = Accumulator(rule, q[0], previous)
    for i in range(50 * copies):
        total.absorb(q[i % 50], weights[i % 50], i)
    mean, variance = of(total.conclude().posterior)
    for j in range(8):
        mu, var = exact(rule, means[:, j], variances[:, j], weights, m0[j], v0[j], copies)
        assert abs(mean[j] - mu) <= 1e-11 * max(abs(means[:, j]).max(), abs(m0[j]))
        assert variance[j] == pytest.approx(var, rel=1e-11)


def test_a_rule_defined_by_a_user_is_usable_by_name(clients):
    from dataclasses import dataclass
    from typing import ClassVar

    from fedbayes.fusion import Rule, register
    from fedbayes.posterior import Gaussian

    @register
    @dataclass(frozen=True)
    class RootMeanFourth(Rule):
        """σ² = (Σ w σ⁴)^½."""

        name: ClassVar[str] = "test-rmf"
        power: int = 2

        def terms(self, q, weight, pivot, address):
            return {"mean": weight * q.mean, "power": weight * q.variance**self.power}

        def solve(self, total, weights, pivot):
            return Gaussian(total["mean"] / weights.total, (total["power"] / weights.total) ** (1 / self.power))

    got = fuse(clients, rule="test_rmf", power="4").gaussians["fc.weight"].variance
    expected = torch.stack([q.gaussians["fc.weight"].variance.double() for q in clients]).pow(4).mean(0).pow(0.25)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)
    assert get_rule("test-rmf").options() == {"power": 2}
