"""Distillation as the round loop's step: called after fusing, it returns the student and what to log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..engine import predict
from ..errors import ConfigError
from ..experiment import Experiment
from ..posterior import Posterior
from . import check_unlabelled, distill, predictors
from .student import check_schedule


class RoundDistiller:
    """FedBE's step of a federation: holds what never changes between rounds and distils each round's clients.

    On rounds that are evaluated it also judges the predictors that distillation starts from, each under its own
    name in the ``model`` field: ``average`` (the fused model), ``1-ensemble`` (the clients) and ``ensemble`` (all
    members).
    """

    def __init__(self, model: nn.Module, unlabelled: Any, transform: Any, experiment: Experiment, judge: Any) -> None:
        if unlabelled is None or len(unlabelled.inputs) == 0:
            raise ConfigError(
                "distillation needs the server's inputs: set distill.fraction above 0, or name distill.data."
            )
        if judge is not None and "test" in judge.splits:
            check_unlabelled(unlabelled, judge.splits["test"])
        check_schedule(len(unlabelled.inputs), experiment.distill)
        self.model, self.unlabelled, self.transform = model, unlabelled, transform
        self.experiment = experiment
        self.judge: Any = judge

    def __call__(
        self,
        fused: Posterior,
        clients: Mapping[int, Posterior],
        weights: Mapping[int, float],
        previous: Posterior,
        round: int,
    ) -> tuple[Posterior, list[dict[str, Any]]]:
        """Return the distilled posterior and the round's ``distill`` and ``evaluation`` events."""
        e = self.experiment
        numbers = sorted(clients)
        held = [clients[c] for c in numbers]
        made = distill(
            self.model, fused, held, [weights[c] for c in numbers], previous, self.unlabelled, self.transform,
            e.distill, (e.seed, "distill", round), e.engine,
        )  # fmt: skip
        events: list[dict[str, Any]] = [{"kind": "distill", "round": round, **made.record}]
        if self.judge is not None and (round % e.evaluation.every == 0 or round == e.rounds):
            for name, members in predictors(fused, held, made).items():
                probabilities = {split: self._probabilities(members, split, name, round) for split in self.judge.splits}
                events += self.judge.events(probabilities, round, name)
        return made.posterior, events

    def _probabilities(self, members: list[Posterior], split: str, name: str, round: int) -> Tensor:
        """Predictions (members x draws, N, C): each member counts once, as in the pseudo-labels."""
        e = self.experiment
        draws = self.judge.samples if name == "average" else e.distill.draws
        made = predict(
            self.model, members, self.judge.splits[split].inputs, self.transform, samples=draws,
            batch_size=e.evaluation.batch_size, draws=e.evaluation.draws,
            seed_address=(e.seed, "evaluate", round, split, name), engine=e.engine,
        )  # fmt: skip
        return made.flatten(0, 1)
