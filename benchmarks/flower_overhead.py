"""What FedBayes adds to Flower: time beside a bare Flower app of the same payload, memory, and the cost of the wires.

    python benchmarks/flower_overhead.py exchange   # real processes, loopback, 3 nodes, 10 MB posteriors
    python benchmarks/flower_overhead.py memory     # 20 virtual nodes, 10 MB posteriors
    python benchmarks/flower_overhead.py wires      # float32, bf16, int8 over 20 rounds on the digits
    python benchmarks/flower_overhead.py private    # masked sums against the open run, ten rounds on the digits

``exchange`` runs both apps one after the other in one network, with the same arrays up and down and one training step
on both sides (the first optimiser of a process costs a second of imports, whoever makes it), and prints seconds per
round, processor seconds per round of all processes (less at the mercy of what else the machine does), and the ratios.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict

from fedbayes import config, runner
from fedbayes.cohort import Update
from fedbayes.experiment import Experiment
from fedbayes.flower.client import client_app
from fedbayes.flower.deploy import follow, partitioned, read_events, write_app
from fedbayes.flower.inprocess import InProcessGrid
from fedbayes.flower.network import Network, marked_processes
from fedbayes.flower.records import put_update, take_assignments
from fedbayes.flower.server import cohort_of
from fedbayes.posterior import Posterior

BARE = """
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
import torch  # as any PyTorch app does

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message, context):
    weights = {k: torch.nn.Parameter(torch.from_numpy(a.numpy().copy())) for k, a in message.content["arrays"].items()}
    optimizer = torch.optim.Adam(weights.values())  # one step, as ours takes: training is no part of the comparison
    sum((w - 1).square().sum() for w in weights.values()).backward()
    optimizer.step()
    arrays = ArrayRecord({k: Array(w.detach().numpy()) for k, w in weights.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@server_app.main()
def main(grid, context):
    size, rounds = context.run_config["size"], context.run_config["rounds"]
    arrays = ArrayRecord({k: Array(np.zeros(size // 8, np.float32)) for k in ("mean", "variance")})
    nodes, seconds = list(grid.get_node_ids()), []
    for _ in range(rounds):
        began = time.perf_counter()
        out = [Message(RecordDict({"arrays": arrays}), n, "train") for n in nodes]
        replies = [r for r in grid.send_and_receive(out) if r.has_content()]
        means = {k: np.mean([r.content["arrays"][k].numpy() for r in replies], 0) for k in arrays}
        arrays = ArrayRecord({k: Array(v) for k, v in means.items()})
        seconds.append(time.perf_counter() - began)
    print("SECONDS " + json.dumps(seconds), flush=True)
"""


def payload(rounds: int, clients: int, **changes: object) -> Experiment:
    """An experiment whose posterior has 1.25 million weights (10 MB) and whose training is one step of one example."""
    plain = {
        "rounds": rounds, "partition.clients": clients, "partition.scheme": "iid", "data.validation": 0.0,
        "data.limit": 20 * clients, "data.test_limit": 10, "local.steps": 1, "local.batch_size": 1, "model.width": 1081,
        "model.name": "mlp", "evaluation.every": 1000, "evaluation.samples": 1, "engine.lanes": 1,
        "engine.device": "cpu", "checkpoint_every": 1000,
    }  # fmt: skip
    return config.override(config.read("digits"), plain | changes)


def exchange(rounds: int = 6, nodes: int = 3) -> None:
    """Seconds per round of a bare Flower app and of ours, in one network."""
    experiment = payload(rounds, nodes)
    start = runner.prepare(experiment).start
    size = 8 * sum(g.mean.numel() for g in start.gaussians.values())
    with tempfile.TemporaryDirectory(prefix="fedbayes-") as name, Network(f"{name}/net", partitioned(nodes)) as network:
        folder = Path(name)
        bare = write_app(folder / "bare", experiment, {})
        (bare / "fedbayes_app.py").write_text(BARE)
        text = (bare / "pyproject.toml").read_text()
        text = (
            text[: text.index("[tool.flwr.app.config]")] + f"[tool.flwr.app.config]\nsize = {size}\nrounds = {rounds}\n"
        )
        (bare / "pyproject.toml").write_text(text.replace("fedbayes-rehearsal", "bare"))
        before = processor_seconds(network)
        network.submit(bare).wait()
        between = processor_seconds(network)
        line = next((x for x in network.log("run").splitlines() if x.startswith("SECONDS ")), None)
        if line is None:
            sys.exit(f"the bare app did not finish; its log ends:\n{network.log('run')[-2000:]}")
        theirs = json.loads(line.removeprefix("SECONDS "))
        app = write_app(folder / "app", experiment, {"out": str(folder / "run"), "report": False})
        follow(network, network.submit(app), folder / "run")
        spent = [(x - y) / rounds for x, y in ((between, before), (processor_seconds(network), between))]
        ours = [e["seconds"] for e in read_events(folder / "run") if e["kind"] == "round"]
    a, b = statistics.median(theirs[1:]), statistics.median(ours[1:])
    print(f"posterior {size / 1e6:.1f} MB, {nodes} nodes, {rounds} rounds; median seconds per round after the first")
    print(f"bare Flower app   {a:6.2f}   {[round(x, 1) for x in theirs]}   processor {spent[0]:.1f} s a round, all in")
    print(f"FedBayes          {b:6.2f}   {[round(x, 1) for x in ours]}   processor {spent[1]:.1f} s a round, all in")
    print(f"ratio             {b / a:6.3f}")


def processor_seconds(network: Network) -> float:
    """Processor time that a network's processes, and those of theirs that have ended, have used so far."""
    ticks = 0
    for pid in marked_processes(network.tag):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(f) for f in fields[11:15])  # utime, stime, and both of the children it has waited for
    return ticks / os.sysconf("SC_CLK_TCK")


def memory() -> None:
    """Peak resident memory of the server while one round of 10 MB posteriors arrives, by number of nodes.

    Each count has a process of its own. Nodes are elsewhere: what stands in for them answers with the posterior it was sent.
    """
    for nodes in (1, 5, 20):
        done = subprocess.run([sys.executable, __file__, f"peak-{nodes}"], check=True, capture_output=True, text=True)
        print(f"{nodes:3} nodes: {done.stdout.strip()}", flush=True)


def peak(nodes: int) -> None:
    """Print by how much one round raises the peak of this process's resident memory."""

    def echo(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "train":
            return client_app(message, context)
        reply = RecordDict()
        for a in take_assignments(message.content):
            put_update(reply, Update(a.client, a.round, a.start, 10, {}), 0, "float32", a.start)
        return Message(reply, reply_to=message)

    setup = runner.prepare(payload(1, nodes))
    size = 8 * sum(g.mean.numel() for g in setup.start.gaussians.values())
    grid = InProcessGrid(echo, [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)])
    federation = runner.make_federation(setup, cohort_of(grid, setup), None)
    federation.judge = None
    federation.cohort.sizes()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew
    before = resident("VmRSS")
    for update in federation.cohort.train(federation.begin()):
        federation.absorb(update)
    federation.end()
    print(f"{size / 1e6:.1f} MB a posterior, {(resident('VmHWM') - before) / 1e6:.0f} MB above what was there before")


def resident(name: str) -> int:
    """Resident memory of this process in bytes: now (``VmRSS``) or at its peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(name)).split()[1])


def private(rounds: int = 10, clients: int = 4) -> None:
    """Accuracy and sigma of masked sums and of the open run, round for round the same seeds.

    The control is the open run from a start whose means differ in their last bit: what any rounding at all grows to.
    """
    print("| sums | stated error of a sum | test accuracy | nll | median sigma | 99 % of means within |")
    print("|---|---|---|---|---|---|")
    shared = {
        "rounds": rounds, "partition.clients": clients, "evaluation.every": 1000, "engine.lanes": 1,
        "engine.device": "cpu", "data.validation": 0.0,
    }  # fmt: skip
    reference = None
    for name, changes in (
        ("open", {}),
        ("open, the start's last bits changed", {}),
        ("masked, 64 bits", {"fusion.private": True}),
        ("masked, 32 bits", {"fusion.private": True, "transport.mask_bits": 32}),
    ):
        experiment = config.override(config.read("digits"), shared | changes)
        setup = runner.prepare(experiment)
        if "last bit" in name:
            for g in setup.start.gaussians.values():
                g.mean.copy_(torch.nextafter(g.mean, torch.tensor(torch.inf)))
        grid = InProcessGrid(client_app, [{"partition-id": i, "num-partitions": clients} for i in range(clients)])
        federation = runner.make_federation(setup, cohort_of(grid, setup), None)
        final = federation.run()
        reference = reference or final
        last = [e for e in federation.history if e["kind"] == "round"][-1]
        test = [e for e in federation.history if e["kind"] == "evaluation" and e["split"] == "test"][-1]["metrics"]
        print(
            f"| {name} | {last['engine'].get('mask_error', 0.0):.1e} | {100 * test['accuracy']:.2f} % | {test['nll']:.4f} | "
            f"{last['fusion']['sigma']['q50']:.6f} | {distance(reference, final):.1e} σ |",
            flush=True,
        )


def distance(one: Posterior, other: Posterior) -> float:
    """How far 99 % of two posteriors' means lie apart at most, in units of the first one's sigma."""
    apart = [((g.mean - other.gaussians[n].mean).abs() / g.variance.sqrt()).flatten() for n, g in one.gaussians.items()]
    return float(torch.cat(apart).quantile(0.99))


def wires(rounds: int = 20) -> None:
    """Bytes a client sends and what the final model is worth, by wire."""
    print("| wire | bytes up a client and round | test accuracy | nll | median sigma |\n|---|---|---|---|---|")
    for wire in ("float32", "bf16", "int8"):
        rows = []
        for seed in range(3):
            changes = {
                "transport.wire": wire, "rounds": rounds, "seed": seed, "evaluation.every": 1000, "engine.lanes": 1,
                "engine.device": "cpu", "data.validation": 0.0,
            }  # fmt: skip
            experiment = config.override(config.read("digits"), changes)
            setup = runner.prepare(experiment)
            grid = InProcessGrid(client_app, [{"partition-id": i, "num-partitions": 10} for i in range(10)])
            federation = runner.make_federation(setup, cohort_of(grid, setup), None)
            federation.run()
            last = [e for e in federation.history if e["kind"] == "round"][-1]
            test = [e for e in federation.history if e["kind"] == "evaluation" and e["split"] == "test"][-1]["metrics"]
            up = last["bytes"]["up"] / len(last["clients"])
            rows.append((up, test["accuracy"], test["nll"], last["fusion"]["sigma"]["q50"]))
        up, accuracy, nll, sigma = (statistics.mean(column) for column in zip(*rows))
        spread = statistics.stdev(r[1] for r in rows)
        print(
            f"| {wire} | {up:,.0f} | {100 * accuracy:.2f} ± {100 * spread:.2f} % | {nll:.4f} | {sigma:.5f} |",
            flush=True,
        )


if __name__ == "__main__":
    parts = {"exchange": exchange, "memory": memory, "wires": wires, "private": private}
    for what in sys.argv[1:] or parts:
        if what.startswith("peak-"):
            peak(int(what.removeprefix("peak-")))
        elif what in parts:
            parts[what]()
        else:
            sys.exit(__doc__)
