"""From an experiment to its result: prepare data, network and clients; run the federation; leave a run directory."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from . import config, seeds
from .cohort import Assignment, Cohort
from .data import Dataset
from .engine import LocalCohort, resolve_device
from .errors import FedBayesError, RunError
from .evaluation import Evaluator
from .experiment import Experiment
from .federation import Event, Federation, run_together
from .objective import kl_divisor, layered_prior
from .posterior import Posterior
from .rundir import RunDirectory, fresh_directory, with_lanes, write_atomically
from .setup import Setup, about, captures_moment, corrects_moment, partition_json, prepare

if TYPE_CHECKING:
    from .predictor import Predictor

DEFAULT_ROOT = Path("runs")


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


# -- clients and federations -------------------------------------------------------------------------------------


def local_cohort(setups: Sequence[Setup]) -> LocalCohort:
    """Make the cohort that trains the clients of one run, or of several that share model and data, in this process."""
    first = setups[0]
    e = first.experiment
    return LocalCohort(
        first.model,
        first.dataset.train,
        [s.shards for s in setups],
        [s.transform for s in setups],
        e.local,
        e.engine,
        samples=e.objective.samples,
        capture_moment=captures_moment(e),
        moment_bias_correction=corrects_moment(e),
    )


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
    own = dataclasses.replace(setup.transform, shift=setup.transform.shift[-1:])  # the server's mean, not client 0's
    captured = e.engine.compile and resolve_device(e.engine.device).type == "cuda"
    lone = dataclasses.replace(e.engine, lanes=2 if captured else 1)  # one lane of a captured step, or the plain loop
    cohort = LocalCohort(setup.model, setup.dataset.train, [setup.server], own,
                         dataclasses.replace(e.local, keep_state=True), lone, samples=e.objective.samples)  # fmt: skip
    judge = Evaluator(setup.model, {"validation": setup.splits()["validation"]}, setup.transform, e)
    best, best_accuracy, waited, posterior = setup.start, -math.inf, 0, setup.start
    size = len(setup.server)
    prior = layered_prior(setup.start, e.objective.prior_std, e.objective.prior_layers)
    for epoch in range(1, e.pretrain.epochs + 1):
        task = Assignment(
            client=0, round=epoch, start=posterior, seed=seeds.derive(e.seed, "pretrain"),
            learning_rate=e.local.learning_rate, divisor=kl_divisor(e.objective.kl_scale, size, size, 1),
            kl_weight=e.objective.kl_weight, prior_std=e.objective.prior_std, prior=prior, l2=e.objective.l2,
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


# -- running -----------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One run inside a shared launch: what to run, where, and whether to continue it."""

    setup: Setup
    path: Path | None = None
    resume: bool = False
    listeners: list[Callable[[Event], None]] = field(default_factory=list)


