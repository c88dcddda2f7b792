"""The papers' GPU-sized studies, in pieces: each call runs as many rounds as fit into its time, the next one goes on.

    PYTHONPATH=src python benchmarks/papers_gpu.py fedbe-convnet-step --parts DATA --state STATE --minutes 9

``DATA`` holds CIFAR-10: the canonical ``cifar-10-batches-py``, or packed parts with their ``unpack.py``. ``STATE``
keeps run directories with their checkpoints and the finished page; give the same one again to continue. Needs torch,
numpy and safetensors only. Studies (``--list``): cells of the recipes at the papers' own scale, run as lanes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Study:
    """Cells of one recipe, and what is changed of them (nothing that the paper states)."""

    recipe: str
    only: tuple[str, ...]
    changes: dict[str, object] = field(default_factory=dict)


FEDBE = ("method=fedavg", "method=v-distillation", "method=fedbe-no-swa", "method=fedbe")


def _fedbe(partition: str, network: str) -> Study:
    return Study("fedbe-table-1", tuple(f"partition={partition} network={network} {m}" for m in FEDBE))


STUDIES = {
    "fedbe-convnet-step": _fedbe("step", "fedbe-convnet"),
    "fedbe-convnet-dirichlet": _fedbe("dirichlet", "fedbe-convnet"),
    "fedbe-resnet20-step": _fedbe("step", "resnet20"),
    "fedbe-resnet20-dirichlet": _fedbe("dirichlet", "resnet20"),
    "fedprox-convnet-step": Study("fedbe-table-2", ("partition=step network=fedbe-convnet",)),
    "fischer-2class": Study(
        "fischer-table-3",
        ("partition=2-class rule=ws weighting=size", "partition=2-class rule=nwa weighting=size"),
        {"data.mean": "global"},  # clients' own means forbid sharing a launch; the reading pixel_mean=global
    ),
    "fischer-pretrained": Study("fischer-table-4", ("pretrain=yes",)),
    "reyes-mnist": Study("reyes-table-2", ("batch=200 dataset=mnist",)),
    "reyes-fashion": Study("reyes-table-2", ("batch=200 dataset=fashion-mnist",)),
    "reyes-rounds": Study("reyes-table-5", ("fraction=0.1",)),
    "ozer-10": Study("ozer-spread-10-clients", ("dataset=fashion-mnist partition=dirichlet-0.5 weights=equal",)),
    "ozer-100": Study("ozer-spread-100-clients", ("dataset=fashion-mnist partition=dirichlet-0.5 weights=equal",)),
}


class TimeIsUp(Exception):
    """The next round would not fit into this call."""


def main() -> int:
    """Run the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("study", nargs="?", choices=sorted(STUDIES))
    p.add_argument("--list", action="store_true", help="list the studies")
    p.add_argument("--parts", type=Path, help="folder of CIFAR-10")
    p.add_argument("--state", type=Path, default=Path("runs/papers-gpu"), help="run directories, kept between calls")
    p.add_argument("--minutes", type=float, default=9.0, help="time of this call")
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--rounds", type=int, default=0, help="fewer rounds than the paper's (schedules shrink with them)")
    p.add_argument("--reading", action="append", default=[], metavar="NAME=OPTION", help="e.g. sign=fisher")
    p.add_argument("--only", action="append", default=[], help="further words the cells must hold, e.g. method=fedbe")
    p.add_argument("--scale", choices=["full", "quick", "smoke"], default="full")
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", choices=["float32", "bf16"], default="bf16")
    p.add_argument("--no-compile", action="store_true")
    options = p.parse_args()
    if options.list or not options.study:
        for name, study in STUDIES.items():
            print(f"{name:26s} {study.recipe}: {'; '.join(study.only)}")
        return 0
    return carry_out(options)


def carry_out(options: argparse.Namespace) -> int:
    """Run one call's worth of a study and print where it stands."""
    import torch

    from fedbayes import recipes

    started = time.monotonic()
    study = STUDIES[options.study]
    gpu = torch.cuda.is_available() and not options.device.startswith("cpu")
    changes = {
        **study.changes,
        "engine.device": options.device,
        "engine.precision": options.precision if gpu else "float32",
        "engine.compile": gpu and not options.no_compile,
    }
    if options.rounds:
        changes["rounds"] = options.rounds
    data = unpacked(options.parts, options.state)
    stop_in_time(started, options.minutes * 60)
    readings = dict(item.split("=", 1) for item in options.reading)
    only = [" ".join([item, *options.only]) for item in study.only]
    finished = True
    try:
        made = recipes.reproduce(
            study.recipe,
            options.scale,
            only,
            options.state,
            data,
            changes=changes,
            seeds=options.seeds,
            readings=readings,
        )
    except TimeIsUp as stop:
        finished = False
        print(stop)
        made = recipes.reproduce(
            study.recipe, options.scale, only, options.state, data, changes=changes, seeds=options.seeds, readings=readings,
            run_many=lambda items: None,
        )  # fmt: skip
    print(made)
    for path in sorted((options.state / "runs").glob("*/metrics.jsonl")):
        print(standing(path))
    print(f"{'finished' if finished else 'call again to go on'} ({time.monotonic() - started:.0f} s)")
    return 0


def unpacked(parts: Path | None, state: Path) -> Path | None:
    """Return a data folder: ``parts`` itself where it holds canonical files, else what its ``unpack.py`` writes."""
    if parts is None or (parts / "cifar-10-batches-py").exists() or not (parts / "unpack.py").exists():
        return parts
    folder = state.parent / "papers-data"
    if not (folder / "cifar-10-batches-py" / "test_batch").exists():
        subprocess.run([sys.executable, str(parts / "unpack.py"), str(folder), "cifar10"], check=True)
    for name in ("mnist", "fashion-mnist"):
        if (parts / name).is_dir() and not (folder / name).exists():
            (folder / name).symlink_to((parts / name).resolve(), target_is_directory=True)
    return folder


def stop_in_time(started: float, budget: float) -> None:
    """Make the round loop stop between rounds, its checkpoints written, before the budget is used up."""
    from fedbayes import runner

    def timed(federations: Sequence) -> None:
        longest = 0.0
        while active := [f for f in federations if not f.finished]:
            used = time.monotonic() - started
            if used + 1.3 * longest + 10 > budget:
                done = ", ".join(f"{f.round}/{f.experiment.rounds}" for f in federations)
                raise TimeIsUp(f"stopped between rounds after {used:.0f} s; rounds done: {done}")
            before = time.monotonic()
            by_run = {f.run_number: f for f in active}
            assignments = [a for f in active for a in f.begin()]
            for update in active[0].cohort.train(assignments):
                by_run[update.run].absorb(update)
            trained = time.monotonic()
            for federation in active:
                federation.end()
            longest = time.monotonic() - before
            print(
                f"round {active[0].round}: clients {trained - before:.1f} s, server {longest - trained + before:.1f} s",
                flush=True,
            )

    runner.run_together = timed


def standing(file: Path) -> str:
    """Return one line about a run: its last evaluation of every predictor."""
    last: dict[str, tuple[int, float, float]] = {}
    for line in file.read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "evaluation" and event["split"] == "test":
            last[event["model"]] = (event["round"], event["metrics"]["accuracy"], event["metrics"]["nll"])
    words = ", ".join(f"{m} {100 * a:.2f} % (NLL {n:.3f})" for m, (_, a, n) in last.items())
    round_ = max((r for r, _, _ in last.values()), default=0)
    return f"{file.parent.name}: round {round_}: {words or 'not evaluated yet'}"


if __name__ == "__main__":
    sys.exit(main())
