"""From the events of finished runs to the numbers a paper prints: last round, best round, over rounds, rounds to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, nearest
from ..rundir import read_events
from ..uncertainty import reliability_index
from .published import Coordinates


@dataclass(frozen=True)
class Outcome:
    """One number of ours: its mean over seeds and its spread (NaN where nothing tells)."""

    value: float
    spread: float
    seeds: int


Series = list[tuple[int, Mapping[str, float]]]
"""Test metrics by evaluated round."""


def series(path: Path, model: str = "global", split: str = "test") -> Series:
    """Return the evaluated rounds of a run, in order."""
    return [
        (e["round"], e["metrics"])
        for e in read_events(path)
        if e["kind"] == "evaluation" and e["split"] == split and e["model"] == model
    ]


def sigma_of(path: Path) -> float:
    """Return the mean sigma of a run's last round (0 where the model has none)."""
    rounds = [e for e in read_events(path) if e["kind"] == "round"]
    sigma = (rounds[-1]["fusion"].get("sigma") if rounds else None) or {}
    return float(sigma.get("mean") or 0.0)


def _last(run: Series, metric: str) -> float:
    return _number(run[-1][1].get(metric)) if run else math.nan


def _best(run: Series, metric: str) -> float:
    scored = [(m["nll"], m) for _, m in run if m.get("nll") is not None]
    return _number(min(scored, key=lambda pair: pair[0])[1].get(metric)) if scored else math.nan


def _mean(run: Series, metric: str) -> float:
    values = [_number(m.get(metric)) for _, m in run]
    return statistics.fmean(values) if values else math.nan


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


REPORTS: dict[str, Callable[[Series, str], float]] = {
    "last": _last,
    "best-test-nll": _best,
    "best-validation-nll": _last,  # the series is cut at the best round before, see ``read``
    "rounds": _mean,
}


def read(paths: Sequence[Path], metric: str, report: str, model: str = "global") -> Outcome | None:
    """Return one metric of a cell's finished runs, a run a seed; None where there is none.

    The spread is the standard deviation over seeds; for ``rounds`` it is the deviation over rounds, as printed.
    """
    if report not in REPORTS:
        raise ConfigError(f"report '{report}' does not exist; {nearest(report, REPORTS)}")
    values, over_rounds, known = [], [], False
    for path in paths:
        run = series(path, model)
        known = known or any(metric in m for _, m in run)
        if report == "best-validation-nll":
            run = _until_best(path, run, model)
        values.append(REPORTS[report](run, metric))
        over_rounds.append(_deviation([_number(m.get(metric)) for _, m in run]))
    if not known:
        return None
    if any(math.isnan(v) for v in values):  # a run that ended in no number has not reproduced anything
        return Outcome(math.nan, math.nan, len(values))
    spread = statistics.fmean(over_rounds) if report == "rounds" else _deviation(values)
    return Outcome(statistics.fmean(values), spread, len(values))


def _until_best(path: Path, run: Series, model: str) -> Series:
    judged = [(m["nll"], r) for r, m in series(path, model, "validation") if m.get("nll") is not None]
    best = min(judged)[1] if judged else math.inf
    return [(r, m) for r, m in run if r <= best]


def _deviation(values: Sequence[float]) -> float:
    """Return the sample deviation; NaN for fewer than two values, or where one is no number."""
    known = len(values) > 1 and all(math.isfinite(v) for v in values)
    return statistics.stdev(values) if known else math.nan


def rounds_to(paths: Sequence[Path], target: float, model: str = "global") -> Outcome | None:
    """Return the first evaluated round whose test accuracy reaches ``target`` (a share).

    Infinite where a run ended without reaching it; None where there is no run.
    """
    runs = [series(path, model) for path in paths]
    reached = [
        next((float(r) for r, m in run if _number(m.get("accuracy")) >= target), math.inf) for run in runs if run
    ]
    if not reached:
        return None
    return Outcome(statistics.fmean(reached), _deviation(reached), len(reached))


