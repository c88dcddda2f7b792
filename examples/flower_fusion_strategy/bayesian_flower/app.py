"""A Flower app with a Bayesian network in plain PyTorch; the one line that is ours is FusionStrategy."""

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from fedbayes.data import load_source
from fedbayes.flower import FusionStrategy


class BayesLinear(nn.Module):
    """Every weight is a Gaussian: mean `weight`, standard deviation softplus(`weight_rho`)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (2 / inputs) ** 0.5)
        self.weight_rho = nn.Parameter(torch.full((outputs, inputs), -4.0))

    def forward(self, x):
        sigma = F.softplus(self.weight_rho)
        noise = torch.randn(len(x), self.weight.shape[0])  # local reparameterisation: the noise of the output
        return x @ self.weight.T + (x.square() @ sigma.square().T).sqrt() * noise

    def kl(self):
        sigma = F.softplus(self.weight_rho)
        return (0.5 * (sigma.square() + self.weight.square() - 1) - sigma.log()).sum()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), BayesLinear(64, 64), nn.ReLU(), BayesLinear(64, 10))


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message, context):
    model, part = network(), int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    digits = load_source("digits").train
    x, y = (t[part :: context.node_config["num-partitions"]] for t in (digits.inputs / 255.0, digits.labels))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(100):
        batch = torch.randint(len(y), (64,))
        kl = sum(layer.kl() for layer in model if isinstance(layer, BayesLinear))
        loss = F.cross_entropy(model(x[batch]), y[batch]) + 1e-2 * kl / len(digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"loss": loss.item(), "num-examples": len(y), "partition-id": part})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def evaluate(round, arrays):
    model, test = network(), load_source("digits").test
    model.load_state_dict(arrays.to_torch_state_dict())
    probabilities = torch.stack([model(test.inputs / 255.0).softmax(1) for _ in range(20)]).mean(0)
    return MetricRecord({"accuracy": (probabilities.argmax(1) == test.labels).float().mean().item()})


@server_app.main()
def main(grid, context):
    strategy = FusionStrategy(context.run_config["rule"], context.run_config["weighting"], fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(network().state_dict()), context.run_config["rounds"], evaluate_fn=evaluate)
