"""Lanes against the plain loop on the demo's network (handwritten digits), as ratios within one run.

    python benchmarks/lanes.py                          # 10 clients
    python benchmarks/lanes.py --clients 100 --threads 1

Every setting trains the same clients for the same epochs; settings take turns, and the least time of each counts.
"""

from __future__ import annotations

import argparse
import time

import torch

from fedbayes import nn as fnn
from fedbayes.cohort import Assignment
from fedbayes.data import load, make_transform, partition
from fedbayes.engine import LocalCohort
from fedbayes.experiment import Data, Engine, Local, Partition
from fedbayes.nn.state import posterior_of


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    data = Data(name="digits")
    train = load(data, seed=0).train
    shards = partition(Partition(clients=args.clients, alpha=0.5), train, 0)
    transform = make_transform(data, train, shards)
    print(f"{args.network}, {args.clients} clients, batch {args.batch}, {torch.get_num_threads()} threads")
    print(f"{'kind':16}{'plain loop':>12}{f'{args.clients} lanes':>12}{'gain':>8}")
    for kind in ("deterministic", "dropout", "flipout"):
        model = fnn.build(args.network, kind=kind, input_shape=tuple(train.inputs.shape[1:]))
        start = posterior_of(model)
        best: dict[int, float] = {}
        cohorts = {
            n: LocalCohort(model, train, shards, transform, Local(batch_size=args.batch), Engine("cpu", n))
            for n in (1, args.clients)
        }  # fmt: skip
        for _ in range(args.repeats):
            for n, cohort in cohorts.items():
                work = [
                    Assignment(c, 1, start, 0, 3e-3, args.epochs, divisor=float(len(train)))
                    for c in range(args.clients)
                ]
                begun = time.perf_counter()
                list(cohort.train(work))
                best[n] = min(best.get(n, 1e9), time.perf_counter() - begun)
        plain, lanes = best[1], best[args.clients]
        print(f"{kind:16}{plain:11.3f}s{lanes:11.3f}s{plain / lanes:7.1f}x")


if __name__ == "__main__":
    main()
