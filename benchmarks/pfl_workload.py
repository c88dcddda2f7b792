"""The CIFAR-10 workload of pfl-research's public benchmark, as lanes and as a plain loop: seconds and accuracy.

    PYTHONPATH=src python benchmarks/pfl_workload.py --data-dir DIR                     # all 1,500 rounds on a CUDA device
    PYTHONPATH=src python benchmarks/pfl_workload.py --data-dir DIR --lanes 1 --rounds 200    # the plain loop, beside it
    python benchmarks/pfl_workload.py --rounds 4 --clients 40 --cohort 8                # without a GPU or data, tiny

1,000 clients hold 50 images each (IID), 50 train per round, batch 10, one epoch, SGD with learning rate 0.1, federated
averaging, evaluation on the 10,000 test images every 10 rounds; 1,500 rounds. The network has two 3x3 convolutions of 32
and 64 channels, one 2x2 max-pooling, a dense layer of 128 and the output layer. Without ``--data-dir`` the images are
synthetic (ten noisy prototypes): good for time, not for accuracy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedbayes.cohort import Assignment
from fedbayes.data import Dataset, Examples, Transform, load, make_transform
from fedbayes.engine import LocalCohort, predict
from fedbayes.experiment import Data, Engine, Local
from fedbayes.fusion import Accumulator
from fedbayes.fusion.together import absorb_together
from fedbayes.nn.state import posterior_of
from fedbayes.posterior import Posterior
from fedbayes.seeds import numpy_rng


def network() -> nn.Module:
    """Return the benchmark's network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def synthetic(train: int, test: int) -> tuple[Examples, Examples]:
    """Return images of ten prototypes under heavy noise."""
    rng = np.random.default_rng(0)
    prototypes = rng.integers(64, 192, (10, 3, 32, 32))

    def make(n: int) -> Examples:
        labels = rng.integers(0, 10, n)
        noisy = prototypes[labels] + rng.normal(0, 80, (n, 3, 32, 32))
        return Examples(torch.from_numpy(noisy.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels))

    return make(train), make(test)


def accuracy(model: nn.Module, posterior: Posterior, test: Examples, transform: Transform, engine: Engine) -> float:
    """Return the share of test images classified rightly."""
    p = predict(model, posterior, test.inputs, transform, samples=1, batch_size=2000, engine=engine)
    return float((p[0].argmax(-1) == test.labels.cpu()).float().mean())


def main() -> None:
    """Run the workload and print seconds and accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--lanes", type=int, default=-1, help="-1: the whole cohort; 1: the plain loop")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.data_dir:
        data = Data(name="cifar10", mean="global")
        dataset: Dataset = load(data, data_dir=args.data_dir, seed=0)
        train, test = dataset.train, dataset.test
        transform = make_transform(data, train, [], test)
    else:
        train, test = synthetic(50 * args.clients, 10_000 if args.device != "cpu" else 500)
        transform = Transform(torch.full((3, 1, 1), 1 / 255), torch.full((1, 3, 32, 32), -0.5))
    lanes = args.cohort if args.lanes < 0 else args.lanes
    engine = Engine(args.device, lanes, args.precision, compile=args.device != "cpu")
    shards = np.random.default_rng(0).permutation(len(train))[: 50 * args.clients].reshape(args.clients, 50)
    model = network()
    local = Local(batch_size=10, optimizer="sgd", learning_rate=0.1, momentum=0.0)
    cohort = LocalCohort(model, train, list(shards), transform, local, engine)
    test = test.to(cohort.setting.device)
    posterior = posterior_of(model).to(cohort.setting.device)
    spent = {"train": 0.0, "fuse": 0.0, "evaluate": 0.0}
    first, curve = 0.0, []
    begun = time.perf_counter()
    for number in range(1, args.rounds + 1):
        clients = numpy_rng(0, "sample", number).choice(args.clients, args.cohort, replace=False)
        work = [Assignment(int(c), number, posterior, 0, 0.1) for c in clients]
        marks = [time.perf_counter()]
        updates = list(cohort.train(work))
        marks.append(time.perf_counter())
        total = Accumulator("fedavg", reference=posterior, previous=posterior)
        absorb_together(
            total, [u.posterior for u in updates], [u.examples for u in updates], [u.client for u in updates]
        )
        posterior = total.conclude().posterior
        marks.append(time.perf_counter())
        if number % args.evaluate_every == 0 or number == args.rounds:
            curve.append((number, accuracy(model, posterior, test, transform, engine)))
            if number % 100 == 0:
                print(f"round {number}: accuracy {curve[-1][1]:.4f}", flush=True)
        marks.append(time.perf_counter())
        for key, a, b in zip(spent, marks[:-1], marks[1:], strict=True):
            spent[key] += b - a
        first = first or marks[2] - marks[0]
    seconds = time.perf_counter() - begun
    found = {"device": args.device, "lanes": lanes, "rounds": args.rounds, "seconds": seconds, "first_round": first,
             "compile": cohort.statistics()["compile_seconds"], **spent, "curve": curve}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(found))
    shares = ", ".join(f"{key} {value:.1f} s" for key, value in spent.items())
    print(f"{args.rounds} rounds on {args.device} with {lanes} lanes: {seconds:.1f} s ({shares}; compiling "
          f"{found['compile']:.1f} s of it), accuracy {curve[-1][1]:.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
