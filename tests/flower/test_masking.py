"""Secure aggregation: the masked sum is the sum, drop-outs included, and single vectors stay hidden."""

import numpy as np
import pytest
from flower_cases import Clock, grid_of, local_run, over_grid, rounds_of, small

from fedbayes import config, runner
from fedbayes.errors import ConfigError, RunError
from fedbayes.flower.masking import FixedPoint, Party, key_stream, threshold_of, unmask

NODES = [7, 2**63 + 11, 3, 1000, 42, 99]


def aggregate(vectors, bits=64, lost_keys=(), lost_shares=(), lost_masked=(), lost_reveal=()):
    """Run the protocol; return the unmasked total, those in it, and every masked vector sent."""
    number, threshold = FixedPoint(bits, len(vectors)), threshold_of(len(vectors))
    parties, publics = {}, {}
    for n in vectors:
        if n not in lost_keys:
            parties[n], publics[n] = Party.begin(n, threshold)
    sealed = {n: p.share(publics) for n, p in parties.items() if n not in lost_shares}
    masked = {
        n: parties[n].mask(number.encode(vectors[n]), {o: box[n] for o, box in sealed.items() if o != n})
        for n in sealed
        if n not in lost_masked
    }
    present, dropped = sorted(masked), sorted(set(sealed) - set(masked))
    total = np.zeros(len(next(iter(vectors.values()))), number.dtype)
    for m in masked.values():
        total = total + m
    shares = {}
    for n in present:
        if n not in lost_reveal:
            for owner, share in parties[n].reveal(present, dropped).items():
                shares.setdefault(owner, []).append(share)
    return number.decode(unmask(total, publics, present, dropped, shares, threshold)), present, masked


def vectors(count=6, size=500, scale=1.0):
    rng = np.random.default_rng(0)
    return {n: rng.normal(scale=scale, size=size) for n in NODES[:count]}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(
    "lost",
    [
        {},
        {"lost_keys": [3]},
        {"lost_shares": [3]},
        {"lost_masked": [3]},
        {"lost_masked": [3, 7]},
        {"lost_shares": [7], "lost_masked": [3]},
        {"lost_reveal": [42, 99]},
        {"lost_masked": [7], "lost_reveal": [42]},
    ],
)
def test_total_is_the_sum_of_those_who_stayed_within_the_stated_error(bits, lost):
    given = vectors()
    total, present, _ = aggregate(given, bits, **lost)
    assert set(present) == set(given) - {n for k, ns in lost.items() if k != "lost_reveal" for n in ns}
    assert np.abs(total - sum(given[n] for n in present)).max() <= FixedPoint(bits, len(given)).error


def test_error_is_no_larger_than_stated_and_of_that_order():
    number = FixedPoint(32, 10)
    values = np.random.default_rng(1).uniform(-100, 100, 100_000)
    error = np.abs(number.decode(number.encode(values)) - values)
    assert error.max() <= number.step / 2
    assert error.mean() == pytest.approx(number.step / 4, rel=0.02)


def test_numbers_out_of_reach_are_refused_not_cut_off():
    number = FixedPoint(32, 10)
    number.encode(np.array([number.reach * 0.999, -number.reach * 0.999]))
    for bad in (number.reach * 1.01, np.nan, np.inf):
        with pytest.raises(RunError, match="cannot be masked"):
            number.encode(np.array([0.0, bad]))
    with pytest.raises(RunError, match="mask_bits = 64 or bound it"):
        number.encode(np.array([np.inf]))
    with pytest.raises(RunError, match=r"small ones\); bound it with privacy.clip"):  # 64 bits are no way out of 64
        FixedPoint(64, 10).encode(np.array([np.inf]))
    with pytest.raises(ConfigError, match="32 or 64"):
        FixedPoint(16, 3)


def test_full_reach_of_every_party_does_not_overflow():
    for bits in (32, 64):
        number = FixedPoint(bits, 6)
        top = {n: np.full(3, number.reach * (1 - 1e-9) * (-1) ** i) for i, n in enumerate(NODES)}
        same = {n: np.full(3, number.reach * (1 - 1e-9)) for n in NODES}
        for given in (top, same):
            assert np.allclose(aggregate(given, bits)[0], sum(given.values()), atol=1e-3)


