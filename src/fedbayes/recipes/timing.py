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
BATCH = 32
"""Examples per measured step and pass; the time of other batch sizes is taken to be proportional."""


@dataclass(frozen=True)
class Work:
    """What the time of a step depends on beside the batch size: one network on inputs of one shape."""

    network: str
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Speed:
    """Seconds per example of a training step (in batches of 32), and of a forward pass at evaluation."""

    train: float
    example: float


def work_of(e: Experiment) -> Work:
    """Return the work one experiment's steps are made of."""
    return Work(e.model.name, e.model.kind, SHAPES.get(e.data.name, (3, 32, 32)))


def examples_of(e: Experiment) -> tuple[float, float]:
    """Return the examples a whole run trains on (full batches, every epoch), and those it passes through for evaluation."""
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
    steps = e.local.steps or epochs * math.ceil(share / e.local.batch_size)
    trained = e.rounds * chosen * steps * e.local.batch_size
    samples = 1 if e.model.kind == "deterministic" else e.evaluation.samples
    passes = math.ceil(e.rounds / e.evaluation.every) * samples * (test + train * e.data.validation)
    if e.distill.enabled:
        whole = SIZES.get(e.distill.data, 50_000)
        unlabelled = min(whole, e.data.limit or whole) if e.distill.data else train * e.distill.fraction
        members = 1 + chosen + e.distill.samples
        trained += e.rounds * e.distill.epochs * unlabelled
        passes += e.rounds * members * unlabelled + math.ceil(e.rounds / e.evaluation.every) * (members + chosen) * test
    return trained, passes


def seconds(recipe: Recipe, speeds: dict[Work, Speed]) -> float:
    """Return the projected seconds of a recipe (all cells, all seeds), one client after the other."""
    total = 0.0
    for cell in recipe.cells:
        trained, passes = examples_of(cell.experiment)
        speed = speeds[work_of(cell.experiment)]
        total += trained * speed.train + passes * speed.example
    return total * recipe.seeds


def measure(works: Iterable[Work], budget: float = 10.0, device: str = "auto") -> dict[Work, Speed]:
    """Time a plain training step and a forward pass of each kind of work, in about ``budget`` seconds together."""
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    wanted = sorted(set(works), key=repr)
    speeds: dict[Work, Speed] = {}
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(derive("timing"))
        ends = time.perf_counter() + budget
        for left, work in zip(range(len(wanted), 0, -1), wanted, strict=True):
            speeds[work] = _measure(work, (ends - time.perf_counter()) / left / 2, place)
    return speeds


def _measure(work: Work, budget: float, device: torch.device) -> Speed:
    model = build(work.network, work.kind, classes=10, in_channels=work.shape[0], input_shape=work.shape).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, *work.shape, device=device)
    y = torch.randint(10, (BATCH,), device=device)
    step = _time(lambda: _step(model, optimizer, x, y), budget, device)
    model.eval()
    with torch.no_grad():
        forward = _time(lambda: model(x), budget, device)
    return Speed(step / BATCH, forward / BATCH)


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
