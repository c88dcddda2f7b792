"""Networks that use one layer twice, under two names, or tie weights between layers: lanes and predictions are theirs."""

import torch
from torch import Tensor, nn

from fedbayes.engine import predict
from fedbayes.experiment import Engine
from fedbayes.nn import bayesianize

from .conftest import assign, distance, split, start_of, train


class Twice(nn.Module):
    """One block under two names, and a head whose weight is tied to the first layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.block = nn.Linear(64, 64)
        self.again = self.block
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.first.weight
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        return self.head(self.tied(torch.tanh(self.again(torch.tanh(self.block(x))))))


def test_lanes_equal_the_plain_loop(make):
    torch.manual_seed(0)
    model = Twice()
    shards, tasks = split([40, 20]), assign(start_of(model), 2, learning_rate=1e-3)
    plain, lanes = train(make(model, shards, 1), tasks), train(make(model, shards, 2), tasks)
    for key, update in plain.items():
        assert distance(update.posterior, lanes[key].posterior) < 1e-5
    assert not start_of(model).same_bits(plain[0, 0].posterior)


def test_predictions_are_those_of_the_posterior_given(examples, transform):
    torch.manual_seed(0)
    model = Twice()
    before = start_of(model)
    other = type(before)({}, {n: t + 0.1 for n, t in before.points.items()})
    made = predict(model, other, examples.inputs[:20], transform, samples=1, batch_size=7, engine=Engine("cpu", 1))
    with torch.no_grad():
        for p in {id(p): p for p in model.parameters()}.values():
            p.add_(0.1)
        expected = model(transform(examples.inputs[:20], client=-1)).softmax(-1)
    torch.testing.assert_close(made[0], expected, rtol=1e-5, atol=1e-6)
    assert start_of(model).same_bits(other) or distance(start_of(model), other) < 1e-6


def test_bayesian_shared_layers_train_alike_in_distribution(make):
    torch.manual_seed(0)
    model = bayesianize(Twice(), "flipout", sigma=1e-6)
    shards, tasks = split([32, 32]), assign(start_of(model), 2, learning_rate=1e-3, kl_weight=0.0)
    plain, lanes = train(make(model, shards, 1), tasks), train(make(model, shards, 2), tasks)
    for key, update in plain.items():  # with next to no noise the two must agree closely
        assert distance(update.posterior, lanes[key].posterior) < 5e-3
