"""``Federation``: the round loop. It knows what to ask of clients and what to do with their answers, not where they are.

One round: choose clients, send the global posterior, collect updates, check, weigh, fuse, distil if asked, evaluate,
log, checkpoint. ``begin``, ``absorb`` and ``end`` are the three steps of a round, so that several federations can share
one launch of a cohort (``run_together``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .checkpoint import pack, unpack
from .cohort import Assignment, Cohort, Update
from .errors import RunError
from .experiment import Experiment
from .fusion import Accumulator, Fused, Rule, Weighting, client_weights, collapse_note, get_rule, get_weighting
from .fusion.together import absorb_together
from .moments import moment_summary
from .objective import annealed, client_prior, kl_divisor, layered_prior
from .posterior import Posterior, Refusal, check
from .rundir import RunDirectory
from .schedule import choose_clients, learning_rate
from .seeds import derive, numpy_rng
from .server import server_step

Event = dict[str, Any]


class Judge(Protocol):
    """What evaluates a posterior; ``fedbayes.evaluation.Evaluator`` is the usual one."""

    def __call__(self, posterior: Posterior, round: int, model: str = "global") -> list[Event]:
        """Return one ``evaluation`` event per split."""
        ...


class Distiller(Protocol):
    """What turns a round's fused posterior and client models into a better one (FedBE).

    A distiller may also have ``together(asked)``, given (distiller, arguments) of every federation in a launch.
    """

    def __call__(
        self,
        fused: Posterior,
        clients: Mapping[int, Posterior],
        weights: Mapping[int, float],
        previous: Posterior,
        round: int,
    ) -> tuple[Posterior, list[Event]]:
        """Return the distilled posterior and events to log (ensembles evaluated on the way)."""
        ...  # fmt: skip


@dataclass
class Best:
    """The best round so far, judged on validation data only."""

    round: int = 0
    score: float = math.inf
    posterior: Posterior | None = None


@dataclass
class _Round:
    """What one round gathers between ``begin`` and ``end``."""

    number: int
    clients: list[int]
    started: float
    accumulator: Accumulator
    weights: dict[int, float] = field(default_factory=dict)
    work: dict[int, int] = field(default_factory=dict)  # examples each client passes over
    held: dict[int, Posterior] = field(default_factory=dict)
    waiting: list[Update] = field(default_factory=list)  # on a GPU, to be added together
    arrived: dict[int, Update] = field(default_factory=dict)
    refused: list[dict[str, Any]] = field(default_factory=list)
    moments: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    fused: Fused | None = None
    posterior: Posterior | None = None  # fused, after the server's own step


class Federation:
    """One federated experiment over a cohort of clients.

    ``judge`` evaluates (None: never), ``directory`` keeps files (None: nothing is written), ``distiller`` is FedBE's
    step, ``listeners`` are called with every event as it is logged. ``run`` is this federation's number in a shared
    launch. ``posterior`` is the global posterior; ``history`` holds every event of this process.
    """

    def __init__(
        self,
        experiment: Experiment,
        start: Posterior,
        cohort: Cohort,
        *,
        judge: Judge | None = None,
        directory: RunDirectory | None = None,
        distiller: Distiller | None = None,
        listeners: Sequence[Callable[[Event], None]] = (),
        run: int = 0,
    ) -> None:
        self.experiment, self.cohort, self.judge, self.directory = experiment, cohort, judge, directory
        self.distiller, self.listeners, self.run_number = distiller, list(listeners), run
        self.posterior = start
        self.round = 0
        self.best = Best()
        self.history: list[Event] = []
        self.rule: Rule = get_rule(experiment.fusion.rule, **options(experiment))
        self.weighting: Weighting = get_weighting(experiment.fusion.weighting)
        self.weighting.require_gaussians(start)
        self._ratios: list[float | None] = []
        self._velocity: dict[str, Tensor] = {}
        self._seconds = 0.0
        self._current: _Round | None = None

    # -- one round -------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether every round has been run."""
        return self.round >= self.experiment.rounds

    def begin(self) -> list[Assignment]:
        """Start the next round: choose its clients and return what each has to do."""
        number = self.round + 1
        sizes = self.cohort.sizes(self.run_number)
        clients = choose_clients(self.experiment, sizes, number)
        current = _Round(number, clients, time.perf_counter(), self._accumulator())
        if not self._holds_updates:
            current.weights = self._weights({c: sizes[c] for c in clients})
        self._current = current
        prior = self._prior(sum(n > 0 for n in sizes.values()))
        assignments = [self._assignment(client, number, sizes, *prior) for client in clients]
        batch = self.experiment.local.batch_size
        current.work = {a.client: a.steps * batch if a.steps else a.epochs * sizes[a.client] for a in assignments}
        return assignments

    def _accumulator(self) -> Accumulator:
        rule = rule_of_round(self.rule, self.experiment, self.round + 1)
        return Accumulator(rule, reference=self.posterior, previous=self.posterior)

    def _prior(self, clients: int) -> tuple[float, Posterior | None]:
        """The prior of this round, one object for all clients: a standard deviation, or a posterior where it is no scalar."""
        o = self.experiment.objective
        whole = self.posterior if o.prior == "previous" else layered_prior(self.posterior, o.prior_std, o.prior_layers)
        return client_prior(o.kl_scale, o.prior_std, whole, clients)

    def _assignment(
        self, client: int, number: int, sizes: Mapping[int, int], prior_std: float, prior: Posterior | None
    ) -> Assignment:
        e = self.experiment
        epochs = e.local.epochs
        if e.local.epochs_max:
            epochs = int(numpy_rng(e.seed, "epochs", number, client).integers(1, e.local.epochs_max + 1))
        return Assignment(
            client=client,
            round=number,
            start=self.posterior,
            seed=e.seed,
            learning_rate=learning_rate(e, number),
            epochs=epochs,
            steps=e.local.steps,
            divisor=kl_divisor(e.objective.kl_scale, sizes[client], sum(sizes.values()), len(sizes)),
            kl_weight=annealed(e.objective.kl_weight, number, e.objective.kl_anneal),
            prior_std=prior_std,
            prior=prior,
            l2=e.objective.l2,
            proximal=e.objective.proximal,
            run=self.run_number,
        )

    @property
    def _holds_updates(self) -> bool:
        """Whether the round must keep every client's posterior: a weighting, check or distillation that compares them."""
        return self.weighting.uses_individuals or self.distiller is not None or self.experiment.fusion.max_update > 0

    def absorb(self, update: Update) -> None:
        """Take one client's update: checked, then added to the round's total (or held, where that is needed)."""
        current = self._open_round()
        if update.round != current.number or update.client not in current.clients:
            return self._refuse(update.client, "", f"the update is for round {update.round}, not {current.number}")
        if update.client in current.arrived or any(u.client == update.client for u in current.waiting):
            return None  # a message delivered twice counts once
        if not self._holds_updates and _on_gpu(update.posterior):
            current.waiting.append(update)
            return self._absorb_waiting() if len(current.waiting) >= _TOGETHER else None
        try:
            if self._holds_updates:
                check(update.posterior, self.posterior, client=update.client,
                      allow_zero_variance=self.rule.allows_zero_variance)  # fmt: skip
                current.held[update.client] = update.posterior
            else:
                current.accumulator.absorb(update.posterior, current.weights[update.client], update.client)
        except Refusal as refusal:
            return self._refuse(update.client, refusal.tensor, refusal.reason)
        if self.rule.name == "precision":
            current.moments[str(update.client)] = moment_summary(update.posterior, self.rule.options()["floor"])
        current.arrived[update.client] = _without_posterior(update)
        return None

    def _absorb_waiting(self) -> None:
        """Add the updates of clients that were trained together on a GPU to the total, in one pass."""
        current = self._open_round()
        waiting, current.waiting = current.waiting, []
        if not waiting:
            return
        clients = [u.client for u in waiting]
        refused = absorb_together(
            current.accumulator, [u.posterior for u in waiting], [current.weights[c] for c in clients], clients
        )
        for update in waiting:
            if update.client in refused:
                refusal = refused[update.client]
                self._refuse(update.client, refusal.tensor, refusal.reason)
                continue
            if self.rule.name == "precision":
                current.moments[str(update.client)] = moment_summary(update.posterior, self.rule.options()["floor"])
            current.arrived[update.client] = _without_posterior(update)

    def _refuse(self, client: int, tensor: str, reason: str) -> None:
        current = self._open_round()
        if self.experiment.fusion.on_bad_client == "stop":
            raise RunError(
                f"round {current.number}: client {client}'s update cannot be used ({tensor or 'update'}: {reason}); "
                "set 'fusion.on_bad_client' to refuse to go on without it."
            )
        current.refused.append({"client": client, "tensor": tensor, "reason": reason})

    def _open_round(self) -> _Round:
        if self._current is None:
            raise RunError("no round has begun: call begin() first.")
        return self._current

    def end(self) -> None:
        """Finish the round: fuse what arrived, distil, evaluate, log, checkpoint."""
        end_together([self])

    def fuse(self) -> None:
        """Fuse what arrived: the first half of a round's end."""
        current = self._open_round()
        self._absorb_waiting()
        self._screen_moves(current)
        known = {r["client"] for r in current.refused}
        failures = [f for f in self.cohort.statistics().get("failures", ()) if f["client"] not in known]
        for failure in failures:
            if failure.get("answered"):  # with something that could not even be read as an update
                self._refuse(failure["client"], "", failure["reason"])
        absent = [
            {"client": f["client"], "tensor": "", "reason": f["reason"]} for f in failures if not f.get("answered")
        ]
        self._check_quorum(current, absent)
        current.refused += absent
        if self._holds_updates:
            self._fuse_held(current)
        current.fused = fused = current.accumulator.conclude()
        f = self.experiment.fusion
        current.posterior, self._velocity = server_step(
            self.posterior, fused.posterior, self._velocity, f.server_learning_rate, f.server_momentum
        )

    def to_distil(self) -> tuple[Posterior, dict[int, Posterior], dict[int, float], Posterior, int]:
        """Return what the distiller is asked with: fused posterior, clients, weights, previous posterior, round."""
        current = self._open_round()
        assert current.posterior is not None
        return current.posterior, current.held, current.weights, self.posterior, current.number

    def close(self, distilled: tuple[Posterior, list[Event]] | None = None) -> None:
        """Take the fused posterior, or the distilled one; evaluate, log: the second half of a round's end."""
        current = self._open_round()
        assert current.fused is not None
        assert current.posterior is not None
        fused, events = current.fused, []
        self.posterior, self.round, self._current = current.posterior, current.number, None
        if distilled is not None:
            self.posterior, events = distilled
        self._seconds += time.perf_counter() - current.started
        if self.rule.name == "precision":  # its variances are Adam's moments, not a posterior's
            fused.record["sigma"] = None
        self._log(self._round_event(current, fused.record))
        for event in events:
            self._log(event)
        self._ratios.append((fused.record.get("sigma") or {}).get("ratio"))
        if note := collapse_note(self._ratios, self.rule.name, len(current.arrived)):
            self._log({"kind": "note", "round": self.round, "text": note})
        self._evaluate()

    def _screen_moves(self, current: _Round) -> None:
        """Refuse clients whose mean moved farther than ``max_update`` times the median client's move."""
        limit = self.experiment.fusion.max_update
        if not limit or len(current.held) < 3:
            return
        moves = {c: move(p, self.posterior) for c, p in current.held.items()}
        median = sorted(moves.values())[len(moves) // 2]
        for client in [c for c, m in moves.items() if m > limit * median]:
            del current.held[client], current.arrived[client]
            ratio = moves[client] / max(median, 1e-300)
            self._refuse(
                client, "", f"its mean moved {ratio:.3g} times as far as the median client's (limit {limit:g})"
            )

    def _check_quorum(self, current: _Round, failures: Sequence[Mapping[str, Any]]) -> None:
        """Stop unless enough clients answered: a refused update is an answer, a client out of reach is none."""
        needed = max(1, math.ceil(self.experiment.participation.quorum * len(current.clients) - 1e-9))
        missing = sorted(set(current.clients) - set(current.arrived))
        if not current.arrived or (missing and len(current.arrived) + len(current.refused) < needed):
            every = [*current.refused, *failures]
            why = [f"client {r['client']}: {r['tensor']} {r['reason']}".replace(":  ", ": ").rstrip(".") for r in every]
            reasons = "; ".join(why[:3]) + (f"; and {len(why) - 3} more" if len(why) > 3 else "")
            if len(why) >= len(current.clients) and all("NaN" in w or "infinite" in w for w in why):
                reasons += "; where training diverges, lower 'local.learning_rate'"
            raise RunError(
                f"round {current.number}: {len(current.arrived)} of {len(current.clients)} clients gave a usable update, "
                f"{needed} are needed ('participation.quorum'); missing: {missing[:20]}"
                + (f"; refused: {reasons}." if reasons else ".")
            )

    def _fuse_held(self, current: _Round) -> None:
        held = dict(sorted(current.held.items()))
        sizes = {c: current.arrived[c].examples for c in held}
        current.weights = self._weights(sizes, held)
        for client, posterior in held.items():
            current.accumulator.absorb(posterior, current.weights[client], client)

    def _weights(self, sizes: Mapping[int, int], held: Mapping[int, Posterior] | None = None) -> dict[int, float]:
        counts: dict[int | str, int] = {**sizes}
        posteriors: dict[int | str, Posterior] | None = {**held} if held is not None else None
        weights = client_weights(self.weighting, counts, posteriors, self.posterior)
        return {int(client): weight for client, weight in weights.items()}

    def _round_event(self, current: _Round, record: Mapping[str, Any]) -> Event:
        updates = [current.arrived[c] for c in sorted(current.arrived)]
        examples = sum(u.examples for u in updates)
        names = sorted({name for u in updates for name in u.metrics} & {"loss", "nll", "kl"})
        train = {n: sum(u.metrics.get(n, math.nan) * u.examples for u in updates) / examples for n in names}
        statistics = dict(self.cohort.statistics())
        moments = {"moments": dict(sorted(current.moments.items()))} if current.moments else {}
        return {
            "kind": "round",
            "round": current.number,
            "seconds": time.perf_counter() - current.started,
            "learning_rate": learning_rate(self.experiment, current.number),
            "clients": [u.client for u in updates],
            "examples": examples,
            "seen": sum(current.work.get(u.client, 0) for u in updates),
            "train": train,
            "fusion": {**record, "weighting": self.weighting.name, "refused": current.refused, **moments},
            "bytes": statistics.pop("bytes", None),
            "engine": statistics,
        }

    def _evaluate(self) -> None:
        e = self.experiment.evaluation
        if self.judge is None or (self.round % e.every and not self.finished):
            return
        for event in self.judge(self.posterior, self.round):
            self._log(event)
            if event["split"] == "validation":
                value = event["metrics"][e.select]
                score = -value if e.select == "accuracy" else value
                if score < self.best.score:
                    self.best = Best(self.round, score, self.posterior)
                    self._save("best.safetensors", self.posterior)

    # -- the whole run ---------------------------------------------------------------------------------------

    def run(self) -> Posterior:
        """Run the rounds that are left and return the final global posterior."""
        run_together([self])
        return self.posterior

    def start(self, about: Mapping[str, Any]) -> None:
        """Log the start of the run, once; what ``about`` says stands in the ``start`` event."""
        if self.round == 0:
            self._log({"kind": "start", "schema": 1, **about})
            if self.rule.name == "dwc" and self.experiment.objective.prior != "previous":
                text = (
                    "The rule 'dwc' takes the previous global posterior for the clients' prior, but objective.prior is fixed: "
                    "the prior is subtracted without having been counted. Set objective.prior to previous."
                )
                self._log({"kind": "note", "round": 0, "text": text})

    def finish(self) -> None:
        """Write the final posterior and the ``end`` event."""
        best = self.best.round or self.round
        self._save("final.safetensors", self.posterior)
        if self.best.posterior is None:
            self._save("best.safetensors", self.posterior)
        self._log({"kind": "end", "rounds": self.round, "best_round": best, "seconds": self._seconds})

    def _save(self, name: str, posterior: Posterior) -> None:
        if self.directory is not None:
            about = {"round": str(self.round), "experiment": self.experiment.name}
            posterior.save(self.directory.path / name, about)

    def _log(self, event: Event) -> None:
        self.history.append(event)
        if self.directory is not None:
            self.directory.log(event)
        for listener in self.listeners:
            listener(event)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint where ``checkpoint_every`` asks for one after this round."""
        if self.round % self.experiment.checkpoint_every == 0 or self.finished:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write a checkpoint of the rounds done now, whatever ``checkpoint_every`` says; nothing without a directory."""
        if self.directory is None:
            return
        state = {
            "round": self.round,
            "seconds": self._seconds,
            "metrics_size": self.directory.metrics_size(),
            "best": {"round": self.best.round, "score": self.best.score if self.best.round else None},
            "ratios": self._ratios,
            "global": self.posterior,
            "best_posterior": self.best.posterior,
            "velocity": self._velocity,
            "cohort": self.cohort.state(),
        }
        self.directory.save_checkpoint(*pack(state))

    def restore(self) -> bool:
        """Continue from the directory's checkpoint; False where there is none (the run starts at its beginning)."""
        loaded = self.directory.load_checkpoint() if self.directory is not None else None
        if loaded is None:
            if self.directory is not None:
                self.directory.truncate_metrics(0)
            return False
        state = unpack(*loaded)
        self.round, self._seconds, self.posterior = state["round"], state["seconds"], state["global"]
        score = state["best"]["score"]
        self.best = Best(state["best"]["round"], math.inf if score is None else score, state["best_posterior"])
        self._ratios = list(state["ratios"])
        self._velocity = state["velocity"]
        self.cohort.restore(state["cohort"])
        if self.directory is not None:
            self.directory.truncate_metrics(state["metrics_size"])
        return True


def run_together(federations: Sequence[Federation]) -> None:
    """Run several federations that share one cohort, round by round, their clients trained in one launch.

    Each keeps its own server state, files and round number; one that is done drops out. Federations resumed from different
    rounds first come level, so that later launches are full again. A lone federation is the plain round loop.
    """
    while active := [f for f in federations if not f.finished]:
        active = [f for f in active if f.round == min(g.round for g in active)]
        by_run = {f.run_number: f for f in active}
        assignments = [a for f in active for a in f.begin()]
        for update in active[0].cohort.train(assignments):
            by_run[update.run].absorb(update)
        end_together(active)


def end_together(federations: Sequence[Federation]) -> None:
    """End a round of federations that share a launch; those that distil do so together, where their distiller can.

    Checkpoints are written last, one right after the other: a launch killed in its evaluations resumes at one round.
    """
    for federation in federations:
        federation.fuse()
    asked = [(f.distiller, f.to_distil()) for f in federations if f.distiller is not None]
    together = getattr(asked[0][0], "together", None) if len(asked) > 1 else None
    distilled = iter(together(asked) if together else [distiller(*round_) for distiller, round_ in asked])
    for federation in federations:
        federation.close(next(distilled) if federation.distiller is not None else None)
    for federation in federations:
        federation.checkpoint_if_due()


def rule_of_round(rule: Rule, experiment: Experiment, round: int) -> Rule:
    """Return the rule as one round uses it: a rule that draws (ppa) draws anew every round."""
    if "seed" not in rule.options():
        return rule
    return get_rule(rule, seed=derive(experiment.seed, "fusion", rule.options()["seed"], round))


def options(experiment: Experiment) -> dict[str, str]:
    """Return the fusion rule's options (``name=value``) as a dictionary."""
    pairs = (item.partition("=") for item in experiment.fusion.options)
    return {name.strip(): value.strip() for name, _, value in pairs}


def move(posterior: Posterior, previous: Posterior) -> float:
    """Return the Euclidean length of the step from one posterior's means and float points to another's."""
    total = sum(
        float((g.mean.double() - previous.gaussians[n].mean.double()).square().sum())
        for n, g in posterior.gaussians.items()
    )
    total += sum(
        float((t.double() - previous.points[n].double()).square().sum())
        for n, t in posterior.points.items()
        if t.is_floating_point() and "running_" not in n
    )
    return math.sqrt(total)


_TOGETHER = 64
"""Updates on a GPU that are added in one pass; more wait for the next, so that memory does not grow with clients."""


def _on_gpu(posterior: Posterior) -> bool:
    tensors = (*(g.mean for g in posterior.gaussians.values()), *posterior.points.values())
    return any(t.is_cuda for t in tensors)


def _without_posterior(update: Update) -> Update:
    """Drop the tensors of an update that has been added to the total: the server's memory must not grow with clients."""
    return Update(update.client, update.round, Posterior(), update.examples, update.metrics, update.run)
