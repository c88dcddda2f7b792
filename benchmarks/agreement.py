"""Many lanes in bf16 against the plain loop in float32: are they the same experiment?

    PYTHONPATH=src python benchmarks/agreement.py --data-dir DIR                          # a CUDA device
    python benchmarks/agreement.py --data-dir DIR --images 400 --test-images 500 --rounds 2 --network cnn   # without one, tiny

First table: the deterministic network after one round from the same start, plain loop and lanes, both in float32 without
TF32: how far apart the fused means are, beside how far the round moved them, for Adam and for plain SGD (Adam's first steps
are signs of gradients, so that rounding grows faster). Second table: ``--rounds`` rounds of CIFAR-10, ten clients, with several
seeds: the plain loop in float32, one seed a process, and all seeds as lanes of one launch in bf16, compiled where the device can.
They agree if their means differ by less than seeds do. Reduced: ``--images`` training images, because the plain loop is
slow (that is what it is measured against in ``rounds.py``). Needs torch, numpy and safetensors only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedbayes import Experiment, Posterior, config, runner
from fedbayes.federation import Federation
from fedbayes.setup import prepare

CUDA = torch.cuda.is_available()
LANES = "bf16" if CUDA else "float32"


def experiment(o: argparse.Namespace, kind: str, seed: int, lanes: int, precision: str, **changes: Any) -> Experiment:
    """Return one federation."""
    rule = "nwa" if kind in ("flipout", "local", "sample") else "fedavg"
    return config.override(
        Experiment(name="agreement"),
        {
            "seed": seed, "rounds": o.rounds, "checkpoint_every": o.rounds, "data.name": "cifar10", "data.validation": 0.0,
            "data.limit": o.images, "data.test_limit": o.test_images, "data.augment": "crop-flip", "partition.scheme": "iid",
            "partition.clients": 10, "model.name": o.network, "model.kind": kind, "fusion.rule": rule,
            "evaluation.every": o.rounds, "evaluation.samples": 10, "evaluation.batch_size": 500, "engine.lanes": lanes,
            "engine.precision": precision, "engine.compile": CUDA and lanes > 1, **changes,
        },
    )  # fmt: skip


def train_alone(o: argparse.Namespace, e: Experiment) -> tuple[Posterior, Posterior]:
    """Return a federation's posterior before and after its rounds, unjudged."""
    setup = prepare(e, data_dir=o.data_dir)
    federation = Federation(e, setup.start, runner.local_cohort([setup]))
    for _ in range(e.rounds):
        for update in federation.cohort.train(federation.begin()):
            federation.absorb(update)
        federation.end()
    return setup.start.to("cpu"), federation.posterior.to("cpu")


def flat(posterior: Posterior) -> torch.Tensor:
    """Return all floating-point numbers of a point model but its running statistics."""
    chosen = [t for n, t in sorted(posterior.points.items()) if t.is_floating_point() and "running" not in n]
    return torch.cat([t.double().flatten() for t in chosen])


def one_round(o: argparse.Namespace) -> list[str]:
    """Lines of the first table."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lines = [f"{'optimiser':12}{'moved by':>12}{'apart by':>12}{'largest':>12}{'of the weights':>16}"]
    for optimizer, rate in (("adam", 1e-3), ("sgd", 0.1)):
        changes = {"rounds": 1, "local.optimizer": optimizer, "local.learning_rate": rate, "local.momentum": 0.0}
        (start, plain), (_, lanes) = (
            train_alone(o, experiment(o, "deterministic", 0, n, "float32", **changes)) for n in (1, 10)
        )
        a, b, c = flat(start), flat(plain), flat(lanes)
        lines.append(
            f"{optimizer:12}{(b - a).norm():12.4g}{(c - b).norm():12.3g}{(c - b).abs().max():12.2g}"
            f"{(c - b).norm() / b.norm():16.2g}"
        )
    return lines


def told(results: Sequence[runner.Result]) -> list[dict[str, float]]:
    """Return test metrics and mean sigma of finished federations."""
    return [{**r.metrics(), "sigma": runner.mean_sigma(r.events)} for r in results]


def plain(o: argparse.Namespace, kind: str, seed: int) -> list[dict[str, float]]:
    """Run one federation as the plain loop."""
    return told([runner.run(experiment(o, kind, seed, 1, "float32"), data_dir=o.data_dir, write=False, report=False)])


def together(o: argparse.Namespace, kind: str) -> list[dict[str, float]]:
    """Run all seeds as lanes of one launch."""
    lanes = 10 * o.seeds
    setups = [prepare(experiment(o, kind, s, lanes, LANES), data_dir=o.data_dir) for s in range(o.seeds)]
    return told(runner.run_setups([runner.Launch(s) for s in setups], report=False))


def compare(o: argparse.Namespace, kind: str, arguments: Sequence[str]) -> list[str]:
    """Lines of the second table for one kind of network."""
    begun = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--plain", f"{kind}:{seed}"], stdout=subprocess.PIPE)
        for seed in range(o.seeds)
    ]
    found = {f"lanes, {LANES}": together(o, kind), "plain, float32": []}
    for child in children:
        out = child.communicate()[0]
        if child.returncode == 0:
            found["plain, float32"] += json.loads(out.splitlines()[-1])
    lines = []
    for way, runs in sorted(found.items(), reverse=True):
        cells = "".join(f"{_spread([r[m] for r in runs], scale):>18}" for m, scale in METRICS)
        lines.append(f"{kind:16}{way:18}{len(runs):6}{cells}")
    return [*lines, f"({kind}: {time.perf_counter() - begun:.0f} s in all)"]


METRICS = (("accuracy", 100), ("nll", 1), ("ece", 100), ("sigma", 1))


def _spread(values: Sequence[float], scale: float) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values) * scale
    deviation = statistics.stdev(values) * scale if len(values) > 1 else math.nan
    return f"{mean:.4g} ± {deviation:.2g}"


def main() -> None:
    """Run what is asked for; the tables come last."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data-dir", type=Path, required=True)
    p.add_argument("--images", type=int, default=10_000)
    p.add_argument("--test-images", type=int, default=0)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--network", default="resnet20")
    p.add_argument("--kinds", default="deterministic,flipout")
    p.add_argument("--skip-one-round", action="store_true")
    p.add_argument("--plain", help=argparse.SUPPRESS)  # kind:seed, in a process of its own
    o = p.parse_args()
    if o.plain:
        kind, seed = o.plain.split(":")
        print(json.dumps(plain(o, kind, int(seed))))
        return
    first = [] if o.skip_one_round else one_round(o)
    second = [line for kind in o.kinds.split(",") for line in compare(o, kind, sys.argv[1:])]
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {o.network}, CIFAR-10, {o.images} images, ten clients")
    if first:
        print("\none round, deterministic, float32: lanes against the plain loop", *first, sep="\n")
    heads = "".join(f"{m:>18}" for m, _ in METRICS)
    print(f"\n{o.rounds} rounds\n{'network':16}{'how':18}{'seeds':>6}{heads}", *second, sep="\n")


if __name__ == "__main__":
    main()
