"""The plain loop's steps against torch.optim, bit for bit."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fedbayes.engine.layout import Layout
from fedbayes.engine.optimizers import Rates
from fedbayes.engine.stepping import Stepper
from fedbayes.experiment import Local

LOCALS = [
    Local(optimizer="adam", learning_rate=0.01),
    Local(optimizer="adam", learning_rate=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    Local(optimizer="sgd", learning_rate=0.1),
    Local(optimizer="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01),
    Local(optimizer="sgd", learning_rate=0.1, momentum=0.9, nesterov=True),
]


def network():
    torch.manual_seed(1)
    shapes = {"a": (5, 3), "a_rho": (5, 3), "b": (4,), "c": (3, 2, 3, 3)}
    parameters = {n: nn.Parameter(torch.randn(s)) for n, s in shapes.items()}
    parameters["c"] = nn.Parameter(parameters["c"].detach().to(memory_format=torch.channels_last))
    return parameters


def theirs(local, parameters, rates):
    means = {"params": [p for n, p in parameters.items() if n != "a_rho"], "lr": rates.mean}
    groups = [means, {"params": [parameters["a_rho"]], "lr": rates.sigma}]
    if local.optimizer == "adam":
        return torch.optim.Adam(groups, betas=local.betas, eps=local.eps, weight_decay=local.weight_decay, fused=True)
    return torch.optim.SGD(
        groups, momentum=local.momentum, nesterov=local.nesterov, weight_decay=local.weight_decay, lr=rates.mean
    )


@pytest.mark.parametrize("local", LOCALS, ids=str)
def test_steps_have_the_bits_of_torchs_optimisers_also_after_their_state_was_kept(local):
    ours, reference, rates = network(), network(), Rates(local.learning_rate, 0.03)
    layout = Layout.of(ours)
    stepper, optimizer = Stepper(local, ours, rates), theirs(local, reference, rates)
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        if step == 3:  # another process goes on from what was kept
            kept = stepper.remember(layout)
            stepper = Stepper(local, ours, rates)
            stepper.recall(kept, layout)
        for one, other in zip(ours.values(), reference.values()):
            one.grad = torch.randn(one.shape, generator=generator).mul_(10.0 ** (step - 3))
            other.grad = one.grad.clone()
        stepper.step()
        optimizer.step()
        assert all(torch.equal(ours[n], reference[n]) for n in ours)
    for name, p in ours.items():
        for moment in stepper.moments:
            assert torch.equal(stepper.state[p][moment], optimizer.state[reference[name]][moment])


def test_training_does_not_load_torchs_compiler():
    """It takes a second of processor time: of every answer of a Flower node."""
    script = (
        "import sys\nfrom fedbayes import config, runner\n"
        "e = config.override(config.read('digits'), {'data.limit': 60, 'local.steps': 1, 'partition.clients': 1,\n"
        "    'engine.lanes': 1, 'engine.device': 'cpu', 'data.validation': 0.0})\n"
        "setup = runner.prepare(e)\ncohort = runner.local_cohort([setup])\n"
        "federation = runner.make_federation(setup, cohort, None)\n"
        "print(len(list(cohort.train(federation.begin()))), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "False"], done.stderr