def test_masked_vectors_look_uniform_and_differ_each_time():
    zeros = {n: np.zeros(20_000) for n in NODES[:3]}
    _, _, first = aggregate(zeros)
    _, _, second = aggregate(zeros)
    for n in zeros:
        scaled = first[n] / 2.0**64
        assert abs(scaled.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 20_000)
        assert np.histogram(scaled, 16, (0, 1))[0].min() > 1000
        assert not np.array_equal(first[n], second[n])
    assert (first[NODES[0]] + first[NODES[1]] != 0).mean() > 0.999  # no two masks cancel alone


def test_key_stream_is_chacha20():
    """First block of RFC 8439, appendix A.1, test vector 1: key and nonce zero, counter 0."""
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert key_stream(bytes(32), 8, np.dtype(np.uint32)).astype("<u4").tobytes().hex() == expected


def test_a_party_does_not_reveal_what_would_unmask_one_node():
    def party():
        parties, publics = {}, {}
        for n in NODES[:3]:
            parties[n], publics[n] = Party.begin(n, 2)
        sealed = {n: p.share(publics) for n, p in parties.items()}
        p = parties[7]
        p.mask(np.zeros(2, np.uint64), {o: box[7] for o, box in sealed.items() if o != 7})
        return p

    for present, dropped in [([7], [3]), ([7, 3], [3]), ([7, 3, 5], []), ([3, 2**63 + 11], [])]:
        with pytest.raises(RunError, match="secure aggregation"):
            party().reveal(present, dropped)
    once = party()
    once.reveal([7, 3], [2**63 + 11])
    with pytest.raises(RunError, match="stage"):
        once.reveal([7, 2**63 + 11], [3])


def test_a_party_refuses_a_round_that_would_not_hide_it():
    p, keys = Party.begin(7, 2)
    with pytest.raises(RunError, match="too few"):
        p.share({7: keys})
    p, keys = Party.begin(7, 2)
    with pytest.raises(RunError, match="keys"):
        p.share({7: keys, 3: keys})
    p, keys = Party.begin(7, 1)
    others = {n: Party.begin(n, 1)[1] for n in (1, 2, 3)}
    with pytest.raises(RunError, match="threshold"):
        p.share({7: keys, **others})


def test_a_share_meant_for_another_node_is_refused():
    parties, publics = {}, {}
    for n in NODES[:3]:
        parties[n], publics[n] = Party.begin(n, 2)
    sealed = {n: p.share(publics) for n, p in parties.items()}
    with pytest.raises(RunError, match="share of node 3 cannot be opened"):
        parties[7].mask(np.zeros(2, np.uint64), {3: sealed[3][2**63 + 11]})


def test_a_wrong_share_of_the_right_form_ends_the_round_with_a_sentence():
    wrong = [b"\1\0\0\0" + bytes(48), b"\2\0\0\0" + bytes(48)]
    with pytest.raises(RunError, match="shares of node 3's secret do not fit"):
        unmask(np.zeros(2, np.uint64), {}, [3], [], {3: wrong}, 2)


# -- in the round loop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["nwa", "ws", "lp", "aalv", "conflation", "wc", "llp", "wasserstein", "dwc", "ppa"])
def test_private_round_gives_the_open_rounds_posterior(rule):
    experiment = small(fusion__private=True, fusion__rule=rule, rounds=1)
    federation, _ = over_grid(experiment, grid_of(3))
    private = federation.run()
    public = local_run(config.override(experiment, {"fusion.private": False})).posterior
    for name, g in public.gaussians.items():
        other = private.gaussians[name]
        assert ((other.mean - g.mean).abs() <= 1e-6 * g.variance.sqrt() + 2e-7 * g.mean.abs()).all()
        assert ((other.variance / g.variance - 1).abs() < 1e-5).all()
    for name, point in public.points.items():
        assert (private.points[name].double() - point.double()).abs().max() < 1e-5


