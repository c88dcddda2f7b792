"""The round loop over Flower's messages: same bits as in one process, streaming, membership, the cost of the wire."""

import tracemalloc

import numpy as np
import pytest
import torch
from flower_cases import Clock, grid_of, local_run, over_grid, replaced, rounds_of, small

from fedbayes import runner
from fedbayes.errors import RunError


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_final_posterior_has_the_same_bits_as_the_local_run_however_clients_are_spread(nodes):
    experiment = small(partition__clients=4)
    local = local_run(experiment)
    federation, _ = over_grid(experiment, grid_of(nodes))
    assert federation.run().same_bits(local.posterior)
    assert rounds_of(federation)[-1]["train"] == rounds_of(local)[-1]["train"]


@pytest.mark.parametrize(
    "changes",
    [
        {"fusion__rule": "dwc", "objective__prior": "previous"},
        {"objective__prior": "previous", "objective__kl_scale": "shared"},
        {"local__keep_state": True, "rounds": 3},
        {"participation__fraction": 0.5, "partition__clients": 4, "rounds": 3},
        {"model__kind": "deterministic", "fusion__rule": "fedavg"},
        {"fusion__weighting": "max-discrepancy"},
    ],
)
def test_same_bits_for_every_kind_of_experiment(changes):
    experiment = small(**changes)
    federation, _ = over_grid(experiment, grid_of(2))
    assert federation.run().same_bits(local_run(experiment).posterior)


def test_order_of_arrival_does_not_matter():
    experiment = small(partition__clients=5, rounds=1)
    plain, _ = over_grid(experiment, grid_of(5))
    grid = grid_of(5)
    held = {}

    def late_first(node, message):  # node 0 answers only after it was asked five times, the others in reverse
        held[node.node] = held.get(node.node, 0) + 1
        node.silent = message.metadata.message_type == "train" and held[node.node] < 8 - node.config["partition-id"]

    grid.before = late_first
    shuffled, _ = over_grid(experiment, grid, clock=Clock())
    assert shuffled.run().same_bits(plain.run())


def test_node_that_is_started_again_gets_its_assignment_again():
    experiment = small(rounds=1, transport__wait=60.0)
    grid = grid_of(3)
    lost = []

    def lose(node, message):  # node 1 takes its first assignment with it and comes back with nothing
        if message.metadata.message_type == "train" and node.node == 1001:
            lost.append(message.metadata.message_id)
            node.silent = message.metadata.message_id == lost[0]
            node.activations = 2 if len(lost) > 2 else 1

    grid.before = lose
    federation, said = over_grid(experiment, grid, clock=Clock())
    assert federation.run().same_bits(local_run(experiment).posterior)
    assert any("is back" in s for s in said)


def test_a_node_refused_for_its_config_takes_part_once_it_is_mended_and_started_again():
    clock, wrong = Clock(), {"partition-id": 1, "num-partitions": 3, "data": "/nowhere/a.npz"}
    grid = grid_of(configs=[{"partition-id": 0, "num-partitions": 3}, wrong, {"partition-id": 2, "num-partitions": 3}])
    experiment = small(rounds=1, transport__wait=60.0)

    def mend(seconds):
        clock.time += seconds
        node = grid.nodes[1001]
        if clock.time > 5 and node.activations == 1:
            node.config, node.activations = {"partition-id": 1, "num-partitions": 3}, 2

    federation, said = over_grid(experiment, grid, clock=clock)
    federation.cohort.sleep = mend
    assert federation.run().same_bits(local_run(experiment).posterior)
    assert sum("is refused" in s for s in said) == 1


def test_node_that_went_away_and_came_back_under_another_number_gets_its_assignment():
    experiment = small(rounds=1, transport__wait=60.0)
    grid, clock = grid_of(3), Clock()
    old = grid.nodes[1002]

    def leave(node, message):
        if message.metadata.message_type == "train" and node is old and old.online:
            old.online = False
            raise ConnectionError

    def sleep(seconds):
        clock.time += seconds
        if clock.time > 5 and 2002 not in grid.nodes:
            grid.nodes[2002] = type(old)(2002, old.config, old.app)

    grid.before = leave
    original = grid._answer
    grid._answer = lambda i: (
        [] if grid._out[i].metadata.dst_node_id == 1002 and not old.online and clock.time < 3 else original(i)
    )
    federation, _said = over_grid(experiment, grid, clock=clock)
    federation.cohort.sleep = sleep
    federation.cohort.sizes()
    grid.before = None
    old.online = False
    assert federation.run().same_bits(local_run(experiment).posterior)


