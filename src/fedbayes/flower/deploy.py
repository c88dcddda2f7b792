"""``rehearse``: a whole deployment on one machine, with real processes, TLS and authenticated nodes.

What ``fedbayes deploy EXPERIMENT --nodes 3 --local`` does: keys and certificates for the occasion, a SuperLink and
SuperNodes on loopback, the experiment as a Flower app, the same run directory and report as ``fedbayes run``, and no
process left behind, however it ends.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.serverapp import Grid

from .. import __version__, config
from ..errors import ConfigError, RunError
from ..experiment import Experiment
from ..posterior import Posterior
from .network import Network, last_lines
from .server import FAILED

if TYPE_CHECKING:
    from ..runner import Result

Listener = Callable[[dict[str, Any]], None]
NodeConfig = Mapping[str, str | int | float]


def rehearse(
    experiment: Experiment,
    nodes: int = 3,
    run_dir: str | Path | None = None,
    insecure: bool = False,
    *,
    resume: bool = False,
    data_dir: str | Path | None = None,
    listeners: Sequence[Listener] = (),
    node_configs: Sequence[NodeConfig] | None = None,
    report: bool = True,
) -> Result:
    """Run an experiment over Flower on this machine and return its result, as ``fedbayes.runner.run`` does.

    ``nodes`` SuperNodes share the experiment's clients (``node_configs`` says what each node is told instead of
    its ``partition-id``). ``listeners`` are called with every event, as the nodes' run writes it. ``insecure`` leaves
    out TLS and node keys. Everything Flower writes, logs included, stays in ``RUN_DIR/flower``.
    """
    from .. import runner
    from ..rundir import FILES_OF_A_RUN, RunDirectory, fresh_directory
    from .masking import LEAST_PARTIES
    from .server import cohort_of

    if nodes < 1:
        raise ConfigError(f"{nodes} nodes cannot run a federation; give at least 1.")
    if run_dir is None and resume:
        raise RunError("nothing to resume: name the run directory (--out).")
    data_dir = data_dir or os.environ.get("FEDBAYES_DATA")
    data_dir = Path(data_dir).expanduser().resolve() if data_dir else None
    setup = runner.prepare(experiment, data_dir=data_dir)  # whatever cannot be is refused before anything starts
    experiment = with_whole_paths(experiment)
    configs = list(node_configs) if node_configs is not None else partitioned(nodes, data_dir)
    runner.make_federation(setup, cohort_of(cast(Grid, None), setup), None)  # nobody is asked anything yet
    if (
        experiment.fusion.private
        and (few := len(configs) if node_configs else min(nodes, len(setup.shards))) < LEAST_PARTIES
    ):
        raise ConfigError(
            f"fusion.private: the sum of {few} node shows its numbers; at least {LEAST_PARTIES} nodes with clients are needed."
        )
    path = Path(run_dir) if run_dir is not None else fresh_directory(runner.DEFAULT_ROOT, experiment.name)
    if any((path / name).exists() for name in FILES_OF_A_RUN):
        RunDirectory(path, experiment, resume=resume).close()
    path = path.resolve()
    with _folder(path / "flower", path) as folder:
        app = write_app(
            folder / "app", experiment, {"out": str(path), "resume": resume, "data-dir": str(data_dir or "")}
        )
        with _stopping_on_signals(), Network(folder, configs, insecure=insecure) as network:
            follow(network, network.submit(app), path, listeners, resume=resume)
    final = Posterior.load(path / "final.safetensors")
    events = read_events(path)
    best = next((e["best_round"] for e in reversed(events) if e["kind"] == "end"), experiment.rounds)
    return runner.Result(setup, final, Posterior.load(path / "best.safetensors"), best, events, path)


def with_whole_paths(experiment: Experiment) -> Experiment:
    """Return the experiment with its paths made absolute: Flower's processes run in another folder."""
    from ..data import get_source
    from ..data.sources import PATH_SOURCES

    names = {key: config.get(experiment, key) for key in ("data.name", "data.ood", "distill.data")}
    paths = {
        k: str(Path(n).expanduser().resolve()) for k, n in names.items() if n and get_source(n).name in PATH_SOURCES
    }
    return config.override(experiment, paths)


