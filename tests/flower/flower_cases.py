"""Small experiments and a federation over an in-process grid, shared by the tests of this room."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("flwr")


def small(**changes):
    """Three clients, two rounds, a Flipout network on the embedded digits: under a second a run."""
    from fedbayes import config

    plain = {
        "rounds": 2, "partition.clients": 3, "data.limit": 240, "data.test_limit": 60, "data.validation": 0.0,
        "local.epochs": 1, "model.width": 16, "engine.lanes": 1, "engine.device": "cpu", "evaluation.samples": 2,
        "evaluation.every": 10, "transport.wait": 1.0,
    }  # fmt: skip
    return config.override(config.read("digits"), plain | {k.replace("__", "."): v for k, v in changes.items()})


def local_run(experiment, setup=None):
    """The same experiment in one process."""
    from fedbayes import runner

    setup = setup or runner.prepare(experiment)
    federation = runner.make_federation(setup, runner.local_cohort([setup]), None)
    federation.run()
    return federation


def over_grid(experiment, grid, setup=None, *, clock=None, directory=None):
    """The experiment's federation over a grid (not yet run)."""
    from fedbayes import runner
    from fedbayes.flower.server import cohort_of

    setup = setup or runner.prepare(experiment)
    cohort = cohort_of(grid, setup)
    cohort.say = lambda sentence: said.append(sentence)
    said: list[str] = []
    if clock is not None:
        cohort.clock, cohort.sleep = clock.now, clock.sleep
    federation = runner.make_federation(setup, cohort, directory)
    return federation, said


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


def grid_of(count=3, app=None, **kwargs):
    """Nodes with partition ids."""
    from fedbayes.flower.client import client_app
    from fedbayes.flower.inprocess import InProcessGrid

    configs = kwargs.pop("configs", None) or [{"partition-id": i, "num-partitions": count} for i in range(count)]
    return InProcessGrid(app or client_app, configs, **kwargs)


def tampered(change):
    """The real client app, its answers changed by ``change(record, client numbers, node)`` before they leave the node."""
    from fedbayes.flower.client import client_app

    def app(message, context):
        reply = client_app(message, context)
        if message.metadata.message_type == "train":
            change(reply.content, context.node_config)
        return reply

    return app


def rounds_of(federation):
    """The round events of a federation."""
    return [e for e in federation.history if e["kind"] == "round"]


def replaced(experiment, section, **changes):
    """An experiment with a section's fields replaced, unchecked."""
    return dataclasses.replace(experiment, **{section: dataclasses.replace(getattr(experiment, section), **changes)})
