"""Differential privacy over Flower: what leaves a node, how much noise a total carries, what is kept in the account."""

import json
import math

import numpy as np
import pytest
import torch
from flower_cases import Clock, grid_of, over_grid, replaced, rounds_of, small
from flwr.app import ConfigRecord

from fedbayes import runner
from fedbayes.errors import RunError
from fedbayes.flower import masked_client
from fedbayes.rundir import RunDirectory

pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")


def noised(**changes):
    plain = {
        "fusion__weighting": "equal", "data__mean": "none", "privacy__clip": 5.0, "privacy__noise": 1.5, "rounds": 1,
    }  # fmt: skip
    return small(**(plain | changes))


def test_under_differential_privacy_a_masked_node_sends_no_losses_and_no_clipping():
    """Epsilon covers the noised sum alone, so nothing exact may travel beside it."""
    federation, _ = over_grid(noised(fusion__private=True), grid_of(3))
    federation.run()
    (event,) = rounds_of(federation)
    assert event["train"] == {}
    assert event["fusion"]["privacy"]["clipped"] is None
    assert event["fusion"]["privacy"]["epsilon"] > 0


@pytest.mark.parametrize(("nodes", "lost"), [(3, 0), (6, 2)])
def test_masked_total_carries_the_stated_noise_also_when_a_third_of_the_nodes_drop_out(monkeypatch, nodes, lost):
    """Nodes that did not move: the total less theirs is the noise; its deviation is z C max w, a little more if more stay."""
    monkeypatch.setattr(
        masked_client, "client_vector", lambda e, update, start, weight: np.zeros(vector_length(e, start))
    )
    grid, clock = grid_of(nodes), Clock()
    grid.before = lambda node, message: setattr(
        node, "silent", node.node < 1000 + lost and message.metadata.message_type == "train.masked"
    )
    experiment = noised(
        fusion__private=True, partition__clients=nodes, participation__quorum=0.5, participation__deadline=5.0
    )
    federation, _ = over_grid(experiment, grid, clock=clock)
    seen = []
    absorb = federation.absorb
    federation.absorb = lambda update: (seen.append(update.total), absorb(update))
    federation.run()
    (total,) = seen
    threshold = math.ceil(2 * nodes / 3)
    stated = 1.5 * 5.0 / nodes
    present = nodes - lost
    assert float(total.std()) == pytest.approx(stated * math.sqrt(present / threshold), rel=5 / math.sqrt(len(total)))
    assert float(total.std()) > stated * (1 - 4 / math.sqrt(len(total)))


def vector_length(experiment, start):
    from fedbayes.fusion import get_rule
    from fedbayes.privacy import Relative

    return Relative(get_rule(experiment.fusion.rule), start).size


def test_noise_of_a_deployment_does_not_follow_from_the_seed():
    first, second = (over_grid(noised(privacy__noise=0.01), grid_of(3))[0] for _ in range(2))
    for federation in (first, second):
        torch.manual_seed(0)
        federation.run()
    for name, g in first.posterior.gaussians.items():
        assert (g.mean != second.posterior.gaussians[name].mean).float().mean() > 0.9


def test_a_round_repeated_after_a_crash_is_a_second_release(tmp_path):
    """The server has seen both noised sums, so epsilon counts both."""
    experiment = noised(rounds=3)
    setup = runner.prepare(experiment)

    def started(resume):
        directory = RunDirectory(tmp_path / "run", experiment, resume=resume)
        return over_grid(experiment, grid_of(3), setup, directory=directory)[0]

    federation = started(False)
    for update in federation.cohort.train(federation.begin()):
        federation.absorb(update)  # killed before the round's end
    federation.directory.close()
    again = started(True)
    again.restore()
    again.run()
    again.directory.close()
    spent = [e["fusion"]["privacy"]["epsilon"] for e in rounds_of(again)]
    once = over_grid(noised(rounds=4), grid_of(3))[0]
    once.run()
    assert spent == [e["fusion"]["privacy"]["epsilon"] for e in rounds_of(once)][1:]
    assert json.loads((tmp_path / "run" / "privacy.json").read_text()) == {"rounds begun": {"0": 4, "1": 4, "2": 4}}


# -- owners and nodes that do not play along ---------------------------------------------------------------------


def test_an_owner_may_allow_masked_sums_only():
    configs = [{"partition-id": i, "num-partitions": 3, "private": "true"} for i in range(3)]
    federation, said = over_grid(small(rounds=1), grid_of(configs=configs))
    with pytest.raises(RunError, match="masked sums only"):
        federation.run()
    assert len(said) >= 3
    masked, _ = over_grid(small(rounds=1, fusion__private=True), grid_of(configs=configs))
    masked.run()
    assert rounds_of(masked)[0]["clients"] == [0, 1, 2]


