"""Making an experiment ready: who holds what, the network, its first posterior; what cannot be is refused here."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from . import config, seeds
from .data import (
    Dataset,
    Examples,
    Holding,
    Transform,
    client_names,
    get_source,
    hold_out,
    load,
    load_inputs,
    make_transform,
    partition,
    split_validation,
    table,
)  # fmt: skip
from .data.partition import get_scheme
from .data.transform import get_augmentation
from .engine import resolve_device
from .engine.plan import count_steps
from .errors import ConfigError, DataError, FedBayesError, nearest
from .experiment import Experiment
from .federation import options
from .fusion import get_rule, get_weighting
from .nn import NETWORKS, Dropout, Variational, build, load_posterior, posterior_of
from .objective import layered_prior
from .posterior import Posterior


@dataclass(frozen=True)
class Setup:
    """An experiment made ready: who holds what, the network, its first posterior."""

    experiment: Experiment
    dataset: Dataset
    shards: list[np.ndarray]  # indices into dataset.train, one array a client
    validation: np.ndarray  # indices into dataset.train kept by the server
    server: np.ndarray  # likewise, for pre-training
    unlabelled: Examples | None  # the server's inputs for distillation
    model: nn.Module
    start: Posterior
    transform: Transform

    def splits(self) -> dict[str, Examples]:
        """Return what the server evaluates on."""
        found = {"test": self.dataset.test}
        if len(self.validation):
            found = {"validation": self.dataset.train.take(self.validation), **found}
        return found | {f"ood:{name}": examples for name, examples in self.dataset.ood.items()}

    def client_names(self) -> list[str]:
        """Return the natural names of the clients (hospitals, sites), or their numbers."""
        everyone = np.sort(np.concatenate(self.shards))
        if not len(everyone):  # nodes have brought their own data: the server knows their numbers alone
            return [f"client {i}" for i in range(len(self.shards))]
        return client_names(self.experiment.partition, _without_inputs(self.dataset.train, everyone))


def prepare(
    experiment: Experiment,
    *,
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
) -> Setup:
    """Load the data, share it out, build the network; every impossible request is refused here, before any work.

    ``dataset`` and ``model`` replace what the experiment names: your own arrays, your own ``nn.Module`` (made
    Bayesian beforehand with ``fedbayes.nn.bayesianize``, or left as it is).
    """
    _right_kinds(experiment, dataset, model)
    for given, named, argument in ((dataset, experiment.data.name, "dataset"), (model, experiment.model.name, "model")):
        if given is None and named.startswith("python:"):
            raise ConfigError(f"'{named}' was given in Python: give it again, with fedbayes.run(..., {argument}=...).")
    own = model is not None
    if dataset is not None:  # say so in config.toml: no later reader must take it for the set of that name
        experiment = _with(experiment, "data", name=f"python:{dataset.name}")
    if own:
        experiment = _with(experiment, "model", name=f"python:{type(model).__qualname__}")
    experiment = config.checked(experiment)
    check_names(experiment)
    if dataset is None:
        dataset = load(experiment.data, sonar=experiment.sonar, data_dir=data_dir, seed=experiment.seed)
    if not len(dataset.test):
        raise DataError(f"data set '{dataset.name}' has no test examples to judge the model on.")
    rest, validation, server, distilled = _server_shares(experiment, dataset)
    light = _without_inputs(dataset.train, rest)
    shards = [rest[p] for p in partition(experiment.partition, light, experiment.seed)]
    for shard in shards:  # refuses batches that would be padding for the most part
        count_steps(len(shard), experiment.local.batch_size, experiment.local.epochs, experiment.local.steps)
    if model is None:
        model = build_network(experiment, len(dataset.classes), dataset.input_shape)
    transform = make_transform(experiment.data, dataset.train, shards, dataset.test)
    start = posterior_of(model)
    draws = _fits(model, transform, dataset, start, experiment.local.batch_size)
    if own:
        experiment = _with(
            experiment, "model", kind=_kind(model, experiment.model.kind, draws or bool(start.gaussians))
        )
    # refuse patterns that match nothing before any work
    layered_prior(start, experiment.objective.prior_std, experiment.objective.prior_layers)
    if captures_moment(experiment):
        if start.gaussians:
            raise ConfigError(
                "the rule 'precision' puts Adam's second moment in the place of a variance, so it fuses point models: set "
                "model.kind to deterministic or dropout, or choose another rule."
            )
        start = with_variances(start, model)
    return Setup(
        experiment, dataset, shards, validation, server,
        _unlabelled(experiment, dataset, distilled, data_dir), model, start, transform,
    )  # fmt: skip


def _right_kinds(experiment: Any, dataset: Any, model: Any) -> None:
    """Refuse things of another kind than ``prepare`` takes: arrays for a data set, a class for a network."""
    for name, given, kind, way_out in (
        ("experiment", experiment, Experiment, "fedbayes.Experiment(...) makes one, config.read(...) reads one"),
        ("dataset", dataset, Dataset, "fedbayes.data.from_arrays(inputs, labels) makes one"),
        ("model", model, nn.Module, "an instance, not its class or a function"),
    ):
        if not isinstance(given, kind) and (given is not None or kind is Experiment):
            raise ConfigError(f"{name} must be of type {kind.__name__}, not {type(given).__name__}: {way_out}.")
    if model is not None and any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise ConfigError("the network has lazy layers without weights yet; pass one example through it first.")


def _fits(model: nn.Module, transform: Transform, dataset: Dataset, start: Posterior, batch_size: int) -> bool:
    """Pass one example through the network: a wrong shape is said here, in one sentence, not in the middle of a round.

    Returns whether the network draws: whether two passes differ.
    """
    probe = copy.deepcopy(model).eval()
    inputs = transform(dataset.test.inputs[:1].cpu(), client=-1)
    with torch.random.fork_rng(), torch.no_grad():
        try:
            load_posterior(probe, start)
            answer, again = probe(inputs), probe(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(
                f"the network does not take inputs of shape {dataset.input_shape} ({str(error).splitlines()[0]}); build it "
                f"for this shape{_tokens(model)}."
            ) from None
        try:
            if batch_size == 1:
                probe.train()(inputs)
        except ValueError as error:  # batch-norm of a single number
            raise ConfigError(
                f"'local.batch_size' = 1: the network cannot train on single examples ({error})."
            ) from None
    if tuple(getattr(answer, "shape", ())) != (1, len(dataset.classes)):
        raise ConfigError(
            f"the network answers one input with shape {tuple(getattr(answer, 'shape', ()))}; it must be (1, "
            f"{len(dataset.classes)}): one number for each of the {len(dataset.classes)} classes{_counted(dataset)}."
        )
    if bool((answer >= 0).all()) and abs(float(answer.sum()) - 1) < 1e-5:
        raise ConfigError(
            "the network answers with probabilities, as after a softmax; the loss takes its own softmax, so return what "
            "comes before (logits)."
        )
    return not torch.equal(answer, again)


def _tokens(model: nn.Module) -> str:
    """Say what a network of tokens must do: inputs reach it as floating-point numbers."""
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    return (
        " (tokens reach it as float32: call inputs.long(), with data.scale = none and data.mean = none)"
        if embeds
        else ""
    )


def _counted(dataset: Dataset) -> str:
    """Say it where numbered labels begin at 1 (or later): the classes before have no example."""
    first = int(torch.cat([dataset.train.labels.cpu(), dataset.test.labels.cpu()]).min())
    return f"; labels count from 0, and the smallest is {first}" if first > 0 else ""


def _without_inputs(train: Examples, positions: np.ndarray) -> Examples:
    """Return labels and columns alone: all a partition looks at, without a second copy of the images."""
    labels = train.labels.cpu()[torch.from_numpy(positions)]
    return Examples(torch.empty(len(positions), 0), labels, {n: v[positions] for n, v in train.columns.items()})


def with_variances(start: Posterior, model: nn.Module) -> Posterior:
    """Return a point model's posterior with its parameters as Gaussians of variance 1: what ``precision`` fuses."""
    parameters = {n for n, p in model.named_parameters() if n in start.points and p.requires_grad}
    gaussians = {n: (start.points[n], torch.ones_like(start.points[n])) for n in start.points if n in parameters}
    points = {n: t for n, t in start.points.items() if n not in parameters}
    return Posterior({**start.gaussians, **gaussians}, points)  # type: ignore[dict-item]


