"""``server_app``: the round loop of a local run, over a ``FlowerCohort``, inside a Flower ServerApp.

The run config of the app names the experiment (``experiment``: a built-in name, a file or TOML text), changes to
single fields (``rounds = 5``, ``fusion.rule = "ws"``, or several at once in ``overrides``), and how to run it:
``out``, ``resume``, ``data-dir``. It leaves the same run directory and report as ``fedbayes run``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from .. import config
from ..errors import ConfigError, FedBayesError
from ..experiment import Experiment
from ..rundir import write_atomically
from .codecs import Layout
from .cohort import FlowerCohort
from .home import refuse_shared_statistics

if TYPE_CHECKING:
    from ..federation import Event
    from ..runner import Result
    from ..setup import Setup

OURS = ("experiment", "overrides", "out", "resume", "data-dir", "report")
FAILED = "fedbayes: "
"""What the one sentence begins with that a failed run leaves in its log."""

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    try:
        serve(grid, Settings.read(context.run_config))
    except FedBayesError as error:
        print(f"{FAILED}{error}", flush=True)
        raise


@dataclass(frozen=True)
class Settings:
    """What a run config says: the experiment, and where and how to run it."""

    experiment: Experiment
    out: str = ""
    resume: bool = False
    data_dir: str = ""
    report: bool = True

    @staticmethod
    def read(run_config: Mapping[str, Any]) -> Settings:
        """Read Flower's (flat) run config; unknown keys and impossible values are refused with a sentence."""
        base = read_experiment(str(run_config.get("experiment", "")))
        changes = {k: v for k, v in run_config.items() if k not in OURS}
        try:
            words = shlex.split(str(run_config.get("overrides", "")))
        except ValueError as error:
            raise ConfigError(f"run config: overrides cannot be read ({error}).") from None
        for word in words:
            key, equals, value = word.partition("=")
            if not equals:
                raise ConfigError(f"run config: overrides holds '{word}'; write key=value pairs separated by spaces.")
            changes[key] = value
        return Settings(
            config.override(base, changes, "run config"),
            str(run_config.get("out", "")),
            _yes(run_config, "resume", False),
            str(run_config.get("data-dir", "")),
            _yes(run_config, "report", True),
        )


def _yes(run_config: Mapping[str, Any], key: str, default: bool) -> bool:
    word = str(run_config.get(key, default)).lower()
    if word not in config.WORDS:
        raise ConfigError(f"run config: {key}={run_config[key]!r} must be true or false.")
    return config.WORDS[word]


def read_experiment(text: str) -> Experiment:
    """Read an experiment given as a name, a file, or the TOML itself (nothing: the defaults)."""
    if not text:
        return Experiment()
    toml = "\n" in text or ("=" in text and not text.endswith(".toml") and not os.path.exists(text))
    return config.loads(text, "run config") if toml else config.read(text)


def serve(grid: Grid, settings: Settings) -> Result:
    """Run one experiment over the nodes of a grid and return its result."""
    from .. import runner
    from ..rundir import fresh_directory

    experiment = settings.experiment
    setup = runner.prepare(experiment, data_dir=settings.data_dir or None)
    path = Path(settings.out) if settings.out else fresh_directory(runner.DEFAULT_ROOT, experiment.name)
    cohort = cohort_of(grid, setup)
    say(f"run directory: {path.resolve()}")
    sizes = cohort.sizes()
    own = any(m.own_data for m in cohort.registry.members.values())
    if own:
        refuse_shared_statistics(experiment)
        setup = dataclasses.replace(setup, shards=[np.empty(0, dtype=np.int64)] * (max(sizes) + 1))
    launch = runner.Launch(setup, path, settings.resume, [announce])
    result = runner.run_with(cohort, [launch], report=False)[0]
    if own:
        _write_sizes(path, sizes)
    if settings.report:
        runner.write_report(path)
    return result


def _write_sizes(path: Path, sizes: Mapping[int, int]) -> None:
    """Correct ``partition.json`` where nodes brought their own data: sizes are known, class counts are not."""
    held = {
        "clients": [{"id": c, "name": f"client {c}", "examples": n, "counts": []} for c, n in sizes.items()],
        "classes": json.loads((path / "partition.json").read_text(encoding="utf-8"))["classes"],
    }
    write_atomically(path / "partition.json", json.dumps(held).encode())


def cohort_of(grid: Grid, setup: Setup) -> FlowerCohort:
    """Return the cohort an experiment asks for: open, or masked where it is private."""
    from .masked_cohort import MaskedCohort

    experiment = setup.experiment
    kind = MaskedCohort if experiment.fusion.private else FlowerCohort
    return kind(
        grid,
        experiment,
        Layout.of(setup.start),
        clients=len(setup.shards),
        classes=setup.dataset.classes,
        shape=tuple(setup.dataset.train.inputs.shape[1:]),
        sizes=[len(shard) for shard in setup.shards],
        say=say,
    )


def say(sentence: str) -> None:
    """Tell the run's log (Flower shows it with ``flwr run --stream`` and ``flwr log``)."""
    print(sentence, flush=True)
    logging.getLogger("fedbayes.flower").info(sentence)


def announce(event: Event) -> None:
    """Tell the log of a round as it ends."""
    if event["kind"] == "round":
        sigma = (event["fusion"].get("sigma") or {}).get("q50")
        about = f", median sigma {sigma:.3g}" if sigma is not None else ""
        say(f"round {event['round']}: {len(event['clients'])} clients, {event['seconds']:.1f} s{about}")
        for refusal in event["fusion"]["refused"]:
            say(f"  client {refusal['client']} refused: {refusal['tensor']} {refusal['reason']}")
    elif event["kind"] == "evaluation" and event["split"] in ("validation", "test"):
        say(f"  {event['split']}: accuracy {event['metrics']['accuracy']:.4f}, nll {event['metrics']['nll']:.4f}")
    elif event["kind"] == "note":
        say(f"  note: {event['text']}")
