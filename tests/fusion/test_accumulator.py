"""Streaming, trees, restarts, refusals, records."""

import json

import pytest
import torch

from fedbayes import Posterior
from fedbayes.errors import ConfigError, PosteriorError
from fedbayes.fusion import Accumulator, collapse_note, fuse, fuse_stacked, get_rule, register, rules
from fedbayes.posterior import Gaussian, Refusal

NAMES = [r.name for r in rules()]
WEIGHTS = [300, 7.5, 1e-3, 41, 5000, 2, 0.3]


def streamed(rule, clients, previous, order, **options):
    total = Accumulator(rule, previous, previous, **options)
    for k in order:
        total.absorb(clients[k], WEIGHTS[k], k)
    return total


@pytest.mark.parametrize("rule", NAMES)
def test_stream_tree_restart_and_batch_give_the_same_bits(rule, clients, previous, tmp_path):
    line = streamed(rule, clients, previous, range(7)).conclude()
    left, right = streamed(rule, clients, previous, [5, 2, 6]), streamed(rule, clients, previous, [4, 0])
    top = streamed(rule, clients, previous, [1, 3])
    right.save(tmp_path / "right.safetensors")
    right = Accumulator.load(tmp_path / "right.safetensors", previous, previous)
    right.merge(left)
    top.merge(right)
    tree = top.conclude()
    assert tree.posterior.same_bits(line.posterior)
    assert tree.record == line.record
    if get_rule(rule).draws:
        return  # fuse shares the population out, an accumulator cannot: the next test
    batch = fuse(dict(enumerate(clients)), rule=rule, weights=dict(enumerate(WEIGHTS)), previous=previous)
    assert batch.same_bits(line.posterior)


def test_totals_of_clients_without_names_merge(clients, previous, tmp_path):
    """Each region counts its clients from 0; here they take free numbers, also after a restart. Named ones stay unique."""
    regions = [Accumulator("lp", previous, previous) for _ in range(3)]
    for k, q in enumerate(clients):
        regions[k % 3].absorb(q, WEIGHTS[k])
    regions[1].absorb(clients[0], 0, client="north")
    regions[1].save(tmp_path / "region.safetensors")
    regions[1] = Accumulator.load(tmp_path / "region.safetensors", previous, previous)
    top = Accumulator("lp", previous, previous)
    for region in regions:
        top.merge(region)
    assert len(top.weights) == 8
    assert top.weights["north"] == 0
    assert sorted(top.weights.values()) == sorted([*WEIGHTS, 0])
    assert top.conclude().posterior.same_bits(fuse(clients, "lp", WEIGHTS, previous))
    with pytest.raises(PosteriorError, match="client north is in both totals"):
        top.merge(regions[1])
    with pytest.raises(PosteriorError, match="cannot be merged with itself"):
        top.merge(top)


def test_fuse_shares_the_population_out(clients, previous):
    """Weights in any unit give the population asked for: the draws of an accumulator fed with shares."""
    total, shares = Accumulator("ppa", previous, previous, population=200), [w / sum(WEIGHTS) for w in WEIGHTS]
    for k, q in enumerate(clients):
        total.absorb(q, shares[k], k)
    want = total.conclude().posterior
    for weights in (WEIGHTS, [1e5 * w for w in WEIGHTS], shares):
        given = dict(enumerate(weights))
        got = fuse(dict(enumerate(clients)), rule="ppa", weights=given, previous=previous, population=200)
        assert got.same_bits(want)


