"""A Flower app with a Bayesian network in plain PyTorch; the one line that is ours is FusionStrategy."""

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from fedbayes.data import load_source
from fedbayes.flower import FusionStrategy


class BayesLinear(nn.Module):  # every weight is a Gaussian: mean `weight`, standard deviation softplus(`weight_rho`)
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (2 / inputs) ** 0.5)
        self.weight_rho = nn.Parameter(torch.full((outputs, inputs), -4.0))

    def forward(self, x):  # local reparameterisation: the noise of the output
        variance = x.square() @ F.softplus(self.weight_rho).square().T
        return x @ self.weight.T + variance.sqrt() * torch.randn_like(variance)

    def kl(self):
        sigma = F.softplus(self.weight_rho)
        return (0.5 * (sigma.square() + self.weight.square() - 1) - sigma.log()).sum()


client_app = ClientApp()
server_app = ServerApp()
digits = load_source("digits")
model = nn.Sequential(nn.Flatten(), BayesLinear(64, 64), nn.ReLU(), BayesLinear(64, 10))


@client_app.train()
def train(message, context):
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
    x, y = digits.train.inputs[part::parts] / 255.0, digits.train.labels[part::parts]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for batch in torch.randint(len(y), (100, 64)):
        loss = F.cross_entropy(model(x[batch]), y[batch]) + 5e-6 * (model[1].kl() + model[3].kl())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"loss": loss.item(), "num-examples": len(y), "partition-id": part})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def evaluate(round, arrays):
    model.load_state_dict(arrays.to_torch_state_dict())
    probabilities = sum(model(digits.test.inputs / 255.0).softmax(1) for _ in range(20)) / 20
    return MetricRecord({"accuracy": (probabilities.argmax(1) == digits.test.labels).float().mean().item()})


@server_app.main()
def main(grid, context):
    strategy = FusionStrategy(context.run_config["rule"], context.run_config["weighting"], fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(model.state_dict()), context.run_config["rounds"], evaluate_fn=evaluate)
