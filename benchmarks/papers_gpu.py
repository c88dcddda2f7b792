"""The papers' GPU-sized studies, in pieces: each call runs as many rounds as fit into its time, the next one goes on.

    PYTHONPATH=src python benchmarks/papers_gpu.py fedbe-convnet-step fischer-2class --parts DATA --state STATE --minutes 9

``DATA`` holds CIFAR-10 (the canonical ``cifar-10-batches-py``, or packed parts with their ``unpack.py``) and the folders
``mnist`` and ``fashion-mnist``. ``STATE`` keeps run directories with their checkpoints, logs and finished pages; give the
same one again to continue. Several studies share the machine, a process each: one compiles while another trains.
Needs torch, numpy and safetensors only. ``--list`` lists the studies: cells of the recipes at the papers' own scale, run as
lanes; what is reduced (``--rounds``, ``--set``) is printed and is part of a run's configuration.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Study:
    """Cells of recipes (name: words that their cells hold), and what is changed of them (nothing that the paper states)."""

    cells: Mapping[str, tuple[str, ...]]
    changes: Mapping[str, object] = field(default_factory=dict)
    variants: tuple[Mapping[str, str], ...] = ()  # further readings of the cells of rule precision


METHODS = ("fedavg", "v-distillation", "fedbe-no-swa", "fedbe")


def _fedbe(partition: str, network: str, methods: Sequence[str] = METHODS, proximal: bool = True) -> Study:
    at = f"partition={partition} network={network}"
    cells = {"fedbe-table-1": tuple(f"{at} method={m}" for m in methods)}
    if proximal:
        cells["fedbe-table-2"] = (f"{at} method=fedprox",)
    return Study(cells, {"checkpoint_every": 5})


def _reyes(name: str) -> Study:
    changes = {"checkpoint_every": 50}
    variants = ({"sign": "fisher"}, {"epsilon": "keras"}, {"sign": "fisher", "epsilon": "keras"})
    return Study({"reyes-table-2": (f"batch=200 dataset={name}",)}, changes, variants)


def _ozer(clients: int) -> Study:
    cells = {f"ozer-spread-{clients}-clients": ("dataset=fashion-mnist partition=dirichlet-0.5 weights=equal",)}
    return Study(cells, {"checkpoint_every": 25})


GLOBAL_MEAN = {"data.mean": "global"}  # clients' own means forbid sharing a launch; the reading pixel_mean=global

STUDIES = {
    "fedbe-convnet-step": _fedbe("step", "fedbe-convnet"),
    "fedbe-convnet-dirichlet": _fedbe("dirichlet", "fedbe-convnet"),
    "fedbe-resnet20-step": _fedbe("step", "resnet20", ("fedavg", "fedbe"), proximal=False),
    "fedbe-resnet20-dirichlet": _fedbe("dirichlet", "resnet20", ("fedavg", "fedbe"), proximal=False),
    "fischer-2class": Study(
        {
            "fischer-table-3": (
                "partition=2-class rule=ws weighting=size",
                "partition=2-class model=flipout rule=nwa weighting=size",
            )
        },
        GLOBAL_MEAN,
    ),
    "fischer-pretrained": Study(
        {"fischer-table-4": ("pretrain=yes partition=iid", "pretrain=yes partition=2-class")}, GLOBAL_MEAN
    ),
    "reyes-mnist": _reyes("mnist"),
    "reyes-fashion": _reyes("fashion-mnist"),
    "ozer-10": _ozer(10),
    "ozer-100": _ozer(100),
}


class TimeIsUp(Exception):
    """The next round would not fit into this call."""


def main() -> int:
    """Run the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "study", nargs="*", help="one or several of --list; 'name:key=value,...' changes fields of one alone"
    )
    p.add_argument("--list", action="store_true", help="list the studies")
    p.add_argument("--parts", type=Path, help="folder of the data sets")
    p.add_argument("--state", type=Path, default=Path("runs/papers-gpu"), help="run directories, kept between calls")
    p.add_argument("--minutes", type=float, default=9.0, help="time of this call")
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--rounds", type=int, default=0, help="fewer rounds than the paper's (schedules shrink with them)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="e.g. local.epochs=40")
    p.add_argument("--reading", action="append", default=[], metavar="NAME=OPTION", help="e.g. sign=fisher")
    p.add_argument("--only", action="append", default=[], help="further words the cells must hold, e.g. method=fedbe")
    p.add_argument("--scale", choices=["full", "quick", "smoke"], default="full")
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", choices=["float32", "bf16"], default="bf16")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument(
        "--pack", type=Path, help="folder for two archives: results (small), checkpoints (to go on elsewhere)"
    )
    options = p.parse_args()
    options.until = time.time() + 60 * options.minutes
    for item in options.study:
        if item.partition(":")[0] not in STUDIES:
            p.error(f"'{item}' is no study; there are {', '.join(STUDIES)}.")
    if options.list or not options.study:
        for name, study in STUDIES.items():
            print(f"{name:26s} {'; '.join(f'{r}: {c}' for r, cells in study.cells.items() for c in cells)}")
        return 0
    try:
        if len(options.study) > 1:
            return side_by_side(options, sys.argv[1:])
        carry_out(options, unpacked(options.parts, options.state))
    finally:
        if options.pack is not None:
            pack(options.state, options.pack)
    return 0


