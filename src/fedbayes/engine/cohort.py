"""``LocalCohort``: clients that train in this process, one after another or many at once on lanes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cohort import Assignment, Update
from ..data import Examples, Transform, side_by_side
from ..errors import ConfigError, DataError, RunError
from ..experiment import Engine, Local
from .choice import choose
from .graph import GraphLoop
from .lanes import LaneLoop
from .layout import StateLayout
from .optimizers import Memory, moments_of
from .plain import PlainLoop
from .processes import ProcessLoop
from .setting import Capture, Job, Outcome, Setting, resolve_device

Loop = PlainLoop | ProcessLoop | LaneLoop | GraphLoop
Shards = Sequence[np.ndarray] | Sequence[Sequence[np.ndarray]]


class LocalCohort:
    """The clients of one federation, or of several that share network and data, trained in this process.

    ``shards`` holds one array of indices into ``examples`` per client; for several runs, one such list per run
    (``Assignment.run`` says which), and one transform per run where clients' means differ. ``engine.lanes`` is 1 for the plain loop, n for up to n clients at once, 0 to
    measure which is faster (see ``lanes``), and whether the plain loop is on several processes. ``samples`` is the number of noise draws averaged per training step.

    ``capture_moment`` makes each update's posterior carry, for every deterministic parameter, the mean of Adam's second
    raw moment over the second half of the last local epoch as its variance (Reyes et al. 2021), at least 1e-37;
    ``moment_bias_correction`` says whether the moment is divided by 1 - beta2^t first.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        shards: Shards,
        transform: Transform | Sequence[Transform],
        local: Local,
        engine: Engine,
        samples: int = 1,
        *,
        capture_moment: bool = False,
        moment_bias_correction: bool = True,
    ) -> None:
        _check(local, engine, samples, capture_moment)
        device = resolve_device(engine.device)
        if engine.compile and device.type != "cuda":
            warnings.warn(
                f"engine.compile is for CUDA devices; on {device} the step runs uncompiled.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.shards = by_run(shards)
        several = isinstance(transform, Sequence)
        common, sites = side_by_side(transform) if several else (transform, (0,) * len(self.shards))
        self.setting = Setting(
            model, examples.to(device), common.to(device), local, engine, device, samples,
            Capture(capture_moment, moment_bias_correction), StateLayout.of(model), sites,
        )  # fmt: skip
        self._lanes = engine.lanes
        self._workers = engine.workers or int(engine.lanes > 0)
        self._why = "asked for" if engine.lanes else ""
        self._memories: dict[tuple[int, int], Memory] = {}
        self._statistics: dict[str, Any] = {}
        self._loops: dict[int, Any] = {}
        self._shape: Sequence[int] | None = None

    # -- the protocol ----------------------------------------------------------------------------------------

    def sizes(self, run: int = 0) -> dict[int, int]:
        """Return how many examples each client holds."""
        return {client: len(shard) for client, shard in enumerate(self._shards_of(run))}

    @property
    def lanes(self) -> int:
        """Clients trained together: what was asked for or, from the first ``train`` on, what was chosen (0: not yet)."""
        return self._lanes

    @property
    def workers(self) -> int:
        """Processes that share out the clients of a plain loop; chosen together with ``lanes`` where left open."""
        return self._workers

    def resolve(self, assignments: Sequence[Assignment]) -> int:
        """Choose lanes and processes now, where they were left open, by measuring on these assignments; return the lanes."""
        if self._lanes == 0:
            jobs = [self._job(a) for a in assignments]
            self._lanes, self._workers, self._why = choose(self.setting, jobs)
        return self._lanes

    def train(self, assignments: Sequence[Assignment]) -> Iterator[Update]:
        """Train every assignment and yield each client's update as it ends."""
        jobs = [self._job(a) for a in assignments]
        if not jobs:
            return
        started = time.perf_counter()
        lanes = self.resolve(assignments)
        loop = self._loop(lanes)
        for outcome in loop.train(jobs):
            a = outcome.job.assignment
            if outcome.memory is not None:
                self._memories[a.run, a.client] = outcome.memory
            yield self._update(outcome, started)
        self._measure(loop, jobs, time.perf_counter() - started)

    def statistics(self) -> dict[str, Any]:
        """Return what the last ``train`` cost."""
        return dict(self._statistics)

    def state(self) -> dict[str, Any]:
        """Return the chosen number of lanes, what was chosen with it, and the optimisers that persist."""
        memories = {f"{run}/{client}": m for (run, client), m in self._memories.items()}
        return {
            "lanes": self._lanes,
            "workers": self._workers,
            "shape": list(getattr(self._loops.get(self._lanes), "shape", None) or self._shape or ()),
            "optimizers": {key: {"steps": m.steps, "rows": dict(m.rows)} for key, m in memories.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave; a run begun on other machines goes on here where nothing of it stayed there."""
        held, trained = state.get("sizes"), state.get("trained")
        if held is not None and {int(c): int(n) for c, n in held.items()} != self.sizes():
            raise RunError(
                "the run was begun over Flower with data of the nodes' own, which are not here: resume it there."
            )
        if trained and self.setting.local.keep_state:
            raise RunError(
                "the run was begun over Flower, and with 'local.keep_state' its clients' optimisers stayed on the nodes: "
                "resume it there, or start again in another directory."
            )
        if self._lanes == 0 and state.get("lanes"):
            self._lanes, self._why = int(state["lanes"]), "as in the checkpoint"
            self._workers = int(state.get("workers") or self._workers or 1)
        self._shape = state.get("shape") or None
        self._memories = {}
        for key, kept in state.get("optimizers", {}).items():
            run, client = key.split("/")
            self._memories[int(run), int(client)] = Memory(int(kept["steps"]), dict(kept["rows"]))

    # -- inside ----------------------------------------------------------------------------------------------

    def _shards_of(self, run: int) -> Sequence[np.ndarray]:
        if not 0 <= run < len(self.shards):
            raise RunError(f"this cohort holds the clients of {len(self.shards)} runs; run {run} is not one of them.")
        return self.shards[run]

    def _job(self, assignment: Assignment) -> Job:
        shards = self._shards_of(assignment.run)
        if not 0 <= assignment.client < len(shards):
            raise RunError(
                f"client {assignment.client} does not exist: this cohort holds clients 0 to {len(shards) - 1}."
            )
        if len(shards[assignment.client]) == 0:
            raise DataError(
                f"client {assignment.client} holds no examples, so it cannot train; leave it out of the round."
            )
        memory = self._memories.get((assignment.run, assignment.client)) if self.setting.local.keep_state else None
        return Job(assignment, shards[assignment.client], memory)

    def _loop(self, lanes: int) -> Loop:
        if lanes not in self._loops:
            graph = self.setting.engine.compile and self.setting.device.type == "cuda"
            if lanes == 1:
                several = self._workers > 1
                self._loops[lanes] = ProcessLoop(self.setting, self._workers) if several else PlainLoop(self.setting)
            elif graph:
                clients = [len(shard) for run in self.shards for shard in run]
                self._loops[lanes] = GraphLoop(self.setting, lanes, clients=clients, shape=self._shape)
            else:
                self._loops[lanes] = LaneLoop(self.setting, lanes)
        return self._loops[lanes]

    def _update(self, outcome: Outcome, started: float) -> Update:
        a, batches = outcome.job.assignment, outcome.batches
        tail = batches.tail
        weights = batches.real[-tail:].sum(axis=1)
        loss, nll = (float(np.average(column, weights=weights)) for column in outcome.losses[-tail:].T)
        metrics = {
            "loss": loss,
            "nll": nll,
            "kl": outcome.divergence,
            "steps": float(batches.steps),
            "seconds": time.perf_counter() - started,
        }
        return Update(a.client, a.round, outcome.posterior, len(outcome.job.shard), metrics, a.run)

    def _measure(self, loop: Loop, jobs: Sequence[Job], seconds: float) -> None:
        steps = [job.steps(self.setting.local) for job in jobs]
        plain = isinstance(loop, (PlainLoop, ProcessLoop))
        done = sum(steps) if plain else loop.lane_steps
        self._statistics = {
            "lanes": getattr(loop, "lanes", 1),
            "workers": loop.workers if isinstance(loop, ProcessLoop) else 1,
            "why": self._why,
            "steps": sum(steps) if plain else loop.steps,
            "lane_steps": done,
            "real_lane_steps": sum(steps),
            "occupancy": sum(steps) / done,
            "seconds": seconds,
            "compile_seconds": getattr(loop, "compile_seconds", 0.0),
        }
        if self.setting.device.type == "cuda":
            self._statistics["peak_memory"] = torch.cuda.max_memory_allocated(self.setting.device)


def by_run(shards: Shards) -> list[list[np.ndarray]]:
    """Return shards as one list of index arrays per run."""
    several = len(shards) > 0 and not isinstance(shards[0], (np.ndarray, Tensor))
    runs: Sequence[Any] = shards if several else [shards]
    return [[np.asarray(shard, dtype=np.int64) for shard in run] for run in runs]


def _check(local: Local, engine: Engine, samples: int, capture_moment: bool) -> None:
    moments_of(local)
    if engine.lanes < 0:
        raise ConfigError(
            f"engine.lanes is {engine.lanes}; 1 is the plain loop, n trains n clients at once, 0 measures."
        )
    if engine.workers < 0:
        raise ConfigError(
            f"engine.workers is {engine.workers}; 1 is this process alone, n trains on n processes, 0 measures."
        )
    if local.batch_size < 1:
        raise ConfigError(f"local.batch_size is {local.batch_size}; it must be at least 1.")
    if samples < 1:
        raise ConfigError(f"objective.samples is {samples}; at least one noise draw per step is needed.")
    if capture_moment and local.optimizer != "adam":
        raise ConfigError(
            f"local.optimizer is '{local.optimizer}', but the second moment that precision weighting needs is Adam's; use 'adam'."
        )
