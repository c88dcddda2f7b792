"""The round loop over clients whose answers are known in closed form."""

import dataclasses
import itertools
import math

import pytest
import torch

from fedbayes import Posterior, config
from fedbayes.checkpoint import pack, unpack
from fedbayes.cohort import Update
from fedbayes.errors import RunError
from fedbayes.experiment import Experiment
from fedbayes.federation import Federation, run_together
from fedbayes.rundir import RunDirectory
from fedbayes.schedule import choose_clients, learning_rate

SIZES = {0: 10, 1: 30, 2: 60, 3: 0}
START = Posterior({"w": (torch.zeros(4), torch.ones(4))}, {"n": torch.tensor(0)})


class Known:
    """Clients that move the mean by their number + 1 and set the variance to 1/(number + 1)."""

    def __init__(self, sizes=SIZES, order=None, spoil=None, silent=()):
        self._sizes, self.order, self.spoil, self.silent, self.rounds = sizes, order, spoil or {}, silent, []

    def sizes(self, run=0):
        return self._sizes

    def train(self, assignments):
        self.rounds.append(assignments)
        for a in sorted(assignments, key=lambda a: (self.order or (lambda c: c))(a.client)):
            if a.client in self.silent:
                continue
            g = a.start.gaussians["w"]
            q = Posterior(
                {"w": (g.mean + a.client + 1, torch.full((4,), 1.0 / (a.client + 1)))}, {"n": a.start.points["n"] + 1}
            )
            q = self.spoil.get(a.client, lambda q: q)(q)
            yield Update(a.client, a.round, q, self._sizes[a.client], {"loss": 1.0 + a.client}, a.run)

    def statistics(self):
        return {"lanes": 1, "bytes": {"up": 1, "down": 2}}

    def state(self):
        return {"trained": len(self.rounds)}

    def restore(self, state):
        self.restored = state


def make(changes=None, cohort=None, **kwargs):
    e = config.override(Experiment(rounds=3), changes or {})
    return Federation(e, START, cohort or Known(), **kwargs)


def test_a_round_is_the_weighted_average_of_those_who_hold_data():
    f = make({"rounds": 1})
    q = f.run()
    expected = (10 * 1 + 30 * 2 + 60 * 3) / 100
    torch.testing.assert_close(q.gaussians["w"].mean, torch.full((4,), expected))
    expected = (10 * 1 + 30 / 2 + 60 / 3) / 100
    torch.testing.assert_close(q.gaussians["w"].variance, torch.full((4,), expected))
    assert q.points["n"] == 1
    event = f.history[0]
    assert event["clients"] == [0, 1, 2]
    assert event["examples"] == 100
    assert event["train"]["loss"] == pytest.approx((10 * 1 + 30 * 2 + 60 * 3) / 100)
    assert event["fusion"]["weights"] == pytest.approx({"0": 0.1, "1": 0.3, "2": 0.6})


@pytest.mark.parametrize("weighting", ["equal", "size", "max-discrepancy", "distance"])
def test_order_of_arrival_leaves_the_same_bits(weighting):
    finals = []
    for order in itertools.permutations(range(4)):
        finals.append(make({"fusion.weighting": weighting}, Known(order=lambda c, order=order: order[c])).run())
    assert all(q.same_bits(finals[0]) for q in finals)


@pytest.mark.parametrize(
    ("spoil", "tensor"),
    [
        (lambda q: Posterior({"w": (q.gaussians["w"].mean * math.nan, q.gaussians["w"].variance)}, q.points), "w"),
        (lambda q: Posterior({"w": (q.gaussians["w"].mean, -q.gaussians["w"].variance)}, q.points), "w"),
        (lambda q: Posterior({"v": q.gaussians["w"]}, q.points), "v"),
        (lambda q: Posterior({"w": (torch.zeros(5), torch.ones(5))}, q.points), "w"),
    ],
)
def test_a_bad_client_is_refused_by_name_and_the_others_fused(spoil, tensor):
    f = make({"rounds": 1}, Known(spoil={1: spoil}))
    q = f.run()
    torch.testing.assert_close(q.gaussians["w"].mean, torch.full((4,), (10 * 1 + 60 * 3) / 70))
    refused = f.history[0]["fusion"]["refused"]
    assert [r["client"] for r in refused] == [1]
    assert refused[0]["reason"]
    with pytest.raises(RunError, match="client 1"):
        make({"rounds": 1, "fusion.on_bad_client": "stop"}, Known(spoil={1: spoil})).run()


