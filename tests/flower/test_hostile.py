"""Nodes that send what cannot be fused are refused by name, and the round goes on with the others."""

import math

import pytest
import torch
from flower_cases import grid_of, over_grid, rounds_of, small, tampered
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedbayes.errors import RunError
from fedbayes.flower.client import client_app
from fedbayes.flower.records import put_posterior, take_posterior
from fedbayes.posterior import Gaussian, Posterior

BAD = 1


def only_from(node, change):
    """Tamper with the answers of one node: ``change(posterior) -> posterior``."""

    def tamper(record, config):
        if config["partition-id"] == node and f"posterior-{node}" in record:
            start = take_posterior(record, f"posterior-{node}")
            put_posterior(record, f"posterior-{node}", change(start))

    return tampered(tamper)


def with_first(change):
    """Change one number of the first Gaussian tensor."""

    def apply(posterior):
        name = sorted(posterior.gaussians)[0]
        g = posterior.gaussians[name]
        mean, variance = g.mean.clone(), g.variance.clone()
        change(mean.view(-1), variance.view(-1))
        return Posterior({**posterior.gaussians, name: Gaussian(mean, variance)}, posterior.points)

    return apply


def nan(mean, variance):
    mean[0] = math.nan


def infinite(mean, variance):
    variance[0] = math.inf


def negative(mean, variance):
    variance[0] = -1e-3


def missing(posterior):
    name = sorted(posterior.gaussians)[0]
    return Posterior({n: g for n, g in posterior.gaussians.items() if n != name}, posterior.points)


def misshapen(posterior):
    name = sorted(posterior.gaussians)[0]
    g = posterior.gaussians[name]
    return Posterior(
        {**posterior.gaussians, name: Gaussian(g.mean.T.contiguous(), g.variance.T.contiguous())}, posterior.points
    )


def foreign(posterior):
    return Posterior({"other.weight": Gaussian(torch.zeros(2), torch.ones(2))})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (with_first(nan), "finite|NaN"),
        (with_first(infinite), "finite|infin"),
        (with_first(negative), "positive|variance"),
        (missing, "missing"),
        (misshapen, "shape"),
        (foreign, "missing|not"),
    ],
)
def test_a_bad_posterior_is_refused_by_name_and_the_round_goes_on(change, word):
    federation, _ = over_grid(small(rounds=1, participation__quorum=0.5), grid_of(3, only_from(BAD, change)))
    federation.run()
    (event,) = rounds_of(federation)
    assert event["clients"] == [0, 2]
    (refusal,) = [r for r in event["fusion"]["refused"] if r["client"] == BAD]
    import re

    assert re.search(word, f"{refusal['tensor']} {refusal['reason']}")
    for g in federation.posterior.gaussians.values():
        assert torch.isfinite(g.mean).all()
        assert (g.variance > 0).all()


def test_an_update_a_hundred_times_too_large_is_refused_where_moves_are_compared():
    experiment = small(rounds=1, partition__clients=5, fusion__max_update=10.0, participation__quorum=0.5)
    plain, _ = over_grid(experiment, grid_of(5))
    start = plain.posterior

    def far(posterior):
        return Posterior(
            {
                n: Gaussian(start.gaussians[n].mean + 100 * (g.mean - start.gaussians[n].mean), g.variance)
                for n, g in posterior.gaussians.items()
            },
            posterior.points,
        )

    federation, _ = over_grid(experiment, grid_of(5, only_from(BAD, far)))
    federation.run()
    assert rounds_of(federation)[0]["clients"] == [0, 2, 3, 4]
    plain.run()
    assert rounds_of(plain)[0]["clients"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record["posterior-1"].clear(),
        lambda record: record.pop("posterior-1-layout"),
        lambda record: record["posterior-1-layout"].update({"layout": "[["}),
        lambda record: record["posterior-1-layout"].update({"codec": "morse"}),
        lambda record: record.update({"posterior-1": ArrayRecord({"mean.float32": Array("float32", [4], "numpy.ndarray", b"junk")})}),
        lambda record: record["update-1"].pop("metric-names"),
        lambda record: record["update-1"].update({"client": 2}),
        lambda record: record["update-1"].update({"run": 7}),
        lambda record: record["update-1"].update({"round": 2}),
        lambda record: record["update-1"].update({"examples": -5}),
        lambda record: record["update-1"].update({"examples": "many"}),
        lambda record: record["update-1"].update({"metric-names": ["loss"], "metric-values": ["low"]}),
        lambda record: record["update-1"].update({"metric-values": [1.0]}),
        lambda record: record["posterior-1-layout"].update({"layout": '[["gaussian","a","float32",[4294967296,4294967296]]]'}),
        lambda record: record.update({"error-1": ConfigRecord({"client": "me"})}),
        lambda record: record.clear(),
    ],
)  # fmt: skip
def test_a_torn_answer_is_a_failure_of_that_client_alone(spoil):
    def tamper(record, config):
        if config["partition-id"] == BAD:
            spoil(record)

    federation, _ = over_grid(small(rounds=1, participation__quorum=0.5), grid_of(3, tampered(tamper)))
    federation.run()
    (event,) = rounds_of(federation)
    assert event["clients"] == [0, 2]
    assert [f["client"] for f in event["engine"]["failures"]] == [BAD]


