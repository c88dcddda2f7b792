"""Lanes agree with the plain loop."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes import nn as fnn
from fedbayes.data import Examples, Transform
from fedbayes.engine import LocalCohort
from fedbayes.experiment import Engine, Local
from fedbayes.nn.state import to_posterior

from .conftest import MakeCohort, assign, distance, norm_net, split, start_of, train

UNEQUAL = [40, 1, 33, 5, 16, 64]
OPTIMIZERS = {
    "adam": Local(batch_size=16),
    "adam, decay, clip": Local(batch_size=16, weight_decay=1e-2, clip_norm=0.5),
    "sgd": Local(batch_size=16, optimizer="sgd", momentum=0.0),
    "momentum": Local(batch_size=16, optimizer="sgd", momentum=0.9, weight_decay=1e-3),
    "nesterov": Local(batch_size=16, optimizer="sgd", momentum=0.8, nesterov=True),
}


def both(make: MakeCohort, model: nn.Module, sizes: list[int], lanes: int, local: Local, rounds: int = 1, **fields):
    found = []
    for n in (1, lanes):
        cohort = make(model, split(sizes), n, local)
        for round in range(1, rounds + 1):
            updates = train(cohort, assign(start_of(model), len(sizes), round=round, **fields))
        found.append(updates)
    assert found[0].keys() == found[1].keys()
    return found


@pytest.mark.parametrize("lanes", [2, 4, 6, 100])
@pytest.mark.parametrize("local", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_unequal_clients_of_a_batch_norm_network(make: MakeCohort, local: Local, lanes: int):
    plain, stacked = both(make, norm_net(), UNEQUAL, lanes, local)
    for key, update in plain.items():
        assert distance(update.posterior, stacked[key].posterior) < 1e-4
        assert update.examples == stacked[key].examples == UNEQUAL[key[1]]
        for name in ("loss", "nll", "kl", "steps"):
            assert update.metrics[name] == pytest.approx(stacked[key].metrics[name], rel=1e-4), name
        assert int(update.posterior.points["norm.num_batches_tracked"]) == update.metrics["steps"]


def test_steps_mode_and_kept_optimisers(make: MakeCohort):
    for local in (OPTIMIZERS["adam"], OPTIMIZERS["momentum"]):
        kept = replace(local, keep_state=True)
        plain, stacked = both(make, norm_net(), UNEQUAL, 3, kept, rounds=3, steps=5)
        fresh, _ = both(make, norm_net(), UNEQUAL, 3, local, rounds=3, steps=5)
        for key, update in plain.items():
            assert update.metrics["steps"] == 5
            assert distance(update.posterior, stacked[key].posterior) < 1e-4
            assert distance(update.posterior, fresh[key].posterior) > 1e-3  # keeping the state matters


def test_epochs_rates_and_penalties_may_differ_by_client(make: MakeCohort):
    model = norm_net()
    changes = [
        {"epochs": 1}, {"epochs": 3, "l2": 1e-2}, {"learning_rate": 1e-3}, {"proximal": 0.5}, {"epochs": 4}, {"steps": 2},
    ]  # fmt: skip
    work = [replace(a, **change) for a, change in zip(assign(start_of(model), 6), changes, strict=True)]
    plain = train(make(model, split(UNEQUAL), 1), work)
    stacked = train(make(model, split(UNEQUAL), 4), work)
    for key, update in plain.items():
        assert distance(update.posterior, stacked[key].posterior) < 1e-4
        assert update.metrics["loss"] == pytest.approx(stacked[key].metrics["loss"], rel=1e-4)
    alone = train(make(model, split(UNEQUAL), 1), [replace(a, l2=0.0, proximal=0.0) for a in work])
    assert distance(plain[0, 1].posterior, alone[0, 1].posterior) > 1e-4  # l2 has an effect
    assert distance(plain[0, 3].posterior, alone[0, 3].posterior) > 1e-4  # so has the proximal term


class Silent(nn.Module):
    """Gaussian weights that are trained by the KL and their means alone: deterministic, yet with sigmas."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 64) * 0.1)
        self.weight_rho = nn.Parameter(torch.full((10, 64), -3.0))
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.flatten(1), self.weight, self.bias)


@pytest.mark.parametrize("prior", ["fixed", "posterior", "mixed"])
def test_the_kl_of_lanes_is_the_objective_s(make: MakeCohort, prior: str):
    torch.manual_seed(3)
    model = Silent()
    state = {"weight": torch.randn(10, 64), "weight_rho": torch.randn(10, 64), "bias": torch.zeros(10)}
    given = to_posterior(state)
    work = assign(start_of(model), 6, prior_std=0.3)
    if prior != "fixed":
        work = [replace(a, prior=given) for a in work]
    if prior == "mixed":
        work = [replace(a, prior=None, prior_std=0.5, kl_weight=0.5) if a.client % 2 else a for a in work]
    local = Local(batch_size=16, sigma_learning_rate=3e-2)
    plain = train(make(model, split(UNEQUAL), 1, local), work)
    stacked = train(make(model, split(UNEQUAL), 4, local), work)
    for key, update in plain.items():
        assert distance(update.posterior, stacked[key].posterior) < 1e-4
        assert update.metrics["kl"] > 0
        for name in ("loss", "kl"):
            assert update.metrics[name] == pytest.approx(stacked[key].metrics[name], rel=1e-4), name