def _with(experiment: Experiment, section: str, **values: Any) -> Experiment:
    return dataclasses.replace(experiment, **{section: dataclasses.replace(getattr(experiment, section), **values)})


def _kind(model: nn.Module, stated: str, draws: bool) -> str:
    """Return the kind of a network that was given, as its layers tell; the stated one where they do not.

    Evaluation and report go by it: one pass of a deterministic network is enough, one of another is not.
    """
    kinds = {m.estimator for m in model.modules() if isinstance(m, Variational)}
    if not kinds and any(isinstance(m, Dropout) for m in model.modules()):
        kinds = {"dropout"}
    if not kinds and not draws:
        kinds = {"deterministic"}
    return stated if stated in kinds or not kinds else min(kinds)


def build_network(experiment: Experiment, classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Build the network an experiment names for inputs of this shape, with the initial weights of its seed."""
    m = experiment.model
    return build(
        m.name, m.kind, classes=classes, in_channels=input_shape[0], input_shape=input_shape, dropout=m.dropout,
        bayesian_bias=m.bayesian_bias, where=m.where, width=m.width, shortcut=m.shortcut, init=m.init, sigma=m.sigma,
        seed=experiment.seed,
    )  # fmt: skip


def _server_shares(e: Experiment, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split the training set: the clients' rest, the server's validation, pre-training and distillation parts."""
    train = dataset.train
    positions = {"_position": np.arange(len(train))}
    rest = Examples(torch.empty(len(train), 0), train.labels.cpu(), {**train.columns, **positions})
    strata = (e.partition.column,) if e.partition.scheme == "column" else ()
    rest, validation = split_validation(rest, e.data.validation, e.seed, columns=strata)
    share = len(train) / max(1, len(rest))
    rest, server = hold_out(rest, e.pretrain.fraction * share, e.seed, columns=strata)
    share = len(train) / max(1, len(rest))
    distil = e.distill.fraction * share if e.distill.enabled and not e.distill.data else 0.0
    rest, distilled = hold_out(rest, distil, seeds.derive(e.seed, "distil"), columns=strata)
    return tuple(part.columns["_position"] for part in (rest, validation, server, distilled))  # type: ignore[return-value]


def _unlabelled(e: Experiment, dataset: Dataset, held: np.ndarray, data_dir: Any) -> Examples | None:
    if not e.distill.enabled:
        return None
    if not e.distill.data:
        return dataset.train.take(held)
    return load_inputs(e.distill.data, dataset.train, sonar=e.sonar, data_dir=data_dir, seed=e.seed, limit=e.data.limit)


def captures_moment(experiment: Experiment) -> bool:
    """Whether clients must send Adam's second moment as a variance (rule ``precision``, Reyes 2021)."""
    return get_rule(experiment.fusion.rule, **options(experiment)).name == "precision"


def corrects_moment(experiment: Experiment) -> bool:
    """Whether that moment is divided by 1 - beta2^t first (option ``bias_correction`` of the rule)."""
    return bool(getattr(get_rule(experiment.fusion.rule, **options(experiment)), "bias_correction", True))


def about(setup: Setup) -> dict[str, Any]:
    """Return what the ``start`` event says of a run."""
    from . import __version__

    d = setup.dataset
    return {
        "name": setup.experiment.name,
        "version": __version__,
        "torch": torch.__version__,
        "device": str(resolve_device(setup.experiment.engine.device)),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "data": d.name,
        "clients": len(setup.shards),
        "train": int(sum(len(s) for s in setup.shards)),
        "validation": len(setup.validation),
        "test": len(d.test),
        "classes": list(d.classes),
        "parameters": int(sum(g.mean.numel() for g in setup.start.gaussians.values())
                          + sum(p.numel() for n, p in setup.model.named_parameters() if n in setup.start.points)),
    }  # fmt: skip


def holdings(setup: Setup) -> list[Holding]:
    """Return who holds what, a row a client."""
    d = setup.dataset
    return table(setup.shards, d.train.labels, d.classes, names=setup.client_names())


def partition_json(setup: Setup) -> dict[str, Any]:
    """Return the content of ``partition.json``."""
    clients = [
        {"id": row.client, "name": row.name, "examples": row.examples, "counts": list(row.counts)}
        for row in holdings(setup)
    ]
    return {"clients": clients, "classes": list(setup.dataset.classes)}


def check_names(experiment: Experiment, source: Callable[[str], str] | None = None) -> None:
    """Refuse names that nothing is registered under (rule, weighting, scheme, network, data set), before any work.

    ``source`` says where a key's value was read, for the sentence.
    """
    e = experiment
    for key, look_up in (
        ("fusion.rule", lambda: get_rule(e.fusion.rule)),
        ("fusion.options", lambda: get_rule(e.fusion.rule, **options(e))),
        ("fusion.weighting", lambda: get_weighting(e.fusion.weighting)),
        ("partition.scheme", lambda: get_scheme(e.partition.scheme)),
        ("model.name", lambda: ":" in e.model.name or _registered("network", e.model.name, NETWORKS)),
        ("data.name", lambda: e.data.name.startswith("python:") or get_source(e.data.name)),
        ("data.augment", lambda: get_augmentation(e.data.augment)),
        ("data.ood", lambda: not e.data.ood or get_source(e.data.ood)),
        ("distill.data", lambda: not e.distill.data or get_source(e.distill.data)),
    ):
        try:
            look_up()
        except FedBayesError as error:
            raise ConfigError(f"{f'{source(key)}: ' if source else ''}'{key}': {error}") from None


def _registered(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ConfigError(f"there is no {what} '{name}'; {nearest(name, known)}")


def share_a_launch(a: Setup, b: Setup) -> bool:
    """Whether two runs may train in one launch: same network, data, local training and engine.

    Seeds, partitions, rules, weightings, priors, KL scalings, learning rates and rounds may differ, and so may what
    the server keeps for itself (validation, pre-training, distillation).
    """

    def shape(s: Setup) -> Experiment:
        e = s.experiment
        return Experiment(
            data=dataclasses.replace(e.data, validation=0.0),
            model=dataclasses.replace(e.model, init="he", sigma=0.02),
            local=dataclasses.replace(e.local, learning_rate=1.0, epochs=1, epochs_max=0, steps=0),
            engine=e.engine,
            sonar=e.sonar,
            objective=dataclasses.replace(config.Experiment().objective, samples=e.objective.samples),
        )

    x, y = a.experiment, b.experiment
    plain = not x.local.keep_state and x.engine.lanes != 1
    alike = shape(a) == shape(b) and _moment(x) == _moment(y)
    return alike and plain and same_examples(a.dataset, b.dataset)


def _moment(e: Experiment) -> tuple[bool, bool]:
    return captures_moment(e), corrects_moment(e)


def same_examples(a: Dataset, b: Dataset) -> bool:
    """Whether two data sets hold the same training and test examples (seeds may draw limits or recordings differently)."""
    if a is b:
        return True
    pairs = [(a.train, b.train), (a.test, b.test)]
    return (a.name, a.classes) == (b.name, b.classes) and all(
        x.inputs.shape == y.inputs.shape and torch.equal(x.labels, y.labels) and torch.equal(x.inputs, y.inputs)
        for x, y in pairs
    )
