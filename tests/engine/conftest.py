"""Small networks and cohorts for the engine's tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbayes.cohort import Assignment, Update
from fedbayes.data import Examples, Transform
from fedbayes.data.transform import CropFlip
from fedbayes.engine import LocalCohort
from fedbayes.experiment import Engine, Local
from fedbayes.nn.state import posterior_of
from fedbayes.posterior import Posterior

SHAPE = (1, 8, 8)


class NormNet(nn.Module):
    """A convolution, batch-norm, a linear layer: everything whose lanes could leak into each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


@pytest.fixture(scope="session")
def examples() -> Examples:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.integers(0, 256, (300, *SHAPE), dtype=np.uint8))
    return Examples(inputs, torch.from_numpy(rng.integers(0, 10, 300)))


@pytest.fixture(scope="session")
def transform() -> Transform:
    return Transform(torch.full((1, 1, 1), 1 / 255), torch.full((1, *SHAPE), -0.5), CropFlip(pad=1))


def norm_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return NormNet()


def split(sizes: Sequence[int]) -> list[np.ndarray]:
    """Return disjoint shards of these sizes."""
    ends = np.cumsum([0, *sizes])
    return [np.arange(a, b) for a, b in itertools.pairwise(ends)]


def assign(start: Posterior, clients: int, **fields: object) -> list[Assignment]:
    base = Assignment(client=0, round=1, start=start, seed=7, learning_rate=1e-2, epochs=2, divisor=300.0)
    return [replace(base, client=c, **fields) for c in range(clients)]  # type: ignore[arg-type]


MakeCohort = Callable[..., LocalCohort]


@pytest.fixture
def make(examples: Examples, transform: Transform) -> MakeCohort:
    def build(
        model: nn.Module, shards: object, lanes: int, local: Local | None = None, **options: object
    ) -> LocalCohort:
        local = local or Local(batch_size=16)
        return LocalCohort(model, examples, shards, transform, local, Engine("cpu", lanes), **options)  # type: ignore[arg-type]

    return build


def train(cohort: LocalCohort, assignments: Sequence[Assignment]) -> dict[tuple[int, int], Update]:
    return {(u.run, u.client): u for u in cohort.train(assignments)}


def distance(a: Posterior, b: Posterior) -> float:
    """Return the largest absolute difference of any number of two posteriors, and check that they match."""
    assert a.gaussians.keys() == b.gaussians.keys()
    assert a.points.keys() == b.points.keys()
    pairs = [(g.mean, b.gaussians[n].mean) for n, g in a.gaussians.items()]
    pairs += [(g.variance, b.gaussians[n].variance) for n, g in a.gaussians.items()]
    pairs += [(t, b.points[n]) for n, t in a.points.items()]
    for x, y in pairs:
        assert x.shape == y.shape
        assert x.dtype == y.dtype
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


def start_of(model: nn.Module) -> Posterior:
    return posterior_of(model)
