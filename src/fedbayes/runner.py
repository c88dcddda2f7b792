"""From an experiment to its result: prepare data, network and clients; run the federation; leave a run directory."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from . import config, seeds
from .cohort import Assignment, Cohort
from .data import (
    Dataset,
    Examples,
    Holding,
    Transform,
    client_names,
    get_source,
    hold_out,
    load,
    make_transform,
    partition,
    split_validation,
    table,
)  # fmt: skip
from .data.partition import SCHEMES
from .engine import LocalCohort, resolve_device
from .errors import ConfigError, RunError, nearest
from .evaluation import Evaluator
from .experiment import Experiment
from .federation import Event, Federation, options, run_together
from .fusion import get_rule, get_weighting
from .nn import NETWORKS, build, posterior_of
from .objective import kl_divisor
from .posterior import Posterior
from .rundir import RunDirectory, fresh_directory, with_lanes, write_atomically

if TYPE_CHECKING:
    from .predictor import Predictor

DEFAULT_ROOT = Path("runs")


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
        return client_names(self.experiment.partition, _without_inputs(self.dataset.train, everyone))


@dataclass(frozen=True)
class Result:
    """What a run gives back: its directory (None when nothing was written), final posterior, events and setup."""

    setup: Setup
    posterior: Posterior
    best: Posterior
    best_round: int
    events: list[Event]
    path: Path | None = None

    def predictor(self, device: str = "auto") -> Predictor:
        """Return what predicts with the best posterior (as ``fedbayes.load`` does from the run directory)."""
        from .nn import load_posterior
        from .predictor import Predictor, card_of

        s = self.setup
        network = load_posterior(copy.deepcopy(s.model), self.best)
        return Predictor(s.experiment, self.best, network, s.transform, card_of(s.dataset, s.model), device, self.path)

    def metrics(self, split: str = "test", model: str = "global") -> dict[str, float]:
        """Return the metrics of a split at the best round (chosen on validation; the last where there is none)."""
        return metrics_of(self.events, split, model)


def metrics_of(events: Sequence[Mapping[str, Any]], split: str = "test", model: str = "global") -> dict[str, float]:
    """Return a split's metrics at the best round named by the ``end`` event, or at the last evaluated round."""
    best = next((e["best_round"] for e in reversed(events) if e["kind"] == "end"), None)
    found = [e for e in events if e["kind"] == "evaluation" and e["split"] == split and e["model"] == model]
    at_best = [e for e in found if e["round"] == best]
    return dict((at_best or found)[-1]["metrics"]) if found else {}


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
    if dataset is not None:  # say so in config.toml: no later reader must take it for the set of that name
        experiment = _named(experiment, "data", f"python:{dataset.name}")
    if model is not None:
        experiment = _named(experiment, "model", f"python:{type(model).__qualname__}")
    check_names(experiment)
    if dataset is None:
        dataset = load(experiment.data, sonar=experiment.sonar, data_dir=data_dir, seed=experiment.seed)
    rest, validation, server, distilled = _server_shares(experiment, dataset)
    light = _without_inputs(dataset.train, rest)
    shards = [rest[p] for p in partition(experiment.partition, light, experiment.seed)]
    if model is None:
        model = build_network(experiment, len(dataset.classes), dataset.input_shape)
    transform = make_transform(experiment.data, dataset.train, shards, dataset.test)
    start = posterior_of(model)
    if captures_moment(experiment):
        start = with_variances(start, model)
    return Setup(
        experiment, dataset, shards, validation, server,
        _unlabelled(experiment, dataset, distilled, data_dir), model, start, transform,
    )  # fmt: skip


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


def _named(experiment: Experiment, section: str, name: str) -> Experiment:
    return dataclasses.replace(experiment, **{section: dataclasses.replace(getattr(experiment, section), name=name)})


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
    other = load(dataclasses.replace(e.data, name=e.distill.data, ood="", exclude_classes=(), limit=0, test_limit=0),
                 data_dir=data_dir, seed=e.seed)  # fmt: skip
    return other.unlabelled or other.train


# -- clients and federations -------------------------------------------------------------------------------------


def local_cohort(setups: Sequence[Setup]) -> LocalCohort:
    """Make the cohort that trains the clients of one run, or of several that share model and data, in this process."""
    first = setups[0]
    e = first.experiment
    return LocalCohort(
        first.model,
        first.dataset.train,
        [s.shards for s in setups],
        first.transform,
        e.local,
        e.engine,
        samples=e.objective.samples,
        capture_moment=captures_moment(e),
    )


def captures_moment(experiment: Experiment) -> bool:
    """Whether clients must send Adam's second moment as a variance (rule ``precision``, Reyes 2021)."""
    return get_rule(experiment.fusion.rule, **options(experiment)).name == "precision"