@pytest.mark.parametrize(("bits", "mean_error", "ratio_error"), [(64, 0.02, 1e-3), (32, 0.5, 0.05)])
def test_accuracy_and_sigma_after_ten_rounds_are_those_of_the_open_run(bits, mean_error, ratio_error):
    experiment = small(
        fusion__private=True,
        transport__mask_bits=bits,
        rounds=10,
        data__test_limit=0,
        evaluation__samples=10,
        partition__clients=4,
    )
    federation, _ = over_grid(experiment, grid_of(4))
    private = federation.run()
    open_run = local_run(config.override(experiment, {"fusion.private": False}))
    for name, g in open_run.posterior.gaussians.items():
        other = private.gaussians[name]
        assert ((other.mean - g.mean).abs() / g.variance.sqrt()).quantile(0.99) < mean_error
        assert (other.variance / g.variance).log().abs().quantile(0.99) < ratio_error
    tests = [
        [e["metrics"]["accuracy"] for e in f.history if e["kind"] == "evaluation" and e["split"] == "test"][-1]
        for f in (federation, open_run)
    ]
    assert abs(tests[0] - tests[1]) < 0.02
    sigmas = [rounds_of(f)[-1]["fusion"]["sigma"]["q50"] for f in (federation, open_run)]
    assert sigmas[0] == pytest.approx(sigmas[1], rel=ratio_error)


def test_nodes_with_several_clients_and_one_that_drops_out_at_each_exchange():
    for stage in ("keys", "shares", "masked", "reveal"):
        grid, clock = grid_of(4), Clock()
        grid.before = lambda node, message, stage=stage: setattr(
            node, "silent", node.node == 1001 and message.metadata.message_type == f"train.{stage}"
        )
        experiment = small(
            fusion__private=True, partition__clients=8, rounds=1, participation__quorum=0.5, participation__deadline=5.0
        )
        federation, _ = over_grid(experiment, grid, clock=clock)
        federation.run()
        gone = [] if stage == "reveal" else [1, 5]
        assert rounds_of(federation)[0]["clients"] == [c for c in range(8) if c not in gone]


def test_too_few_nodes_end_the_round_with_a_sentence():
    grid, clock = grid_of(3), Clock()
    grid.before = lambda node, message: setattr(
        node, "silent", node.node != 1000 and message.metadata.message_type == "train.masked"
    )
    federation, _ = over_grid(small(fusion__private=True, participation__deadline=5.0), grid, clock=clock)
    with pytest.raises(RunError, match=r"1 of 3 nodes sent a masked sum, and 2 are needed.*no answer within 5 s"):
        federation.run()


def test_a_draw_that_falls_on_one_node_is_refused_before_the_first_round():
    changes = {"partition__clients": 4, "participation__fraction": 0.5, "rounds": 20, "transport__wait": 600.0}
    grid, clock = grid_of(2), Clock()
    grid.before = lambda node, message: message.metadata.message_type == "query" or pytest.fail("a round began")
    federation, _ = over_grid(small(fusion__private=True, **changes), grid, clock=clock)
    with pytest.raises(
        RunError, match=r"drawn for round \d+ \(\d, \d\) all live on node 100\d.*participation.fraction"
    ):
        federation.run()
    assert clock.time < 600  # nothing was waited for


def test_private_bytes_are_counted_and_no_clients_metrics_are_told():
    federation, _ = over_grid(small(fusion__private=True, rounds=1), grid_of(3))
    federation.run()
    (event,) = rounds_of(federation)
    assert event["bytes"]["up"] > 3 * 8 * 2 * sum(g.mean.numel() for g in federation.posterior.gaussians.values())
    assert event["engine"]["mask_error"] == FixedPoint(64, 3).error
    assert event["train"]["loss"] == pytest.approx(rounds_of(local_run(small(rounds=1)))[0]["train"]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fusion__weighting": "max-discrepancy"}, "max-discrepancy.*single clients"),
        ({"fusion__weighting": "distance"}, "distance.*single clients"),
        ({"fusion__max_update": 10.0}, "max_update"),
        ({"fusion__rule": "precision", "model__kind": "deterministic"}, "precision.*any size"),
    ],
)
def test_what_needs_single_posteriors_refuses_private_mode_with_a_sentence(changes, sentence):
    experiment = small(fusion__private=True, **changes)
    setup = runner.prepare(experiment)
    with pytest.raises(ConfigError, match=sentence):
        over_grid(experiment, grid_of(3), setup)[0].run()
