"""Seconds per federated round on one device, against the same round as a plain eager PyTorch loop, in one run.

    PYTHONPATH=src python benchmarks/rounds.py --out rounds.json                    # a CUDA device
    PYTHONPATH=src python benchmarks/rounds.py --profile --variants                 # and where the time goes, what pays
    python benchmarks/rounds.py --device cpu --network mlp --images 2000 --batch 16 # without a GPU, at a tiny size

A round is everything but evaluation: shuffles, pad-crop-flip, one local epoch of every client, the KL, client weights and
fusion of the posteriors. Images are random (uint8), which changes nothing about the time. Ours is the median of several
rounds after a warm-up round; compilation and capture are listed apart. The plain loop runs some steps of one client,
extrapolated to the round's steps (``--baseline-steps 0``: a whole round); its fusion is left out, in its favour.
Every row has a process of its own: all compile side by side, then each is measured while the others wait.
Needs torch, numpy and safetensors only.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbayes import nn as fnn
from fedbayes.cohort import Assignment, Update
from fedbayes.data import Examples, Transform
from fedbayes.data.transform import CropFlip
from fedbayes.engine import LocalCohort
from fedbayes.experiment import Engine, Local
from fedbayes.fusion import Accumulator, client_weights, get_rule
from fedbayes.fusion.together import absorb_together
from fedbayes.nn.state import posterior_of
from fedbayes.posterior import Posterior


@dataclass(frozen=True)
class Row:
    """One line of the table: a kind of network, federations side by side, and the targets in seconds."""

    label: str
    kind: str
    runs: int
    must: float
    aim: float


ROWS = (
    Row("deterministic", "deterministic", 1, 0.60, 0.30),
    Row("flipout", "flipout", 1, 0.90, 0.50),
    Row("flipout, three runs", "flipout", 3, 0.60, 0.25),
    Row("deterministic, three runs", "deterministic", 3, 0.35, 0.15),
    Row("dropout", "dropout", 1, 0.70, 0.35),
)


class Job:
    """The data, network and clients of one measurement."""

    def __init__(self, args: argparse.Namespace, kind: str, runs: int, lanes: int, **engine: Any) -> None:
        shape = (3, 32, 32)
        rng = np.random.default_rng(0)
        images = torch.from_numpy(rng.integers(0, 256, (args.images, *shape), dtype=np.uint8))
        examples = Examples(images, torch.from_numpy(rng.integers(0, 10, args.images)))
        transform = Transform(torch.full((3, 1, 1), 1 / 255), torch.full((1, *shape), -0.5), CropFlip())
        shards = [np.array_split(np.random.default_rng(r).permutation(args.images), args.clients) for r in range(runs)]
        model = fnn.build(args.network, kind=kind, classes=10, in_channels=3, input_shape=shape)
        self.args, self.runs = args, runs
        self.settings = Engine(**{"device": args.device, "lanes": lanes, "precision": args.precision} | engine)
        self.cohort = LocalCohort(model, examples, shards, transform, Local(batch_size=args.batch), self.settings)
        start = posterior_of(model).to(self.cohort.setting.device)
        self.posteriors: dict[int, Posterior] = dict.fromkeys(range(runs), start)
        self.rule = get_rule("nwa")
        self.number = 0

    def assignments(self, steps: int = 0) -> list[Assignment]:
        """Return the work of the next round."""
        self.number += 1
        return [
            Assignment(client=c, round=self.number, start=self.posteriors[run], seed=run, learning_rate=1e-3, steps=steps,
                       divisor=float(self.args.images), run=run)
            for run in range(self.runs)
            for c in range(self.args.clients)
        ]  # fmt: skip

    def round(self) -> None:
        """Train every client, weigh, fuse: one round of every run."""
        totals, weights = {}, {}
        for run, posterior in self.posteriors.items():
            totals[run] = Accumulator(self.rule, reference=posterior, previous=posterior)
            weights[run] = client_weights("size", sizes=self.cohort.sizes(run))
        updates: dict[int, list[Update]] = {run: [] for run in self.posteriors}
        for update in self.cohort.train(self.assignments()):
            updates[update.run].append(update)
        for run, total in totals.items():
            clients = [u.client for u in updates[run]]
            absorb_together(total, [u.posterior for u in updates[run]], [weights[run][c] for c in clients], clients)
        self.posteriors = {run: total.conclude().posterior for run, total in totals.items()}

    def baseline(self, steps: int) -> float:
        """Return the seconds of one run's round as a plain loop, from ``steps`` steps of one client (0: the whole round)."""
        if steps == 0:
            return seconds(lambda: list(self.cohort.train(self.assignments())))
        work = [self.assignments(steps)[0]]
        list(self.cohort.train([replace(work[0], steps=3)]))
        took = seconds(lambda: list(self.cohort.train(work)))
        return took / steps * sum(-(-n // self.args.batch) for n in self.cohort.sizes(0).values())


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], object]) -> float:
    """Return the wall time of an action, its device work included."""
    synchronize()
    begun = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - begun


def measure(
    args: argparse.Namespace, row: Row, turn: Callable[[], object] = lambda: None, **engine: Any
) -> dict[str, Any]:
    """Return seconds per round and run of one row, and what came with it; ``turn`` is called after the warm-up round."""
    cuda = torch.cuda.is_available() and args.device != "cpu"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    job = Job(args, row.kind, row.runs, args.clients * row.runs, **{"compile": cuda} | engine)
    first = seconds(job.round)
    turn()
    rounds = [seconds(job.round) for _ in range(args.rounds)]
    found = job.cohort.statistics()
    if args.profile and cuda:
        profile(job, row.label)
    return {
        "label": row.label,
        "lanes": found["lanes"],
        "seconds": statistics.median(rounds) / row.runs,
        "spread": (max(rounds) - min(rounds)) / row.runs,
        "first_round": first,
        "compile": found["compile_seconds"],
        "training_share": found["seconds"] / rounds[-1],
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan"),
        "must": row.must,
        "aim": row.aim,
    }