def test_an_update_far_too_large_is_refused():
    def giant(q):
        return Posterior({"w": (q.gaussians["w"].mean * 100, q.gaussians["w"].variance)}, q.points)

    f = make({"rounds": 1, "fusion.max_update": 10}, Known(spoil={2: giant}))
    f.run()
    assert [r["client"] for r in f.history[0]["fusion"]["refused"]] == [2]
    assert f.history[0]["clients"] == [0, 1]


def test_quorum():
    assert make({"rounds": 1, "participation.quorum": 0.6}, Known(silent={1})).run()
    with pytest.raises(RunError, match="2 of 3 clients"):
        make({"rounds": 1}, Known(silent={1})).run()
    with pytest.raises(RunError, match="0 of 3"):
        make({"rounds": 1, "participation.quorum": 0.1}, Known(silent={0, 1, 2})).run()


def test_a_round_that_diverges_everywhere_says_so_briefly():
    def nowhere(q):
        return Posterior({"w": (q.gaussians["w"].mean * math.nan, q.gaussians["w"].variance)}, q.points)

    sizes = dict.fromkeys(range(50), 5)
    with pytest.raises(RunError, match=r"client 2: .*; and 47 more; where training diverges, lower") as caught:
        make({"rounds": 1}, Known(sizes, spoil=dict.fromkeys(sizes, nowhere))).run()
    assert len(str(caught.value)) < 600


def test_a_fraction_of_100_clients_is_drawn_without_replacement_by_round():
    e = config.override(Experiment(), {"participation.fraction": 0.1})
    sizes = dict.fromkeys(range(100), 5)
    draws = [choose_clients(e, sizes, r) for r in range(1, 200)]
    assert all(len(set(d)) == 10 for d in draws)
    assert draws[0] == choose_clients(e, sizes, 1)
    assert draws[0] != draws[1]
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=100)
    assert counts.min() > 5
    assert counts.max() < 40
    assert choose_clients(config.override(e, {"participation.fraction": 0.001}), sizes, 1).__len__() == 1


def test_learning_rates_follow_the_readings():
    def rates(changes, rounds=(1, 50, 51, 60)):
        e = config.override(Experiment(rounds=100), {"local.learning_rate": 1.0, **changes})
        return [learning_rate(e, r) for r in rounds]

    assert rates({}) == [1, 1, 1, 1]
    base = {"schedule": "exponential", "schedule.silent": 50, "schedule.decay": 0.04}
    assert rates(base) == pytest.approx([1, 1, math.exp(-0.04), math.exp(-0.4)])
    assert rates({**base, "schedule.reading": "keep"}) == pytest.approx([1, 1, 0.96, 0.96**10])
    assert rates({**base, "schedule.reading": "literal"}) == pytest.approx([1, 1, 0.04, 0.04**10])
    step = {"schedule": "step", "schedule.milestones": "0.3,0.6", "schedule.factor": 0.1}
    assert rates(step, (30, 31, 60, 61)) == pytest.approx([1, 0.1, 0.1, 0.01])


def test_kl_terms_of_an_assignment():
    f = make({"objective.kl_anneal": 4, "objective.kl_weight": 0.5, "objective.prior_std": 2.0})
    first = f.begin()[1]
    assert (first.divisor, first.kl_weight, first.prior_std, first.prior) == (100, 0.125, 2.0, None)
    shared = make({"objective.kl_scale": "shared"}).begin()[1]
    assert shared.divisor == 30
    holders = [c for c, n in SIZES.items() if n]  # who holds nothing multiplies nothing
    assert shared.prior_std == pytest.approx(math.sqrt(len(holders)))
    previous = make({"objective.prior": "previous"}).begin()[0]
    assert previous.prior is not None