def reliability(paths: Sequence[Path], model: str = "global") -> Outcome | None:
    """Return the reliability index of test accuracy over rounds as a share (Reyes 2021, eq. 7).

    NaN for a run that never got anything right, or whose accuracy is no number: the index divides by the mean.
    """
    values = []
    for path in paths:
        accuracies = [_number(m.get("accuracy")) for _, m in series(path, model)]
        if len(accuracies) > 1:
            values.append(reliability_index(accuracies) / 100 if sum(accuracies) > 0 else math.nan)
    return Outcome(statistics.fmean(values), _deviation(values), len(values)) if values else None


def outcome(
    at: Coordinates, metric: str, report: str, runs: Mapping[Coordinates, tuple[Sequence[Path], str]]
) -> Outcome | None:
    """Return our number for a printed place, from the finished runs by cell (paths, predictor)."""
    if metric == "reliability":
        return _reliability_at(at, runs)
    found = next(((paths, model) for cell, (paths, model) in runs.items() if set(cell) <= set(at)), None)
    if found is None or not found[0]:
        return None
    paths, model = found
    if metric == "rounds":
        return rounds_to(paths, float(dict(at)["target"]) / 100, model)
    return read(paths, metric, report, model)


def ran(at: Coordinates, runs: Mapping[Coordinates, tuple[Sequence[Path], str]]) -> bool:
    """Whether every cell that a printed place is made of has a finished run."""
    group = _batches_of(at, runs) or [run for cell, run in runs.items() if set(cell) <= set(at)]
    return bool(group) and all(paths for paths, _ in group)


def _batches_of(
    at: Coordinates, runs: Mapping[Coordinates, tuple[Sequence[Path], str]]
) -> list[tuple[Sequence[Path], str]]:
    """Return the runs of the cell at a place; with ``batch=mean`` those of all its batch sizes."""
    rest = set(at) - {("batch", "mean")}
    return [run for cell, run in runs.items() if rest <= set(cell)]


def _reliability_at(at: Coordinates, runs: Mapping[Coordinates, tuple[Sequence[Path], str]]) -> Outcome | None:
    """One index, or (``batch=mean``) the mean over the batch sizes of eq. (8), when all of them have been run."""
    group = _batches_of(at, runs)
    found = [reliability(paths, model) for paths, model in group if paths]
    values = [o for o in found if o is not None]
    if not values or len(values) < len(group):
        return None
    return Outcome(
        statistics.fmean(o.value for o in values), statistics.fmean(o.spread for o in values), values[0].seeds
    )


# -- verdicts ------------------------------------------------------------------------------------------------------

NOISE = {
    "accuracy": 0.005,
    "nll": 0.01,
    "ece": 0.005,
    "predictive_variance": 1e-5,
    "reliability": 0.005,
    "rounds": 5.0,
}
"""Least combined spread by metric: below it two runs of one and the same thing differ (Fischer's own noise floor)."""

RELATIVE = {"predictive_variance": 0.1}
"""The same as a share of the printed number, for metrics printed from 1e-11 to 0.1."""

AGREES_WITHIN = 2.0
"""A difference of at most this many combined spreads counts as agreement."""


@dataclass(frozen=True)
class Verdict:
    """The paper's number, ours, their difference in units of the combined spread, and what follows."""

    at: Coordinates
    metric: str
    paper: float
    paper_spread: float | None
    ours: Outcome | None
    difference: float
    word: str


def judge(at: Coordinates, metric: str, paper: float, spread: float | None, ours: Outcome | None,
          noise: Mapping[str, float] | None = None, *, ran: bool = False) -> Verdict:  # fmt: skip
    """Compare one number: ``agrees`` or ``differs``; without ours ``not run``, or ``no number`` where it ``ran``.

    The combined spread is sqrt(paper's² + ours²), unknown ones left out, and at least the metric's noise.
    """
    if ours is None:
        return Verdict(at, metric, paper, spread, None, math.nan, "no number" if ran else "not run")
    mine = 0.0 if math.isnan(ours.spread) else ours.spread
    least = max({**NOISE, **(noise or {})}.get(metric, 0.0), RELATIVE.get(metric, 0.0) * abs(paper))
    combined = max(math.hypot(spread or 0.0, mine), least, 1e-12)
    difference = (ours.value - paper) / combined
    return Verdict(
        at, metric, paper, spread, ours, difference, "agrees" if abs(difference) <= AGREES_WITHIN else "differs"
    )