def mean_sigma(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean sigma of the posterior that ``metrics_of`` speaks of (0 for point models)."""
    best = next((e["best_round"] for e in reversed(events) if e["kind"] == "end"), None)
    rounds = {e["round"]: e["fusion"].get("sigma") for e in events if e["kind"] == "round"}
    sigma = rounds.get(best) if best in rounds else next(reversed(rounds.values()), None)
    return float((sigma or {}).get("mean") or 0.0)


def run(
    experiment: Experiment | str | Path,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    listeners: Sequence[Callable[[Event], None]] = (),
    report: bool = True,
    write: bool = True,
    track: str | None = None,
) -> Result:
    """Run one experiment (or the built-in or TOML file of that name) and return its result.

    ``out`` is the run directory (default: a fresh one under ``runs/``); ``write=False`` writes nothing at all;
    ``resume=True`` continues the run that ``out`` holds. ``dataset`` and ``model`` are your own, see ``prepare``.
    ``track="tensorboard"`` writes the same numbers for TensorBoard too.
    """
    if resume and out is None:
        raise RunError("nothing to resume: name the run directory with --out (out=).")
    if isinstance(experiment, str | Path):
        experiment = config.read(experiment)
    setup = prepare(experiment, data_dir=data_dir, dataset=dataset, model=model)
    cohort = local_cohort([setup])
    make_federation(setup, cohort, None)  # what cannot be is refused here, before a directory is made for it
    path = None if not write else Path(out) if out is not None else fresh_directory(DEFAULT_ROOT, experiment.name)
    listeners = list(listeners)
    if track:
        from .track import tracker

        listeners.append(tracker(track, path))
    return run_with(cohort, [Launch(setup, path, resume, listeners)], report=report)[0]


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
        _keep_lanes(cohort, directories)
        pretrained: dict[Any, tuple[Posterior, list[Event]]] = {}
        federations = [
            _start(launch, directory, cohort, i, pretrained)
            for i, (launch, directory) in enumerate(zip(launches, directories))
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


def _keep_lanes(cohort: Cohort, directories: Sequence[RunDirectory | None]) -> None:
    """Take a lane count that was left open from a run directory that has one: it was chosen before the run was killed."""
    stored = next(((d.lanes, d.workers) for d in directories if d is not None and d.lanes), None)
    if isinstance(cohort, LocalCohort) and stored and not cohort.lanes:
        cohort.restore({"lanes": stored[0], "workers": stored[1]})


def _write_lanes(cohort: Cohort, federations: Sequence[Federation]) -> None:
    """Resolve a lane count that was left open and write it into the configurations: noise depends on it."""
    if not isinstance(cohort, LocalCohort) or cohort.lanes:
        return
    # the plain beginning: a private federation's own books a release, and here nothing is sent
    tasks = [a for f in federations if not f.finished for a in Federation.begin(f)]
    if not tasks:
        return
    lanes = cohort.resolve(tasks)
    for federation in federations:
        if federation.directory is not None:
            federation.directory.write_config(with_lanes(federation.experiment, lanes, cohort.workers))


def _start(
    launch: Launch,
    directory: RunDirectory | None,
    cohort: Cohort,
    run: int,
    pretrained: dict[Any, tuple[Posterior, list[Event]]],
) -> Federation:
    setup = launch.setup
    federation = make_federation(setup, cohort, directory, launch.listeners, run)
    if launch.resume and federation.restore():
        return federation
    if directory is not None:
        directory.truncate_metrics(0)
        write_atomically(directory.path / "partition.json", json.dumps(partition_json(setup)).encode())
        from .predictor import save_card

        save_card(directory.path, setup.experiment, setup.dataset, setup.transform, setup.model)
    federation.start(about(setup))
    if len(setup.server):
        told = [*([directory.log] if directory else []), *launch.listeners]
        federation.posterior = _pretrained(setup, told, pretrained)
    return federation


def _pretrained(
    setup: Setup, listeners: Sequence[Callable[[Event], None]], known: dict[Any, tuple[Posterior, list[Event]]]
) -> Posterior:
    """Pre-train, or take the result and the events of a run of this launch that pre-trains alike."""
    key = _pretraining(setup)
    if key in known:
        for event in known[key][1]:
            for listener in listeners:
                listener(event)
    else:
        events: list[Event] = []
        known[key] = pretrain(setup, [events.append, *listeners]), events
    return known[key][0]


def _pretraining(setup: Setup) -> tuple[Experiment, bytes, bytes]:
    """Return what pre-training depends on: runs of one launch that agree in it (rules compared, say) share its result."""
    e = setup.experiment
    alike = Experiment(
        seed=e.seed, data=e.data, model=e.model, pretrain=e.pretrain, engine=e.engine, evaluation=e.evaluation,
        local=dataclasses.replace(e.local, epochs=1, epochs_max=0, steps=0),
        objective=dataclasses.replace(e.objective, prior="fixed", proximal=0.0, kl_anneal=0), sonar=e.sonar,
    )  # fmt: skip
    return alike, setup.server.tobytes(), setup.validation.tobytes()


def _finish(federation: Federation) -> None:
    judge, directory = federation.judge, federation.directory
    if directory is not None and isinstance(judge, Evaluator):
        best = federation.best.posterior or federation.posterior
        judge.save_predictions(best, federation.best.round or federation.round, directory.path)
    federation.finish()


def write_report(*paths: Path, out: Path | None = None) -> Path | None:
    """Write the report of one run or of several; where it cannot be written, say why: the run itself is safe and done."""
    try:
        from .report import write

        return write(list(paths), out)
    except Exception as error:  # a mistake in a picture must not look like a failed run
        why = error if isinstance(error, (ImportError, FedBayesError)) else repr(error)
        print(f"report.html was not written: {why}")
        return None
