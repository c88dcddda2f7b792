"""``FusionStrategy``: our fusion inside somebody else's Flower app.

Their apps send a PyTorch state dict as an ``ArrayRecord`` and the number of examples as a metric, as every Flower
tutorial does. The strategy reads means and scales out of it by name, fuses Gaussians by a rule, everything else by
weighted mean, and sends the same record back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from ..errors import ConfigError, PosteriorError, nearest
from ..fusion import Accumulator, client_weights, get_rule, get_weighting
from ..posterior import Gaussian, Posterior

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Scale:
    """How a library writes a Gaussian's width: to the variance and back, in float64."""

    to_variance: Callable[[Tensor], Tensor]
    from_variance: Callable[[Tensor], Tensor]


def _inverse_softplus(variance: Tensor) -> Tensor:
    sigma = variance.sqrt()
    return sigma + torch.log(-torch.expm1(-sigma))


SCALES = {
    "softplus": Scale(lambda t: torch.nn.functional.softplus(t).square(), _inverse_softplus),
    "log_sigma": Scale(lambda t: torch.exp(2 * t), lambda v: 0.5 * torch.log(v)),
    "log_variance": Scale(torch.exp, torch.log),
    "sigma": Scale(torch.square, torch.sqrt),
    "variance": Scale(lambda t: t, lambda v: v),
}
"""Parameterisations by name: ``softplus`` (sigma = log(1 + e^rho): FedBayes, bayesian-torch, BLiTZ), and the others."""


