"""A complete federated Bayesian experiment with your own network and your own arrays, top to bottom.

    python examples/own_network_and_data.py

Five clients, unequal class mixes, real handwritten digits (any arrays will do). Each client learns a distribution
over the weights; the server fuses the five distributions; the result predicts and says how sure it is.
"""

import torch
from sklearn.datasets import load_digits  # your own data here
from torch import nn

import fedbayes
from fedbayes import config
from fedbayes.data import Dataset, Examples
from fedbayes.nn import bayesianize


class Network(nn.Module):
    """Any torch.nn.Module: it needs to know nothing of federations, lanes or distributions."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(16 * 4 * 4, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


def own_data() -> Dataset:
    """Wrap arrays: inputs (N, C, H, W) or (N, features), integer labels, names of the classes."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    train, test = slice(0, 1400), slice(1400, None)
    return Dataset(
        name="my digits",
        train=Examples(inputs[train], targets[train]),
        test=Examples(inputs[test], targets[test]),
        classes=tuple("0123456789"),
    )


experiment = config.override(
    fedbayes.Experiment(name="own", rounds=15),
    {
        "partition.scheme": "dirichlet", "partition.clients": 5, "partition.alpha": 0.5,
        "local.epochs": 3, "local.batch_size": 16, "local.learning_rate": 3e-3,
        "objective.kl_weight": 0.1, "fusion.rule": "nwa",
    },
)  # fmt: skip

torch.manual_seed(0)
network = bayesianize(Network(), "flipout")  # convolutions and linear layers get a distribution

result = fedbayes.run(experiment, dataset=own_data(), model=network)

test = result.metrics("test")
print(
    f"accuracy {test['accuracy']:.3f}, NLL {test['nll']:.3f}, ECE {test['ece']:.3f}, epistemic {test['epistemic']:.4f}"
)

prediction = result.predictor()(own_data().test.inputs[:5])
for label, sure, doubt in zip(prediction.names, prediction.confidence, prediction.epistemic):
    print(f"class {label}  probability {sure:.2f}  epistemic uncertainty {doubt:.4f}")
print(f"report: {result.path / 'report.html'}")
