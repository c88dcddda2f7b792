"""The plain loop against a hand-written one; the cohort's protocol, memory and refusals."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes import nn as fnn
from fedbayes.cohort import Assignment
from fedbayes.data import Examples, Transform
from fedbayes.engine import LocalCohort, resolve_device
from fedbayes.engine.divergence import add_kl_gradient, divergence
from fedbayes.engine.optimizers import second_half
from fedbayes.errors import ConfigError, DataError, PosteriorError, RunError
from fedbayes.experiment import Engine, Local
from fedbayes.nn.state import to_posterior
from fedbayes.objective import gaussian_kl
from fedbayes.posterior import Posterior
from fedbayes.seeds import numpy_rng

from .conftest import MakeCohort, assign, distance, norm_net, split, start_of, train


def by_hand(model: nn.Module, examples: Examples, transform: Transform, shard: np.ndarray, a: Assignment, batch: int):
    """Train one client in the most literal way; return the model and Adam's second moments after every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=a.learning_rate)
    seconds = []
    for epoch in range(a.epochs):
        order = numpy_rng(a.seed, "order", a.round, a.client, epoch).permutation(shard)
        padded = -(-len(order) // batch) * batch
        numbers = transform.draw(numpy_rng(a.seed, "augment", a.round, a.client, epoch), padded)
        for begin in range(0, padded, batch):
            rows = [order[i % len(order)] for i in range(begin, begin + batch)]
            counts = sum(i < len(order) for i in range(begin, begin + batch))
            drawn = {k: torch.from_numpy(v[begin : begin + batch]) for k, v in numbers.items()}
            x = transform(examples.inputs[rows], client=a.client, **drawn)
            loss = F.cross_entropy(model(x)[:counts], examples.labels[rows][:counts])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append({n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in model.named_parameters()})
    return model, seconds


@pytest.mark.parametrize("size", [1, 5, 16, 40])
def test_the_plain_loop_is_the_obvious_one(make: MakeCohort, examples: Examples, transform: Transform, size: int):
    model, shard = norm_net(), np.arange(200, 200 + size)
    (work,) = assign(start_of(model), 1, epochs=3)
    update = train(make(model, [shard], 1), [work])[0, 0]
    expected, _ = by_hand(norm_net().train(), examples, transform, shard, work, 16)
    assert distance(update.posterior, start_of(expected)) < 1e-5


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("corrected", [True, False])
def test_the_second_moment_of_the_last_half_epoch(
    make: MakeCohort, examples: Examples, transform: Transform, lanes: int, corrected: bool
):
    model, sizes = norm_net(), [70, 3, 40]
    cohort = make(model, split(sizes), lanes, capture_moment=True, moment_bias_correction=corrected)
    updates = train(cohort, assign(start_of(model), 3))
    for client, shard in enumerate(split(sizes)):
        _, seconds = by_hand(norm_net().train(), examples, transform, shard, assign(start_of(model), 3)[client], 16)
        per_epoch = -(-len(shard) // 16)
        late = range(len(seconds) - math.ceil(per_epoch / 2), len(seconds))
        assert late.start == second_half(len(seconds), per_epoch)
        gaussians = updates[0, client].posterior.gaussians
        assert set(gaussians) == {n for n, _ in model.named_parameters()}
        for name, g in gaussians.items():
            scale = [1 - 0.999 ** (i + 1) if corrected else 1.0 for i in late]
            mean = sum(seconds[i][name] / s for i, s in zip(late, scale, strict=True)) / len(late)
            torch.testing.assert_close(g.variance, mean.clamp(min=1e-12), rtol=5e-3, atol=1e-9)
    weights = {k: replace(a, start=updates[0, k].posterior) for k, a in enumerate(assign(start_of(model), 3, round=2))}
    assert len(train(cohort, list(weights.values()))) == 3  # such a posterior can be trained on: from its means


def test_closed_form_kl_gradient_is_autograd_s():
    torch.manual_seed(0)
    for full in (False, True):
        mean = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
        rho = (torch.randn(3, 20, dtype=torch.float64) * 6 - 4).requires_grad_()
        prior_mean = torch.randn(3, 20, dtype=torch.float64) if full else 0.0
        prior_variance = torch.rand(3, 20 if full else 1, dtype=torch.float64) + 0.1
        weight = torch.tensor([[0.5], [1.0], [3.0]], dtype=torch.float64)
        values = [
            gaussian_kl({"w": mean[i], "w_rho": rho[i]}, {"w": prior_mean[i] if full else torch.zeros(())},
                        {"w": prior_variance[i]})
            for i in range(3)
        ]  # fmt: skip
        torch.testing.assert_close(divergence(mean, rho, prior_mean, prior_variance), torch.stack(values))
        expected = torch.autograd.grad((torch.stack(values)[:, None] * weight).sum(), [mean, rho])
        found = torch.ones(3, 40, dtype=torch.float64)
        value = add_kl_gradient(found, mean.detach(), rho.detach(), prior_mean, prior_variance, weight)
        torch.testing.assert_close(value, torch.stack(values).detach())
        torch.testing.assert_close(found, torch.cat(expected, 1) + 1)


@pytest.mark.parametrize("kind", ["flipout", "dropout"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_same_bits_again_whatever_happens_around_it(make: MakeCohort, kind: str, lanes: int):
    torch.manual_seed(0)
    model = fnn.build("mlp", kind=kind, classes=10, in_channels=1, input_shape=(1, 8, 8), width=8)
    work = assign(start_of(model), 6)
    shards = split([40, 1, 33, 5, 16, 64])
    first = train(make(model, shards, lanes), work)
    torch.manual_seed(99)
    cohort, second = make(model, shards, lanes), {}
    state = torch.get_rng_state()
    for update in cohort.train(work):
        assert torch.equal(torch.get_rng_state(), state)  # nothing drawn from the caller's generator
        torch.rand(7)
        state = torch.get_rng_state()
        second[update.run, update.client] = update
    assert first.keys() == second.keys()
    assert all(first[k].posterior.same_bits(second[k].posterior) for k in first)
    other = train(make(model, shards, lanes), [replace(a, round=2) for a in work])
    assert not first[0, 0].posterior.same_bits(other[0, 0].posterior)


def test_a_client_trains_alike_alone_and_in_company(make: MakeCohort):
    """One lane: what a node of a real federation computes, whoever else there is."""
    torch.manual_seed(0)
    model = fnn.build("mlp", kind="flipout", classes=10, in_channels=1, input_shape=(1, 8, 8), width=8)
    shards = split([20, 30, 10])
    work = assign(start_of(model), 3)
    together = train(make(model, shards, 1), work)
    for a in reversed(work):
        alone = train(make(model, shards, 1), [a])
        assert alone[0, a.client].posterior.same_bits(together[0, a.client].posterior)


def test_kept_optimisers_survive_a_restart(make: MakeCohort):
    model, shards = norm_net(), split([20, 33])
    for lanes, optimizer in ((1, "adam"), (2, "adam"), (1, "sgd"), (2, "sgd")):
        local = Local(batch_size=16, keep_state=True, optimizer=optimizer)  # type: ignore[arg-type]
        rounds = [assign(start_of(model), 2, round=r) for r in (1, 2, 3)]
        whole = make(model, shards, lanes, local)
        for work in rounds:
            expected = train(whole, work)
        half = make(model, shards, lanes, local)
        for work in rounds[:2]:
            train(half, work)
        resumed = make(model, shards, lanes, local)
        resumed.restore(half.state())
        found = train(resumed, rounds[2])
        for key, update in expected.items():
            assert update.posterior.same_bits(found[key].posterior)


def test_the_start_is_left_as_it_was(make: MakeCohort):
    model = norm_net()
    for lanes in (1, 2):
        start, before = start_of(model), start_of(model)
        updates = train(make(model, split([20, 33]), lanes), assign(start, 2))
        kept = Posterior(
            dict(updates[0, 0].posterior.gaussians), {n: t.clone() for n, t in updates[0, 0].posterior.points.items()}
        )
        assert start.same_bits(before)
        assert start_of(model).same_bits(before)
        train(make(model, split([20, 33]), lanes), assign(updates[0, 0].posterior, 2))
        assert updates[0, 0].posterior.same_bits(kept)


def test_bf16_is_close(make: MakeCohort, examples: Examples, transform: Transform):
    torch.manual_seed(0)
    model = fnn.build("mlp", kind="deterministic", classes=10, in_channels=1, input_shape=(1, 8, 8), width=16)
    work = assign(start_of(model), 4, learning_rate=1e-3)
    exact = train(make(model, split([32] * 4), 1), work)
    for lanes in (1, 4):
        cohort = LocalCohort(
            model, examples, split([32] * 4), transform, Local(batch_size=16), Engine("cpu", lanes, "bf16")
        )
        for key, update in train(cohort, work).items():
            gap = abs(update.metrics["nll"] - exact[key].metrics["nll"])
            assert 0 < gap < 0.02
            assert all(t.dtype == torch.float32 for t in update.posterior.points.values())


class Odd(nn.Module):
    """A user's module: a frozen parameter, a buffer it assigns anew, a parameter it does not use, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = torch.tanh(self.first(x.flatten(1) * self.frozen))
        return self.head(torch.tanh(self.second(x)))


def test_an_odd_module_of_the_user_s_own(make: MakeCohort):
    torch.manual_seed(0)
    model = Odd()
    local = Local(batch_size=16, weight_decay=0.1)
    work = assign(start_of(model), 3)
    plain, lanes = (
        train(make(model, split([40, 5, 17]), 1, local), work),
        train(make(model, split([40, 5, 17]), 2, local), work),
    )
    for key, update in plain.items():
        assert distance(update.posterior, lanes[key].posterior) < 1e-4
        assert float(update.posterior.points["calls"]) == update.metrics["steps"]
        assert torch.equal(update.posterior.points["frozen"], torch.ones(64))
        assert float(update.posterior.points["unused"][0]) < 1


def test_refusals(make: MakeCohort, examples: Examples, transform: Transform):
    model = norm_net()
    start = start_of(model)

    def refuse(
        error: type[Exception], words: str, work: Sequence[Assignment], lanes: int = 1, shards: object = None
    ) -> None:
        cohort = make(model, shards if shards is not None else split([20, 30]), lanes)
        with pytest.raises(error, match=words):
            list(cohort.train(work))

    for lanes in (1, 2):
        refuse(RunError, "client 2 does not exist", assign(start, 3), lanes)
        refuse(RunError, "holds the clients of 1 runs", assign(start, 2, run=1), lanes)
        refuse(DataError, "client 1 holds no examples", assign(start, 2), lanes, [np.arange(4), np.arange(0)])
        bad = to_posterior({n: t for n, t in model.state_dict().items() if n != "head.bias"})
        refuse(PosteriorError, "lacks 'head.bias'", assign(bad, 2), lanes)
        extra = to_posterior({**model.state_dict(), "heads.bias": torch.zeros(3)})
        refuse(PosteriorError, "'heads.bias'.*did you mean 'head.bias'", assign(extra, 2), lanes)
        shape = to_posterior({**model.state_dict(), "head.bias": torch.zeros(3)})
        refuse(PosteriorError, r"'head.bias' has shape \(3,\)", assign(shape, 2), lanes)
    for local, words in (
        (Local(batch_size=0), "batch_size is 0"),
        (replace(Local(), optimizer="adamw"), "did you mean 'adam'"),
    ):
        with pytest.raises(ConfigError, match=words):
            make(model, split([20]), 1, local)
    with pytest.raises(ConfigError, match="lanes is -1"):
        make(model, split([20]), -1)
    with pytest.raises(ConfigError, match="samples is 0"):
        LocalCohort(model, examples, split([20]), transform, Local(), Engine("cpu"), 0)
    with pytest.raises(ConfigError, match=r"second moment.*Adam"):
        make(model, split([20]), 1, Local(optimizer="sgd"), capture_moment=True)
    with pytest.raises(ConfigError, match="not a device"):
        resolve_device("gpu7x")
    assert list(make(model, split([20]), 1).train([])) == []


def test_the_engine_needs_torch_numpy_safetensors_alone():
    code = (
        "import sys, fedbayes.engine; print([m for m in ('tyro', 'flwr', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


class Recurrent(nn.Module):
    """An LSTM over the rows of the digits: torch has no batching rule for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


def test_a_network_that_cannot_run_as_lanes_gets_the_plain_loop(make: MakeCohort):
    torch.manual_seed(0)
    model = Recurrent()
    shards, tasks = split([30, 20, 10]), assign(start_of(model), 3)
    chosen, plain = make(model, shards, 0), make(model, shards, 1)
    updates = train(chosen, tasks)
    assert chosen.lanes == 1
    assert "the network cannot run as lanes (Batching rule" in chosen.statistics()["why"]
    for key, update in train(plain, tasks).items():
        assert distance(update.posterior, updates[key].posterior) < 1e-6
    with pytest.raises(ConfigError, match=r"cannot run as lanes .*lstm.*'engine\.lanes' to 1"):
        train(make(model, shards, 3), tasks)