def profile(job: Job, label: str) -> None:
    """Print the kernels of one round that take most time, and where the host spends its own."""
    host = cProfile.Profile()
    host.runcall(lambda: seconds(job.round))
    print(f"\n--- host functions of one round: {label}")
    pstats.Stats(host).sort_stats("cumulative").print_stats(40)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        job.round()
        synchronize()
    print(f"\n--- kernels of one round: {label}")
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90))


# -- variants: what was thought to pay ----------------------------------------------------------------------------


@contextlib.contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Change an attribute for the length of a block."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def variants() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return ways to build the step by name: a context that changes the code, and engine settings."""
    import torch._inductor.config as inductor

    from fedbayes.engine import graph
    from fedbayes.nn.layers import Flipout

    plain = contextlib.nullcontext
    return {
        "as shipped": (plain, {}),
        "flipout in one call": (lambda: changed(Flipout, "one_call", True), {}),
        "contiguous images": (lambda: changed(graph, "lanes_as_channels", lambda x: x), {}),
        "one step per graph": (lambda: changed(graph, "block_size", lambda lengths: 1), {}),
        "max-autotune": (lambda: changed(inductor, "max_autotune", True), {}),
        "coordinate descent": (lambda: changed(inductor, "coordinate_descent_tuning", True), {}),
        "float32": (plain, {"precision": "float32"}),
        "not compiled": (plain, {"compile": False}),
    }


def compare_variants(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every variant on the Flipout row and the deterministic one."""
    found = []
    for name, (context, engine) in variants().items():
        for row in ROWS[:2]:
            torch._dynamo.reset()
            try:
                with context():
                    result = measure(args, row, **engine)
            except Exception as error:
                print(f"{name}, {row.label}: {type(error).__name__}: {str(error)[:300]}")
                continue
            found.append(result | {"variant": name})
            print(f"{name:24}{row.label:16}{result['seconds']:8.3f} s  compile {result['compile']:.0f} s", flush=True)
    return found


# -- the rows, a process each --------------------------------------------------------------------------------------

READY = "ready"


def one_row(args: argparse.Namespace, row: Row) -> dict[str, Any]:
    """Measure one row when it is its turn: a line comes in on the standard input."""

    def turn() -> None:
        print(READY, flush=True)
        sys.stdin.readline()

    plain = Job(args, row.kind, 1, 1)
    found = measure(args, row, turn)
    return found | {"plain": plain.baseline(args.baseline_steps)}


def all_rows(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Start a process a row, wait until all are warm, let each measure in turn; one that failed is a row that says so."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    pipe = subprocess.PIPE
    children = {n: subprocess.Popen([*command, str(n)], stdin=pipe, stdout=pipe, text=True) for n in numbers}
    for n, child in children.items():
        assert child.stdout is not None
        while (line := child.stdout.readline()) and line.strip() != READY:
            print(line, end="", flush=True)
        print(f"row {n}, {ROWS[n - 1].label}: {'warm' if line else 'failed'}", flush=True)
    results = []
    for n, child in children.items():
        *lines, last = child.communicate("go\n")[0].splitlines() or [""]
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
        if child.returncode == 0:
            results.append(json.loads(last))
            print(f"row {n}: {results[-1]['seconds']:.3f} s", flush=True)
        else:
            print(
                f"row {n}, {ROWS[n - 1].label}: not measured, exit {child.returncode}; its error is above", flush=True
            )
    return results


# -- the table ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--rounds", type=int, default=5, help="rounds measured after the warm-up")
    parser.add_argument("--rows", default="", help="numbers of the table's rows, e.g. 1,2 (default: all)")
    parser.add_argument("--baseline-steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = [int(i) for i in args.rows.split(",")] if args.rows else list(range(1, len(ROWS) + 1))
    if not {*rows} <= {*range(1, len(ROWS) + 1)}:
        parser.error(f"--rows {args.rows}: the rows are numbered 1 to {len(ROWS)}.")
    name = torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    if args.child:
        print(json.dumps(one_row(args, ROWS[args.child - 1])), flush=True)
        return
    print(
        f"{name}; torch {torch.__version__}; {args.network}, {args.images} images, {args.clients} clients, {args.precision}"
    )
    compared = compare_variants(args) if args.variants else []
    results = all_rows(rows)
    if args.out:
        args.out.write_text(json.dumps({"device": name, "rows": results, "variants": compared}, indent=1))
    print("\nseconds per federation and round")
    print(
        f"{'network':28}{'lanes':>6}{'plain loop':>12}{'ours':>9}{'gain':>8}{'must':>7}{'aim':>6}{'compile':>9}{'memory':>9}"
    )
    for r in results:
        print(
            f"{r['label']:28}{r['lanes']:6}{r['plain']:12.3f}{r['seconds']:9.3f}{r['plain'] / r['seconds']:7.1f}x"
            f"{r['must']:7.2f}{r['aim']:6.2f}{r['compile']:8.1f}s{r['memory_gb']:8.2f}G"
        )
    sys.exit(len(results) < len(rows))


if __name__ == "__main__":
    main()
