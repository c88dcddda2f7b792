"""How ``papers_gpu.py`` uses a GPU that is lent by the minute: pieces of runs, studies side by side, a deadline, a summary.

A study runs in a process of its own and stops between rounds when its time is up: it writes its checkpoints, judges the
posterior it has, and goes on from there in the next call with the same folder. ``side_by_side`` keeps several going at
once, so that one compiles while another trains, starts the next when one is done, repeats one that failed without
compiling, ends all at the deadline, and shows what every run has reached.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

GRACE = 25.0
"""Seconds before the deadline at which a study stops by itself, so that checkpoints are written; half of it is for packing."""
WORTH_STARTING = 75.0
"""Seconds that must be left for a study to be started: less is spent on importing and compiling."""
ARCHIVE_LIMIT = 15 * 2**20
"""Bytes an archive of checkpoints may have; larger ones are left out."""


class TimeIsUp(Exception):
    """The next round would not fit into this call."""


# -- one study -----------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """How long rounds take, those that evaluate apart: what decides whether the next one fits."""

    until: float
    plain: float = 0.0
    judging: float = 10.0

    def fits(self, judges: bool) -> bool:
        """Whether another round, and judging what it gives, fit."""
        return time.time() + 1.2 * self.plain + self.judging * (2 if judges else 1) <= self.until

    def note(self, seconds: float, judged: bool, compiling: float) -> None:
        """Take in how long a round took; the latest counts, for others come and go on the same device."""
        if judged and self.plain:
            self.judging = max(1.0, seconds - compiling - self.plain)
        elif not judged:
            self.plain = seconds - compiling


def stop_in_time(until: float, pause: float = 0.0) -> None:
    """Make the round loop stop between rounds, in time.

    ``pause`` is the time to wait after a round, in units of the round: what leaves more of the device to others.
    """
    from fedbayes import runner
    from fedbayes.federation import end_together

    clock = Clock(until)

    def timed(federations: Sequence[Any]) -> None:
        compiled = 0.0
        while active := [f for f in federations if not f.finished]:
            judges = any((f.round + 1) % f.experiment.evaluation.every == 0 for f in active)
            if not clock.fits(judges):
                _leave(federations)
            before = time.monotonic()
            by_run = {f.run_number: f for f in active}
            assignments = [a for f in active for a in f.begin()]
            for update in active[0].cohort.train(assignments):
                by_run[update.run].absorb(update)
            trained = time.monotonic()
            end_together(active)
            ended = time.monotonic()
            total = active[0].cohort.statistics().get("compile_seconds", 0.0)
            clock.note(ended - before, judges, total - compiled)
            compiled = total
            print(
                f"round {active[0].round} of {len(active)} runs: clients {trained - before:.2f} s, "
                f"server {ended - trained:.2f} s", flush=True,
            )  # fmt: skip
            time.sleep(min(pause * (ended - before), max(0.0, until - time.time())))

    runner.run_together = timed


def _leave(federations: Sequence[Any]) -> None:
    """Write checkpoints, then judge what was not judged: those events are dropped when the run goes on."""
    for f in federations:
        if f.round % f.experiment.checkpoint_every:
            f.checkpoint()
    for f in federations:
        if f.round and not f.finished and f.round % f.experiment.evaluation.every:
            for event in f.judge(f.posterior, f.round):
                f.directory.log(event)
    done = ", ".join(f"{f.round}/{f.experiment.rounds}" for f in federations)
    raise TimeIsUp(f"stopped between rounds; rounds done: {done}")


def unpacked(parts: Path | None, state: Path) -> Path | None:
    """Return a data folder: ``parts`` itself where it holds canonical files, else what its ``unpack.py`` writes."""
    if parts is None or (parts / "cifar-10-batches-py").exists() or not (parts / "unpack.py").exists():
        return parts
    folder = state.parent / "papers-data"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"cifar10": folder / "cifar-10-batches-py" / "batches.meta", "svhn_test": folder / "svhn-test.npz"}
    busy = [
        subprocess.Popen([sys.executable, str(parts / "unpack.py"), str(folder), name])
        for name, last in wanted.items()
        if not last.exists() and list(parts.glob(f"{name.partition('_')[0]}*"))
    ]
    for process in busy:
        if process.wait():
            raise SystemExit(f"{parts / 'unpack.py'} failed (exit {process.returncode}).")
    for name in ("mnist", "fashion-mnist"):
        if (parts / name).is_dir() and not (folder / name).exists():
            (folder / name).symlink_to((parts / name).resolve(), target_is_directory=True)
    return folder


# -- several studies -----------------------------------------------------------------------------------------------


@dataclass
class Child:
    """A study that runs in a process of its own."""

    item: str
    process: subprocess.Popen[bytes]
    log: IO[str]
    compiled: bool


def side_by_side(command: Sequence[str], items: Sequence[str], state: Path, until: float, at_once: int) -> None:
    """Run ``command ITEM`` for every item, ``at_once`` at a time, and end what is left at ``until`` (seconds of the epoch).

    A study that fails is started once more with ``--no-compile``, in a folder of its own.
    """
    logs = state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running = [(item, True) for item in items], []

    def start(item: str, compiled: bool) -> Child:
        name = "".join(c if c.isalnum() else "-" for c in item) + ("" if compiled else "-uncompiled")
        log = open(logs / f"{name}.log", "a")  # noqa: SIM115 - closed when its process has ended
        extra = ["--state", str(state)] if compiled else ["--state", str(state / "uncompiled"), "--no-compile"]
        words = [sys.executable, "-u", *command, item, *extra, "--until", str(until - GRACE)]
        return Child(item, subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT), log, compiled)

    while (waiting or running) and time.time() < until - GRACE / 2:
        while waiting and len(running) < at_once and until - time.time() > WORTH_STARTING:
            running.append(start(*waiting.pop(0)))
        if not running:
            break
        time.sleep(0.5)
        for child in [c for c in running if c.process.poll() is not None]:
            running.remove(child)
            child.log.close()
            _tell(child)
            if child.process.returncode and child.compiled and "--no-compile" not in command:
                waiting.insert(0, (child.item, False))
    for child in running:
        child.process.kill()
        child.process.wait()
        child.log.close()
        print(f"== {child.item}: ended at the deadline", flush=True)
    for item, _ in waiting:
        print(f"== {item}: no time left to start it", flush=True)


def _tell(child: Child) -> None:
    """Print how a study ended, and the end of its log where it failed."""
    print(f"== {child.item}: exit {child.process.returncode}", flush=True)
    if child.process.returncode:
        print(*Path(child.log.name).read_text(errors="replace").splitlines()[-12:], sep="\n", flush=True)


def pack(state: Path, folder: Path) -> None:
    """Write what a call has left: the summary, an archive of what is read, one of checkpoints a study, to go on elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.txt").write_text(summary(state))
    results = ("*.html", "*.csv", "*.json", "logs/*.log", "runs/*/config.toml", "runs/*/metrics.jsonl")
    with tarfile.open(folder / "results.tar.gz", "w:gz", compresslevel=6) as archive:
        for root in (state, state / "uncompiled"):
            for path in sorted({p for pattern in results for p in root.glob(pattern)}):
                archive.add(path, path.relative_to(state))
    for labels in sorted(state.glob("labels-*.json")):
        paths = [state / "runs" / run / "checkpoint.safetensors" for run in json.loads(labels.read_text())]
        paths = [p for p in paths if p.exists()]
        name = labels.stem.removeprefix("labels-")
        if (size := sum(p.stat().st_size for p in paths)) > ARCHIVE_LIMIT or len(list(folder.iterdir())) >= 7:
            print(f"checkpoints of {name} left out: {size / 2**20:.0f} MiB")
        elif paths:
            with tarfile.open(folder / f"checkpoints-{name}.tar", "w") as archive:
                for path in paths:
                    archive.add(path, path.relative_to(state))