def side_by_side(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run several studies at once, a process each, and show how each ended."""
    data = unpacked(options.parts, options.state)  # once, before they need it
    logs = options.state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    rest = [a for a in arguments if a not in options.study]
    for flag in ("--parts", "--minutes", "--pack"):
        if flag in rest:
            del rest[rest.index(flag) : rest.index(flag) + 2]
    minutes = max(0.5, (options.until - time.time()) / 60)
    running = {}
    for item in options.study:
        log = open(logs / f"{''.join(c if c.isalnum() else '-' for c in item)}.log", "a")  # noqa: SIM115 - closed when its process has ended
        where = [] if data is None else ["--parts", str(data)]
        command = [sys.executable, "-u", __file__, item, *rest, *where, "--minutes", f"{minutes:.2f}"]
        running[item] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log
    worst = 0
    for item, (process, log) in running.items():
        try:
            worst = max(worst, abs(process.wait(max(30.0, options.until + 45 - time.time()))))
        except subprocess.TimeoutExpired:
            process.kill()
            worst = 1
        log.close()
        lines = Path(log.name).read_text().splitlines()
        print(f"== {item} (exit {process.poll()}) ==", *lines[-25:], sep="\n", flush=True)
    return worst


def carry_out(options: argparse.Namespace, data: Path | None) -> None:
    """Run one call's worth of a study and print where it stands."""
    from fedbayes import recipes
    from fedbayes.compare import Cell, run_grid

    begun = time.monotonic()
    name, _, own = options.study[0].partition(":")
    study, changes = STUDIES[name], changes_of(options, own)
    stop_in_time(options.until)
    runs: list[tuple[str, Any, Path]] = []

    def call(run_many: Any) -> list[Any]:
        made = []
        for number, readings in enumerate(readings_of(study, options)):
            for recipe, cells in study.cells.items():
                only = [" ".join([item, *options.only]) for item in cells]
                if number:
                    only = [f"{item} rule=precision" for item in only if "rule=fedavg" not in item]
                    if not only:
                        continue
                made.append(
                    recipes.reproduce(
                        recipe, options.scale, only, options.state, data, changes=changes, seeds=options.seeds,
                        readings=readings, run_many=run_many,
                    )
                )  # fmt: skip
        return made

    own_only = changes.pop("only", None)
    options.only = [*options.only, *([str(own_only)] if own_only else [])]
    call(runs.extend)
    cells = {path: Cell(label, {}, e.seed, e, path) for label, e, path in runs}
    print(f"{name}: {len(cells)} runs, prepared in {time.monotonic() - begun:.0f} s", flush=True)
    finished = True
    try:
        run_grid(list(cells.values()), data_dir=data, most_together=24)
    except TimeIsUp as stop:
        finished = False
        print(stop)
    for made in call(lambda items: None):
        print(made)
    for path in cells:
        if (path / "metrics.jsonl").exists():
            print(cells[path].label, *cells[path].experiment.fusion.options, standing(path))
    print(f"{'finished' if finished else 'call again to go on'} ({time.monotonic() - begun:.0f} s)", flush=True)


def changes_of(options: argparse.Namespace, own: str) -> dict[str, object]:
    """Return the fields changed in every cell: the study's own, the machine's, the command line's."""
    import torch

    name = options.study[0].partition(":")[0]
    gpu = torch.cuda.is_available() and not options.device.startswith("cpu")
    changes: dict[str, object] = {
        **STUDIES[name].changes,
        "engine.device": options.device,
        "engine.precision": options.precision if gpu else "float32",
        "engine.compile": gpu and not options.no_compile,
    }
    if options.rounds:
        changes["rounds"] = options.rounds
    pairs = [*options.set, *(item for item in own.split(",") if item)]
    return changes | dict(pair.split("=", 1) for pair in pairs)


def readings_of(study: Study, options: argparse.Namespace) -> list[dict[str, str]]:
    """Return the readings to run a study's cells under, the variants of its precision cells after the first."""
    asked = dict(item.split("=", 1) for item in options.reading)
    return [asked, *({**asked, **variant} for variant in study.variants if not asked)]


def unpacked(parts: Path | None, state: Path) -> Path | None:
    """Return a data folder: ``parts`` itself where it holds canonical files, else what its ``unpack.py`` writes."""
    if parts is None or (parts / "cifar-10-batches-py").exists() or not (parts / "unpack.py").exists():
        return parts
    folder = state.parent / "papers-data"
    packed = list(parts.glob("cifar10-*"))
    if packed and not (folder / "cifar-10-batches-py" / "test_batch").exists():
        subprocess.run([sys.executable, str(parts / "unpack.py"), str(folder), "cifar10"], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("mnist", "fashion-mnist"):
        if (parts / name).is_dir() and not (folder / name).exists():
            (folder / name).symlink_to((parts / name).resolve(), target_is_directory=True)
    return folder


def stop_in_time(until: float) -> None:
    """Make the round loop stop between rounds, its checkpoints written, before the time is used up."""
    from fedbayes import runner
    from fedbayes.federation import end_together

    longest = {"round": 0.0}

    def timed(federations: Sequence) -> None:
        while active := [f for f in federations if not f.finished]:
            if time.time() + 1.3 * longest["round"] + 10 > until:
                done = ", ".join(f"{f.round}/{f.experiment.rounds}" for f in federations)
                for federation in federations:
                    if federation.round % federation.experiment.checkpoint_every:
                        federation.checkpoint()
                raise TimeIsUp(f"stopped between rounds; rounds done: {done}")
            before = time.monotonic()
            by_run = {f.run_number: f for f in active}
            assignments = [a for f in active for a in f.begin()]
            for update in active[0].cohort.train(assignments):
                by_run[update.run].absorb(update)
            trained = time.monotonic()
            end_together(active)
            spent = time.monotonic() - before
            compiling = active[0].cohort.statistics().get("compile_seconds", 0.0) if longest["round"] == 0 else 0.0
            longest["round"] = max(longest["round"], spent - compiling)
            print(
                f"round {active[0].round} of {len(active)} runs: clients {trained - before:.2f} s, "
                f"server {spent - trained + before:.2f} s", flush=True,
            )  # fmt: skip

    runner.run_together = timed


def standing(folder: Path) -> str:
    """Return a few lines about a run: every predictor's last evaluation and its course."""
    courses: dict[str, list[tuple[int, float, float]]] = {}
    sigma = ""
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "evaluation" and event["split"] == "test":
            metrics = event["metrics"]
            courses.setdefault(event["model"], []).append((event["round"], metrics["accuracy"], metrics["nll"]))
        elif event["kind"] == "round" and event["fusion"].get("sigma"):
            sigma = f", mean sigma {event['fusion']['sigma']['mean']:.3g}"
    lines = [f"{folder.name}{sigma}"]
    for model, course in courses.items():
        round_, accuracy, nll = course[-1]
        thin = course[:: max(1, len(course) // 10)]
        words = " ".join(f"{r}:{100 * a:.1f}" for r, a, _ in thin)
        lines.append(f"  {model}: round {round_}: {100 * accuracy:.2f} % (NLL {nll:.3f}); {words}")
    return "\n".join(lines)


def pack(state: Path, folder: Path) -> None:
    """Write what a call has left into two archives: results that are read, checkpoints to go on with elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    results = ("*.html", "*.csv", "logs/*.log", "runs/*/config.toml", "runs/*/metrics.jsonl", "runs/*/partition.json")
    with tarfile.open(folder / "results.tar.gz", "w:gz") as archive:
        for path in sorted({p for pattern in results for p in state.glob(pattern)}):
            archive.add(path, path.relative_to(state))
    with tarfile.open(folder / "checkpoints.tar", "w") as archive:
        for path in sorted(state.glob("runs/*/checkpoint*")):
            archive.add(path, path.relative_to(state))
    print(*(f"{p} {p.stat().st_size / 2**20:.1f} MiB" for p in sorted(folder.glob("*.tar*"))), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
