"""Projected time of a recipe on this machine, from a short measurement of a training step and a forward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..experiment import Experiment
from ..nn import build
from ..seeds import derive
from .grid import Recipe

SHAPES = {
    "mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32),
    "svhn": (3, 32, 32), "digits": (1, 8, 8),
}  # fmt: skip
SIZES = {
    "mnist": 60_000,
    "fashion-mnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn": 73_257,
    "digits": 1437,
}
TESTS = {"svhn": 26_032, "digits": 360}
MEASURED_TEST_BATCH = 200


@dataclass(frozen=True)
class Work:
    """What a recipe's time depends on: one network with its batch, and how much of it there is."""

    network: str
    kind: str
    data: str
    batch: int


@dataclass(frozen=True)
class Speed:
    """Seconds of one training step, and of one example's forward pass at evaluation."""

    step: float
    example: float


def work_of(e: Experiment) -> Work:
    """Return the work one experiment's steps are made of."""
    return Work(e.model.name, e.model.kind, e.data.name, e.local.batch_size)


def steps_and_passes(e: Experiment) -> tuple[float, float]:
    """Return the training steps of a whole run, and the examples its evaluations pass through the network."""
    train = e.data.limit or SIZES.get(e.data.name, 50_000)
    test = e.data.test_limit or TESTS.get(e.data.name, 10_000)
    held = (
        e.data.validation
        + e.pretrain.fraction
        + (e.distill.fraction if e.distill.enabled and not e.distill.data else 0)
    )
    clients = max(1, e.partition.clients)
    share = train * (1 - held) / clients
    chosen = max(1, round(e.participation.fraction * clients))
    epochs = (e.local.epochs_max + 1) / 2 if e.local.epochs_max else e.local.epochs
    steps = e.rounds * chosen * (e.local.steps or epochs * math.ceil(share / e.local.batch_size))
    samples = 1 if e.model.kind == "deterministic" else e.evaluation.samples
    passes = math.ceil(e.rounds / e.evaluation.every) * samples * (test + train * e.data.validation)
    if e.distill.enabled:
        unlabelled = train * e.distill.fraction
        members = 1 + chosen + e.distill.samples
        steps += e.rounds * e.distill.epochs * math.ceil(unlabelled / e.distill.batch_size)
        passes += e.rounds * members * unlabelled + math.ceil(e.rounds / e.evaluation.every) * (members + chosen) * test
    return steps, passes


def seconds(recipe: Recipe, speeds: dict[Work, Speed]) -> float:
    """Return the projected seconds of a recipe (all cells, all seeds), one client after the other."""
    total = 0.0
    for cell in recipe.cells:
        steps, passes = steps_and_passes(cell.experiment)
        speed = speeds[work_of(cell.experiment)]
        total += steps * speed.step + passes * speed.example
    return total * recipe.seeds


def measure(works: Iterable[Work], budget: float = 10.0, device: str = "auto") -> dict[Work, Speed]:
    """Time a plain training step and a forward pass of each kind of work, in about ``budget`` seconds together."""
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    wanted = sorted(set(works), key=repr)
    each = budget / max(1, len(wanted)) / 2
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(derive("timing"))
        return {work: _measure(work, each, place) for work in wanted}


def _measure(work: Work, budget: float, device: torch.device) -> Speed:
    shape = SHAPES.get(work.data, (3, 32, 32))
    model = build(work.network, work.kind, classes=10, in_channels=shape[0], input_shape=shape).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(work.batch, *shape, device=device)
    y = torch.randint(10, (work.batch,), device=device)
    test = torch.randn(MEASURED_TEST_BATCH, *shape, device=device)
    step = _time(lambda: _step(model, optimizer, x, y), budget, device)
    model.eval()
    with torch.no_grad():
        forward = _time(lambda: model(test), budget, device)
    return Speed(step, forward / MEASURED_TEST_BATCH)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def _time(run: Callable[[], object], budget: float, device: torch.device) -> float:
    """Return the best of the calls that fit into the budget, at least two (the first warms up)."""
    best, started = math.inf, time.perf_counter()
    for number in range(1000):
        before = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - before
        if number:
            best = min(best, took)
        if number and time.perf_counter() - started > budget:
            break
    return best


def duration(value: float) -> str:
    """Write seconds as a reader would: 40 s, 12 min, 5 h, 3 days."""
    for limit, unit, words in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "days")):
        if value < limit:
            return f"{value / unit:.0f} {words}"
    return "–"
