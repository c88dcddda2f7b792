"""The rival of ``versus_flower.py``: the same federated job as a Flower app, simulated with Ray, as a Flower user writes it.

Message API, two actors of one core and one thread each, data and network kept by an actor from message to message,
inputs made ready beforehand, nothing evaluated. ``FedAvg`` averages the deterministic network; the Flipout network is
fused by ``FusionStrategy`` (nwa), which is FedBayes' own way into somebody else's Flower app. The network and the KL are
the library's, the training loop is plain PyTorch.

Started by ``versus_flower.py``, which says when a round may begin and takes its seconds:
``python versus_flower_app.py JOB_FOLDER`` with ``job.json`` and ``data.npz`` in the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from functools import lru_cache
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from fedbayes import nn as fnn
from fedbayes.flower import FusionStrategy
from fedbayes.objective import gaussian_kl

FOLDER = "VERSUS_FLOWER_JOB"
"""Environment variable that names the job's folder: Ray's actors inherit it."""

client_app, server_app = ClientApp(), ServerApp()


@lru_cache(maxsize=1)
def job() -> dict[str, Any]:
    """Return the job's settings."""
    return json.loads((Path(os.environ[FOLDER]) / "job.json").read_text())


@lru_cache(maxsize=1)
def data() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return inputs, labels and each client's positions in them; read once by every actor."""
    arrays = np.load(Path(os.environ[FOLDER]) / "data.npz")
    shards = np.split(arrays["positions"], arrays["ends"][:-1])
    return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]), [torch.from_numpy(s) for s in shards]


@lru_cache(maxsize=1)
def network() -> nn.Module:
    """Return the network; made once by every process."""
    return fnn.build(job()["network"], kind=job()["kind"], classes=10, input_shape=tuple(data()[0].shape[1:]))


def train(model: nn.Module, x: Tensor, y: Tensor, divisor: float) -> float:
    """Train for the job's epochs and return the mean loss."""
    settings = job()
    parameters = dict(model.named_parameters())
    gaussian = [n for n in parameters if n + "_rho" in parameters]
    mean, variance = dict.fromkeys(gaussian, torch.zeros(())), dict.fromkeys(gaussian, torch.ones(()))
    optimizer = torch.optim.Adam(parameters.values(), lr=settings["learning_rate"])
    total, steps = 0.0, 0
    for _ in range(settings["epochs"]):
        for batch in torch.randperm(len(x)).split(settings["batch_size"]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            if gaussian:
                loss = loss + gaussian_kl(parameters, mean, variance) / divisor
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
    return total / steps


@client_app.train()
def on_train(message: Message, context: Context) -> Message:
    """Train one client from the global model and answer with its own."""
    torch.set_num_threads(1)
    x, y, shards = data()
    mine = shards[int(context.node_config["partition-id"])]
    model = network().train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(model, x[mine], y[mine], divisor=float(sum(len(s) for s in shards)))
    metrics = MetricRecord({"loss": loss, "num-examples": len(mine)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class Paced:
    """A strategy whose rounds wait for leave to begin and tell how long they took."""

    line: Connection
    begun = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Wait for leave, then go on as the strategy does."""
        self.line.recv()
        self.begun = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)  # type: ignore[misc]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Aggregate as the strategy does, then tell the seconds of the round and how many clients answered."""
        answers = list(replies)
        result = super().aggregate_train(server_round, answers)  # type: ignore[misc]
        self.line.send((time.perf_counter() - self.begun, sum(not m.has_error() for m in answers)))
        return result


class PacedFedAvg(Paced, FedAvg):
    """``FedAvg``, paced."""


class PacedFusion(Paced, FusionStrategy):
    """``FusionStrategy``, paced."""


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds; every client takes part in each."""
    clients = len(data()[2])
    settings: dict[str, Any] = {
        "fraction_evaluate": 0.0, "min_train_nodes": clients, "min_available_nodes": clients
    }  # fmt: skip
    deterministic = job()["kind"] == "deterministic"
    strategy: Any = PacedFedAvg(**settings) if deterministic else PacedFusion("nwa", **settings)
    with Client(str(Path(os.environ[FOLDER]) / "line")) as line:
        strategy.line = line
        strategy.start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=job()["rounds"])


def main() -> None:
    """Simulate on two cores, an actor on each."""
    os.environ[FOLDER] = sys.argv[1]
    import versus_flower_app as app  # so that Ray's actors import it by name and keep what it caches

    torch.set_num_threads(2)  # the server's: it works while the actors wait
    run_simulation(
        server_app=app.server_app,
        client_app=app.client_app,
        num_supernodes=job()["clients"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": job()["cores"], "_temp_dir": sys.argv[1] + "/ray", "log_to_driver": False},
        },
    )


if __name__ == "__main__":
    main()
