"""Failures, staged with real processes: ``python -m fedbayes.flower.failures [NAME ...]``.

Each scenario starts its own network (TLS, authenticated nodes), breaks something, and says in one line what happened.
What each should end in stands in its docstring; ``docs/deploying.md`` holds the outcomes.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .. import __version__, config, runner
from ..errors import RunError
from ..experiment import Experiment
from ..posterior import Posterior
from .deploy import follow, partitioned, read_events, write_app
from .network import Network

PATIENCE = 600.0


def experiment(**changes: object) -> Experiment:
    """Three clients on the embedded digits, two rounds, enough local steps that a round lasts some seconds."""
    plain = {
        "rounds": 2, "partition.clients": 3, "local.epochs": 20, "engine.lanes": 1, "engine.device": "cpu",
        "evaluation.samples": 2, "transport.wait": 300.0,
    }  # fmt: skip
    return config.override(config.read("digits"), plain | {k.replace("__", "."): v for k, v in changes.items()})


MISBEHAVING = """
import time

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbayes.flower.client import client_app as honest
from fedbayes.flower.records import put_posterior, take_posterior
from fedbayes.flower.server import server_app
from fedbayes.posterior import Gaussian, Posterior


def spoilt(kind, sent, start):
    name = sorted(sent.gaussians)[0]
    g = sent.gaussians[name]
    if kind == "far":
        moved = {n: start.gaussians[n].mean + 100 * (q.mean - start.gaussians[n].mean) for n, q in sent.gaussians.items()}
        return Posterior({n: Gaussian(moved[n], q.variance) for n, q in sent.gaussians.items()}, sent.points)
    if kind == "foreign":
        return Posterior({"other.weight": Gaussian(torch.zeros(3), torch.ones(3))})
    wrong = {
        "nan": Gaussian(g.mean * float("nan"), g.variance),
        "shape": Gaussian(g.mean[:-1], g.variance[:-1]),
        "negative": Gaussian(g.mean, -g.variance),
    }[kind]
    return Posterior({**sent.gaussians, name: wrong}, sent.points)


class Misbehaving(ClientApp):
    def __call__(self, message, context):
        kind, type = context.node_config.get("misbehave", ""), message.metadata.message_type
        if kind == "layout" and type == "query":
            about = message.content["experiment"]
            about["toml"] = about["toml"].replace("width = 0", "width = 24")
        reply = honest(message, context)
        client = context.node_config["partition-id"]
        if kind == "slow" and type == "train":
            time.sleep(3600)
        if kind not in ("", "slow", "layout") and type == "train":
            record = reply.content
            sent, start = take_posterior(record, f"posterior-{client}"), take_posterior(message.content, "start")
            put_posterior(record, f"posterior-{client}", spoilt(kind, sent, start))
        return reply


client_app = Misbehaving()
__all__ = ["client_app", "server_app"]  # Flower looks for them without importing
"""
"""An app whose nodes do what their node config says (``misbehave=nan``), between the real client and the wire."""


class Stage:
    """A network with an experiment running on it; ``misbehave`` says by node what is wrong with it."""

    def __init__(
        self, folder: Path, experiment: Experiment, nodes: int = 3, misbehave: Mapping[int, str] | None = None
    ) -> None:
        self.folder, self.experiment, self.path = folder, experiment, folder / "run"
        self.misbehave = dict(misbehave or {})
        kinds = ({"misbehave": self.misbehave[i]} if i in self.misbehave else {} for i in range(nodes))
        self.network = Network(folder / "net", [{**c, **k} for c, k in zip(partitioned(nodes), kinds)])

    def __enter__(self) -> Stage:
        self.network.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.network.stop()

    def submit(self, *, resume: bool = False) -> None:
        """Submit the experiment (again)."""
        settings = {"out": str(self.path), "resume": resume, "report": False}
        app = write_app(self.folder / "app", self.experiment, settings)
        if self.misbehave:
            (app / "fedbayes_app.py").write_text(MISBEHAVING)
        self.process = self.network.submit(app)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something, or fail saying what never came."""
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RunError(f"waited in vain for {what}; the run's log ends: {self.network.log('run')[-500:]}")
            time.sleep(0.2)

    def training(self, node: int, messages: int = 1, kind: str = "train") -> bool:
        """Whether a node has received so many training messages."""
        return self.network.log(f"node-{node}").count(f"Receiving: {kind} message") >= messages

    def finish(self, *, resume: bool = False) -> list[dict]:
        """Wait for the end and return the round events."""
        follow(self.network, self.process, self.path, resume=resume)
        return [e for e in read_events(self.path) if e["kind"] == "round"]

    def same_bits(self) -> bool:
        """Whether the result is the local run's, bit for bit."""
        setup = runner.prepare(self.experiment)
        local = runner.make_federation(setup, runner.local_cohort([setup]), None)
        return Posterior.load(self.path / "final.safetensors").same_bits(local.run())


