"""``Run``: what the report reads from a run directory, each part on demand and absent without harm."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import uncertainty
from ..data.arrays import read_npz
from ..errors import RunError
from ..rundir import reading

Event = dict[str, Any]


@dataclass(frozen=True)
class Predictions:
    """Sampled class probabilities (M, N, C) of one set of inputs, their labels and their places in that set."""

    probabilities: np.ndarray
    labels: np.ndarray
    indices: np.ndarray

    @cached_property
    def per_example(self) -> dict[str, np.ndarray]:
        """What ``uncertainty.per_example`` gives, as arrays, and ``correct``; uncertainties as they are ranked."""
        values = uncertainty.per_example(torch.as_tensor(self.probabilities))
        values |= uncertainty.ranking_scores(values)
        out = {name: value.cpu().numpy() for name, value in values.items()}
        return out | {"correct": out["prediction"] == self.labels}

    @cached_property
    def mean(self) -> np.ndarray:
        """Mean prediction (N, C)."""
        return uncertainty.predictive_mean(torch.as_tensor(self.probabilities)).numpy()


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory. Sections of the report get a ``Run`` and read what they need from it.

    ``config`` is the resolved configuration as nested dictionaries; ``setting("partition.alpha", 0.5)`` looks up one
    value. ``events`` are the lines of ``metrics.jsonl``. ``predictions("test")`` is None where there are none.
    """

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration (``config.toml``), or {} where there is none."""
        file = self.path / "config.toml"
        if not file.exists():
            return {}
        with reading(file):
            return _printable(tomllib.loads(file.read_text(encoding="utf-8")))

    def setting(self, key: str, default: Any = None) -> Any:
        """One value of the configuration by its dotted name."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    @cached_property
    def events(self) -> list[Event]:
        """Every whole line of ``metrics.jsonl``; a torn last line (a run killed while writing) is left out."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").split("\n")
        events = []
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError:
                if number < len(lines):
                    raise RunError(f"{self.path / 'metrics.jsonl'}, line {number}, is not JSON.") from None
                continue
            if not isinstance(event, dict):
                raise RunError(f"{self.path / 'metrics.jsonl'}, line {number}, is no JSON object.")
            events.append(_printable(event))
        return [e for e in events if e]

    def kind(self, kind: str) -> list[Event]:
        """Events of one kind: start, round, evaluation, note, end."""
        return [e for e in self.events if e.get("kind") == kind]

    @property
    def start(self) -> Event:
        """The start event, or {} where the file has none."""
        return next(iter(self.kind("start")), {})

    @property
    def end(self) -> Event | None:
        """The end event; None while the run goes on or when it was stopped."""
        return next(iter(reversed(self.kind("end"))), None)

    @property
    def rounds(self) -> list[Event]:
        """Round events in order."""
        return self.kind("round")

    @property
    def shared(self) -> bool:
        """Whether the run trained in one launch with others: the time of a round is then not its own.

        It shows in the steps of the launch: more than this run's examples make, one incomplete batch a client and epoch
        allowed for.
        """
        batch, epochs = int(self.setting("local.batch_size", 32)), int(self.setting("local.epochs", 1) or 1)
        for event in self.rounds:
            steps = (event.get("engine") or {}).get("real_lane_steps") or 0
            own = int(event.get("seen", event.get("examples", 0))) / batch + len(event.get("clients", ())) * max(
                epochs, 1
            )
            if own and steps > own:
                return True
        return False

    @property
    def name(self) -> str:
        """The experiment's name."""
        return str(self.start.get("name") or self.setting("name") or self.path.name)

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes."""
        named = self.start.get("classes") or (self.partition or {}).get("classes")
        if named:
            return [str(c) for c in named]
        test = self.predictions("test")
        return [str(i) for i in range(test.probabilities.shape[2])] if test else []

    def evaluations(self, split: str = "test", model: str = "global") -> list[Event]:
        """Evaluation events of a split (``test``, ``validation``, ``ood:NAME``) and model, in order of round."""
        found = [e for e in self.kind("evaluation") if e.get("split") == split and e.get("model", "global") == model]
        return sorted(found, key=lambda e: e.get("round", 0))

    @property
    def splits(self) -> list[str]:
        """Splits that were evaluated."""
        return list(dict.fromkeys(e.get("split", "") for e in self.kind("evaluation")))

    @property
    def models(self) -> list[str]:
        """Models that were evaluated on the test data, the global one first."""
        seen = dict.fromkeys(e.get("model", "global") for e in self.kind("evaluation") if e.get("split") == "test")
        return sorted(seen, key=lambda m: m != "global")

    @cached_property
    def partition(self) -> dict[str, Any] | None:
        """Content of ``partition.json``: clients with counts per class."""
        file = self.path / "partition.json"
        if not file.exists():
            return None
        with reading(file):
            found = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise RunError("it is no JSON object")
            return _printable(found)

    def predictions(self, name: str = "test") -> Predictions | None:
        """The stored predictions ``predictions-NAME.npz``, or None."""
        return self._predictions.get(name)

    @cached_property
    def _predictions(self) -> dict[str, Predictions]:
        out = {}
        for file in sorted(self.path.glob("predictions-*.npz")):
            with reading(file):
                data = read_npz(file)
                p, labels = data["probabilities"], data["labels"]
                indices = data["indices"] if "indices" in data else np.arange(p.shape[1])
                if labels.shape != p.shape[1:2] or indices.shape != labels.shape:
                    raise RunError(
                        f"probabilities {p.shape}, labels {labels.shape} and indices {indices.shape} do not match"
                    )
                uncertainty.predictive_mean(p)  # refuses what are no probabilities
                out[file.stem.removeprefix("predictions-")] = Predictions(p, labels, indices)
        return out

    @property
    def outliers(self) -> dict[str, Predictions]:
        """Stored predictions on out-of-distribution inputs, by the name of their data set."""
        return {n.removeprefix("ood-"): p for n, p in self._predictions.items() if n not in ("test", "validation")}

    @cached_property
    def headline(self) -> dict[str, float]:
        """The scalars the run is judged by: of the stored test predictions, else of the best evaluated round."""
        test = self.predictions("test")
        if test is not None:
            return uncertainty.summarize(torch.as_tensor(test.probabilities), test.labels, self.bins)
        evaluations = self.evaluations("test")
        if not evaluations:
            return {}
        best = (self.end or {}).get("best_round")
        chosen = next((e for e in evaluations if e.get("round") == best), evaluations[-1])
        return {k: math.nan if v is None else float(v) for k, v in chosen.get("metrics", {}).items()}

    @property
    def bins(self) -> int:
        """Bins of the calibration error as configured."""
        return int(self.setting("evaluation.bins", 15))

    @property
    def spreads(self) -> list[tuple[int, dict[str, Any]]]:
        """Round and spread of the fused posterior; empty for networks whose weights have no distribution.

        Precision weighting sends variances with point models too: they weigh the clients and are no uncertainty.
        """
        if self.setting("model.kind") in ("deterministic", "dropout"):
            return []
        return [(e["round"], s) for e in self.rounds if (s := (e.get("fusion") or {}).get("sigma"))]

    @property
    def sigma(self) -> dict[str, Any]:
        """Spread of the last round's fused posterior; {} where there is none."""
        return self.spreads[-1][1] if self.spreads else {}

    def samples_seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Round numbers and the examples the clients had trained on by the end of each, epochs counted."""
        numbers, seen = [0], [0]
        for event in self.rounds:
            numbers.append(int(event["round"]))
            seen.append(seen[-1] + int(event.get("seen", event.get("examples", 0))))
        return np.asarray(numbers, float), np.asarray(seen, float)


UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")
"""Control characters, line ends, and marks that turn the direction of all that follows: no name needs them."""


def _printable(value: Any) -> Any:
    """The same value with every text in it on one line, and unable to disturb the text around it."""
    if isinstance(value, str):
        return UNPRINTABLE.sub(" ", value)
    if isinstance(value, Mapping):
        return {_printable(k): _printable(v) for k, v in value.items()}
    return [_printable(v) for v in value] if isinstance(value, list) else value


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return (path / "metrics.jsonl").is_file()


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs named by paths: run directories themselves, or folders that hold some at any depth."""
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        here = list(_walk(path))
        if not here:
            what = "is not there" if not path.exists() else "holds no run (no metrics.jsonl in it or below it)"
            raise RunError(f"{path} {what}; name a run directory or a folder of runs.")
        found |= {p.resolve(): Run(p) for p in here}
    return list(found.values())


def _walk(path: Path) -> Iterator[Path]:
    if is_run(path):
        yield path
    elif path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith(".") and child.name != "figures":
                yield from _walk(child)