def test_a_server_that_asks_a_private_node_for_its_posterior_after_the_census_gets_none():
    configs = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    grid = grid_of(configs=configs)
    federation, _ = over_grid(small(rounds=1, participation__quorum=0.5), grid)
    federation.cohort.sizes()
    configs[1]["private"] = True
    federation.run()
    assert rounds_of(federation)[0]["clients"] == [0, 2]
    assert "masked sums only" in rounds_of(federation)[0]["engine"]["failures"][0]["reason"]


@pytest.mark.parametrize(
    ("stage", "spoil"),
    [
        ("keys", lambda r: r.pop("keys")),
        ("keys", lambda r: r["keys"].update({"masking": "text"})),
        ("keys", lambda r: r["keys"].update({"masking": b"garbage"})),
        ("keys", lambda r: r["keys"].update({"masking": r["keys"]["sealing"]})),
        ("shares", lambda r: r.pop("sealed")),
        ("shares", lambda r: r["sealed"].popitem()),
        ("masked", lambda r: r["masked"].clear()),
        ("masked", lambda r: r["included"].update({"clients": [2]})),
        ("masked", lambda r: r["included"].update({"clients": [1, 1]})),
        ("reveal", lambda r: r["shares"].update({"1001": b"z"})),
        ("reveal", lambda r: r["shares"].update({"1001": b"\x07" + r["shares"]["1001"][1:]})),
        ("reveal", lambda r: r["shares"].popitem()),
        ("reveal", lambda r: r.update({"shares": ConfigRecord({"x": 1})})),
    ],
)
def test_an_answer_that_makes_no_sense_drops_its_node_and_the_others_are_summed(stage, spoil):
    from fedbayes.flower.client import client_app

    def app(message, context):
        reply = client_app(message, context)
        if message.metadata.message_type == f"train.{stage}" and context.node_config["partition-id"] == 1:
            spoil(reply.content)
        return reply

    experiment = small(fusion__private=True, rounds=1, participation__quorum=0.5, partition__clients=4)
    federation, _ = over_grid(experiment, grid_of(4, app), clock=Clock())
    federation.run()
    (event,) = rounds_of(federation)
    assert event["clients"] == ([0, 1, 2, 3] if stage == "reveal" else [0, 2, 3])
    assert any(f["client"] == 1 and "cannot be read" in f["reason"] for f in event["engine"]["failures"])


def test_a_broken_share_or_an_endless_reason_is_said_in_one_short_sentence():
    from fedbayes.flower.client import client_app

    def app(message, context):
        reply, kind = client_app(message, context), message.metadata.message_type
        if kind == "train.shares" and context.node_config["partition-id"] == 1:
            reply.content["sealed"]["1000"] = b"broken"
        if kind == "train.masked" and context.node_config["partition-id"] == 0:
            assert "masked" not in reply.content
            reply.content["failures"]["0"] += "x" * 10**5
        return reply

    experiment = small(fusion__private=True, rounds=1, participation__quorum=0.5, partition__clients=4)
    federation, _ = over_grid(experiment, grid_of(4, app), clock=Clock())
    federation.run()
    (event,) = rounds_of(federation)
    assert event["clients"] == [1, 2, 3]
    (failure,) = event["engine"]["failures"]
    assert "the share of node 1001 cannot be opened" in failure["reason"]
    assert len(failure["reason"]) <= 500


@pytest.mark.parametrize(("quorum", "clients"), [(1.0, [0, 1, 2]), (0.6, [0, 1])])
def test_a_private_round_waits_for_its_nodes_where_the_quorum_needs_them(quorum, clients):
    grid, clock = grid_of(3), Clock()
    grid.nodes[1002].online = False

    def wake(seconds):
        clock.time += seconds
        grid.nodes[1002].online |= clock.time > 5

    experiment = small(fusion__private=True, rounds=1, transport__wait=60.0)
    federation, _ = over_grid(replaced(experiment, "participation", quorum=quorum), grid, clock=clock)
    federation.cohort.sleep = wake
    federation.cohort.restore({"sizes": {0: 80, 1: 80, 2: 80}, "trained": {}})  # as a resumed run knows them
    federation.run()
    (event,) = rounds_of(federation)
    assert event["clients"] == clients
    missing = [(f["client"], f["reason"]) for f in event["engine"]["failures"]]
    assert missing == ([] if 2 in clients else [(2, "no node that hosts it is connected")])


@pytest.mark.parametrize(("private", "kind"), [(False, "train"), (True, "train.masked")])
def test_a_node_that_flower_does_not_address_counts_as_silent(private, kind):
    """Flower gives None for the number of a message to a node it does not know any more."""
    grid = grid_of(4)
    push = grid.push_messages
    grid.push_messages = lambda messages: [
        None if (m.metadata.message_type, m.metadata.dst_node_id) == (kind, 1002) else push([m])[0] for m in messages
    ]
    experiment = small(
        rounds=1, partition__clients=4, participation__quorum=0.5, participation__deadline=5.0, fusion__private=private
    )
    federation, _ = over_grid(experiment, grid, clock=Clock())
    federation.run()
    assert rounds_of(federation)[0]["clients"] == [0, 1, 3]
