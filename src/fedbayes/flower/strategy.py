"""``FusionStrategy``: our fusion inside somebody else's Flower app.

Their apps send a PyTorch state dict as an ``ArrayRecord`` and the number of examples as a metric, as every Flower
tutorial does. The strategy reads means and scales out of it by name, fuses Gaussians by a rule, everything else by
weighted mean, and sends the same record back.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from ..atomic import not_written
from ..errors import ConfigError, FedBayesError, PosteriorError, RunError, nearest
from ..fusion import Accumulator, client_weights, get_rule, get_weighting
from ..posterior import Gaussian, Posterior, Refusal, check

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

    A client whose answer is unfit (NaN, other tensors or shapes, no positive variance, no number of examples) is refused
    by name and the others are fused. With ``checkpoint=FILE`` the global model is saved after each round, and ``start`` continues from it. All
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
        self._types: dict[str, torch.dtype] = {}  # of the model's tensors, in their order
        self._done = 0

    def summary(self) -> None:
        """Log what will be done."""
        log.info("\t├──> Fusion: %s, weights: %s", self.rule.name, self.weighting.name)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global model; remember it as the previous posterior."""
        self._previous = self._expect(arrays)
        return super().configure_train(server_round + self._done, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for evaluations, their round counted on from a checkpoint's as the training's is."""
        return super().configure_evaluate(server_round + self._done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fuse the clients' posteriors, in an order that does not depend on who answered first."""
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)  # Flower stops at one odd reply
        previous = self._previous
        if not valid or previous is None:
            return None, None
        refused: list[Refusal] = []
        held: dict[int | str, Posterior] = {}
        messages = _by_client(valid)
        for client, message in messages.items():
            try:
                held[client] = self._read(message, client, previous)
            except Refusal as refusal:
                refused.append(refusal)
        accumulator = Accumulator(self.rule, reference=previous, previous=previous)
        sizes = {c: _examples(messages[c], self.weighted_by_key) for c in held}
        weights = client_weights(self.weighting, sizes, held, previous) if held else {}  # type: ignore[arg-type]
        for client, posterior in held.items():
            try:
                accumulator.absorb(posterior, weights[client], client)
            except Refusal as refusal:
                refused.append(refusal)
        for refusal in refused:
            log.warning("round %d: %s", server_round + self._done, refusal)
        self.record = {"refused": [{"client": r.client, "tensor": r.tensor, "reason": r.reason} for r in refused]}
        if not any(accumulator.weights.values()):
            return None, None
        fused = accumulator.conclude()
        self.record = {**fused.record, **self.record}
        arrays = self.arrays(fused.posterior)
        if self.checkpoint is not None:
            fused.posterior.save(self.checkpoint, {"round": str(server_round + self._done)})
        return arrays, self._metrics([messages[c].content for c in accumulator.weights])

    def _metrics(self, used: Sequence[RecordDict]) -> MetricRecord | None:
        """Average the clients' metrics, where all report the same ones."""
        names = {frozenset((k, isinstance(v, list) and len(v)) for k, v in _metrics_of(r).items()) for r in used}
        if len(names) > 1:
            log.warning("the clients report different metrics; they are not averaged.")
            return None
        return self.train_metrics_aggr_fn(list(used), self.weighted_by_key)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds; with a checkpoint, those that are left, counted on from where it stopped."""
        if self.checkpoint is not None:
            try:
                self.checkpoint.parent.mkdir(parents=True, exist_ok=True)  # missed now rather than after a round
            except OSError as error:
                raise not_written(self.checkpoint, error) from None
        if self.checkpoint is not None and self.checkpoint.exists():
            saved = Posterior.load(self.checkpoint)
            self._refuse_other_model(saved, self._expect(initial_arrays))
            self._done = int(saved.metadata.get("round", "0"))
            initial_arrays = self.arrays(saved)
            log.info("Continuing after round %d (%s)", self._done, self.checkpoint)
        evaluate = kwargs.get("evaluate_fn")
        if evaluate is not None and self._done:
            kwargs["evaluate_fn"] = lambda round, arrays: evaluate(round + self._done, arrays)
        result = super().start(grid, initial_arrays, max(0, num_rounds - self._done), *args, **kwargs)
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {round + self._done: found for round, found in getattr(result, name).items()})
        if self._done and not len(result.arrays):
            result.arrays = initial_arrays  # every round was done before
        return result

    def _refuse_other_model(self, saved: Posterior, expected: Posterior) -> None:
        there, here = _shapes(saved), _shapes(expected)
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise RunError(
                    f"{self.checkpoint} holds another model: '{name}' is {there.get(name, 'absent')} there and "
                    f"{here.get(name, 'absent')} here; name another checkpoint or remove it."
                )

    # -- state dict <-> posterior --------------------------------------------------------------------------------

    def _expect(self, arrays: ArrayRecord) -> Posterior:
        """Remember the order and types of the model's tensors; return them as a posterior."""
        self._types = {n: torch.from_numpy(np.empty(0, a.dtype)).dtype for n, a in arrays.items()}
        return self.posterior(arrays)

    def posterior(self, arrays: ArrayRecord) -> Posterior:
        """Read a state dict as a posterior; its Gaussians are float64, as the square of a small sigma needs."""
        tensors = {n: torch.from_numpy(a.numpy().copy()) for n, a in arrays.items()}
        gaussians, points = {}, {}
        scales = {n: s for n in tensors if (s := self.scale_of(n)) in tensors and s != n}
        if not scales and any(self._stem(n, self.scale) for n in tensors):
            raise ConfigError(
                f"the model has scales named '{self.scale}' but no means named '{self.mean}' to go with them."
            )
        for name, tensor in tensors.items():
            if name in scales:
                gaussians[name] = Gaussian(tensor.double(), self.form.to_variance(tensors[scales[name]].double()))
            elif name not in scales.values():
                points[name] = tensor
        return Posterior(gaussians, points)

    def arrays(self, posterior: Posterior) -> ArrayRecord:
        """Write a posterior as the state dict it was read from, in its order and types."""
        tensors = dict(posterior.points)
        for name, g in posterior.gaussians.items():
            tensors[name] = g.mean
            tensors[self.scale_of(name)] = self.form.from_variance(g.variance.double())
        types = self._types or {n: tensors[n].dtype for n in sorted(tensors)}
        return ArrayRecord({n: Array(tensors[n].to(dtype).cpu().numpy()) for n, dtype in types.items()})

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

    def _read(self, message: Message, client: int | str, previous: Posterior) -> Posterior:
        """Read and check one client's answer; whatever is wrong with it is a ``Refusal`` that names the client."""
        try:
            records = list(message.content.array_records.values())
            if len(records) != 1:
                raise PosteriorError(f"its answer holds {len(records)} array records, not one")
            posterior = self.posterior(records[0])
            _examples(message, self.weighted_by_key)
        except (FedBayesError, ValueError, TypeError, OSError, EOFError) as error:
            raise Refusal(client, "", str(error).rstrip(".")) from None
        check(posterior, previous, client=client, allow_zero_variance=self.rule.allows_zero_variance)
        return posterior