def node_killed(folder: Path) -> str:
    """A node is killed while it trains; the quorum is met, so the round ends at the deadline without it."""
    with Stage(folder, experiment(participation__quorum=0.6, participation__deadline=60.0)) as stage:
        stage.submit()
        stage.until(lambda: stage.training(1), "node 1 to train")
        stage.network.kill_node(1)
        rounds = stage.finish()
    return f"clients by round {[r['clients'] for r in rounds]}; noted: {rounds[0]['engine']['failures'][0]['reason']}"


def node_killed_without_quorum(folder: Path) -> str:
    """A node is killed and every client is needed: the round waits 'transport.wait' seconds and fails with a sentence."""
    with Stage(folder, experiment(transport__wait=20.0)) as stage:
        stage.submit()
        stage.until(lambda: stage.training(1), "node 1 to train")
        stage.network.kill_node(1)
        try:
            stage.finish()
        except RunError as error:
            return f"stopped: {error}"
    return "UNEXPECTED: the run went on"


def node_returns(folder: Path) -> str:
    """A node is killed while it trains and started again: it gets its assignment again, and the result is unchanged."""
    with Stage(folder, experiment()) as stage:
        stage.submit()
        stage.until(lambda: stage.training(1), "node 1 to train")
        stage.network.kill_node(1)
        stage.network.return_node(1)
        rounds = stage.finish()
        again = "sent again" in stage.network.log("run")
    return f"clients by round {[r['clients'] for r in rounds]}; sent again: {again}; same bits: {stage.same_bits()}"


def node_hangs(folder: Path) -> str:
    """A node stops answering without ending (as a machine that hangs): the deadline ends the round without it."""
    with Stage(folder, experiment(participation__quorum=0.6, participation__deadline=60.0, rounds=1)) as stage:
        stage.submit()
        stage.until(lambda: stage.training(2), "node 2 to train")
        stage.network.pause_node(2)
        rounds = stage.finish()
    return f"clients {rounds[0]['clients']}; noted: {rounds[0]['engine']['failures'][0]['reason']}"


def node_slow(folder: Path) -> str:
    """A node trains far too slowly: the deadline ends the round without it."""
    changes = {"participation__quorum": 0.6, "participation__deadline": 40.0, "rounds": 1, "local__epochs": 1}
    with Stage(folder, experiment(**changes), misbehave={2: "slow"}) as stage:
        stage.submit()
        rounds = stage.finish()
    return f"clients {rounds[0]['clients']}; noted: {rounds[0]['engine']['failures'][0]['reason']}"


def bad_updates(folder: Path) -> str:
    """Nodes send NaN, a wrong shape, another model, a negative variance, a move 100 times too long: each refused by name."""
    kinds = {3: "nan", 4: "shape", 5: "foreign", 6: "negative", 7: "far"}
    changes = {"partition__clients": 8, "rounds": 1, "local__epochs": 1, "participation__quorum": 0.3}
    with Stage(folder, experiment(fusion__max_update=10.0, **changes), 8, kinds) as stage:
        stage.submit()
        (event,) = stage.finish()
    said = sorted((r["client"], r["tensor"], r["reason"]) for r in event["fusion"]["refused"])
    return f"clients {event['clients']}; refused: " + "; ".join(f"{c}: {t} {r}".replace("  ", " ") for c, t, r in said)


def another_version(folder: Path) -> str:
    """A node with another version of the package: refused, both versions named."""
    package = Path(__file__).parents[1]
    shutil.copytree(package, folder / "old" / "fedbayes", ignore=shutil.ignore_patterns("__pycache__"))
    start = folder / "old" / "fedbayes" / "__init__.py"
    start.write_text(start.read_text().replace(f'__version__ = "{__version__}"', '__version__ = "0.0.9"'))
    return _refused(folder, {}, {"PYTHONPATH": str(folder / "old")})


def another_layout(folder: Path) -> str:
    """A node whose network has other shapes: refused, both layouts and the first difference named."""
    return _refused(folder, {2: "layout"}, {})