# -- what was reached ----------------------------------------------------------------------------------------------


def keep_labels(state: Path, study: str, labels: Mapping[str, str]) -> None:
    """Remember what the runs of a study are called, by the name of their folder."""
    state.mkdir(parents=True, exist_ok=True)
    (state / f"labels-{study}.json").write_text(json.dumps(dict(labels)))


def summary(state: Path) -> str:
    """Return two lines a run: its last numbers, and its accuracy over the rounds."""
    head = f"{'run':58}{'round':>6}{'acc%':>7}{'NLL':>7}{'ECE%':>6}{'sigma':>9}{'epist.':>9}{'OODmi':>6}{'OODh':>6}{'mean%':>7}"
    lines = [head]
    for root in (state, state / "uncompiled"):
        for labels in sorted(root.glob("labels-*.json")):
            study = labels.stem.removeprefix("labels-") + ("" if root == state else " (uncompiled)")
            for run, label in json.loads(labels.read_text()).items():
                values = " ".join(word.rpartition("=")[2] for word in label.split() if not word.startswith("seed=0"))
                lines += _standing(f"{study.split('-only-')[0]}: {values}", root / "runs" / run)
    return "\n".join(lines)


def _standing(label: str, folder: Path) -> list[str]:
    tests: dict[str, list[dict[str, Any]]] = {}
    outliers: dict[str, float] = {}
    sigma, done = math.nan, 0
    for event in _events(folder / "metrics.jsonl"):
        if event["kind"] == "round":
            done = event["round"]
            known = event["fusion"].get("sigma") or {}
            sigma = known.get("mean", sigma)
        elif event["kind"] == "evaluation" and event["split"] == "test":
            tests.setdefault(event["model"], []).append(event)
        elif event["kind"] == "evaluation" and event["split"].startswith("ood"):
            outliers = event["metrics"]
    course = tests.pop("global", [])
    if not course:
        return [f"{label[:64]:64} {done} rounds, nothing judged"]
    last, nan = course[-1]["metrics"], math.nan
    mean = sum(e["metrics"]["accuracy"] for e in course) / len(course)
    words = [f"{e['round']}:{100 * e['metrics']['accuracy']:.1f}" for e in course[:: max(1, len(course) // 9)]]
    others = [f"{n} {100 * events[-1]['metrics']['accuracy']:.1f}" for n, events in tests.items()]
    return [
        f"{label[:58]:58}{course[-1]['round']:>6}{100 * last['accuracy']:7.2f}{last['nll']:7.3f}{100 * last['ece']:6.2f}"
        f"{sigma:9.2g}{last.get('epistemic', nan):9.2g}{outliers.get('auroc_mutual_information', nan):6.2f}"
        f"{outliers.get('auroc_entropy', nan):6.2f}{100 * mean:7.2f}",
        "    " + " ".join(words) + ("; " + ", ".join(others) if others else ""),
    ]


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log that may have been cut off in the middle of one."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