def partitioned(nodes: int, data_dir: str | Path | None = None) -> list[dict[str, str | int | float]]:
    """Return the node configs of ``nodes`` nodes that share an experiment's clients."""
    extra = {"data-dir": str(Path(data_dir).resolve())} if data_dir else {}
    return [{"partition-id": i, "num-partitions": nodes, **extra} for i in range(nodes)]


def write_app(folder: Path, experiment: Experiment, settings: Mapping[str, str | bool]) -> Path:
    """Write the thin Flower app that runs ``experiment``: two imports, and the run config that carries it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fedbayes_app.py").write_text(
        '"""What Flower loads; everything is in fedbayes.flower."""\n\n'
        "from fedbayes.flower.client import client_app\nfrom fedbayes.flower.server import server_app\n\n"
        '__all__ = ["client_app", "server_app"]\n'
    )
    lines = [
        "[project]",
        'name = "fedbayes-rehearsal"',
        f'version = "{__version__}"',
        'description = "A federated Bayesian experiment, rehearsed on one machine"',
        'license = "Apache-2.0"',
        f'dependencies = ["flwr=={importlib.metadata.version("flwr")}"]',
        "",
        "[tool.flwr.app]",
        'publisher = "fedbayes"',
        "",
        "[tool.flwr.app.components]",
        'serverapp = "fedbayes_app:server_app"',
        'clientapp = "fedbayes_app:client_app"',
        "",
        "[tool.flwr.app.config]",
        f"experiment = {_toml(config.dumps(experiment))}",
        *(f"{key} = {_toml(value)}" for key, value in settings.items()),
    ]
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _toml(value: str | bool) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def follow(
    network: Network,
    process: subprocess.Popen[bytes],
    path: Path,
    listeners: Sequence[Listener] = (),
    *,
    resume: bool = False,
    poll: float = 0.2,
) -> None:
    """Wait for a submitted run; hand its events to listeners as they are written; raise the sentence it failed with."""
    size = (path / "metrics.jsonl").stat().st_size if resume and (path / "metrics.jsonl").exists() else 0
    tail = Tail(path / "metrics.jsonl", size)
    ended = False
    while not ended:
        ended = process.poll() is not None
        if network.superlink is not None and network.superlink.poll() is not None and not ended:
            raise RunError(
                f"the SuperLink ended (status {network.superlink.returncode}); its log: {network.folder}/logs."
            )
        for event in tail.read():
            for listener in listeners:
                listener(event)
        if not ended:
            time.sleep(poll)
    log = network.run_log()
    failures = [line for line in log.splitlines() if line.startswith(FAILED)]
    if failures:
        raise RunError(failures[-1].removeprefix(FAILED))
    events = read_events(path)
    if not events or events[-1]["kind"] != "end":
        raise RunError(
            f"the run ended before its last round; Flower's log ({network.folder / 'logs' / 'run.log'}) ends: {last_lines(log)}"
        )


class Tail:
    """New whole lines of a growing JSON-lines file."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path, self.position = path, size

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events written since the last call."""
        if not self.path.exists():
            return
        if self.path.stat().st_size < self.position:
            self.position = self.path.stat().st_size  # rounds after the checkpoint were dropped by a resumed run
        with open(self.path, "rb") as f:
            f.seek(self.position)
            for line in f:
                if not line.endswith(b"\n"):
                    return
                self.position += len(line)
                yield json.loads(line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run directory."""
    file = path / "metrics.jsonl"
    return list(Tail(file).read()) if file.exists() else []


@contextmanager
def _folder(folder: Path, run: Path) -> Iterator[Path]:
    """Hold ``RUN_DIR/flower`` alone; keep its logs afterwards, drop Flower's home and the app."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{run} is in use by another deployment; wait for it or choose another directory.") from None
        shutil.rmtree(folder / "logs", ignore_errors=True)
        try:
            yield folder
        finally:
            for name in ("home", "app"):
                shutil.rmtree(folder / name, ignore_errors=True)


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that they stop the network like Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    old = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