class FusionStrategy(FedAvg):
    """Flower's FedAvg with the averaging replaced by a fusion of posteriors.

    ``rule`` and ``weighting`` are names as in ``fedbayes rules``; ``options`` are the rule's own. ``mean`` and ``scale``
    say how a layer's two tensors are called, as patterns of the last part of their names in which ``*`` is the same
    text: FedBayes ``*`` and ``*_rho`` (the default), bayesian-torch ``mu_*`` and ``rho_*``, BLiTZ ``*_mu`` and ``*_rho``.
    ``parameterisation`` says what the scale tensor holds (see ``SCALES``). Tensors without a scale are points.

    A client whose tensors are unfit (NaN, wrong shape, no positive variance) is refused by name and the others are
    fused. With ``checkpoint=FILE`` the global model is saved after each round, and ``start`` continues from it. All
    other arguments are those of ``flwr.serverapp.strategy.FedAvg``.
    """

    def __init__(
        self,
        rule: str = "nwa",
        weighting: str = "size",
        *,
        mean: str = "*",
        scale: str = "*_rho",
        parameterisation: str = "softplus",
        options: Mapping[str, Any] | None = None,
        checkpoint: str | Path | None = None,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if parameterisation not in SCALES:
            raise ConfigError(
                f"parameterisation '{parameterisation}' is not known; {nearest(parameterisation, SCALES)}"
            )
        if mean.count("*") != 1 or scale.count("*") != 1 or mean == scale:
            raise ConfigError(f"mean='{mean}' and scale='{scale}' must differ and each hold one *.")
        self.rule = get_rule(rule, **(options or {}))
        self.weighting = get_weighting(weighting)
        self.mean, self.scale, self.form = mean, scale, SCALES[parameterisation]
        self.checkpoint = Path(checkpoint) if checkpoint is not None else None
        self.record: dict[str, Any] = {}
        """What the last fusion says of sigma, weights and refused clients."""
        self._previous: Posterior | None = None
        self._names: list[str] = []
        self._done = 0

    def summary(self) -> None:
        """Log what will be done."""
        log.info("\t├──> Fusion: %s, weights: %s", self.rule.name, self.weighting.name)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global model; remember it as the previous posterior."""
        self._names = list(arrays)
        self._previous = self.posterior(arrays)
        return super().configure_train(server_round + self._done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fuse the clients' posteriors, in an order that does not depend on who answered first."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        previous = self._previous
        if not valid or previous is None:
            return None, None
        replies_by_client = {_identity(m): m for m in sorted(valid, key=_identity)}
        accumulator = Accumulator(self.rule, reference=previous, previous=previous)
        weights = self._weights(replies_by_client, previous)
        used = []
        for client, message in replies_by_client.items():
            try:
                accumulator.absorb(self._read(message), weights[client], client)
                used.append(message.content)
            except PosteriorError as error:
                log.warning("round %d: %s", server_round + self._done, error)
        if not used:
            return None, None
        fused = accumulator.conclude()
        self.record = fused.record
        arrays = self.arrays(fused.posterior)
        if self.checkpoint is not None:
            fused.posterior.save(self.checkpoint, {"round": str(server_round + self._done)})
        return arrays, self.train_metrics_aggr_fn(used, self.weighted_by_key)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds; with a checkpoint, those that are left, counted on from where it stopped."""
        if self.checkpoint is not None and self.checkpoint.exists():
            saved = Posterior.load(self.checkpoint)
            self._done = int(saved.metadata.get("round", "0"))
            self._names = list(initial_arrays)
            initial_arrays = self.arrays(saved)
            log.info("Continuing after round %d (%s)", self._done, self.checkpoint)
        evaluate = kwargs.get("evaluate_fn")
        if evaluate is not None and self._done:
            kwargs["evaluate_fn"] = lambda round, arrays: evaluate(round + self._done, arrays)
        return super().start(grid, initial_arrays, max(0, num_rounds - self._done), *args, **kwargs)

    # -- state dict <-> posterior --------------------------------------------------------------------------------

    def posterior(self, arrays: ArrayRecord) -> Posterior:
        """Read a state dict as a posterior."""
        tensors = {n: torch.from_numpy(a.numpy().copy()) for n, a in arrays.items()}
        gaussians, points = {}, {}
        scales = {n: s for n in tensors if (s := self.scale_of(n)) in tensors and s != n}
        if not scales and any(self._stem(n, self.scale) for n in tensors):
            raise ConfigError(
                f"the model has scales named '{self.scale}' but no means named '{self.mean}' to go with them."
            )
        for name, tensor in tensors.items():
            if name in scales:
                wide = tensors[scales[name]].double()
                gaussians[name] = Gaussian(tensor, self.form.to_variance(wide).to(tensor.dtype))
            elif name not in scales.values():
                points[name] = tensor
        return Posterior(gaussians, points)

    def arrays(self, posterior: Posterior) -> ArrayRecord:
        """Write a posterior as the state dict it was read from, in its order."""
        tensors = dict(posterior.points)
        for name, g in posterior.gaussians.items():
            tensors[name] = g.mean
            tensors[self.scale_of(name)] = self.form.from_variance(g.variance.double()).to(g.mean.dtype)
        return ArrayRecord({n: Array(tensors[n].cpu().numpy()) for n in self._names or sorted(tensors)})

    def scale_of(self, name: str) -> str:
        """Name of the scale tensor that belongs to a mean tensor of this name (empty: it is no mean)."""
        stem = self._stem(name, self.mean)
        head, dot, _ = name.rpartition(".")
        return f"{head}{dot}{self.scale.replace('*', stem)}" if stem else ""

    @staticmethod
    def _stem(name: str, pattern: str) -> str:
        before, after = pattern.split("*")
        last = name.rpartition(".")[2]
        fits = last.startswith(before) and last.endswith(after) and len(last) > len(before) + len(after)
        return last[len(before) : len(last) - len(after)] if fits else ""

    def _read(self, message: Message) -> Posterior:
        return self.posterior(next(iter(message.content.array_records.values())))

    def _weights(self, replies: Mapping[Any, Message], previous: Posterior) -> dict[Any, float]:
        sizes = {c: _examples(m, self.weighted_by_key) for c, m in replies.items()}
        held = {c: self._read(m) for c, m in replies.items()} if self.weighting.uses_individuals else None
        return client_weights(self.weighting, sizes, held, previous)  # type: ignore[arg-type]


def _identity(message: Message) -> Any:
    """A client's own number where it reports one (partition-id), else the node's, which is random."""
    for record in message.content.metric_records.values():
        if "partition-id" in record:
            return int(record["partition-id"])  # type: ignore[arg-type]
    return message.metadata.src_node_id


def _examples(message: Message, key: str) -> int:
    return int(next(iter(message.content.metric_records.values()))[key])  # type: ignore[arg-type]
