"""The same federated job here and as a Flower simulation (Ray) of the same PyTorch code, in one run, as a ratio.

    python benchmarks/versus_flower.py --data-dir ../shared/data --out versus_flower.json
    python benchmarks/versus_flower.py --jobs digits --lanes --venv /tmp/versus-flower

Jobs: the demo's MLP on the embedded 8x8 digits, and LeNet on Fashion-MNIST; 10 and 100 clients (IID, so that every client
works alike); deterministic with federated averaging, and Flipout with nwa. A round is everything but evaluation: the model
goes out, every client trains, the answers are fused. Both sides have the same network, batch size, epochs and optimiser.

The Flower side is ``versus_flower_app.py``, in a virtual environment of its own that this script makes (``--venv`` keeps
it): two Ray actors with one core and one thread each. Ours is the engine as it comes (``lanes = 0``, ``workers = 0``, torch's
own number of threads): it measures and chooses lanes, the plain loop, or the plain loop on two processes. Rounds alternate,
one there, one here, so that whatever else the machine does hits both; a ratio is taken of each such pair, and the median
ratio is reported with the smallest and largest. The first round of both sides is left out and reported as start-up:
for Flower it includes starting Ray, for ours the engine's measurement.

Beside wall time stand core-seconds, all processes of a side added up: they tell how much work a round is, and hardly
depend on what else the machine does. (Where strangers fill the cores, wall time favours the side with more processes.)

``--lanes`` also compares lanes 1 with lanes 10 on the demo, whole rounds, alternating likewise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedbayes import config
from fedbayes.experiment import Experiment
from fedbayes.federation import Federation
from fedbayes.runner import Setup, local_cohort, prepare

ROOT = Path(__file__).resolve().parents[1]
PINS = ("flwr[simulation]==1.41.0", "ray==2.55.1", "torch==2.13.0", "numpy", "safetensors")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Nothing is reported to anybody while a benchmark runs, and Ray's actors are not nice (15 is Ray's default): on a busy
machine that would slow the Flower side alone."""
CORES = 2

DIGITS = {"data.name": "digits", "model.name": "mlp", "local.epochs": "2", "local.batch_size": "16"}
FASHION = {"data.name": "fashion-mnist", "model.name": "lenet", "local.epochs": "1", "local.batch_size": "32",
           "local.learning_rate": "0.001"}  # fmt: skip
JOBS = {"digits": DIGITS, "fashion-mnist": FASHION}
KINDS = {"deterministic": "fedavg", "flipout": "nwa"}


class Cost(NamedTuple):
    """What one round took: wall time, and the time of all cores that worked for it."""

    seconds: float
    core_seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table: seconds per round on both sides, round by round, and what the first rounds took."""

    job: str
    clients: int
    kind: str
    lanes: int
    workers: int
    threads: int
    flower: list[Cost]
    ours: list[Cost]
    flower_start: float
    ours_start: float

    @property
    def ratios(self) -> list[float]:
        """Flower's seconds over ours, pair by pair."""
        return [a.seconds / b.seconds for a, b in zip(self.flower, self.ours, strict=True)]

    @property
    def work(self) -> float:
        """Flower's core-seconds over ours, the median of the pairs."""
        return statistics.median(a.core_seconds / b.core_seconds for a, b in zip(self.flower, self.ours, strict=True))


# -- our side -----------------------------------------------------------------------------------------------------


def experiment(job: str, clients: int, kind: str, images: int) -> Experiment:
    """Return the job as an experiment of the library, on the CPU."""
    settings = {
        **JOBS[job], "partition.scheme": "iid", "partition.clients": str(clients), "model.kind": kind,
        "fusion.rule": KINDS[kind], "engine.device": "cpu", "engine.lanes": "0", "data.validation": "0",
        "objective.kl_weight": "1", "rounds": "1000000",
    }  # fmt: skip
    if job != "digits":
        settings["data.limit"] = str(images)
    return config.override(config.read("digits"), settings, "benchmark")


class Ours:
    """A federation whose rounds are timed one by one: nothing is evaluated, nothing written."""

    def __init__(self, setup: Setup, threads: int = CORES, **engine: int) -> None:
        e = setup.experiment
        setup = replace(setup, experiment=replace(e, engine=replace(e.engine, **engine)))
        self.threads = threads
        self.federation = Federation(setup.experiment, setup.start, local_cohort([setup]))

    @property
    def lanes(self) -> int:
        """The number of lanes in use."""
        return int(self.federation.cohort.statistics()["lanes"])

    @property
    def workers(self) -> int:
        """The number of processes in use."""
        return int(self.federation.cohort.statistics()["workers"])

    def round(self) -> Cost:
        """Run a round and return what it took, processes of its own included."""
        torch.set_num_threads(self.threads)
        begun, worked = time.perf_counter(), own_core_seconds()
        for update in self.federation.cohort.train(self.federation.begin()):
            self.federation.absorb(update)
        self.federation.end()
        return Cost(time.perf_counter() - begun, own_core_seconds() - worked)