def make_federation(
    setup: Setup,
    cohort: Cohort,
    directory: RunDirectory | None,
    listeners: Sequence[Callable[[Event], None]] = (),
    run: int = 0,
) -> Federation:
    """Make the round loop of a setup over any cohort."""
    judge = Evaluator(setup.model, setup.splits(), setup.transform, setup.experiment)
    distiller = None
    if setup.experiment.distill.enabled:
        from .distill import RoundDistiller

        distiller = RoundDistiller(setup.model, setup.unlabelled, setup.transform, setup.experiment, judge)
    kind = Federation
    if setup.experiment.fusion.private or setup.experiment.privacy.clip > 0 or setup.experiment.privacy.noise > 0:
        from .privacy.federation import PrivateFederation as kind  # sums only, clipped and noised
    return kind(
        setup.experiment, setup.start, cohort,
        judge=judge, directory=directory, distiller=distiller, listeners=listeners, run=run,
    )  # fmt: skip


def pretrain(setup: Setup, listeners: Sequence[Callable[[Event], None]] = ()) -> Posterior:
    """Train on the server's own share before the first round, with early stopping (Fischer 2024, Table 4).

    Epoch by epoch; stops after ``patience`` epochs without a better validation accuracy and returns the best.
    """
    e = setup.experiment
    lone = dataclasses.replace(e, engine=dataclasses.replace(e.engine, lanes=1))
    server = dataclasses.replace(setup, experiment=lone, shards=[setup.server])
    cohort = LocalCohort(setup.model, setup.dataset.train, [setup.server], setup.transform,
                         dataclasses.replace(e.local, keep_state=True), lone.engine, samples=e.objective.samples)  # fmt: skip
    judge = Evaluator(setup.model, server.splits(), setup.transform, e)
    if "validation" not in judge.splits:
        raise ConfigError(
            "'pretrain.fraction' needs a validation set for early stopping: set 'data.validation' above 0."
        )
    judge.splits = {"validation": judge.splits["validation"]}
    best, best_accuracy, waited, posterior = setup.start, -math.inf, 0, setup.start
    size = len(setup.server)
    for epoch in range(1, e.pretrain.epochs + 1):
        task = Assignment(
            client=0, round=epoch, start=posterior, seed=seeds.derive(e.seed, "pretrain"),
            learning_rate=e.local.learning_rate, divisor=kl_divisor(e.objective.kl_scale, size, size, 1),
            kl_weight=e.objective.kl_weight, prior_std=e.objective.prior_std, l2=e.objective.l2,
        )  # fmt: skip
        posterior = next(iter(cohort.train([task]))).posterior
        metrics = judge(posterior, epoch, "pretrain")[0]["metrics"]
        for listener in listeners:
            listener({"kind": "pretrain", "epoch": epoch, "metrics": metrics})
        if metrics["accuracy"] > best_accuracy:
            best, best_accuracy, waited = posterior, metrics["accuracy"], 0
        else:
            waited += 1
            if waited >= e.pretrain.patience:
                break
    return best


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


def check_names(experiment: Experiment) -> None:
    """Refuse names that nothing is registered under (rule, weighting, scheme, network, data set), before any work."""
    get_rule(experiment.fusion.rule, **options(experiment))
    get_weighting(experiment.fusion.weighting)
    if experiment.partition.scheme not in SCHEMES:
        raise ConfigError(
            f"'partition.scheme' {experiment.partition.scheme!r} does not exist; "
            f"{nearest(experiment.partition.scheme, SCHEMES)}"
        )
    if ":" not in experiment.model.name and experiment.model.name not in NETWORKS:
        raise ConfigError(
            f"'model.name' {experiment.model.name!r} is no network; {nearest(experiment.model.name, NETWORKS)}"
        )
    if not experiment.data.name.startswith("python:"):
        get_source(experiment.data.name)


# -- running -----------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One run inside a shared launch: what to run, where, and whether to continue it."""

    setup: Setup
    path: Path | None = None
    resume: bool = False
    listeners: list[Callable[[Event], None]] = field(default_factory=list)


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    listeners: Sequence[Callable[[Event], None]] = (),
    report: bool = True,
    write: bool = True,
) -> Result:
    """Run one experiment and return its result.

    ``out`` is the run directory (default: a fresh one under ``runs/``); ``write=False`` writes nothing at all;
    ``resume=True`` continues the run that ``out`` holds. ``dataset`` and ``model`` are your own, see ``prepare``.
    """
    if resume and out is None:
        raise RunError("nothing to resume: name the run directory with --out (out=).")
    setup = prepare(experiment, data_dir=data_dir, dataset=dataset, model=model)
    path = None if not write else Path(out) if out is not None else fresh_directory(DEFAULT_ROOT, experiment.name)
    return run_setups([Launch(setup, path, resume, list(listeners))], report=report)[0]


