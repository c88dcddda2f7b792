"""Relative coordinates change nothing, clipping bounds what a client can do, and noise has the size it is said to have."""

import math

import pytest
import torch

from fedbayes import config
from fedbayes.errors import ConfigError, PosteriorError
from fedbayes.fusion import fuse, get_rule
from fedbayes.posterior import Gaussian, Posterior
from fedbayes.privacy import Relative, RelativeAccumulator, refuse_unless_sum, secret_normal, sensitivity
from fedbayes.privacy.relative import clipped

RULES = ["nwa", "ws", "lp", "aalv", "conflation", "wc", "llp", "wasserstein", "dwc", "fedavg"]


def reference(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return Posterior(
        {
            "a": Gaussian(torch.randn(40, generator=g, dtype=dtype), torch.rand(40, generator=g, dtype=dtype) + 0.1),
            "b": Gaussian(1e3 + torch.randn(3, 3, generator=g, dtype=dtype), 1e-6 * (torch.rand(3, 3, generator=g, dtype=dtype) + 0.1)),
        },
        {"bn.running_var": torch.rand(5, generator=g), "count": torch.tensor(10), "w": torch.randn(4, generator=g)},
    )  # fmt: skip


def client(seed, base, step=0.4):
    g = torch.Generator().manual_seed(seed)
    gaussians = {
        n: Gaussian(
            q.mean + step * q.variance.sqrt() * torch.randn(q.mean.shape, generator=g, dtype=q.mean.dtype),
            q.variance * torch.exp(step * torch.randn(q.mean.shape, generator=g, dtype=q.mean.dtype) - 0.5),
        )
        for n, q in base.gaussians.items()
    }
    points = {n: t + 2 if not t.is_floating_point() else t * (1 + 0.1 * seed) for n, t in base.points.items()}
    return Posterior(gaussians, points)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fusing_in_relative_coordinates_is_fusing(rule, dtype):
    base = reference(dtype)
    clients = {i: client(i, base) for i in range(1, 5)}
    weights = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    direct = fuse(clients, rule=rule, weights=weights, previous=base)
    accumulator = RelativeAccumulator(get_rule(rule), base)
    for i, q in clients.items():
        accumulator.absorb(q, weights[i], i)
    fused = accumulator.conclude()
    tolerance = 1e-9 if dtype == torch.float64 else 2e-6
    for name, g in direct.gaussians.items():
        other = fused.posterior.gaussians[name]
        assert other.mean.dtype == dtype
        assert ((other.mean - g.mean).abs() <= tolerance * (g.variance.sqrt() + g.mean.abs())).all()
        assert ((other.variance / g.variance - 1).abs() < tolerance * 10).all()
    for name, t in direct.points.items():
        assert fused.posterior.points[name].dtype == t.dtype
        assert torch.allclose(fused.posterior.points[name].double(), t.double(), rtol=1e-6)
    assert fused.record["sigma"]["ratio"] == pytest.approx(math.exp(
        0.5 * torch.cat([(direct.gaussians[n].variance / base.gaussians[n].variance).log().reshape(-1) for n in base.gaussians]).mean()
    ), rel=1e-5)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_no_client_can_change_the_sum_by_more_than_the_sensitivity(rule):
    base = reference()
    chosen = get_rule(rule)
    relative = Relative(chosen, base)
    weights = {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}
    bound = 0.7
    wild = client(9, base, step=3.0)
    for posterior in (wild, client(1, base), base):
        vector, was = clipped(relative, posterior, 0.25, 1, bound)
        norm = float(torch.linalg.vector_norm(vector - relative.idle(0.25, 1)))
        assert norm <= sensitivity(chosen, weights, bound) * (1 + 1e-9)
        if posterior is wild:
            assert was
            assert norm == pytest.approx(sensitivity(chosen, weights, bound))
    assert not clipped(relative, base, 0.25, 1, bound)[1]


def test_noise_on_the_total_has_the_stated_deviation():
    base = Posterior({"a": Gaussian(torch.zeros(200_000), torch.ones(200_000))})
    accumulator = RelativeAccumulator(
        get_rule("nwa"), base, bound=1.0, noise=0.01, generator=torch.Generator().manual_seed(1)
    )
    for i in range(4):
        accumulator.absorb(base, 0.25, i)
    fused = accumulator.conclude().posterior.gaussians["a"]
    assert float(fused.mean.std()) == pytest.approx(0.01, rel=0.01)
    assert float((fused.variance - 1).std()) == pytest.approx(0.01, rel=0.01)


def test_noise_that_makes_a_variance_impossible_keeps_the_previous_gaussian_and_says_how_often():
    base = Posterior({"a": Gaussian(torch.zeros(10_000), torch.full((10_000,), 4.0))})
    accumulator = RelativeAccumulator(get_rule("nwa"), base, noise=1.0, generator=torch.Generator().manual_seed(1))
    accumulator.absorb(base, 1.0, 0)
    fused = accumulator.conclude()
    g = fused.posterior.gaussians["a"]
    assert (g.variance > 0).all()
    share = float(((g.variance == 4.0) & (g.mean == 0.0)).double().mean())
    assert share == pytest.approx(0.1587, abs=0.02)  # P(1 + N(0, 1) < 0)
    assert fused.record["repaired"] == pytest.approx(share, abs=1e-3)


def test_a_bad_posterior_is_refused_before_it_is_added():
    base = reference()
    accumulator = RelativeAccumulator(get_rule("nwa"), base)
    bad = Posterior(
        {**base.gaussians, "a": Gaussian(base.gaussians["a"].mean * math.nan, base.gaussians["a"].variance)},
        base.points,
    )
    with pytest.raises(PosteriorError, match="'a'"):
        accumulator.absorb(bad, 1.0, 3)
    accumulator.absorb(base, 1.0, 0)
    assert torch.isfinite(accumulator.conclude().posterior.gaussians["a"].mean).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"privacy.clip": 1.0}, "fusion.weighting = equal"),
        ({"privacy.clip": 1.0, "fusion.weighting": "equal", "fusion.rule": "ppa"}, "draws at random"),
        ({"privacy.noise": 1.0}, "privacy.clip"),
        ({"privacy.clip": 1.0, "fusion.weighting": "equal"}, r"use data\.mean = none or client"),
        (
            {"privacy.clip": 1.0, "fusion.weighting": "equal", "data.mean": "client", "data.scale": "standard"},
            r"use data\.scale = unit or none",
        ),
        ({"fusion.private": True, "fusion.weighting": "max-discrepancy"}, "single clients"),
        ({"fusion.private": True, "distill.enabled": True}, "distill"),
    ],
)
def test_what_cannot_be_private_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        refuse_unless_sum(config.override(config.Experiment(), changes))