@pytest.mark.parametrize("rule", NAMES)
def test_block_size_does_not_matter_and_plain_sums_agree(rule, clients, previous, monkeypatch):
    line = streamed(rule, clients, previous, range(7)).conclude().posterior
    plain = streamed(rule, clients, previous, range(7), reproducible=False).conclude().posterior
    for name, g in line.gaussians.items():
        torch.testing.assert_close(plain.gaussians[name].mean, g.mean, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(plain.gaussians[name].variance, g.variance, rtol=1e-6, atol=0)
    if get_rule(rule).draws:
        return  # draws are addressed by block
    monkeypatch.setattr("fedbayes.fusion.accumulator._CPU_BLOCK", 5)
    assert streamed(rule, clients, previous, range(7)).conclude().posterior.same_bits(line)


@pytest.mark.parametrize("rule", [n for n in NAMES if not get_rule(n).draws])
def test_pure_functions_agree_with_the_accumulator(rule, clients, previous):
    """summarize, add, conclude alone, as a secure aggregation would use them; and their sum handed back in."""
    chosen, line = get_rule(rule), streamed(rule, clients, previous, range(7)).conclude().posterior
    total = chosen.summarize(clients[0], WEIGHTS[0], previous)
    for q, w in zip(clients[1:], WEIGHTS[1:]):
        total = chosen.add(total, chosen.summarize(q, w, previous))
    by_hand, _ = chosen.conclude(total, WEIGHTS, previous)
    handed = Accumulator(rule, previous, previous)
    handed.add_total(total, dict(enumerate(WEIGHTS)))
    for got in (by_hand, handed.conclude().posterior):
        for name, g in line.gaussians.items():
            torch.testing.assert_close(got.gaussians[name].mean, g.mean, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(got.gaussians[name].variance, g.variance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", [n for n in NAMES if not get_rule(n).draws])
def test_a_total_handed_in_is_checked(rule, clients, previous):
    """As masked sums come: a statistic too few, of another model, or of clients that are in it already."""
    chosen = get_rule(rule)
    total, sums = Accumulator(rule, previous, previous), chosen.summarize(clients[0], 1.0, previous)
    key = next(iter(sums))
    with pytest.raises(PosteriorError, match=f"lacks the statistic '{key}' of the rule '{rule}'"):
        total.add_total({k: t for k, t in sums.items() if k != key}, {0: 1})
    with pytest.raises(PosteriorError, match=f"'{key}' has 16 numbers where the model has 17"):
        total.add_total({**sums, key: sums[key][1:]}, {0: 1})
    total.add_total(sums, {0: 1})
    with pytest.raises(PosteriorError, match="client 0 is in both totals"):
        total.add_total(sums, {0: 1})
    fused = total.conclude().posterior
    torch.testing.assert_close(fused.gaussians["fc.weight"].mean, clients[0].gaussians["fc.weight"].mean)


@pytest.mark.parametrize("rule", [n for n in NAMES if not get_rule(n).draws])
def test_stacked_agrees(rule, clients, previous):
    name, start = "conv.weight", previous.gaussians["conv.weight"]
    means = torch.stack([q.gaussians[name].mean for q in clients])
    variances = torch.stack([q.gaussians[name].variance for q in clients])
    got = fuse_stacked(means, variances, WEIGHTS, rule, start)
    want = fuse(clients, rule=rule, weights=WEIGHTS, previous=previous).gaussians[name]
    torch.testing.assert_close(got.mean, want.mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got.variance, want.variance, rtol=1e-6, atol=0)


def test_misuse_of_stacked_is_told_in_words(previous):
    m, v = torch.zeros(3, 4), torch.ones(3, 4)
    for bad in (previous, Gaussian(m[0, :2], v[0, :2]), Gaussian(m, v)):
        with pytest.raises(PosteriorError, match=r"previous must be a Gaussian .* shape \(4,\)"):
            fuse_stacked(m, v, rule="dwc", previous=bad)
    for bad in (m.int(), m.numpy(), [1.0]):
        with pytest.raises(PosteriorError, match="floating-point torch tensors"):
            fuse_stacked(bad, bad)
    with pytest.raises(PosteriorError, match=r"shapes \(3, 4\) and \(3, 2\)"):
        fuse_stacked(m, v[:, :2])
    for weights in ("abc", [1, None, 2]):
        with pytest.raises(PosteriorError, match="give 3 finite weights"):
            fuse_stacked(m, v, weights)
    assert not fuse_stacked(m.requires_grad_(), v).mean.requires_grad  # no graph is kept
    assert fuse_stacked(m, v, [1e200, 1e-200, 1e200], "ws").variance.tolist() == [0.5] * 4


def test_linear_pooling_stacked_does_not_cancel():
    means = torch.tensor([1.0, 1.0 + 3e-5, 1.0 - 1e-6], dtype=torch.float64)[:, None]
    variances = torch.tensor([1e-10, 2e-10, 5e-11], dtype=torch.float64)[:, None]
    got = fuse_stacked(means, variances, [0.1, 0.3, 0.77], "lp", Gaussian(torch.zeros(1), torch.ones(1)))
    qs = [Posterior({"w": (m, v)}) for m, v in zip(means, variances)]
    want = fuse(qs, rule="lp", weights=[0.1, 0.3, 0.77]).gaussians["w"]
    torch.testing.assert_close(got.variance, want.variance, rtol=1e-5, atol=0)


def test_a_bad_client_is_refused_and_leaves_no_trace(clients, previous):
    bad = Posterior(
        {**clients[3].gaussians, "fc.weight": (torch.full((5,), float("nan")), torch.ones(5))}, clients[3].points
    )
    total = Accumulator("lp", previous, previous)
    for k, q in enumerate(clients):
        if k == 3:
            with pytest.raises(Refusal) as caught:
                total.absorb(bad, WEIGHTS[k], k)
            assert (caught.value.client, caught.value.tensor) == (3, "fc.weight")
        else:
            total.absorb(q, WEIGHTS[k], k)
    fused = total.conclude()
    rest = [0, 1, 2, 4, 5, 6]
    assert fused.posterior.same_bits(streamed("lp", clients, previous, rest).conclude().posterior)
    assert [r["client"] for r in fused.record["refused"]] == [3]
    assert "3" not in fused.record["weights"]
    assert sum(fused.record["weights"].values()) == pytest.approx(1)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused(weight, clients):
    with pytest.raises(PosteriorError, match="weight"):
        Accumulator("nwa", clients[0]).absorb(clients[0], weight, 1)


def test_misuse_is_told_in_words(clients, previous, tmp_path):
    total = Accumulator("nwa", previous)
    total.absorb(clients[0], 1, 4)
    with pytest.raises(PosteriorError, match=r"client 4 .*already absorbed"):
        total.absorb(clients[1], 1, 4)
    with pytest.raises(PosteriorError, match="nothing to fuse"):
        Accumulator("nwa", previous).conclude()
    with pytest.raises(PosteriorError, match="nothing to fuse"):
        fuse([])
    with pytest.raises(PosteriorError, match="same rule"):
        total.merge(Accumulator("ws", previous))
    with pytest.raises(PosteriorError, match="same previous"):
        total.merge(Accumulator("nwa", clients[1]))
    with pytest.raises(PosteriorError, match="2 weights were given for 7"):
        fuse(clients, weights=[1, 2])
    with pytest.raises(PosteriorError, match="merge takes another Accumulator; a Posterior was given"):
        total.merge(clients[0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(PosteriorError, match="floor is nan"):
        Accumulator("nwa", previous, floor=float("nan"))
    Posterior(metadata={"accumulator": "{}"}).save(tmp_path / "old.safetensors")
    with pytest.raises(PosteriorError, match="total of an accumulator of this version"):
        Accumulator.load(tmp_path / "old.safetensors", previous)
    clients[0].save(tmp_path / "q.safetensors")
    with pytest.raises(PosteriorError, match="not an accumulator"):
        Accumulator.load(tmp_path / "q.safetensors", previous)


def test_weight_zero_adds_nothing(clients, previous):
    for rule in ("conflation", "dwc", "wc", "nwa"):
        all_, some = fuse(clients, rule=rule, weights=[1, 1, 1, 0, 0, 0, 0], previous=previous), clients[:3]
        assert all_.same_bits(fuse(some, rule=rule, previous=previous))


def test_fuse_is_lazy(clients):
    """One client is made at a time, and dropped before the next but one."""
    import weakref

    alive = []

    def stream():
        for q in range(6):
            made = Posterior({n: Gaussian(g.mean + q, g.variance) for n, g in clients[0].gaussians.items()})
            alive.append(weakref.ref(made))
            assert sum(r() is not None for r in alive) <= 3  # the first (reference), the last, this one
            yield made
            del made

    fuse(stream(), rule="nwa")


def test_record_is_json_and_says_what_metrics_need(clients, previous):
    record = streamed("conflation", clients, previous, range(7)).conclude().record
    assert json.loads(json.dumps(record)) == record
    assert record["rule"] == "conflation"
    assert set(record["sigma"]) == {"mean", "q01", "q05", "q50", "q95", "q99", "ratio", "floor_share", "layers"}
    assert record["sigma"]["ratio"] < 0.3


def test_types_survive(clients):
    half = [q.to(dtype=torch.bfloat16) for q in clients]
    fused = fuse(half, rule="conflation")
    assert fused.gaussians["fc.weight"].mean.dtype == torch.bfloat16
    assert fused.points["bn.num_batches_tracked"].dtype == torch.int64


def test_variance_never_underflows_to_zero():
    tiny = Posterior({"w": (torch.zeros(1), torch.full((1,), 2e-38))})
    assert fuse([tiny] * 100, rule="ws").gaussians["w"].variance.item() > 0


def test_collapse_is_told_once():
    told = [collapse_note([None, *[10**-0.5] * n], "ws", 10) for n in range(8)]
    assert sum(t is not None for t in told) == 1
    assert "collapsing" in told[3]
    assert "ws" in told[3]
    assert all(collapse_note([None, *[r] * n]) is None for r in (0.97, 1.0, 1.2) for n in range(40))
    slow = [collapse_note([0.88] * n) for n in range(60)]
    assert sum(t is not None for t in slow) == 1


def test_rules_are_found_by_alias_and_options_checked():
    assert get_rule("EAA").name == "nwa"
    assert get_rule("FedIV").name == "conflation"
    assert get_rule("CF").name == "wc"
    assert get_rule("ppa", population="50", seed="3").options() == {"population": 50, "seed": 3}
    with pytest.raises(ConfigError, match="did you mean 'conflation'"):
        get_rule("conflaton")
    with pytest.raises(ConfigError, match="did you mean 'population'"):
        get_rule("ppa", popluation=3)
    with pytest.raises(ConfigError, match="whole number"):
        get_rule("ppa", population="many")
    with pytest.raises(ConfigError, match="whole number"):
        get_rule("ppa", population=10.5)
    with pytest.raises(ConfigError, match="inverse"):
        get_rule("precision", sign="invers")
    with pytest.raises(ConfigError, match="true or false"):
        get_rule("precision", by_size="maybe")
    for rule in rules():
        words = (rule.formula, rule.papers, rule.effect, rule.when)
        assert all(words) or rule.name.startswith("test-"), rule
    with pytest.raises(ConfigError, match="taken by 'nwa'"):
        register(type("Other", (type(get_rule("ws")),), {"name": "eaa", "aliases": ()}))