def test_round_goes_on_without_a_dead_node_when_the_quorum_is_met():
    grid = grid_of(3)
    federation, _ = over_grid(small(participation__quorum=0.6), grid, clock=Clock())
    federation.cohort.sizes()
    grid.nodes[1001].online = False
    federation.run()
    assert [r["clients"] for r in rounds_of(federation)] == [[0, 2], [0, 2]]
    assert "not connected" in rounds_of(federation)[0]["engine"]["failures"][0]["reason"]


def test_round_waits_for_a_dead_node_and_then_fails_with_a_sentence_when_the_quorum_is_missed():
    grid, clock = grid_of(3), Clock()
    federation, _ = over_grid(small(transport__wait=30.0), grid, clock=clock)
    federation.cohort.sizes()
    grid.nodes[1001].online = False
    with pytest.raises(RunError, match=r"2 of 3 clients.*quorum.*missing: \[1\]"):
        federation.run()
    assert clock.time >= 30


def test_deadline_ends_the_round_without_a_slow_node():
    grid, clock = grid_of(3), Clock()
    grid.before = lambda node, message: setattr(
        node, "silent", node.node == 1000 and message.metadata.message_type == "train"
    )
    federation, said = over_grid(
        small(participation__quorum=0.5, participation__deadline=20.0, rounds=1), grid, clock=clock
    )
    federation.run()
    assert rounds_of(federation)[0]["clients"] == [1, 2]
    assert 20 <= clock.time < 25
    assert any("within 20 s" in s for s in said)


def test_nodes_that_do_not_say_who_they_are_share_the_clients_when_their_number_is_known():
    experiment = small(partition__clients=5, transport__nodes=2)
    federation, _ = over_grid(experiment, grid_of(configs=[{}, {}]))
    assert federation.run().same_bits(local_run(experiment).posterior)


def test_nodes_that_do_not_say_who_they_are_are_asked_to_when_their_number_is_not_known():
    federation, _ = over_grid(small(), grid_of(configs=[{}, {}]))
    with pytest.raises(RunError, match=r"no 'partition-id'.*transport\.nodes=3"):
        federation.run()


def test_two_nodes_that_claim_one_client_are_named():
    grid = grid_of(configs=[{"partition-id": 0, "name": "ward-a"}, {"clients": "0,1,2", "name": "ward-b"}])
    federation, _ = over_grid(small(), grid)
    with pytest.raises(RunError, match="client 0 lives on two nodes, node ward-a and node ward-b"):
        federation.run()


def test_missing_nodes_are_waited_for_and_then_named():
    clock = Clock()
    federation, said = over_grid(
        small(transport__wait=45.0), grid_of(configs=[{"partition-id": 0, "num-partitions": 3}]), clock=clock
    )
    with pytest.raises(RunError, match="clients without a node: 1, 2"):
        federation.run()
    assert clock.time >= 45
    assert said[0].startswith("waiting for nodes")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"partition-id": 3, "num-partitions": 3}, "must be below num-partitions=3"),
        ({"partition-id": "x"}, "must be a whole number"),
        ({"clients": "0,7"}, "client 7 does not exist"),
        ({"data": "/nowhere.npz"}, "is not on this node"),
        ({"partition_id": 0}, "partition-id"),
    ],
)
def test_a_wrong_node_config_is_refused_with_a_sentence(config, sentence):
    federation, _ = over_grid(small(), grid_of(configs=[config]), clock=Clock())
    with pytest.raises(RunError, match=sentence):
        federation.run()