def test_epochs_drawn_per_client_and_round():
    f = make({"local.epochs_max": 20}, Known(dict.fromkeys(range(50), 3)))
    epochs = [a.epochs for a in f.begin()]
    assert min(epochs) >= 1
    assert max(epochs) <= 20
    assert len(set(epochs)) > 5
    assert epochs == [a.epochs for a in make({"local.epochs_max": 20}, Known(dict.fromkeys(range(50), 3))).begin()]


def test_collapse_is_said_once():
    def shrink(q):
        return Posterior({"w": (q.gaussians["w"].mean, torch.full((4,), 1e-12))}, q.points)

    f = make({"rounds": 6}, Known(spoil=dict.fromkeys(range(3), shrink)))
    f.run()
    assert [e["kind"] for e in f.history].count("note") == 1


def test_resume_continues_to_the_same_bits(tmp_path):
    whole = make({"rounds": 5, "fusion.server_momentum": 0.5}).run()
    e = config.override(Experiment(rounds=5), {"fusion.server_momentum": 0.5})
    with RunDirectory(tmp_path, e) as d:
        f = Federation(dataclasses.replace(e, rounds=2), START, Known(), directory=d)
        f.run()
        d.log({"kind": "written after the checkpoint"})
    with RunDirectory(tmp_path, e, resume=True) as d:
        cohort = Known()
        g = Federation(e, START, cohort, directory=d)
        assert g.restore()
        assert (g.round, cohort.restored) == (2, {"trained": 2})
        assert g.run().same_bits(whole)
        assert [x["round"] for x in d.events()] == [1, 2, 3, 4, 5]


def test_federations_share_a_launch_and_end_when_each_is_done():
    cohort = Known()
    feds = [
        Federation(config.override(Experiment(rounds=r), {"fusion": rule}), START, cohort, run=i)
        for i, (r, rule) in enumerate([(1, "nwa"), (3, "ws")])
    ]
    run_together(feds)
    assert [len(a) for a in cohort.rounds] == [6, 3, 3]
    assert feds[1].posterior.same_bits(make({"fusion": "ws"}).run())


def test_federations_resumed_from_different_rounds_come_level_first(tmp_path):
    """Checkpoints of one launch may lie apart (checkpoint_every); full launches pay, and draw noise as they would have."""
    e, cohort = config.override(Experiment(rounds=5), {"fusion": "nwa"}), Known()
    feds = [Federation(e, START, cohort, run=i) for i in range(3)]
    for _ in range(2):
        run_a_round(feds[0])
    run_a_round(feds[1])
    cohort.rounds.clear()
    run_together(feds)
    assert [sorted({a.run for a in launch}) for launch in cohort.rounds] == [[2], [1, 2], *[[0, 1, 2]] * 3]
    assert all(f.posterior.same_bits(make({"rounds": 5, "fusion": "nwa"}).run()) for f in feds)


def run_a_round(federation):
    for update in federation.cohort.train(federation.begin()):
        federation.absorb(update)
    federation.end()


def test_state_survives_packing():
    state = {"a": [1, None, "x", {"b": torch.arange(2)}], "q": START, "n": {"k": 1.5}}
    tensors, rest = pack(state)
    back = unpack(tensors, rest)
    assert back["a"][:3] == [1, None, "x"]
    assert torch.equal(back["a"][3]["b"], torch.arange(2))
    assert back["q"].same_bits(START)
    assert back["n"] == {"k": 1.5}


def test_clients_out_of_reach_are_named_and_do_not_count_for_the_quorum():
    class Lossy(Known):
        def statistics(self):
            return {"failures": [{"client": 1, "reason": "its node is gone"}]}

    f = make({"rounds": 1, "participation.quorum": 0.6}, Lossy(silent={1}))
    f.run()
    assert f.history[0]["fusion"]["refused"] == [{"client": 1, "tensor": "", "reason": "its node is gone"}]
    with pytest.raises(RunError, match=r"2 of 3 .*its node is gone"):
        make({"rounds": 1}, Lossy(silent={1})).run()