def _refused(folder: Path, misbehave: Mapping[int, str], environment: Mapping[str, str]) -> str:
    """Run with node 2 as told and return the sentence the run stopped with."""
    with Stage(folder, experiment(rounds=1, local__epochs=1, transport__wait=20.0), misbehave=misbehave) as stage:
        if environment:
            stage.network.kill_node(2)
            stage.network.return_node(2, environment=environment)
        stage.submit()
        try:
            stage.finish()
        except RunError as error:
            return f"stopped: {error}"
    return "UNEXPECTED: the run went on"


def disk_full(folder: Path) -> str:
    """The server's disk fills up after a round (its files may not grow any more): no torn file, a sentence, resumable."""
    with Stage(folder, experiment(rounds=3)) as stage:
        stage.submit()
        stage.until(lambda: stage.training(0, 2), "the second round")
        for pid in stage.network.server_apps():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, 1000))
        said = ""
        try:
            stage.finish()
        except RunError as error:
            said = str(error)
        torn = sorted(f.name for f in stage.path.glob("*.part"))
        stage.submit(resume=True)
        rounds = stage.finish(resume=True)
    return f"stopped: {said}; torn files: {torn}; then rounds {[r['round'] for r in rounds]}; same bits: {stage.same_bits()}"


def superlink_killed(folder: Path) -> str:
    """The SuperLink is killed after a round and started again; nodes reconnect, the run resumes to the same bits."""
    with Stage(folder, experiment(local__epochs=2)) as stage:
        stage.submit()
        stage.until(lambda: any(e["kind"] == "round" for e in read_events(stage.path)), "the first round")
        stage.network.kill_superlink()
        stage.process.wait()
        time.sleep(2)
        stage.network.start_superlink()
        stage.submit(resume=True)
        rounds = stage.finish(resume=True)
    return f"rounds {[r['round'] for r in rounds]}; same bits: {stage.same_bits()}"


def server_app_killed(folder: Path) -> str:
    """The server's process is killed in the middle of a round; submitted again with resume it ends in the same bits."""
    with Stage(folder, experiment(rounds=3)) as stage:
        stage.submit()
        stage.until(lambda: stage.training(0, 2), "the second round")
        stage.network.kill_server_app()
        stage.process.kill()
        stage.process.wait()
        stage.submit(resume=True)
        rounds = stage.finish(resume=True)
    return f"rounds {[r['round'] for r in rounds]}; same bits: {stage.same_bits()}"


def private_node_killed(folder: Path) -> str:
    """Secure aggregation with four nodes; one is killed after it shared its keys: the sum of the others is unmasked."""
    changes = {"fusion__private": True, "partition__clients": 4, "rounds": 1, "participation__deadline": 60.0}
    with Stage(folder, experiment(participation__quorum=0.5, **changes), nodes=4) as stage:
        stage.submit()
        stage.until(lambda: stage.training(3, kind="train.masked"), "node 3 to train")
        stage.network.kill_node(3)
        rounds = stage.finish()
    return f"clients {rounds[0]['clients']}; error of the sum at most {rounds[0]['engine']['mask_error']:.1e}"


def wrong_keys(folder: Path) -> str:
    """A node whose key was never registered and one without a key are refused by the SuperLink, which logs both."""
    from .pki import make_node_key

    with Stage(folder, experiment(rounds=1, local__epochs=1)) as stage:
        stranger, anonymous = (stage.network.add_node({"partition-id": 0}) for _ in range(2))
        stage.network.start_node(stranger.number, key=make_node_key(folder / "other", "stranger")[0])
        stage.network.start_node(anonymous.number)
        stage.submit()
        rounds = stage.finish()
        log = stage.network.log("superlink")
        said = ["ApiError:2004" in log, "ApiError:2001" in log]
    return f"refused and logged: {said}; clients {rounds[0]['clients']}"


SCENARIOS = {
    f.__name__.replace("_", "-"): f
    for f in (
        node_killed,
        node_killed_without_quorum,
        node_returns,
        node_hangs,
        node_slow,
        bad_updates,
        another_version,
        another_layout,
        disk_full,
        superlink_killed,
        server_app_killed,
        private_node_killed,
        wrong_keys,
    )
}


def main(names: list[str]) -> int:
    """Run the named scenarios (all of them by default); one line each."""
    status = 0
    for name in names or list(SCENARIOS):
        with tempfile.TemporaryDirectory(prefix="fedbayes-") as folder:
            began = time.monotonic()
            try:
                outcome = SCENARIOS[name](Path(folder))
            except (RunError, OSError) as error:
                outcome, status = f"FAILED: {error}", 1
            print(f"{name} ({time.monotonic() - began:.0f} s): {outcome}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