@pytest.mark.parametrize("private", [False, True])
def test_bytes_counted_for_each_client_are_those_of_the_messages_on_the_wire(private):
    """Against the size of Flower's own protobuf of every message, node by node (one client each)."""
    from flwr.common.serde import recorddict_to_proto

    from fedbayes.flower.client import client_app

    sent = {"down": {}, "up": {}}

    def enter(way, client, content):
        sent[way][client] = sent[way].get(client, 0) + recorddict_to_proto(content).ByteSize()

    def app(message, context):
        asked = message.metadata.message_type != "query"
        client = str(context.node_config["partition-id"])
        if asked:
            enter("down", client, message.content)
        reply = client_app(message, context)
        if asked:
            enter("up", client, reply.content)
        return reply

    federation, _ = over_grid(small(rounds=1, fusion__private=private), grid_of(3, app))
    federation.run()
    counted = rounds_of(federation)[0]["bytes"]
    for way in ("down", "up"):
        assert counted[way] == sum(c[way] for c in counted["clients"].values())
        for client, size in sent[way].items():
            assert counted["clients"][client][way] == pytest.approx(size, rel=0.06)  # protobuf's own tags


@pytest.mark.parametrize(("wire", "share"), [("bf16", 0.5), ("int8", 0.25)])
def test_lossy_wires_cost_less_and_stay_close(wire, share):
    exact, _ = over_grid(small(), grid_of(3))
    lossy, _ = over_grid(small(transport__wire=wire), grid_of(3))
    exact.run()
    lossy.run()
    up = [rounds_of(f)[-1]["bytes"]["up"] for f in (exact, lossy)]
    fixed = 3 * 1700  # names, layout, metrics and biases are as they were
    assert up[1] - fixed == pytest.approx(share * (up[0] - fixed), rel=0.2)
    for name, g in exact.posterior.gaussians.items():
        other = lossy.posterior.gaussians[name]
        assert ((g.mean - other.mean).abs() / g.variance.sqrt()).quantile(0.99) < 0.2
        assert (g.variance / other.variance).log().abs().quantile(0.99) < 0.1


def test_eight_bits_are_refused_for_variances_of_any_size():
    from fedbayes.errors import ConfigError

    precision = small(fusion__rule="precision", model__kind="deterministic", transport__wire="bf16")
    over_grid(precision, grid_of(3))
    with pytest.raises(ConfigError, match=r"int8: the rule 'precision'.*use bf16 or float32"):
        over_grid(replaced(precision, "transport", wire="int8"), grid_of(3))


def test_server_memory_does_not_grow_with_the_number_of_nodes():
    """Peak of NumPy and Python memory for replies of 0.4 MB each; the total and one client are all that is held."""
    from flwr.app import Message, RecordDict

    from fedbayes.cohort import Update
    from fedbayes.flower.client import client_app
    from fedbayes.flower.records import put_update, take_assignments

    size = 40_000

    def app(message, context):
        if message.metadata.message_type != "train":
            return client_app(message, context)
        reply = RecordDict()
        for a in take_assignments(message.content):
            put_update(reply, Update(a.client, a.round, a.start, 10, {}), 0, "float32", a.start)
        return Message(reply, reply_to=message)

    def peak(nodes):
        experiment = small(partition__clients=nodes, partition__scheme="iid", rounds=1, model__width=600)
        setup = runner.prepare(experiment)
        assert sum(g.mean.numel() for g in setup.start.gaussians.values()) > size / 2
        federation, _ = over_grid(experiment, grid_of(nodes, app), setup)
        federation.judge = None
        federation.cohort.sizes()
        tracemalloc.start()
        federation.run()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(16) < 1.5 * peak(4)


def test_resumed_federation_meets_its_nodes_again_and_ends_in_the_same_bits(tmp_path):
    from fedbayes.rundir import RunDirectory

    experiment = small(rounds=3)
    local = local_run(experiment)
    with RunDirectory(tmp_path / "run", experiment) as directory:
        federation, _ = over_grid(experiment, grid_of(3), directory=directory)
        for update in federation.cohort.train(federation.begin()):
            federation.absorb(update)
        federation.end()  # and then the server dies
    with RunDirectory(tmp_path / "run", experiment, resume=True) as directory:
        again, _ = over_grid(experiment, grid_of(3), directory=directory)
        assert again.restore()
        assert again.round == 1
        assert again.run().same_bits(local.posterior)