def _by_client(messages: Sequence[Message]) -> dict[int | str, Message]:
    """Replies by client, in an order of their own; nodes that report one and the same number are told apart by theirs."""
    claims = Counter(map(_identity, messages))
    named = {
        (i if claims[i] == 1 else f"{i} (node {m.metadata.src_node_id})"): m for m in messages for i in [_identity(m)]
    }
    return {client: named[client] for client in sorted(named, key=str)}


def _identity(message: Message) -> int:
    """A client's own number where it reports one (partition-id), else the node's, which is random."""
    for record in message.content.metric_records.values():
        number = record.get("partition-id")
        if isinstance(number, int | float) and float(number).is_integer():
            return int(number)
    return message.metadata.src_node_id


def _examples(message: Message, key: str) -> float:
    value = _metrics_of(message.content).get(key)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise PosteriorError(f"its '{key}' is {value!r}, not a number above 0")
    return value


def _metrics_of(content: RecordDict) -> Mapping[str, Any]:
    return next(iter(content.metric_records.values()), {})


def _shapes(posterior: Posterior) -> dict[str, str]:
    gaussians = {n: f"a Gaussian {tuple(g.mean.shape)}" for n, g in posterior.gaussians.items()}
    return gaussians | {n: f"a point {tuple(t.shape)}" for n, t in posterior.points.items()}
