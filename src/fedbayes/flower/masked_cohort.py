"""``MaskedCohort``: the server's side of secure aggregation; it yields one total where ``FlowerCohort`` yields updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..cohort import Assignment, Update
from ..errors import PosteriorError, RunError
from ..experiment import Experiment
from ..federation import options
from ..fusion import client_weights
from ..posterior import Posterior
from ..privacy.federation import MaskedTotal
from ..privacy.relative import Relative, refuse_unless_sum
from .cohort import FlowerCohort, alike
from .masked_client import METRICS
from .masking import LEAST_PARTIES, FixedPoint, threshold_of, unmask
from .records import payload_bytes


class MaskedCohort(FlowerCohort):
    """Nodes that only ever send masked sums (``fusion.private``); see ``masking`` for the protocol.

    A party is a node: it adds up the statistics of its own clients before it masks them. Up to a third of the nodes
    may drop out at any point of a round.
    """

    adds_noise = True

    def __init__(self, grid: Grid, experiment: Experiment, *args: Any, **kwargs: Any) -> None:
        super().__init__(grid, experiment, *args, **kwargs)
        refuse_unless_sum(experiment, options(experiment))
        FixedPoint(experiment.transport.mask_bits, 1)

    def train(self, assignments: Sequence[Assignment]) -> Iterator[Update]:
        """Do the four exchanges of a round and yield the total of those who stayed."""
        if not assignments:
            return
        yield MaskedRound(self, assignments).run()


class MaskedRound:
    """One round of secure aggregation, seen from the server."""

    def __init__(self, cohort: MaskedCohort, assignments: Sequence[Assignment]) -> None:
        self.cohort, self.assignments = cohort, {a.client: a for a in assignments}
        self.experiment = cohort.experiment
        self.rule = refuse_unless_sum(self.experiment, options(self.experiment))
        self.start = assignments[0].start
        self.hosts = cohort.registry.hosts(self.assignments)
        self.seconds = self.experiment.participation.deadline or self.experiment.transport.wait
        self.weights = client_weights(
            self.experiment.fusion.weighting, {c: cohort.registry.sizes[c] for c in self.assignments}
        )
        self.failures: dict[int, str] = {}
        self.down = self.up = 0
        self.began = cohort.clock()

    def run(self) -> MaskedTotal:
        """Return the round's total, or raise a sentence when too few nodes stayed to unmask one."""
        publics = self._keys()
        sealed = self._shares(publics)
        total, included = self._masked(sealed)
        present = sorted(included)
        dropped = sorted(set(sealed) - set(present))
        self._enough(present, "sent a masked sum")
        shares = self._reveal(present, dropped)
        number = FixedPoint(self.experiment.transport.mask_bits, self.parties)
        plain = number.decode(unmask(total, publics, present, dropped, shares, self.threshold))
        clients = sorted(c for cs in included.values() for c in cs)
        first = self.assignments[min(self.assignments)]
        self.cohort._trained |= dict.fromkeys(clients, first.round)
        self.cohort._statistics = self._statistics(present)
        values, clipped = plain[: -len(METRICS) - 1], round(float(plain[-1]))
        return MaskedTotal(
            client=-1,
            round=first.round,
            posterior=Posterior(),
            examples=sum(self.cohort.registry.sizes[c] for c in clients),
            metrics=self._metrics(plain[-len(METRICS) - 1 : -1], clients),
            run=first.run,
            total=torch.from_numpy(values.copy()),
            weights={c: self.weights[c] for c in clients},
            sizes={c: self.cohort.registry.sizes[c] for c in clients},
            refusals={c: r for c, r in self.failures.items() if c not in clients},
            clipped=clipped,
        )

    @property
    def parties(self) -> int:
        """Nodes that started the round."""
        return len(self.hosts)

    @property
    def threshold(self) -> int:
        """Nodes needed to the end."""
        return threshold_of(self.parties)

    def _about(self) -> ConfigRecord:
        bits = self.experiment.transport.mask_bits
        return ConfigRecord({"threshold": self.threshold, "parties": self.parties, "bits": bits})

    def _keys(self) -> dict[int, tuple[bytes, bytes]]:
        record = RecordDict({"masking": self._about()})
        found = {}
        for node, reply in self._ask("keys", dict.fromkeys(self.hosts, record)):
            keys: Any = reply.config_records["keys"]
            found[node] = (keys["masking"], keys["sealing"])
        self._enough(found, "sent its keys")
        return found

    def _shares(self, publics: Mapping[int, tuple[bytes, bytes]]) -> dict[int, dict[int, bytes]]:
        record = RecordDict(
            {
                "masking-keys": ConfigRecord({str(n): k for n, (k, _) in publics.items()}),
                "sealing-keys": ConfigRecord({str(n): k for n, (_, k) in publics.items()}),
            }
        )
        found = {}
        for node, reply in self._ask("shares", dict.fromkeys(publics, record)):
            sealed: Any = reply.config_records["sealed"]
            found[node] = {int(n): box for n, box in sealed.items()}
        self._enough(found, "sent its shares")
        return found

    def _masked(self, sealed: Mapping[int, Mapping[int, bytes]]) -> tuple[np.ndarray, dict[int, list[int]]]:
        """Send assignments and sealed shares; add up masked vectors as they arrive, one in memory at a time."""
        messages = {n: self._assignment(n, {o: boxes[n] for o, boxes in sealed.items() if n in boxes}) for n in sealed}
        number = FixedPoint(self.experiment.transport.mask_bits, self.parties)
        size = Relative(self.rule, self.start).size + len(METRICS) + 1
        total, included = np.zeros(size, number.dtype), {}
        for node, reply in self._ask("masked", messages):
            for client, reason in reply.config_records.get("failures", ConfigRecord()).items():
                self._fail(int(client), f"{self.cohort.registry.label(node)}: {reason}")
            if "masked" not in reply:
                continue
            vector = reply.array_records["masked"]["vector"].numpy()
            clients: Any = reply.config_records["included"]["clients"]
            if vector.shape != total.shape or vector.dtype != total.dtype or not set(clients) <= set(self.hosts[node]):
                for client in self.hosts[node]:
                    self._fail(client, f"{self.cohort.registry.label(node)} sent a masked vector of another form.")
                continue
            total += vector
            included[node] = list(clients)
        return total, included

    def _assignment(self, node: int, sealed: Mapping[int, bytes]) -> RecordDict:
        mine = [self.assignments[c] for c in self.hosts[node]]
        if len(alike(mine)) > 1:
            raise RunError("fusion.private: clients of one node must start from one posterior and prior.")
        (group,) = alike(mine)
        record = self.cohort.message(self.cohort.registry.members[node], group, None).content
        record["masking"] = self._about()
        record["sealed"] = ConfigRecord({str(n): box for n, box in sealed.items()})
        record["weights"] = ConfigRecord({str(a.client): self.weights[a.client] for a in mine})
        return record

    def _reveal(self, present: Sequence[int], dropped: Sequence[int]) -> dict[int, list[bytes]]:
        record = RecordDict({"sum": ConfigRecord({"present": list(present), "dropped": list(dropped)})})
        found: dict[int, list[bytes]] = {}
        for answered, (_, reply) in enumerate(self._ask("reveal", dict.fromkeys(present, record)), 1):
            shares: Any = reply.config_records["shares"]
            for n, share in shares.items():
                found.setdefault(int(n), []).append(share)
            if answered >= self.threshold:
                break
        return found

    def _ask(self, stage: str, records: Mapping[int, RecordDict]) -> Iterator[tuple[int, RecordDict]]:
        """One exchange; nodes that fail or stay silent drop out, and their clients are noted."""
        round = next(iter(self.assignments.values())).round
        messages = [Message(r, n, f"train.{stage}", group_id=str(round)) for n, r in records.items()]
        self.down += sum(payload_bytes(r) for r in records.values())
        silent = set(records)
        for node, reply in self.cohort._exchange(messages, self.seconds):
            silent.discard(node)
            if isinstance(reply, str):
                self._drop(node, reply)
                continue
            self.up += payload_bytes(reply)
            try:
                yield node, reply
            except (KeyError, PosteriorError) as error:
                self._drop(node, f"its answer cannot be read ({error})")
        for node in silent:
            self._drop(node, f"no answer within {self.seconds:g} s in the exchange '{stage}'")

    def _drop(self, node: int, reason: str) -> None:
        for client in self.hosts[node]:
            self._fail(client, f"{self.cohort.registry.label(node)}: {reason}")

    def _fail(self, client: int, reason: str) -> None:
        if client not in self.failures:
            self.failures[client] = reason
            self.cohort.say(f"client {client}: {reason}")

    def _enough(self, nodes: Any, what: str) -> None:
        if len(nodes) < max(self.threshold, LEAST_PARTIES):
            reasons = "; ".join(f"client {c}: {r}" for c, r in sorted(self.failures.items()))
            raise RunError(
                f"secure aggregation: {len(nodes)} of {self.parties} nodes {what}, and {max(self.threshold, LEAST_PARTIES)} "
                f"are needed so that no single node's numbers show" + (f" ({reasons})." if reasons else ".")
            )

    def _metrics(self, sums: np.ndarray, clients: Sequence[int]) -> dict[str, float]:
        share = sum(self.weights[c] for c in clients) or 1.0
        count = sum(g.mean.numel() for g in self.start.gaussians.values()) or 1
        return {n: float(v) / share * (count if n == "kl" else 1) for n, v in zip(METRICS, sums)}

    def _statistics(self, present: Sequence[int]) -> dict[str, Any]:
        number = FixedPoint(self.experiment.transport.mask_bits, self.parties)
        return {
            "seconds": self.cohort.clock() - self.began,
            "nodes": len(present),
            "wire": f"masked, {self.experiment.transport.mask_bits} bits",
            "mask_error": number.error,
            "failures": [{"client": c, "reason": r} for c, r in sorted(self.failures.items())],
            "bytes": {"down": self.down, "up": self.up},
        }