def test_a_run_begun_in_one_process_goes_on_over_flower_and_back(tmp_path):
    from fedbayes.flower.server import Settings, serve

    whole = local_run(small(rounds=3)).posterior
    runner.run(small(rounds=1), tmp_path / "a", report=False)
    serve(grid_of(2), Settings(small(rounds=2), str(tmp_path / "a"), resume=True, report=False))
    assert runner.run(small(rounds=3), tmp_path / "a", resume=True, report=False).posterior.same_bits(whole)

    kept = {"local__keep_state": True}  # optimisers do not travel
    runner.run(small(rounds=1, **kept), tmp_path / "b", report=False)
    with pytest.raises(RunError, match=r"begun as a simulation.*keep_state"):
        serve(grid_of(2), Settings(small(rounds=2, **kept), str(tmp_path / "b"), resume=True))
    serve(grid_of(2), Settings(small(rounds=1, **kept), str(tmp_path / "c"), report=False))
    with pytest.raises(RunError, match=r"begun over Flower.*keep_state"):
        runner.run(small(rounds=2, **kept), tmp_path / "c", resume=True)


def test_own_optimiser_state_that_a_node_has_lost_is_missed_and_said(tmp_path):
    experiment = small(rounds=2, local__keep_state=True, participation__quorum=0.5)
    grid = grid_of(3)
    federation, said = over_grid(experiment, grid)
    for update in federation.cohort.train(federation.begin()):
        federation.absorb(update)
    federation.end()
    grid.nodes[1000].state = type(grid.nodes[1000].state)()  # the node was restarted
    federation.run()
    assert rounds_of(federation)[-1]["clients"] == [1, 2]
    assert any("keep_state" in s for s in said)


def test_reading_a_run_config(tmp_path):
    from fedbayes.errors import ConfigError
    from fedbayes.flower.server import Settings

    settings = Settings.read(
        {"experiment": "digits", "rounds": 7, "fusion.rule": "ws", "overrides": "local.epochs=3 seed=5", "out": "here"}
    )
    e = settings.experiment
    assert (e.rounds, e.fusion.rule, e.local.epochs, e.seed, settings.out) == (7, "ws", 3, 5, "here")
    with pytest.raises(ConfigError, match=r"run config.*partition\.alpha"):
        Settings.read({"partition.alhpa": 1.0})
    with pytest.raises(ConfigError, match="key=value"):
        Settings.read({"overrides": "rounds"})
    with pytest.raises(ConfigError, match="overrides cannot be read"):
        Settings.read({"overrides": "name='x"})
    told = Settings.read({"resume": "false", "report": "no"})
    assert (told.resume, told.report) == (False, False)
    with pytest.raises(ConfigError, match="resume='maybe' must be true or false"):
        Settings.read({"resume": "maybe"})
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    (folder / "config.toml").write_text("rounds = 7")
    for text in (folder, folder / "config.toml", "rounds = 7"):
        assert Settings.read({"experiment": str(text)}).experiment.rounds == 7
    assert torch.get_num_threads() >= 1


def test_a_full_disk_at_a_checkpoint_stops_with_a_sentence_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    import errno
    import os

    from fedbayes.rundir import RunDirectory

    experiment = small(rounds=3)
    local = local_run(experiment)
    writes = []

    def full(descriptor):
        writes.append(descriptor)
        if federation.round == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with RunDirectory(tmp_path / "run", experiment) as directory:
        federation, _ = over_grid(experiment, grid_of(3), directory=directory)
        with monkeypatch.context() as m:
            m.setattr(os, "fsync", full)
            with pytest.raises(RunError, match=r"disk is full.*--resume"):
                federation.run()
    assert writes
    assert not list((tmp_path / "run").glob("*.part"))
    with RunDirectory(tmp_path / "run", experiment, resume=True) as directory:
        again, _ = over_grid(experiment, grid_of(3), directory=directory)
        assert again.restore()
        assert again.round == 1
        assert again.run().same_bits(local.posterior)


def test_inputs_the_server_distils_on_need_not_be_on_a_node(tmp_path):
    inputs = np.random.default_rng(0).integers(0, 256, (32, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "server.npz", inputs=inputs)
    changes = {"distill__enabled": True, "distill__data": str(tmp_path / "server.npz"), "distill__swa": "none"}
    experiment = small(**changes, distill__epochs=1, rounds=1)
    local, setup = local_run(experiment), runner.prepare(experiment)
    (tmp_path / "server.npz").unlink()
    federation, _ = over_grid(experiment, grid_of(2), setup)
    assert federation.run().same_bits(local.posterior)
