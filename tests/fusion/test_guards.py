"""Bad clients, bad weights, extreme numbers: what is refused, in which words, and what is fused all the same."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbayes import Posterior
from fedbayes.errors import ConfigError, PosteriorError
from fedbayes.fusion import Accumulator, Rule, fuse, fuse_stacked, get_rule, register, rules
from fedbayes.posterior import Gaussian, Refusal

SUMS = [r.name for r in rules() if not r.draws]


def one(mean, variance, dtype=torch.float64, **points):
    return Posterior({"w": (torch.tensor(mean, dtype=dtype), torch.tensor(variance, dtype=dtype))}, points)


GOOD = [one([1.0, 2.0], [1.0, 0.5]), one([3.0, 4.0], [2.0, 0.25])]
BAD = {
    "means that are NaN": one([float("nan"), 1.0], [1.0, 1.0]),
    "means that are infinite": one([1.0, float("-inf")], [1.0, 1.0]),
    "variances that are infinite": one([1.0, 1.0], [1.0, float("inf")]),
    "zero or negative": one([1.0, 1.0], [0.0, 1.0]),
    "least -1": one([1.0, 1.0], [-1.0, 1.0]),
    "is missing": Posterior(),
    "should be a Gaussian": Posterior(points={"w": torch.zeros(2)}),
    "is not a tensor of this model": one([1.0, 1.0], [1.0, 1.0], extra=torch.zeros(1)),
    r"has shape \(1,\) where \(2,\)": one([1.0], [1.0]),
    "floating-point|torch.int64 where": Posterior({"w": (torch.tensor([1, 2]), torch.tensor([1, 1]))}),
    "variances of type torch.int64": Posterior({"w": (torch.ones(2), torch.tensor([1, 1]))}),
}


@pytest.mark.parametrize("reason", BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_fuse_goes_on_without_a_bad_client_and_says_so(reason, place):
    clients = [*GOOD]
    clients.insert(place, BAD[reason])
    previous = one([0.0, 0.0], [1.0, 1.0])  # says what tensors are right, even when the first client is the bad one
    with pytest.warns(UserWarning, match=rf"client {place} is refused.*({reason})"):
        fused = fuse(iter(clients), rule="conflation", previous=previous)
    assert fused.same_bits(fuse(GOOD, rule="conflation"))
    with pytest.raises(Refusal, match=rf"client {place} is refused.*({reason})"):
        fuse(iter(clients), rule="conflation", previous=previous, on_bad_client="stop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PosteriorError, match=f"nothing to fuse: all 2 were refused.*({reason})"):
            fuse([BAD[reason]] * 2, previous=previous)


@pytest.mark.parametrize("reason", BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_odd_client_of_a_list_is_refused_wherever_it_stands(reason, place):
    """Without a previous posterior most clients say what tensors are right, not the one that happens to come first."""
    clients = [*GOOD]
    clients.insert(place, BAD[reason])
    for given in (clients, tuple(clients), dict(enumerate(clients))):
        with pytest.warns(UserWarning, match=rf"client {place} is refused.*({reason})"):
            fused = fuse(given, rule="conflation")
        assert fused.same_bits(fuse(GOOD, rule="conflation"))


def test_misuse_of_fuse_is_told_in_words():
    with pytest.raises(ConfigError, match="did you mean 'refuse'"):
        fuse(GOOD, on_bad_client="refus")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="several posteriors"):
        fuse(GOOD[0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="number 1 is of type dict"):
        fuse([GOOD[0], {}])  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="3 weights were given for 2 posteriors"):
        fuse(iter(GOOD), weights=[1, 2, 3])
    with pytest.raises(PosteriorError, match="1 weights were given, but there are more"):
        fuse(iter(GOOD), weights=[1])
    for weight in (-1.0, float("nan"), float("inf"), "a", None):
        with pytest.raises(PosteriorError, match="weight of client 1 is"):
            fuse(GOOD, weights=[1, weight])
    for posteriors in (None, 3):
        with pytest.raises(PosteriorError, match=f"several posteriors.*; {posteriors} was given"):
            fuse(posteriors)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="weights is 3; give one number for each"):
        fuse(GOOD, weights=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match=r"weights is 'size'; give one number.* client_weights\('size', sizes\)"):
        fuse(GOOD, weights="size")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="previous is of type dict"):
        fuse(GOOD, previous={})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="named by text; None is of type NoneType"):
        fuse(GOOD, rule=None)  # pyright: ignore[reportArgumentType]
    assert fuse(GOOD, rule=type(get_rule("ws"))).same_bits(fuse(GOOD, rule="ws"))
    complex_ = Posterior(points={"c": torch.tensor([1j])})
    with pytest.raises(Refusal, match=r"'c' has type torch\.complex64"):
        fuse([complex_], on_bad_client="stop")


@pytest.mark.parametrize("rule", SUMS)
@pytest.mark.parametrize("scale", [2.0**1000, 2.0**-1000, 2.0**300])
def test_only_ratios_of_weights_matter_however_large(rule, scale):
    previous = one([0.0, 0.0], [4.0, 4.0])
    plain = fuse(GOOD, rule=rule, weights=[1, 3], previous=previous).gaussians["w"]
    got = fuse(GOOD, rule=rule, weights=[scale, 3 * scale], previous=previous).gaussians["w"]
    torch.testing.assert_close(got.mean, plain.mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(got.variance, plain.variance, rtol=1e-15, atol=0)


@pytest.mark.parametrize("rule", ["nwa", "lp", "conflation", "wc", "dwc", "llp"])
def test_a_client_too_extreme_to_sum_leaves_the_total_untouched(rule):
    total, clean = (Accumulator(rule, GOOD[0], one([0.0, 0.0], [4.0, 4.0])) for _ in range(2))
    extreme = one([1.0, 1e200], [1e-300, 1e300])
    total.absorb(GOOD[0], 1, "a")
    with pytest.raises(Refusal, match="client x is refused: 'w' has numbers too extreme"):
        total.absorb(extreme, 1, "x")
    with pytest.raises(Refusal, match="a weight must be 0 or between"):
        total.absorb(GOOD[1], 1e300, "y")
    total.absorb(GOOD[1], 2, "b")
    clean.absorb(GOOD[0], 1, "a")
    clean.absorb(GOOD[1], 2, "b")
    assert total.conclude().posterior.same_bits(clean.conclude().posterior)


def test_a_reference_with_nan_is_refused():
    with pytest.raises(PosteriorError, match="the reference posterior is unfit: 'w' has 1 means that are NaN"):
        Accumulator("lp", BAD["means that are NaN"])


def test_clients_without_a_name_keep_their_number_when_one_is_refused():
    total = Accumulator("nwa", GOOD[0])
    total.absorb(GOOD[0])
    with pytest.raises(Refusal, match="client 1 is"):
        total.absorb(BAD["is missing"])
    total.absorb(GOOD[1])
    assert list(total.conclude().record["weights"]) == ["0", "2"]


def test_nothing_to_fuse_in_empty_tensors():
    empty = Posterior({"w": (torch.zeros(0), torch.zeros(0))}, {"p": torch.zeros(0)})
    fused = fuse([empty, empty], rule="lp")
    assert fused.same_bits(empty)
    assert fuse([Posterior(), Posterior()]).gaussians == {}
    beside = Posterior({**GOOD[0].gaussians, "none": (torch.zeros(0, 3), torch.zeros(0, 3))})
    total = Accumulator("nwa", beside, beside)
    total.absorb(beside)
    assert list(total.conclude().record["sigma"]["layers"]) == ["w"]  # a mean of no numbers would be NaN, no JSON


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", SUMS)
def test_one_client_comes_back_in_every_type_with_small_variances_too(rule, dtype):
    """Half precision has no normal number below 6e-5, a common variance: its subnormal ones must survive."""
    client, previous = one([0.3, 0.001], [1e-5, 3e-6], dtype), one([0.0, 0.0], [4.0, 4.0], dtype)
    assert fuse([client], rule=rule, previous=previous).same_bits(client)


@pytest.mark.parametrize(("variance", "before"), [(1e6, 1e-12), (1e-12, 1e6), (3.0, 1e-12)])
def test_dwc_of_one_client_returns_it_however_sure_the_previous_global_was(variance, before):
    got = fuse([one([0.3], [variance])], rule="dwc", previous=one([0.7], [before])).gaussians["w"]
    assert got.mean.item() == pytest.approx(0.3, rel=1e-15)
    assert got.variance.item() == pytest.approx(variance, rel=1e-15)


@pytest.mark.parametrize(("mean", "before"), [(1e-12, 1.0), (1e-9, 1e3), (-3e-8, 7e5)])
def test_dwc_of_one_client_keeps_a_mean_far_smaller_than_the_previous(mean, before):
    for dtype, digits in ((torch.float64, 1e-15), (torch.float32, 0)):
        client = one([mean], [0.3], dtype)
        got = fuse([client], rule="dwc", previous=one([before], [1.0], dtype)).gaussians["w"]
        assert got.mean.item() == pytest.approx(client.gaussians["w"].mean.item(), rel=digits, abs=0)


def test_a_saved_total_knows_its_pivot_its_floor_and_its_rule(tmp_path, monkeypatch):
    (tmp_path / "rules_of_mine.py").write_text(
        "from dataclasses import dataclass\nfrom fedbayes.fusion import register\nfrom fedbayes.fusion.averages import NWA\n"
        "@register\n@dataclass(frozen=True)\nclass Mine(NWA):\n    name = 'test-mine'\n    aliases = ()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    previous = one([0.0, 0.0], [4.0, 4.0])
    total = Accumulator("rules_of_mine:test-mine", GOOD[0], previous, floor=0.9)
    total.absorb(GOOD[0], 2, 5)
    path = total.save(tmp_path / "total.safetensors")
    again = Accumulator.load(path, GOOD[0], previous)
    assert again.conclude().record == total.conclude().record
    assert again.floor == 0.9
    with pytest.raises(PosteriorError, match="another previous global"):
        Accumulator.load(path, GOOD[0], one([0.0, 0.0], [4.0, 4.1]))
    code = f"from fedbayes import Posterior\nfrom fedbayes.fusion import Accumulator\nimport torch\n" \
           f"w = lambda m, v: Posterior({{'w': (torch.tensor(m, dtype=torch.float64), torch.tensor(v, dtype=torch.float64))}})\n" \
           f"a = Accumulator.load({str(path)!r}, w([1., 2.], [1., .5]), w([0., 0.], [4., 4.]))\nprint(a.rule.name)"  # fmt: skip
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    out = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "test-mine"  # a fresh process finds the rule where it was found first


def test_stacked_leaves_out_clients_of_weight_zero():
    rng = torch.Generator().manual_seed(0)
    m, v = torch.randn(3, 5, generator=rng), torch.rand(3, 5, generator=rng) + 0.1
    previous = Gaussian(torch.zeros(5), torch.full((5,), 9.0))
    for rule in SUMS:
        some, rest = fuse_stacked(m, v, [1, 0, 2], rule, previous), fuse_stacked(m[::2], v[::2], [1, 2], rule, previous)
        assert torch.equal(some.mean, rest.mean), rule
        assert torch.equal(some.variance, rest.variance), rule
    for weights in ([1, float("nan"), 1], [1, -1, 1], [0, 0, 0], [1, 1]):
        with pytest.raises(PosteriorError, match="give 3 finite weights"):
            fuse_stacked(m, v, weights)


@pytest.mark.parametrize(("rule", "clients"), [("aalv", 4), ("dwc", 12)])
def test_compiled_loops_agree(rule, clients):
    """The two that need most of the compiler: a vector logarithm, and a repair; by one kernel, and by tiles of ten clients."""
    rng = torch.Generator().manual_seed(0)
    m, v = torch.randn(clients, 301, generator=rng), 10 ** (10 * torch.rand(clients, 301, generator=rng) - 12)
    weights = list(range(1, clients + 1))
    before = v.amax(0)
    before[::7] = 1e-30  # far surer than any client: repaired
    previous = Gaussian(m.mean(0), before)
    try:
        got = fuse_stacked(m, v, weights, rule, previous, compile=True)
    except Exception as error:
        if "compiler" in str(error).lower():
            pytest.skip("no C++ compiler here")
        raise
    want = fuse_stacked(m, v, weights, rule, previous)
    torch.testing.assert_close(got.mean, want.mean, rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(got.variance, want.variance, rtol=3e-7, atol=0)


def test_a_configuration_names_a_rule_of_ones_own(tmp_path, monkeypatch):
    """The rule of docs/adding-a-rule.md, from a TOML file, in the folder one works in."""
    import re

    from fedbayes import config
    from fedbayes.setup import options

    page = (Path(__file__).parents[2] / "docs" / "adding-a-rule.md").read_text(encoding="utf-8")
    code, toml = re.findall(r"```python\n(.*?)```", page, re.S)[0], re.findall(r"```toml\n(.*?)```", page, re.S)[0]
    (tmp_path / "my_rules.py").write_text(code, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(toml, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    experiment = config.read(tmp_path / "mine.toml")
    rule = get_rule(experiment.fusion.rule, **options(experiment))
    assert (rule.name, rule.options()) == ("power-mean", {"power": 3.0})
    sys.modules.pop("my_rules", None)


def test_clients_are_named_by_text_or_whole_numbers(tmp_path):
    total = Accumulator("nwa", GOOD[0])
    total.absorb(GOOD[0], np.float32(2), np.int64(3))
    total.absorb(GOOD[1], torch.tensor(1.0), "b")
    total.save(tmp_path / "total.safetensors")
    assert Accumulator.load(tmp_path / "total.safetensors", GOOD[0]).weights == {3: 2.0, "b": 1.0}
    with pytest.raises(PosteriorError, match=r"\('x', 1\) is neither"):
        total.absorb(GOOD[0], 1, ("x", 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="client 2's update is of type dict"):
        total.absorb({})  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refusal, match="its weight is 'heavy'"):
        total.absorb(GOOD[0], "heavy", 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refusal, match="already absorbed"):
        total.absorb(GOOD[0], 1, "3")  # the record could not tell it from 3
    assert [r["client"] for r in total.refused] == [4, "3"]


def test_a_number_beyond_its_type_becomes_the_largest_one():
    far = [one([6e4], [1.0], torch.float16), one([-6e4], [1.0], torch.float16)]
    fused = fuse(far, rule="lp").gaussians["w"]
    assert fused.mean.item() == 0
    assert fused.variance.item() == torch.finfo(torch.float16).max
    stacked = fuse_stacked(torch.tensor([[-1e30], [1e30]]), torch.ones(2, 1), rule="lp")
    assert stacked.variance.item() == torch.finfo(torch.float32).max
    counters = [Posterior(points={"n": torch.tensor(2**63 - 1)})]
    assert fuse(counters).points["n"].item() == 2**63 - 1024  # the largest that a float64 and an int64 hold


def test_mean_and_variance_keep_types_of_their_own():
    mixed = Posterior({"w": (torch.ones(2), torch.full((2,), 1e-60, dtype=torch.float64))})
    fused = fuse([mixed] * 3, rule="conflation").gaussians["w"]
    assert (fused.mean.dtype, fused.variance.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(fused.variance, mixed.gaussians["w"].variance / 3, rtol=1e-15, atol=0)


OWN = """
from fedbayes.fusion import Rule, register

