"""Distillation as the round loop's step: called after fusing, it returns the student and what to log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..engine import predict
from ..errors import ConfigError
from ..experiment import Experiment
from ..nn import posterior_of
from ..posterior import Posterior
from . import Taught, check_unlabelled, learned, predictors, resolve, teach
from .models import NO_POSTERIOR
from .student import Lesson, Training, check_schedule, train_student

Asked = tuple[Posterior, Mapping[int, Posterior], Mapping[int, float], Posterior, int]
"""A round to distil: fused posterior, clients' posteriors and weights by number, previous global posterior, round."""


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
        if experiment.distill.distribution == "posterior" and not posterior_of(model).gaussians:
            raise ConfigError(NO_POSTERIOR)  # the rule precision's variances are Adam's moments, not a posterior's
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
        return distil_together([(self, (fused, clients, weights, previous, round))])[0]

    @staticmethod
    def together(
        asked: Sequence[tuple[RoundDistiller, Asked]],
    ) -> list[tuple[Posterior, list[dict[str, Any]]]]:
        """Distil a round of several federations that share a launch (see ``distil_together``)."""
        return distil_together(asked)

    def teach(self, asked: Asked) -> tuple[Lesson, Taught]:
        """Return the student's lesson of a round, and the ensemble that gives it."""
        fused, clients, weights, previous, round = asked
        e, numbers = self.experiment, sorted(clients)
        return teach(
            self.model, fused, [clients[c] for c in numbers], [weights[c] for c in numbers], previous, self.unlabelled,
            self.transform, e.distill, (e.seed, "distill", round), e.engine,
        )  # fmt: skip

    def finish(
        self, asked: Asked, taught: Taught, student: tuple[Mapping[str, Tensor], Training]
    ) -> tuple[Posterior, list[dict[str, Any]]]:
        """Return the student as the global posterior, and the round's events."""
        fused, clients, _, _, round = asked
        e, held = self.experiment, [clients[c] for c in sorted(clients)]
        made = learned(fused, taught, student)
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


def distil_together(
    asked: Sequence[tuple[RoundDistiller, Asked]],
) -> list[tuple[Posterior, list[dict[str, Any]]]]:
    """Distil a round of several federations that share a launch; what each gets is what it would get alone.

    On a GPU with a captured step (``engine.compile``) their students are lanes of one step; elsewhere they are
    distilled one after the other.
    """
    first = asked[0][0]
    lessons = [d.teach(a) for d, a in asked]
    engine = first.experiment.engine
    device = resolve(engine)
    if engine.compile and device.type == "cuda":
        from .lanes import train_students

        students = train_students(first.model, [l for l, _ in lessons], first.transform, device, engine.precision)
    else:
        students = [
            train_student(d.model, l.state, l.inputs, l.targets, d.transform, l.settings, l.seed_address, device,
                          d.experiment.engine.precision)
            for (d, _), (l, _) in zip(asked, lessons, strict=True)
        ]  # fmt: skip
    return [d.finish(a, t, s) for (d, a), (_, t), s in zip(asked, lessons, students, strict=True)]
