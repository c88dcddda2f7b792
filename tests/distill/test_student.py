"""Pseudo-labels, schedules, stochastic weight averaging, and distillation where the answer is known."""

import math

import pytest
import torch
from torch import nn

from fedbayes.distill import (
    RunningAverage,
    distillation_loss,
    learning_rate_at,
    pseudo_labels,
    refresh_batchnorm,
    sharpen,
    takes_snapshot,
    train_student,
)
from fedbayes.errors import ConfigError
from fedbayes.experiment import Distill

CPU = torch.device("cpu")


def identity(x, *, client=None, offsets=None, flips=None):
    return x


def test_pseudo_labels_average_members_and_their_samples():
    p = torch.rand(4, 3, 5, 2).softmax(-1)
    by_hand = torch.stack([p[r, m] for r in range(4) for m in range(3)]).mean(0)
    torch.testing.assert_close(pseudo_labels(p), by_hand)


def test_sharpening_with_half_a_temperature_squares_and_renormalises():
    p = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
    want = p**2 / (p**2).sum(-1, keepdim=True)
    torch.testing.assert_close(sharpen(p, 0.5), want, atol=1e-12, rtol=0)
    assert sharpen(p, 1.0) is p
    assert float(sharpen(p, 0.01)[0, 0]) == pytest.approx(1.0)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"distill\.sharpen"):
        sharpen(torch.ones(1, 2) / 2, 0.0)


def test_the_loss_is_the_kl_divergence_and_its_reading():
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.1, 0.9]])
    logits = torch.randn(3, 2)
    p = logits.softmax(-1)
    kl = [sum(float(t * (t / q).log()) if t > 0 else 0.0 for t, q in zip(ts, qs)) for ts, qs in zip(target, p)]
    ours = distillation_loss(logits, target, torch.tensor([1.0, 1.0, 0.0]), "batch")
    assert float(ours) == pytest.approx((kl[0] + kl[1]) / 2, rel=1e-5)
    halved = distillation_loss(logits, target, torch.tensor([1.0, 1.0, 0.0]), "batch-classes")
    assert float(halved) == pytest.approx(float(ours) / 2, rel=1e-6)


def test_cyclical_schedule_falls_linearly_and_snapshots_at_the_bottom():
    s = Distill(swa="cyclical", swa_start=4, swa_cycle=5, learning_rate=1.0, learning_rate_min=0.2)
    assert [learning_rate_at(i, s) for i in range(4)] == [1.0] * 4
    assert [round(learning_rate_at(i, s), 6) for i in range(4, 10)] == [1.0, 0.8, 0.6, 0.4, 0.2, 1.0]
    assert [i for i in range(20) if takes_snapshot(i, s)] == [8, 13, 18]
    assert all(math.isclose(learning_rate_at(i, s), 0.2) for i in (8, 13, 18))


def test_constant_schedule_takes_43_snapshots_of_the_released_settings():
    s = Distill(swa="constant", swa_start=500, swa_cycle=25, epochs=20, batch_size=128)
    steps = 20 * math.ceil(10_000 / 128)
    assert steps == 1580
    assert sum(takes_snapshot(i, s) for i in range(steps)) == 43
    assert {learning_rate_at(i, s) for i in range(steps)} == {s.learning_rate}


def test_running_average_is_the_mean():
    snapshots = [{"w": torch.randn(3, generator=torch.Generator().manual_seed(i))} for i in range(7)]
    average = RunningAverage()
    for s in snapshots:
        average.absorb(s)
    want = torch.stack([s["w"].double() for s in snapshots]).mean(0)
    torch.testing.assert_close(average.mean()["w"], want, rtol=1e-12, atol=0)


def test_a_schedule_without_a_snapshot_is_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="would average no snapshot"):
        train_student(net, net.state_dict(), torch.randn(4, 2), torch.full((4, 2), 0.5), identity, Distill(), (0,), CPU)


@pytest.fixture
def convex():
    """One-hot inputs and a linear softmax: convex, and any prediction per input can be represented."""
    n, c = 6, 3
    members = torch.stack([torch.randn(n, c, generator=torch.Generator().manual_seed(i)) * 2 for i in range(5)])
    targets = members.softmax(-1).mean(0)
    return nn.Linear(n, c, bias=False), torch.eye(n), targets


@pytest.mark.parametrize("swa", ["none", "constant", "cyclical"])
def test_distillation_matches_the_ensemble_where_it_can(convex, swa):
    net, inputs, targets = convex
    settings = Distill(
        swa=swa, epochs=1500, batch_size=4, learning_rate=0.6, learning_rate_min=0.3, swa_start=2000, swa_cycle=20, weight_decay=0.0
    )  # fmt: skip
    state, record = train_student(net, net.state_dict(), inputs, targets, identity, settings, (0,), CPU)
    predicted = torch.softmax(inputs @ state["weight"].T, -1)
    torch.testing.assert_close(predicted, targets, atol=2e-3, rtol=0)
    assert record.last_loss < record.first_loss / 100
    assert record.snapshots == (0 if swa == "none" else 50)


def test_the_network_passed_in_is_untouched_and_runs_repeat(convex):
    net, inputs, targets = convex
    before = net.weight.detach().clone()
    settings = Distill(swa="none", epochs=3, batch_size=4)
    one, _ = train_student(net, net.state_dict(), inputs, targets, identity, settings, (1,), CPU)
    torch.manual_seed(123)
    two, _ = train_student(net, net.state_dict(), inputs, targets, identity, settings, (1,), CPU)
    assert torch.equal(one["weight"], two["weight"])
    assert torch.equal(net.weight, before)


def test_one_epoch_is_sgd_with_momentum_written_by_hand(convex):
    net, inputs, targets = convex
    settings = Distill(swa="none", epochs=2, batch_size=6, learning_rate=0.1, momentum=0.9, weight_decay=0.01)
    state, _ = train_student(net, net.state_dict(), inputs, targets, identity, settings, (0,), CPU)
    w, v = net.weight.detach().clone(), torch.zeros_like(net.weight)
    for _ in range(2):
        p = torch.softmax(inputs @ w.T, -1)
        grad = (p - targets).T @ inputs / 6 + 0.01 * w
        v = 0.9 * v + grad
        w = w - 0.1 * v
    torch.testing.assert_close(state["weight"], w, atol=1e-6, rtol=1e-5)


def test_refresh_measures_what_the_inputs_have():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    inputs = torch.randn(64, 3) * 3 + 1
    assert refresh_batchnorm(net, inputs, identity, 64) == 1
    hidden = net[0](inputs).detach()
    torch.testing.assert_close(net[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, hidden.var(0), rtol=1e-4, atol=1e-5)
    assert net[1].momentum == 0.1
    assert refresh_batchnorm(nn.Linear(2, 2), torch.randn(4, 2), identity, 2) == 0


def test_sigmas_are_not_trained():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2))
            self.weight_rho = nn.Parameter(torch.full((2, 2), -1.0))

        def forward(self, x):
            sigma = nn.functional.softplus(self.weight_rho)
            return x @ (self.weight + sigma * torch.randn(2, 2)).T

    net = Noisy()
    targets = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    state, _ = train_student(
        net,
        net.state_dict(),
        torch.eye(2),
        targets,
        identity,
        Distill(swa="none", epochs=5, learning_rate=0.1),
        (0,),
        CPU,
    )
    assert torch.equal(state["weight_rho"], torch.full((2, 2), -1.0))
    assert float(state["weight"].abs().max()) > 0