def own_core_seconds() -> float:
    """Return the processor time that this process and its children, living and dead, have used so far."""
    children = [p.pid for p in multiprocessing.active_children() if p.pid]
    return sum(os.times()[:4]) + sum(map(used, children))


def used(process: int) -> float:
    """Return the processor time a living process has used so far (0 for one that is gone)."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def write_job(setup: Setup, folder: Path, rounds: int) -> None:
    """Write what the Flower app needs: settings, ready inputs, labels, who holds what."""
    e, train = setup.experiment, setup.dataset.train
    settings = {
        "network": e.model.name, "kind": e.model.kind, "clients": len(setup.shards), "epochs": e.local.epochs,
        "batch_size": e.local.batch_size, "learning_rate": e.local.learning_rate, "rounds": rounds, "cores": CORES,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(settings))
    np.savez(
        folder / "data.npz",
        x=setup.transform(train.inputs).numpy(),
        y=train.labels.numpy(),
        positions=np.concatenate(setup.shards),
        ends=np.cumsum([len(s) for s in setup.shards]),
    )


# -- Flower's side ------------------------------------------------------------------------------------------------


def environment(folder: Path) -> Path:
    """Return the Python of a virtual environment with Flower and Ray, made there when it is not."""
    python = folder / "bin" / "python"
    done = folder / ".versus-flower"
    if not done.exists():
        print(f"installing {', '.join(PINS)} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", *PINS], check=True)
        done.touch()
    return python


@contextmanager
def flower(python: Path, folder: Path) -> Iterator[Connection]:
    """Start the Flower simulation of the job in ``folder`` and yield the line to it; end all it started."""
    variables = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")}
    variables["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"
    log = folder / "flower.log"
    with Listener(str(folder / "line")) as listener, log.open("w") as out:
        command = [python, ROOT / "benchmarks" / "versus_flower_app.py", folder]
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, cwd=folder)
        try:
            yield answer(listener, process, log)
            process.wait(timeout=60)
        finally:
            end(process, folder)


def answer(listener: Listener, process: subprocess.Popen, log: Path, patience: float = 180) -> Connection:
    """Wait for the simulation to call, and say why where it cannot."""
    listener._listener._socket.settimeout(1)  # type: ignore[attr-defined] - no public way to wait with a limit
    for _ in range(int(patience)):
        try:
            return listener.accept()
        except TimeoutError:
            if process.poll() is not None:
                break
    raise SystemExit(f"the Flower simulation did not start; its last words:\n{log.read_text()[-3000:]}")


def end(process: subprocess.Popen, folder: Path) -> None:
    """End the simulation and every process of its Ray: they all name the job's folder in their command line."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for number in of_folder(folder):
            os.kill(number, sign)
        for _ in range(50):
            if not of_folder(folder):
                return
            time.sleep(0.1)