def test_sigmas_have_their_own_learning_rate(make: MakeCohort):
    model, start = Silent(), None
    start = start_of(model)
    moved = {}
    for rate in (1e-2, 1e-1):
        update = train(make(model, split([32, 32]), 2, Local(batch_size=32, learning_rate=1e-2, sigma_learning_rate=rate)),
                       assign(start, 2, steps=1))[0, 0]  # fmt: skip
        rho = {n: torch.log(torch.expm1(g.variance.sqrt().double())) for n, g in update.posterior.gaussians.items()}
        moved[rate] = float((rho["weight"] + 3).abs().mean())
        assert float((update.posterior.points["bias"]).abs().max()) == pytest.approx(
            1e-2, rel=1e-2
        )  # Adam's first step
    assert moved[1e-1] == pytest.approx(10 * moved[1e-2], rel=1e-2)


@pytest.mark.parametrize("kind", ["flipout", "local", "sample", "dropout"])
def test_noisy_networks_have_the_same_distribution(make: MakeCohort, kind: str):
    torch.manual_seed(0)
    model = fnn.build("mlp", kind=kind, classes=10, in_channels=1, input_shape=(1, 8, 8), width=8, sigma=0.3)
    shards = [np.arange(32)] * 120
    found = []
    for lanes in (1, 120):
        work = [replace(a, client=c, seed=c) for c, a in enumerate(assign(start_of(model), 120, steps=1, divisor=1e9))]
        updates = train(make(model, shards, lanes, Local(batch_size=32, optimizer="sgd", momentum=0.0)), work)
        found.append(np.array([updates[0, c].metrics["nll"] for c in range(120)]))
    plain, stacked = found
    assert plain.std() > 1e-3
    assert len(np.unique(stacked)) > 100  # every lane draws its own noise
    standard_error = math.hypot(plain.std(), stacked.std()) / math.sqrt(120)
    assert abs(plain.mean() - stacked.mean()) < 4 * standard_error
    assert 0.7 < plain.std() / stacked.std() < 1.4


def test_several_draws_average_the_loss(examples: Examples, transform: Transform):
    torch.manual_seed(0)
    model = fnn.build("mlp", kind="flipout", classes=10, in_channels=1, input_shape=(1, 8, 8), width=8, sigma=0.3)
    spread = {}
    still = replace(transform, augmentation=None)
    for samples in (1, 16):
        for lanes in (1, 60):
            shards = [np.arange(16)] * 60
            cohort = LocalCohort(model, examples, shards, still, Local(batch_size=16), Engine("cpu", lanes), samples)
            updates = train(cohort, assign(start_of(model), 60, steps=1))
            spread[samples, lanes] = np.std([u.metrics["nll"] for u in updates.values()])
    for lanes in (1, 60):
        assert 2.5 < spread[1, lanes] / spread[16, lanes] < 6.5  # the spread of a mean of 16 is a quarter


def test_one_client_does_not_see_another(make: MakeCohort):
    """A client's result does not depend on who else is on the lanes: NaN beside it, other sizes, other starts."""
    model = norm_net()
    work = assign(start_of(model), 6)
    reference = train(make(model, split(UNEQUAL), 6), work)
    poisoned = to_posterior({n: t * math.nan if t.is_floating_point() else t for n, t in model.state_dict().items()})
    mixed = [replace(a, start=poisoned) if a.client == 5 else a for a in work]
    updates = train(make(model, split(UNEQUAL), 3), mixed)
    assert math.isnan(updates[0, 5].metrics["loss"])
    for client in range(5):
        assert distance(updates[0, client].posterior, reference[0, client].posterior) < 1e-4


def test_multi_run_launch_equals_runs_one_by_one(make: MakeCohort):
    starts = [start_of(norm_net(seed)) for seed in (1, 2, 3)]
    shards = [split([20, 9, 50]), split([7, 60]), split([33, 2, 1, 18])]
    model = norm_net()

    def work(run: int, as_run: int):
        return [
            replace(a, run=as_run, seed=run, learning_rate=(1e-2, 2e-2, 5e-3)[run], round=4)
            for a in assign(starts[run], len(shards[run]))
        ]

    together = train(make(model, shards, 5), [a for run in range(3) for a in work(run, run)])
    assert len(together) == 9
    for run in range(3):
        alone = train(make(model, shards[run], 1), work(run, 0))
        for (_, client), update in alone.items():
            assert distance(update.posterior, together[run, client].posterior) < 1e-4


def test_statistics(make: MakeCohort):
    model = norm_net()
    cohort: LocalCohort = make(model, split(UNEQUAL), 3)
    train(cohort, assign(start_of(model), 6))
    s = cohort.statistics()
    steps = sum(2 * -(-n // 16) for n in UNEQUAL)
    assert s["lanes"] == 3
    assert s["real_lane_steps"] == s["lane_steps"] == steps
    assert s["occupancy"] == 1.0
    assert s["steps"] < steps
    assert s["seconds"] > 0


def test_auto_chooses_once_and_keeps_it(make: MakeCohort):
    model = norm_net()
    cohort = make(model, split(UNEQUAL), 0)
    assert cohort.lanes == 0
    work = assign(start_of(model), 6)
    chosen = cohort.resolve(work)
    assert chosen in (1, 6)
    updates = train(cohort, work)
    assert cohort.lanes == cohort.statistics()["lanes"] == chosen
    again = train(make(model, split(UNEQUAL), chosen), work)  # measuring left no trace
    for key, update in updates.items():
        assert update.posterior.same_bits(again[key].posterior)
    resumed = make(model, split(UNEQUAL), 0)
    resumed.restore({"lanes": 4, "optimizers": {}})
    assert resumed.lanes == 4