def test_statistics_that_are_not_finite_are_refused_and_not_clipped_into_the_sum():
    """Precisions of 1e-320 variances overflow; as NaN they would pass any bound and spoil everybody's total."""
    base = reference()
    tiny = torch.full((40,), 5e-324, dtype=torch.float64)
    bad = Posterior({**base.gaussians, "a": Gaussian(base.gaussians["a"].mean, tiny)}, base.points)
    accumulator = RelativeAccumulator(get_rule("conflation"), base, bound=1.0)
    accumulator.absorb(base, 0.5, 0)
    with pytest.raises(PosteriorError, match=r"client 3.*not finite"):
        accumulator.absorb(bad, 0.5, 3)
    fused = accumulator.conclude()
    assert torch.isfinite(fused.posterior.gaussians["a"].mean).all()


# -- noise that cannot be subtracted -----------------------------------------------------------------------------


def test_secret_noise_is_standard_normal_and_never_the_same():
    from scipy import stats

    torch.manual_seed(0)
    first = secret_normal(300_001)
    torch.manual_seed(0)
    second = secret_normal(300_001)
    assert first.shape == (300_001,)
    assert not (first == second).any()
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-6
    assert abs(float((first[:-1] * first[1:]).mean())) < 5 / math.sqrt(300_000)  # neighbours are independent
    assert abs(float((first * second).mean())) < 5 / math.sqrt(300_000)


def test_without_a_generator_the_noise_is_secret_and_has_the_stated_deviation():
    base = Posterior({"a": Gaussian(torch.zeros(100_000), torch.ones(100_000))})

    def total():
        torch.manual_seed(0)
        accumulator = RelativeAccumulator(get_rule("nwa"), base, bound=1.0, noise=0.01)
        accumulator.absorb(base, 1.0, 0)
        return accumulator.conclude().posterior.gaussians["a"].mean

    first, second = total(), total()
    assert float(first.std()) == pytest.approx(0.01, rel=0.02)
    assert (first != second).float().mean() > 0.99


def federation(**changes):
    from fedbayes import runner

    plain = {
        "rounds": 3, "partition.clients": 4, "data.limit": 240, "data.test_limit": 60, "data.validation": 0.0,
        "local.epochs": 1, "model.width": 16, "engine.lanes": 1, "engine.device": "cpu", "evaluation.samples": 2,
        "evaluation.every": 10, "fusion.weighting": "equal", "data.mean": "none",
    }  # fmt: skip
    experiment = config.override(config.read("digits"), plain | changes)
    setup = runner.prepare(experiment)
    return runner.make_federation(setup, runner.local_cohort([setup]), None)


def test_epsilon_is_reported_each_round_and_repeats_by_seed(monkeypatch):
    """Also where lanes are measured on the first round's assignments: that sends nothing, so it is no release."""
    from fedbayes import runner

    monkeypatch.setattr("fedbayes.engine.cohort.choose", lambda setting, jobs: (1, 1, "measured"))
    first, second = (
        federation(**{"privacy.clip": 5.0, "privacy.noise": 1.5}),
        federation(**{"privacy.clip": 5.0, "privacy.noise": 1.5, "engine.lanes": 0}),
    )
    runner._write_lanes(second.cohort, [second])
    assert first.run().same_bits(second.run())
    spent = [e["fusion"]["privacy"]["epsilon"] for e in first.history if e["kind"] == "round"]
    assert spent == [e["fusion"]["privacy"]["epsilon"] for e in second.history if e["kind"] == "round"]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert len(set(spent)) == 3
    assert all(0 <= e["fusion"]["privacy"]["clipped"] <= 4 for e in first.history if e["kind"] == "round")


def test_a_clip_nobody_reaches_and_no_noise_is_the_ordinary_federation():
    plain, wide = federation(), federation(**{"privacy.clip": 1e9})
    plain.run()
    wide.run()
    for name, g in plain.posterior.gaussians.items():
        other = wide.posterior.gaussians[name]
        assert ((g.mean - other.mean).abs() / g.variance.sqrt()).quantile(0.99) < 0.02
        assert (g.variance / other.variance).log().abs().quantile(0.99) < 1e-3
    assert [e["fusion"]["privacy"]["epsilon"] for e in wide.history if e["kind"] == "round"] == [None] * 3