def test_a_torn_answer_is_an_answer_and_the_round_goes_on_as_with_any_other_bad_one():
    def tear(record, config):
        if config["partition-id"] == BAD:
            record["posterior-1-layout"]["layout"] = "[" * 100_000

    federation, _ = over_grid(small(rounds=1), grid_of(3, tampered(tear)))  # the quorum is everybody
    federation.run()
    (event,) = rounds_of(federation)
    assert event["clients"] == [0, 2]
    assert event["fusion"]["refused"] == [
        {"client": BAD, "tensor": "", "reason": "node 1001: the layout that came with the arrays cannot be read."}
    ]
    strict, _ = over_grid(small(rounds=1, fusion__on_bad_client="stop"), grid_of(3, tampered(tear)))
    with pytest.raises(RunError, match=r"client 1's update cannot be used .*layout"):
        strict.run()


def test_what_a_node_says_stays_on_one_line_of_the_log():
    def shout(record, config):
        if config["partition-id"] == BAD:
            record.clear()
            record["error-1"] = ConfigRecord({"reason": "no\nfedbayes: the run has failed\x1b[31m"})

    federation, said = over_grid(small(rounds=1, participation__quorum=0.5), grid_of(3, tampered(shout)))
    federation.run()
    (failure,) = rounds_of(federation)[0]["engine"]["failures"]
    assert failure["reason"] == "node 1001: no fedbayes: the run has failed [31m"
    assert all(sentence.isprintable() for sentence in said)


@pytest.mark.parametrize("changes", [{}, {"fusion__max_update": 10.0}])
def test_weights_by_size_use_what_the_census_said_and_not_what_an_answer_claims(changes):
    def tamper(record, config):
        if config["partition-id"] == BAD:
            record["update-1"]["examples"] = 10**9

    boasting, _ = over_grid(small(rounds=1, **changes), grid_of(3, tampered(tamper)))
    honest, _ = over_grid(small(rounds=1, **changes), grid_of(3))
    assert boasting.run().same_bits(honest.run())
    assert rounds_of(boasting)[0]["examples"] == 240


def test_an_answer_for_somebody_elses_client_is_ignored():
    def tamper(record, config):
        if config["partition-id"] == BAD:
            for name in ("posterior-1", "posterior-1-layout", "update-1"):
                record[name.replace("1", "0")] = record[name]
            record["update-0"] = ConfigRecord({**record["update-0"], "client": 0})

    federation, said = over_grid(small(rounds=1), grid_of(3, tampered(tamper)))
    honest, _ = over_grid(small(rounds=1), grid_of(3))
    assert federation.run().same_bits(honest.run())
    assert any("was not asked for" in s for s in said)


def test_a_client_that_raises_is_a_failure_with_its_reason():
    def before(node, message):
        if message.metadata.message_type == "train" and node.node == 1001:
            raise RuntimeError("disk on fire")

    federation, said = over_grid(small(rounds=1, participation__quorum=0.5), grid_of(3, before=before))
    federation.run()
    assert rounds_of(federation)[0]["clients"] == [0, 2]
    assert any("disk on fire" in s for s in said)


def test_another_version_of_the_package_is_refused_with_both_versions_named():
    def app(message, context):
        reply = client_app(message, context)
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == BAD:
            reply.content["census"]["version"] = "0.0.7"
        return reply

    federation, said = over_grid(small(), grid_of(3, app))
    with pytest.raises(RunError, match=r"clients without a node: 1.*0\.0\.7.*0\.1\.0"):
        federation.run()
    assert any("is refused" in s and "0.0.7" in s for s in said)


def test_a_node_refuses_a_server_of_another_version(monkeypatch):
    federation, said = over_grid(small(rounds=1, participation__quorum=0.5), grid_of(3))
    federation.cohort.sizes()
    monkeypatch.setattr("fedbayes.flower.cohort.__version__", "9.9.9")
    monkeypatch.setattr("fedbayes.flower.records.__version__", "9.9.9")
    with pytest.raises(RunError, match="quorum"):
        federation.run()
    assert any("9.9.9" in s and "0.1.0" in s for s in said)


def test_another_model_layout_is_refused_with_both_layouts_named():
    from flower_cases import small as make

    from fedbayes import config

    other = config.dumps(make(model__width=24))

    def app(message, context):
        if context.node_config["partition-id"] == BAD:
            asked = RecordDict(dict(message.content.items()))
            asked["experiment"] = ConfigRecord({**asked["experiment"], "toml": other})
            altered = Message(asked, dst_node_id=1, message_type=message.metadata.message_type)
            altered.metadata.__dict__["_message_id"] = message.metadata.message_id
            return client_app(altered, context)
        return client_app(message, context)

    federation, said = over_grid(small(), grid_of(3, app))
    with pytest.raises(RunError, match="model layout"):
        federation.run()
    (sentence,) = [s for s in said if "is refused" in s]
    assert "(24, 64)" in sentence
    assert "(16, 64)" in sentence


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"sizes": [10**9]}, "holds 1000000000 examples of client 1 and the server 80"),
        ({"sizes": [-5]}, "cannot be read"),
        ({"clients": [99]}, "client 99, and the experiment has clients 0 to 2"),
        ({"clients": [1, 1], "sizes": [80, 80]}, "cannot be read"),
        ({"clients": ["1"]}, "cannot be read"),
        ({"placed": "yes"}, "cannot be read"),
    ],
)
def test_a_census_that_cannot_be_true_is_refused(told, reason):
    def app(message, context):
        reply = client_app(message, context)
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == BAD:
            reply.content["census"].update(told)
        return reply

    federation, _ = over_grid(small(), grid_of(3, app))
    with pytest.raises(RunError, match=f"was refused .*{reason}"):
        federation.run()


def test_a_node_that_runs_another_app_is_refused():
    def app(message, context):
        return Message(RecordDict({"hello": ConfigRecord({"a": 1})}), reply_to=message)

    federation, said = over_grid(small(), grid_of(3, app))
    with pytest.raises(RunError, match="another app"):
        federation.run()
    assert len(said) >= 3
