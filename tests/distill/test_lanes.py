"""Students and ensemble members as lanes: the plain loop, one after the other, is the reference."""

import dataclasses

import pytest
import torch

from fedbayes.distill import Lesson, train_student
from fedbayes.distill.lanes import train_students
from fedbayes.engine.predict import _Evaluator
from fedbayes.experiment import Distill, Engine
from fedbayes.nn import build, posterior_of
from fedbayes.nn.state import state_of

CPU = torch.device("cpu")
SWA = Distill(epochs=3, batch_size=8, swa_start=2, swa_cycle=3)


class Scale:
    """A transform: stored bytes to numbers around zero."""

    def __call__(self, raw, *, client=None, offsets=None, flips=None):
        return raw.float() / 128 - 1

    def to(self, device):
        return self


def lesson(network, settings, number, n=20, shape=(1, 8, 8)):
    noise = torch.Generator().manual_seed(number)
    inputs = torch.randint(0, 256, (n, *shape), generator=noise, dtype=torch.uint8)
    targets = torch.rand(n, 10, generator=noise).softmax(-1)
    state = {k: v.detach().clone() for k, v in state_of(network).items()}
    return Lesson(state, inputs, targets, settings, (number, "distill", 1))


VARIED = [
    SWA,
    dataclasses.replace(SWA, swa="none", momentum=0.5),
    dataclasses.replace(SWA, swa="constant", reduction="batch-classes", weight_decay=0.1),
    dataclasses.replace(SWA, refresh_batchnorm=False),
    dataclasses.replace(SWA, epochs=2),  # another shape: a launch of its own
]


@pytest.mark.parametrize(("name", "shape"), [("mlp", (1, 8, 8)), ("resnet20", (3, 8, 8))])
def test_every_lane_learns_what_the_plain_loop_learns(name, shape):
    networks = [
        build(name, "deterministic", classes=10, in_channels=shape[0], input_shape=shape, seed=i) for i in range(5)
    ]
    lessons = [lesson(n, s, i, shape=shape) for i, (n, s) in enumerate(zip(networks, VARIED, strict=True))]
    together = train_students(networks[0], lessons, Scale(), CPU)
    for one, (state, record) in zip(lessons, together, strict=True):
        want, wanted = train_student(
            networks[0], one.state, one.inputs, one.targets, Scale(), one.settings, one.seed_address, CPU
        )
        assert state.keys() == want.keys()
        for key, t in want.items():
            torch.testing.assert_close(state[key], t, atol=2e-4, rtol=2e-3, msg=lambda m, k=key: f"{k}: {m}")
        assert (record.steps, record.snapshots) == (wanted.steps, wanted.snapshots)
        assert record.last_loss == pytest.approx(wanted.last_loss, rel=1e-3)


def test_a_second_round_starts_afresh():
    """The step is kept from round to round; nothing of the last round may be left in it."""
    network = build("mlp", "deterministic", classes=10, in_channels=1, input_shape=(1, 8, 8), seed=0)
    one, two = lesson(network, SWA, 1), lesson(network, SWA, 2)
    first = train_students(network, [one, two], Scale(), CPU)
    train_students(network, [two, one], Scale(), CPU)
    again = train_students(network, [one, two], Scale(), CPU)
    for (a, _), (b, _) in zip(first, again, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_lanes_keep_the_sigmas_of_variational_students():
    network = build("mlp", "flipout", classes=10, in_channels=1, input_shape=(1, 8, 8), seed=0)
    lessons = [lesson(network, SWA, i) for i in range(2)]
    for one, (state, _) in zip(lessons, train_students(network, lessons, Scale(), CPU), strict=True):
        for key, t in one.state.items():
            assert torch.equal(state[key], t) == key.endswith("_rho"), key


@pytest.mark.parametrize("kind", ["deterministic", "flipout", "local"])
def test_members_as_lanes_predict_what_each_predicts_alone(kind):
    networks = [build("lenet", kind, classes=10, in_channels=1, input_shape=(1, 28, 28), seed=i) for i in range(4)]
    posteriors = [posterior_of(n) for n in networks]
    inputs = torch.randint(0, 256, (30, 1, 28, 28), dtype=torch.uint8)
    evaluator = _Evaluator(networks[0], Engine(device="cpu"), "per_pass", 1000)
    assert evaluator.lanes_possible
    together = evaluator.members(posteriors, inputs, Scale(), 2, (0, "teach"))
    alone = torch.stack([evaluator(p, inputs, Scale(), 2, (0, "teach", r)) for r, p in enumerate(posteriors)])
    assert together.shape == (4, 2, 30, 10)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_members_with_masks_or_noise_of_their_own_keep_their_addresses():
    network = build("mlp", "dropout", classes=10, in_channels=1, input_shape=(1, 8, 8), dropout=0.2, seed=0)
    assert not _Evaluator(network, Engine(device="cpu"), "per_pass", 100).lanes_possible
    noisy = build("mlp", "flipout", classes=10, in_channels=1, input_shape=(1, 8, 8), seed=0)
    assert not _Evaluator(noisy, Engine(device="cpu"), "per_example", 100).lanes_possible
