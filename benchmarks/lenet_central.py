#!/usr/bin/env python3
"""A Flipout LeNet on Fashion-MNIST, trained centrally, beside the same network without a distribution.

    python benchmarks/lenet_central.py --data ../shared/data/fashion-mnist [--epochs 8] [--kl-weight 1] [--seeds 0 1 2]

Same initial means, same batches, same Adam; the Bayesian one minimises the negative ELBO per example. The table at
the end has accuracy, NLL and ECE (15 bins) on the 10,000 test images (25 Monte-Carlo samples for the Bayesian one),
the median sigma and the seconds of training.
`--data` is a folder with the four canonical files (train-images-idx3-ubyte.gz ...). Needs torch and numpy.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedbayes.nn as fnn
from fedbayes import objective, seeds
from fedbayes.cohort import Assignment
from fedbayes.uncertainty import summarize


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 28, 28) in 0..1 and labels of one split."""
    images, labels = (
        np.frombuffer(gzip.decompress((folder / f"{split}-{what}-ubyte.gz").read_bytes()), np.uint8)
        for what in ("images-idx3", "labels-idx1")
    )
    x = torch.from_numpy(images[16:].copy()).reshape(-1, 1, 28, 28).float() / 255
    return x, torch.from_numpy(labels[8:].astype(np.int64))


def train(network: nn.Module, x: Tensor, y: Tensor, seed: int, a: argparse.Namespace) -> None:
    """Adam on the negative ELBO per example, learning rate falling along a cosine."""
    parameters = dict(network.named_parameters())
    job = Assignment(
        0, 1, fnn.posterior_of(network), seed, a.lr, divisor=len(x), kl_weight=a.kl_weight, prior_std=a.prior_std
    )
    terms = objective.make_terms(job, parameters)
    optimizer = torch.optim.Adam(network.parameters(), a.lr)
    steps = a.epochs * (len(x) // a.batch)
    torch.manual_seed(seeds.derive(seed, "noise"))
    step = 0
    for epoch in range(a.epochs):
        order = torch.from_numpy(seeds.numpy_rng(seed, "order", epoch).permutation(len(x)))
        for batch in order.split(a.batch):
            if len(batch) < a.batch:
                continue
            for group in optimizer.param_groups:
                group["lr"] = a.lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad(set_to_none=True)
            nll = objective.cross_entropy(network(x[batch]), y[batch])
            loss = nll + objective.penalty(parameters, terms)
            loss.backward()
            optimizer.step()
            step += 1
        print(f"  epoch {epoch + 1}: nll {nll.item():.3f}, loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def judge(network: nn.Module, x: Tensor, y: Tensor, samples: int) -> dict[str, float]:
    """Metrics on the test images."""
    network.eval()
    batches = [torch.stack([network(b).softmax(-1) for _ in range(samples)]) for b in x.split(1000)]
    return summarize(torch.cat(batches, 1), y)


def row(kind: str, seed: int, data: dict[str, tuple[Tensor, Tensor]], a: argparse.Namespace) -> dict[str, float]:
    """Train and judge one network."""
    network = fnn.build("lenet", kind, in_channels=1, where=a.where, sigma=a.sigma, seed=seed)
    began = time.perf_counter()
    train(network, *data["train"], seed, a)
    seconds = time.perf_counter() - began
    metrics = judge(network, *data["t10k"], samples=25 if kind != "deterministic" else 1)
    names = fnn.gaussian_names(dict(network.named_parameters()))
    rho = [network.get_parameter(n + fnn.RHO).flatten() for n in names]
    sigma = F.softplus(torch.cat(rho)).median().item() if rho else 0.0
    return metrics | {"sigma": sigma, "seconds": seconds}


def main() -> None:
    """Train both for every seed, print the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--kl-weight", type=float, default=1.0, help="1: the evidence lower bound itself; below: tempered")
    p.add_argument("--prior-std", type=float, default=1.0)
    p.add_argument("--sigma", type=float, default=0.02, help="initial sigma")
    p.add_argument("--where", default="", help="layers made Bayesian (default: the linear ones, as Ozer; '*': all)")
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    a = p.parse_args()
    data = {split: read(a.data, split) for split in ("train", "t10k")}
    lines: list[str] = []
    reached = 0
    for seed in a.seeds:
        rows = {kind: row(kind, seed, data, a) for kind in ("deterministic", "flipout")}
        reached += rows["flipout"]["accuracy"] >= 0.85 and rows["flipout"]["ece"] < rows["deterministic"]["ece"]
        for kind, m in rows.items():
            lines.append(
                f"{seed:4d}  {kind:14s}{m['accuracy']:9.4f}{m['nll']:8.4f}{m['ece']:8.4f}{m['sigma']:8.4f}{m['seconds']:9.0f}"
            )
    layers = a.where or "fc*"
    print(
        f"\nLeNet, Fashion-MNIST, {a.epochs} epochs, batch {a.batch}, KL weight {a.kl_weight}, Bayesian layers: {layers}"
    )
    print(f"{'seed':4s}  {'kind':14s}{'accuracy':>9s}{'NLL':>8s}{'ECE':>8s}{'sigma':>8s}{'seconds':>9s}")
    print("\n".join(lines))
    print(f"at least 85 % with an ECE below the deterministic net's: {reached} of {len(a.seeds)} seeds")


if __name__ == "__main__":
    sys.exit(main())
