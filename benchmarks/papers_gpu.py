"""The papers' GPU-sized studies, in pieces: each call runs as many rounds as fit into its time, the next one goes on.

    PYTHONPATH=src python benchmarks/papers_gpu.py fedbe-convnet-step fischer-iid --data-dir DATA --state STATE --pack OUT

``DATA`` holds CIFAR-10 (the canonical ``cifar-10-batches-py``, or packed parts with their ``unpack.py``), ``svhn-test.npz``
(or its packed part) and the folders ``mnist`` and ``fashion-mnist``. ``STATE`` keeps run directories with their checkpoints,
logs and finished pages; give the same one again to continue. Several studies share the machine, a process each. Needs
torch, numpy and safetensors only. ``--list`` lists the studies: cells of the recipes at the papers' own scale, run as lanes;
what is reduced (``rounds``, ``--set``) is part of a run's configuration. The summary is printed last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_pieces import TimeIsUp, keep_labels, pack, side_by_side, stop_in_time, summary, unpacked


@dataclass(frozen=True)
class Study:
    """Cells of recipes (name: words that their cells hold), and what is changed of them (nothing that the paper states)."""

    cells: Mapping[str, tuple[str, ...]]
    changes: Mapping[str, object] = field(default_factory=dict)
    variants: tuple[tuple[str, Mapping[str, str]], ...] = ()  # words of cells that are run under other readings too


METHODS = ("fedavg", "v-distillation", "fedbe-no-swa", "fedbe")


def _fedbe(partition: str, network: str, methods: Sequence[str] = METHODS, proximal: bool = True) -> Study:
    at = f"partition={partition} network={network}"
    cells = {"fedbe-table-1": tuple(f"{at} method={m}" for m in methods)}
    if proximal:
        cells["fedbe-table-2"] = (f"{at} method=fedprox",)
    return Study(cells, {"checkpoint_every": 5})


def _reyes(name: str) -> Study:
    changes = {"checkpoint_every": 50}
    readings = ({"sign": "fisher"}, {"epsilon": "keras"}, {"sign": "fisher", "epsilon": "keras"})
    variants = tuple(("rule=precision", reading) for reading in readings)
    return Study({"reyes-table-2": (f"batch=200 dataset={name}",)}, changes, variants)


def _ozer(clients: int, data: str = "fashion-mnist") -> Study:
    cells = {f"ozer-spread-{clients}-clients": (f"dataset={data} partition=dirichlet-0.5 weights=equal",)}
    return Study(cells, {"checkpoint_every": 25})


OFTEN = {"checkpoint_every": 10}

IID = OFTEN | {"data.ood": "svhn-test.npz"}
"""Of ``fischer-iid``: with SVHN as out-of-distribution data."""

STUDIES = {
    "fischer-iid": Study(
        {
            "fischer-table-2": (
                "partition=iid rule=ws weighting=size",
                "partition=iid rule=conflation",
                "partition=iid rule=nwa weighting=size",  # Flipout, and beside it deterministic and MC-dropout
            )
        },
        IID,
        (("model=flipout rule=nwa", {"kl_scale": "federation"}),),
    ),
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
        OFTEN,
    ),
    "fischer-pretrained": Study(
        {"fischer-table-4": ("pretrain=yes partition=iid", "pretrain=yes partition=2-class")}, OFTEN
    ),
    "reyes-mnist": _reyes("mnist"),
    "reyes-fashion": _reyes("fashion-mnist"),
    "ozer-10": _ozer(10),
    "ozer-100": _ozer(100),
    "ozer-100-cifar10": _ozer(100, "cifar10"),
}


def main() -> int:
    """Run the command line."""
    options = arguments()
    if options.list or not options.study:
        for name, study in STUDIES.items():
            print(f"{name:26s} {'; '.join(f'{r}: {c}' for r, cells in study.cells.items() for c in cells)}")
        return 0
    if len(options.study) == 1 and options.pack is None:
        carry_out(options, options.study[0])
        return 0
    data = unpacked(options.data_dir, options.state)  # once, before they need it
    command = [__file__, *([] if data is None else ["--data-dir", str(data)]), *passed_on(options)]
    try:
        side_by_side(command, options.study, options.state, options.until, options.at_once)
    finally:
        if options.pack is not None:
            pack(options.state, options.pack)
        print(summary(options.state), flush=True)
    return 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "study", nargs="*",
        help="one or several of --list; 'name:key=value,...' changes fields of one alone (also only, reading.NAME, pause)",
    )  # fmt: skip
    p.add_argument("--list", action="store_true", help="list the studies")
    p.add_argument("--data-dir", type=Path, help="folder of the data sets")
    p.add_argument("--state", type=Path, default=Path("runs/papers-gpu"), help="run directories, kept between calls")
    p.add_argument("--minutes", type=float, default=9.0, help="time of this call")
    p.add_argument("--until", type=float, help="when this call must have ended, in seconds of the epoch")
    p.add_argument("--at-once", type=int, default=8, help="studies that run side by side")
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--rounds", type=int, default=0, help="fewer rounds than the paper's (schedules shrink with them)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="e.g. local.epochs=40")
    p.add_argument("--reading", action="append", default=[], metavar="NAME=OPTION", help="e.g. sign=fisher")
    p.add_argument("--only", action="append", default=[], help="further words the cells must hold, e.g. method=fedbe")
    p.add_argument("--scale", choices=["full", "quick", "smoke"], default="full")
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", choices=["float32", "bf16"], default="bf16")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--pack", type=Path, help="folder for archives: results (small), checkpoints (to go on elsewhere)")
    options = p.parse_args()
    options.until = options.until or time.time() + 60 * options.minutes
    for item in options.study:
        if item.partition(":")[0] not in STUDIES:
            p.error(f"'{item}' is no study; there are {', '.join(STUDIES)}.")
    return options


def passed_on(options: argparse.Namespace) -> list[str]:
    """Return the arguments that every study of a call is given."""
    lists = [("--set", options.set), ("--reading", options.reading), ("--only", options.only)]
    words = [word for flag, values in lists for value in values for word in (flag, value)]
    for flag in ("seeds", "rounds", "scale", "device", "precision"):
        words += [f"--{flag}", str(getattr(options, flag))]
    return words + (["--no-compile"] if options.no_compile else [])


def carry_out(options: argparse.Namespace, item: str) -> None:
    """Run one call's worth of a study and print where it stands."""
    from fedbayes.compare import Cell, run_grid

    begun = time.monotonic()
    name, _, text = item.partition(":")
    own = dict(pair.split("=", 1) for pair in text.split(",") if pair)
    data = unpacked(options.data_dir, options.state)
    stop_in_time(options.until, float(own.pop("pause", 0.0)))
    grid = GridOf(name, options, own, data)
    runs, concluded = grid.runs(), False
    keep_labels(options.state, "".join(c if c.isalnum() else "-" for c in item), {p.name: l for l, _, p in runs})
    print(f"{name}: {len(runs)} runs, prepared in {time.monotonic() - begun:.0f} s", flush=True)
    try:
        run_grid([Cell(l, {}, e.seed, e, p) for l, e, p in runs], data_dir=data, lanes_shared=True, most_together=24)
        concluded = True
    except TimeIsUp as stop:
        print(stop)
    for made in grid.pages():
        print(made)
    print(f"{'finished' if concluded else 'call again to go on'} ({time.monotonic() - begun:.0f} s)", flush=True)


