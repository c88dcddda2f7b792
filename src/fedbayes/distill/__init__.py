"""FedBE (Chen & Chao 2021): a distribution over models, their ensemble, and its distillation into one global model.

The round loop calls :func:`distill` after fusing. The pieces are pure functions with their own tests:
:func:`draw` (a distribution over models), :func:`ensemble` (Algorithm 1's set of members),
:func:`pseudo_labels`, :func:`train_student` (SGD and stochastic weight averaging).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError, RunError
from ..experiment import Distill, Engine
from ..posterior import Gaussian, Posterior
from .labels import pseudo_labels, sharpen
from .models import Round, dirichlet_weights, distributions, draw, ensemble, gaussian_moments, register
from .student import (
    Lesson,
    RunningAverage,
    Training,
    distillation_loss,
    learning_rate_at,
    refresh_batchnorm,
    takes_snapshot,
    train_student,
)

__all__ = [
    "Distilled",
    "Lesson",
    "Round",
    "RunningAverage",
    "Taught",
    "Training",
    "check_unlabelled",
    "dirichlet_weights",
    "distill",
    "distillation_loss",
    "distributions",
    "draw",
    "ensemble",
    "gaussian_moments",
    "learned",
    "learning_rate_at",
    "predictors",
    "pseudo_labels",
    "refresh_batchnorm",
    "register",
    "sharpen",
    "takes_snapshot",
    "teach",
    "train_student",
]


@dataclass(frozen=True)
class Distilled:
    """What a distillation gives: the new global posterior, the ensemble's members, and a record for ``metrics.jsonl``."""

    posterior: Posterior
    ensemble_posteriors: tuple[Posterior, ...]
    record: Mapping[str, Any]


def distill(
    model: nn.Module,
    fused: Posterior,
    clients: Sequence[Posterior],
    weights: Sequence[float],
    previous: Posterior | None,
    unlabelled: Any,
    transform: Any,
    settings: Distill,
    seed_address: Sequence[int | str],
    engine: Engine | None = None,
) -> Distilled:
    """Replace the average by a student of the ensemble (FedBE, Algorithm 1, the server's part of one round).

    Args:
        model: the network, for its structure; its own values are not used or changed.
        fused: the average of this round; the student starts from it and keeps its sigmas.
        clients: the round's client models, in the order of ``weights`` (any positive scale).
        previous: last round's global model; only the released code's Gaussian needs it.
        unlabelled: the server's ``Examples``; labels are never read.
        transform: called as the round loop does, with ``client=-1``; inputs are not augmented.
        seed_address: e.g. ``(seed, "distill", round)``; models, shuffles and layer noise derive from it.
        engine: device and precision (default: CPU-or-CUDA as ``Engine()`` says).

    When: clients' data are unequal and the server has inputs of its own, labelled or not, from any similar domain.
    """
    engine = engine or Engine()
    lesson, made = teach(
        model, fused, clients, weights, previous, unlabelled, transform, settings, seed_address, engine
    )
    student = train_student(
        model, lesson.state, lesson.inputs, lesson.targets, transform, settings, seed_address, resolve(engine),
        engine.precision,
    )  # fmt: skip
    return learned(fused, made, student)


@dataclass(frozen=True)
class Taught:
    """What the ensemble says: its members, their predictions on the server's inputs, and a record for the log."""

    members: tuple[Posterior, ...]
    probabilities: Tensor
    record: Mapping[str, Any]