class Mean(Rule):
    def terms(self, q, weight, pivot, address):
        return {"mean": weight * q.mean, "variance": weight * q.variance}
    def solve(self, total, weights, pivot):
        return total["mean"] / weights.total, total["variance"] / weights.total

@register
class Pair(Mean):
    name = "test-pair"

@register
class Negative(Mean):
    name = "test-negative"
    def solve(self, total, weights, pivot):
        return total["mean"], -total["variance"]

@register
class Summed(Mean):
    name = "test-summed"
    def terms(self, q, weight, pivot, address):
        return {"mean": (weight * q.mean).sum(), "variance": weight * q.variance}

@register
class NoDict(Mean):
    name = "test-nodict"
    def terms(self, q, weight, pivot, address):
        return q

@register
class Taken(Mean):
    name = "test-taken"
    def terms(self, q, weight, pivot, address):
        return {"points": q.mean}
"""


def test_mistakes_in_a_rule_of_ones_own_are_told_in_words(tmp_path, monkeypatch):
    (tmp_path / "rules_with_mistakes.py").write_text(OWN)
    (tmp_path / "rules_broken.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    assert fuse(GOOD, rule="rules_with_mistakes:test-pair").same_bits(fuse(GOOD, rule="nwa"))
    with pytest.raises(
        PosteriorError, match="'test-negative' gave 2 of 2 weights of 'w' no finite mean or no positive"
    ):
        fuse(GOOD, rule="test-negative")
    with pytest.raises(ConfigError, match=r"'mean' must be a tensor of the weights' shape \(2,\); it has shape \(\)"):
        fuse(GOOD, rule="test-summed")
    with pytest.raises(ConfigError, match="must return a dict of tensors, not a Gaussian"):
        fuse(GOOD, rule="test-nodict")
    with pytest.raises(ConfigError, match="'points' is taken"):
        fuse(GOOD, rule="test-taken")
    with pytest.raises(ConfigError, match=r"SyntaxError.*name it as in an import statement"):
        get_rule("rules_broken:x")
    with pytest.raises(ConfigError, match="does not define `solve`"):
        register(type("Half", (Rule,), {"name": "test-half", "terms": lambda self, q, w, p, a: {}}))
    for options in ({"floor": 0}, {"floor": -1}, {"floor": 2}, {"floor": "nan"}):
        with pytest.raises(ConfigError, match="must be a share of the previous precision"):
            get_rule("dwc", **options)
    with pytest.raises(ConfigError, match="must be positive and finite"):
        get_rule("precision", floor="inf")


def test_what_is_no_posterior_is_told_in_words(tmp_path):
    from safetensors.torch import save_file

    t = torch.ones(2)
    for gaussians in ({"w": t}, {"w": (t,)}, {"w": (t, t, t)}, {"w": ([1.0], [1.0])}, {"w": (t.numpy(), t.numpy())}):
        with pytest.raises(PosteriorError, match=r"'w' is .*; a Gaussian must be a pair of torch tensors"):
            Posterior(gaussians)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="'b' is a float; a point must be a torch tensor"):
        Posterior(points={"b": 1.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="'w' is both a Gaussian and a point"):
        Posterior({"w": Gaussian(t, t)}, {"w": t})
    for tensors, why in (({"a": t}, "holds a tensor 'a'"), ({"mean/a": t}, "'a' needs both a mean and a variance")):
        save_file(tensors, tmp_path / "other.safetensors")
        with pytest.raises(PosteriorError, match=rf"other\.safetensors is not a posterior.*{why}"):
            Posterior.load(tmp_path / "other.safetensors")