def of_folder(folder: Path) -> list[int]:
    """Return the numbers of processes (other than this one) that name a folder in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append(int(entry.name))
    return found


def core_seconds(folder: Path) -> float:
    """Return the processor time that all living processes of a folder have used so far."""
    return sum(map(used, of_folder(folder)))


def told(line: Connection, clients: int, folder: Path) -> Cost:
    """Let the simulation run a round and return what it took; every client must have answered."""
    log, before = folder / "flower.log", core_seconds(folder)
    line.send("go")
    try:
        seconds, answered = line.recv()
    except EOFError:
        raise SystemExit(f"the Flower simulation ended early:\n{log.read_text()[-3000:]}") from None
    if answered != clients:
        raise SystemExit(f"only {answered} of {clients} Flower clients answered:\n{log.read_text()[-3000:]}")
    return Cost(seconds, core_seconds(folder) - before)


# -- the comparison -----------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, python: Path, job: str, clients: int, kind: str) -> Row:
    """Run a job on both sides, round about."""
    setup = prepare(experiment(job, clients, kind, args.images), data_dir=args.data_dir)
    with tempfile.TemporaryDirectory(prefix="vf-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_job(setup, folder, 1 + args.rounds)
        began = time.perf_counter()
        with flower(python, folder) as line:
            told(line, clients, folder)
            flower_start, began = time.perf_counter() - began, time.perf_counter()
            ours = Ours(setup)
            ours.round()
            ours_start = time.perf_counter() - began
            pairs = [(told(line, clients, folder), ours.round()) for _ in range(args.rounds)]
    theirs, mine = (list(side) for side in zip(*pairs, strict=True))
    row = Row(job, clients, kind, ours.lanes, ours.workers, ours.threads, theirs, mine, flower_start, ours_start)
    print(line_of(row), flush=True)
    return row


def compare_lanes(rounds: int, threads: int) -> list[dict[str, Any]]:
    """Compare lanes 1 with lanes 10 on the demo's experiment, as it is."""
    found = []
    for kind, rule in KINDS.items():
        changes = {"model.kind": kind, "fusion.rule": rule, "engine.device": "cpu", "rounds": "1000000"}
        e = config.override(config.read("digits"), changes, "benchmark")
        setup = prepare(e)
        sides = {n: Ours(setup, threads, lanes=n) for n in (1, 10)}
        for side in sides.values():
            side.round()
        pairs = [(sides[1].round().seconds, sides[10].round().seconds) for _ in range(rounds)]
        ratios = [plain / lanes for plain, lanes in pairs]
        found.append(
            {
                "kind": kind,
                "plain": statistics.median(p for p, _ in pairs),
                "lanes": statistics.median(l for _, l in pairs),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return found


HEAD = (
    f"{'job':15}{'clients':>8} {'network':14}{'lanes':>6}{'procs':>6}{'threads':>8}{'Flower':>9}{'ours':>9}{'ratio':>8}"
    f"{'least':>8}{'most':>8}{'core-s: Flower':>16}{'ours':>8}{'ratio':>8}{'start: Flower':>15}{'ours':>7}"
)


def line_of(row: Row) -> str:
    """Return a line of the table."""
    (a, work_a), (b, work_b) = (map(statistics.median, zip(*side, strict=True)) for side in (row.flower, row.ours))
    return (
        f"{row.job:15}{row.clients:8} {row.kind:14}{row.lanes:6}{row.workers:6}{row.threads:8}{a:8.2f}s{b:8.2f}s"
        f"{statistics.median(row.ratios):7.1f}x{min(row.ratios):7.1f}x{max(row.ratios):7.1f}x"
        f"{work_a:15.2f}s{work_b:7.2f}s{row.work:7.1f}x{row.flower_start:14.1f}s{row.ours_start:6.1f}s"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="digits,fashion-mnist")
    parser.add_argument("--clients", default="10,100")
    parser.add_argument("--kinds", default="deterministic,flipout")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of rounds measured after the first")
    parser.add_argument("--images", type=int, default=12_000, help="Fashion-MNIST images in all (60000: every one)")
    parser.add_argument("--data-dir", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument(
        "--venv", type=Path, help="where Flower is, or is to be, installed (default: a temporary folder)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides of --lanes")
    parser.add_argument("--lanes", action="store_true", help="also compare lanes 1 with lanes 10 on the demo")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that Ray is ended too
    with suppress(PermissionError):  # Linux shares a busy machine between sessions: both sides are in one of their own
        os.setsid()
    lanes = compare_lanes(max(5, args.rounds), args.threads) if args.lanes else []
    with tempfile.TemporaryDirectory(prefix="versus-flower-") as temporary:
        python = environment((args.venv or Path(temporary)).absolute())
        print(HEAD)
        rows = [
            compare(args, python, job, int(clients), kind)
            for job in args.jobs.split(",")
            for clients in args.clients.split(",")
            for kind in args.kinds.split(",")
        ]
    if args.out:
        results = [asdict(r) | {"ratio": statistics.median(r.ratios), "work": r.work} for r in rows]
        about = {
            "torch": torch.__version__,
            "threads": args.threads,
            "cores": CORES,
            "pins": PINS,
            "images": args.images,
        }
        args.out.write_text(json.dumps({**about, "rows": results, "lanes": lanes}, indent=1))
    for found in lanes:
        print(
            f"\ndemo, {found['kind']}: lanes 1 {found['plain']:.3f} s, lanes 10 {found['lanes']:.3f} s a round: "
            f"{found['ratio']:.1f}x ({found['least']:.1f} to {found['most']:.1f})"
        )
    print("\nmedian seconds per round, evaluation left out; ratio = Flower / ours, pair by pair")
    print(HEAD, *map(line_of, rows), sep="\n")


if __name__ == "__main__":
    main()