class GridOf:
    """The runs of one study as an item of the command line asks for them, and the pages that compare them with the paper."""

    def __init__(self, name: str, options: argparse.Namespace, own: dict[str, str], data: Path | None) -> None:
        self.name, self.options, self.data = name, options, data
        self.only = [*options.only, *([own.pop("only")] if "only" in own else [])]
        self.asked = dict(item.split("=", 1) for item in options.reading)
        self.asked |= {k.partition(".")[2]: own.pop(k) for k in list(own) if k.startswith("reading.")}
        asked = dict(item.split("=", 1) for item in options.set)
        self.changes = {**STUDIES[name].changes, **self._machine(), **asked, **own}
        if data is not None and (data / str(outliers := self.changes.get("data.ood", ""))).is_file():
            self.changes["data.ood"] = str(data / str(outliers))

    def _machine(self) -> dict[str, object]:
        """Return what the machine decides, and the rounds."""
        import torch

        o = self.options
        gpu = torch.cuda.is_available() and not o.device.startswith("cpu")
        changes: dict[str, object] = {
            "engine.device": o.device,
            "engine.precision": o.precision if gpu else "float32",
            "engine.compile": gpu and not o.no_compile,
        }
        return changes | ({"rounds": o.rounds} if o.rounds else {})

    def runs(self) -> list[tuple[str, Any, Path]]:
        """Return label, experiment and folder of every run."""
        found: dict[Path, tuple[str, Any, Path]] = {}
        self._reproduce(lambda items: found.update({path: (label, e, path) for label, e, path in items}))
        return [
            (" ".join([label, f"KL/{e.objective.kl_scale}", *e.fusion.options]), e, path)
            for label, e, path in found.values()
        ]

    def pages(self) -> list[Any]:
        """Write and return the comparisons with the printed tables."""
        return self._reproduce(lambda items: None)

    def _reproduce(self, run_many: Any) -> list[Any]:
        from fedbayes import recipes
        from fedbayes.recipes.runner import matches

        study, o, made = STUDIES[self.name], self.options, []
        variants = () if self.asked else study.variants
        for words, readings in [("", self.asked), *variants]:
            for recipe, cells in study.cells.items():
                only = [" ".join([item, *self.only, words]) for item in cells]
                known = recipes.load_recipe(recipe, o.scale, readings).cells
                only = [item for item in only if any(matches(cell, item) for cell in known)]
                if only:
                    made.append(
                        recipes.reproduce(
                            recipe, o.scale, only, o.state, self.data, changes=self.changes,
                            seeds=o.seeds, readings=readings, run_many=run_many,
                        )
                    )  # fmt: skip
        return made


if __name__ == "__main__":
    sys.exit(main())