def teach(
    model: nn.Module,
    fused: Posterior,
    clients: Sequence[Posterior],
    weights: Sequence[float],
    previous: Posterior | None,
    unlabelled: Any,
    transform: Any,
    settings: Distill,
    seed_address: Sequence[int | str],
    engine: Engine,
) -> tuple[Lesson, Taught]:
    """Make the ensemble and its pseudo-labels: the first half of :func:`distill`, whose arguments these are.

    Returns the student's lesson and what the second half, :func:`learned`, needs beside it. When: several
    federations of one launch distil together (:func:`train_students`).
    """
    if len(clients) == 0:
        raise ConfigError("distillation needs at least one client model of the round.")
    round_ = Round(fused, clients, weights, previous, _buffers(model))
    members = ensemble(round_, settings, seed_address)
    probabilities = _predict(model, members, unlabelled.inputs, transform, settings, (*seed_address, "teach"), engine)
    targets = pseudo_labels(probabilities, settings.sharpen)
    if not bool(torch.isfinite(targets).all()):
        raise DataError(
            "the ensemble's predictions on the server's inputs are not finite; a client model has diverged."
        )
    known = model.state_dict().keys()
    state = {n: t for n, t in _to_state(fused).items() if n in known}  # an estimated variance is not the network's
    record = {
        "distribution": settings.distribution,
        "members": len(members),
        "examples": len(unlabelled.inputs),
        "swa": settings.swa,
        "teacher_entropy": float(-(torch.xlogy(targets, targets)).sum(-1).mean()),
        "disagreement": float((probabilities.mean(1).argmax(-1) != targets.argmax(-1)).float().mean()),
    }
    lesson = Lesson(state, unlabelled.inputs, targets, settings, tuple(seed_address))
    return lesson, Taught(tuple(members), probabilities, record)


def learned(fused: Posterior, taught: Taught, student: tuple[Mapping[str, Tensor], Training]) -> Distilled:
    """Return a trained student as the new global posterior: the second half of :func:`distill`."""
    state, training = student
    if not math.isfinite(training.last_loss):
        raise RunError("distillation has diverged: the student's loss is not finite; lower 'distill.learning_rate'.")
    return Distilled(_to_posterior(state, fused), taught.members, {**taught.record, **asdict(training)})


def predictors(
    fused: Posterior, clients: Sequence[Posterior], distilled: Distilled | None
) -> dict[str, list[Posterior]]:
    """Return the posteriors whose mean prediction each named predictor is; the names are an evaluation's ``model`` field.

    ``average`` is the fused model before distillation, ``1-ensemble`` the clients of the round, ``ensemble`` the
    whole set that taught the student.
    """
    named = {"average": [fused], "1-ensemble": list(clients)}
    if distilled is not None:
        named["ensemble"] = list(distilled.ensemble_posteriors)
    return named


def check_unlabelled(unlabelled: Any, train: Any) -> None:
    """Refuse server inputs that the network cannot read: other shape or type than the training inputs."""
    if len(unlabelled.inputs) == 0:
        raise DataError("the server holds no unlabelled inputs; set distill.data, or distill.fraction above 0.")
    have, want = tuple(unlabelled.inputs.shape[1:]), tuple(train.inputs.shape[1:])
    if have != want:
        raise DataError(
            f"distill.data: inputs have shape {have}, but the clients' have {want}; use inputs of that shape."
        )
    if unlabelled.inputs.dtype != train.inputs.dtype:
        raise DataError(
            f"distill.data: inputs are {unlabelled.inputs.dtype}, but the clients' are {train.inputs.dtype}; use one type."
        )


def _predict(model, members, inputs, transform, settings: Distill, seed_address, engine: Engine) -> Tensor:
    """Class probabilities of all members, run as lanes: (members, samples, N, classes)."""
    from ..engine import predict

    variational = any(m.gaussians for m in members)
    samples = settings.draws if variational or settings.draws > 1 else 1
    return predict(
        model, members, inputs, transform, samples=samples, batch_size=1000, draws="per_pass",
        seed_address=tuple(seed_address), engine=engine,
    )  # fmt: skip


def _to_state(posterior: Posterior) -> dict[str, Tensor]:
    from ..nn.state import from_posterior

    return from_posterior(posterior)


def _to_posterior(state: Mapping[str, Tensor], fused: Posterior) -> Posterior:
    """Full state back to a posterior in the devices and types of ``fused``; variances are the fused ones, bit for bit."""
    gaussians = {n: Gaussian(state[n].to(g.mean.device, g.mean.dtype), g.variance) for n, g in fused.gaussians.items()}
    points = {n: state[n].to(t.device, t.dtype) for n, t in fused.points.items()}
    return Posterior(gaussians, points)


def __getattr__(name: str) -> Any:
    if name == "RoundDistiller":  # needs the engine; the pure functions above do not
        from .step import RoundDistiller

        return RoundDistiller
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _buffers(model: nn.Module) -> frozenset[str]:
    """Names of the network's buffers: measured, not learned, so not sampled."""
    return frozenset(n for n, _ in model.named_buffers())


def resolve(engine: Engine) -> torch.device:
    """Return the device an engine distils on."""
    if engine.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(engine.device)