def run_setups(launches: Sequence[Launch], *, report: bool = True) -> list[Result]:
    """Run several prepared experiments in one launch: their clients share the lanes, each keeps its own server.

    The runs must share network, data, local training and engine settings (``share_a_launch``).
    """
    cohort = local_cohort([launch.setup for launch in launches])
    return run_with(cohort, launches, report=report)


def run_with(cohort: Cohort, launches: Sequence[Launch], *, report: bool = True) -> list[Result]:
    """Run prepared experiments over a given cohort (lanes, or Flower's nodes) and leave their run directories."""
    directories: list[RunDirectory | None] = []
    try:
        for launch in launches:
            directories.append(
                RunDirectory(launch.path, launch.setup.experiment, resume=launch.resume) if launch.path else None
            )
        federations = [
            _start(launch, directory, cohort, i) for i, (launch, directory) in enumerate(zip(launches, directories))
        ]
        _write_lanes(cohort, federations)
        run_together(federations)
        for federation in federations:
            _finish(federation)
        results = [
            Result(launch.setup, f.posterior, f.best.posterior or f.posterior, f.best.round or f.round,
                   list(f.directory.events()) if f.directory else f.history, launch.path)
            for launch, f in zip(launches, federations)
        ]  # fmt: skip
    finally:
        for directory in directories:
            if directory is not None:
                directory.close()
    if report:
        for result in results:
            if result.path is not None:
                write_report(result.path)
    return results


def _write_lanes(cohort: Cohort, federations: Sequence[Federation]) -> None:
    """Resolve a lane count that was left open and write it into the configurations: noise depends on it."""
    if not isinstance(cohort, LocalCohort) or cohort.lanes:
        return
    tasks = [a for f in federations if not f.finished for a in f.begin()]
    if not tasks:
        return
    lanes = cohort.resolve(tasks)
    for federation in federations:
        if federation.directory is not None:
            federation.directory.write_config(with_lanes(federation.experiment, lanes))


def _start(launch: Launch, directory: RunDirectory | None, cohort: Cohort, run: int) -> Federation:
    setup = launch.setup
    federation = make_federation(setup, cohort, directory, launch.listeners, run)
    if launch.resume and federation.restore():
        return federation
    if directory is not None:
        directory.truncate_metrics(0)
        write_atomically(directory.path / "partition.json", json.dumps(partition_json(setup)).encode())
        from .predictor import save_card

        save_card(directory.path, setup.experiment, setup.dataset, setup.transform, setup.model)
    if len(setup.server):
        federation.posterior = pretrain(setup, launch.listeners)
    federation.start(about(setup))
    return federation


def _finish(federation: Federation) -> None:
    judge, directory = federation.judge, federation.directory
    if directory is not None and isinstance(judge, Evaluator):
        best = federation.best.posterior or federation.posterior
        judge.save_predictions(best, federation.best.round or federation.round, directory.path)
    federation.finish()


def write_report(path: Path) -> Path | None:
    """Write ``report.html`` where the report extra is installed; say in one line where it is not."""
    try:
        from .report import write
    except ImportError:
        print('report.html was not written: pip install "fedbayes[report]" adds it.')
        return None
    return write([path])


def share_a_launch(a: Setup, b: Setup) -> bool:
    """Whether two runs may train in one launch: same network, data, local training and engine.

    Seeds, partitions, rules, weightings, priors, KL scalings, learning rates and rounds may differ.
    """

    def shape(s: Setup) -> Experiment:
        e = s.experiment
        return Experiment(
            data=e.data,
            model=dataclasses.replace(e.model, init="he", sigma=0.02),
            local=dataclasses.replace(e.local, learning_rate=1.0, epochs=1, epochs_max=0, steps=0),
            engine=e.engine,
            sonar=e.sonar,
            objective=dataclasses.replace(config.Experiment().objective, samples=e.objective.samples),
        )

    x, y = a.experiment, b.experiment
    plain = x.data.mean != "client" and not x.local.keep_state and x.engine.lanes != 1
    alike = shape(a) == shape(b) and captures_moment(x) == captures_moment(y)
    return alike and plain and same_examples(a.dataset, b.dataset)


def same_examples(a: Dataset, b: Dataset) -> bool:
    """Whether two data sets hold the same training and test examples (seeds may draw limits or recordings differently)."""
    if a is b:
        return True
    pairs = [(a.train, b.train), (a.test, b.test)]
    return (a.name, a.classes) == (b.name, b.classes) and all(
        x.inputs.shape == y.inputs.shape and torch.equal(x.labels, y.labels) and torch.equal(x.inputs, y.inputs)
        for x, y in pairs
    )
