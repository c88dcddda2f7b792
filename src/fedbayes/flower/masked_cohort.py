"""``MaskedCohort``: the server's side of secure aggregation; it yields one total where ``FlowerCohort`` yields updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..cohort import Assignment, Update
from ..errors import RunError
from ..experiment import Experiment
from ..federation import options
from ..fusion import client_weights
from ..posterior import Posterior
from ..privacy.federation import MaskedTotal
from ..privacy.relative import Relative, refuse_unless_sum
from ..schedule import choose_clients
from .cohort import POLL_SECONDS, FlowerCohort, alike, quorum_of
from .masked_client import metrics_sent
from .masking import LEAST_PARTIES, FixedPoint, check_keys, check_share, threshold_of, unmask
from .records import account, payload_bytes, share_out, told

T = TypeVar("T")


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

    def _wait_for_all(self) -> None:
        super()._wait_for_all()
        for round in range(1, self.experiment.rounds + 1):  # who is drawn is known beforehand: no round is lost to it
            self._refuse_lone_node(choose_clients(self.experiment, self.registry.sizes, round), round)

    def _refuse_lone_node(self, clients: Sequence[int], round: int) -> None:
        """Refuse a round whose clients are all on one node: their sum would be that node's own numbers."""
        hosts = self.registry.hosts(clients)
        if len(hosts) < LEAST_PARTIES and sum(map(len, hosts.values())) == len(clients):
            raise RunError(
                f"fusion.private: the clients drawn for round {round} ({', '.join(map(str, clients))}) all live on "
                f"{self.registry.label(min(hosts))}, and a sum of one node shows its numbers; raise "
                "'participation.fraction' or spread the clients over more nodes."
            )

    def train(self, assignments: Sequence[Assignment]) -> Iterator[Update]:
        """Do the four exchanges of a round and yield the total of those who stayed."""
        if not assignments:
            return
        self._refuse_lone_node([a.client for a in assignments], assignments[0].round)
        yield MaskedRound(self, assignments).run()


class MaskedRound:
    """One round of secure aggregation, seen from the server."""

    def __init__(self, cohort: MaskedCohort, assignments: Sequence[Assignment]) -> None:
        self.cohort, self.assignments = cohort, {a.client: a for a in assignments}
        self.experiment = cohort.experiment
        self.rule = refuse_unless_sum(self.experiment, options(self.experiment))
        self.start = assignments[0].start
        self.hosts: dict[int, list[int]] = {}
        self.seconds = self.experiment.participation.deadline or self.experiment.transport.wait
        self.weights = client_weights(
            self.experiment.fusion.weighting, {c: cohort.registry.sizes[c] for c in self.assignments}
        )
        self.failures: dict[int, str] = {}
        self.traffic: dict[int, dict[str, int]] = {}
        self.began = cohort.clock()

    def run(self) -> MaskedTotal:
        """Return the round's total, or raise a sentence when too few nodes stayed to unmask one."""
        self.hosts = self._connected()
        publics = self._keys()
        sealed = self._shares(publics)
        total, included = self._masked(sealed)
        present = sorted(included)
        dropped = sorted(set(sealed) - set(present))
        self._enough(present, "sent a masked sum")
        shares = self._reveal(publics, present, dropped)
        number = FixedPoint(self.experiment.transport.mask_bits, self.parties)
        plain = number.decode(unmask(total, publics, present, dropped, shares, self.threshold))
        clients = sorted(c for cs in included.values() for c in cs)
        first = self.assignments[min(self.assignments)]
        self.cohort._trained |= dict.fromkeys(clients, first.round)
        self.cohort._statistics = self._statistics(present)
        names = metrics_sent(self.experiment)
        values, sums = np.split(plain, [len(plain) - len(names)])
        return MaskedTotal(
            client=-1,
            round=first.round,
            posterior=Posterior(),
            examples=sum(self.cohort.registry.sizes[c] for c in clients),
            metrics=self._metrics(dict(zip(names, sums)), clients),
            run=first.run,
            total=torch.from_numpy(values.copy()),
            weights={c: self.weights[c] for c in clients},
            sizes={c: self.cohort.registry.sizes[c] for c in clients},
            refusals={c: r for c, r in self.failures.items() if c not in clients},
        )

    def _connected(self) -> dict[int, list[int]]:
        """Nodes that are there with their clients; below the quorum they are waited for, as an open round does."""
        registry, needed = self.cohort.registry, quorum_of(self.experiment, len(self.assignments))
        while True:
            self.cohort._meet()
            hosts = {n: cs for n, cs in registry.hosts(self.assignments).items() if registry.stamp(n)}
            there = {c for cs in hosts.values() for c in cs}
            late = self.cohort.clock() - self.began > self.experiment.transport.wait
            if late or (len(there) >= needed and len(hosts) >= LEAST_PARTIES):
                break
            self.cohort.sleep(POLL_SECONDS)
        for client in self.assignments.keys() - there:
            self._fail(client, "no node that hosts it is connected")
        return hosts

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
        known: set[bytes] = set()

        def read(_node: int, reply: RecordDict) -> tuple[bytes, bytes]:
            keys = reply.config_records["keys"]
            pair = _bytes(keys["masking"]), _bytes(keys["sealing"])
            check_keys(pair)
            if len({*pair} - known) < len(pair):
                raise ValueError("a key that was sent before")
            known.update(pair)
            return pair

        record = RecordDict({"masking": self._about()})
        found = dict(self._ask("keys", dict.fromkeys(self.hosts, record), read))
        self._enough(found, "sent its keys")
        return found

    def _shares(self, publics: Mapping[int, tuple[bytes, bytes]]) -> dict[int, dict[int, bytes]]:
        record = RecordDict(
            {
                "masking-keys": ConfigRecord({str(n): k for n, (k, _) in publics.items()}),
                "sealing-keys": ConfigRecord({str(n): k for n, (_, k) in publics.items()}),
            }
        )

        def read(node: int, reply: RecordDict) -> dict[int, bytes]:
            boxes = {int(n): _bytes(box) for n, box in reply.config_records["sealed"].items()}
            if boxes.keys() != publics.keys() - {node}:
                raise ValueError("shares for other nodes than those that were named")
            return boxes

        found = dict(self._ask("shares", dict.fromkeys(publics, record), read))
        self._enough(found, "sent its shares")
        return found

    def _masked(self, sealed: Mapping[int, Mapping[int, bytes]]) -> tuple[np.ndarray, dict[int, list[int]]]:
        """Send assignments and sealed shares; add up masked vectors as they arrive, one in memory at a time."""
        messages = {n: self._assignment(n, {o: boxes[n] for o, boxes in sealed.items() if n in boxes}) for n in sealed}
        number = FixedPoint(self.experiment.transport.mask_bits, self.parties)
        size = Relative(self.rule, self.start).size + len(metrics_sent(self.experiment))
        total, included = np.zeros(size, number.dtype), {}

        def read(node: int, reply: RecordDict) -> tuple[np.ndarray | None, list[int], dict[int, str]]:
            failures = {int(c): str(r) for c, r in reply.config_records.get("failures", ConfigRecord()).items()}
            if "masked" not in reply:
                return None, [], failures
            vector = reply.array_records["masked"]["vector"].numpy()
            clients = [int(c) for c in reply.config_records["included"]["clients"]]  # type: ignore[union-attr]
            known = clients and len(set(clients)) == len(clients) and set(clients) <= set(self.hosts[node])
            if vector.shape != total.shape or vector.dtype != total.dtype or not known:
                raise ValueError("a masked vector of another form")
            return vector, clients, failures

        for node, (vector, clients, failures) in self._ask("masked", messages, read):
            for client in failures.keys() & set(self.hosts[node]):
                self._fail(client, f"{self.cohort.registry.label(node)}: {failures[client]}")
            if vector is not None:
                total += vector
                included[node] = clients
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

    def _reveal(
        self, publics: Mapping[int, Any], present: Sequence[int], dropped: Sequence[int]
    ) -> dict[int, list[bytes]]:
        record = RecordDict({"sum": ConfigRecord({"present": list(present), "dropped": list(dropped)})})
        found: dict[int, list[bytes]] = {}

        kinds = dict.fromkeys(present, "seed") | dict.fromkeys(dropped, "key")
        index = {node: i for i, node in enumerate(sorted(publics), 1)}

        def read(node: int, reply: RecordDict) -> dict[int, bytes]:
            found = {int(n): _bytes(share) for n, share in reply.config_records["shares"].items()}
            if found.keys() != kinds.keys():
                raise ValueError("shares for other nodes than those that were named")
            for owner, share in found.items():
                check_share(share, kinds[owner], index[node])
            return found

        for answered, (_, shares) in enumerate(self._ask("reveal", dict.fromkeys(present, record), read), 1):
            for owner, share in shares.items():
                found.setdefault(owner, []).append(share)
            if answered >= self.threshold:
                break
        return found

    def _ask(
        self, stage: str, records: Mapping[int, RecordDict], read: Callable[[int, RecordDict], T]
    ) -> Iterator[tuple[int, T]]:
        """One exchange, each answer read; nodes that fail, stay silent or make no sense drop out, their clients noted."""
        round = next(iter(self.assignments.values())).round
        messages = [Message(r, n, f"train.{stage}", group_id=str(round)) for n, r in records.items()]
        for node, record in records.items():
            share_out(self.traffic, self.hosts[node], "down", payload_bytes(record))
        silent = set(records)
        for node, reply in self.cohort._exchange(messages, self.seconds):
            silent.discard(node)
            if isinstance(reply, str):
                self._drop(node, reply)
                continue
            share_out(self.traffic, self.hosts[node], "up", payload_bytes(reply))
            try:
                answer = read(node, reply)
            except (KeyError, TypeError, ValueError, OSError, EOFError) as error:
                self._drop(node, f"its answer in the exchange '{stage}' cannot be read ({error})")
                continue
            yield node, answer
        for node in silent:
            self._drop(node, f"no answer within {self.seconds:g} s in the exchange '{stage}'")

    def _drop(self, node: int, reason: str) -> None:
        for client in self.hosts[node]:
            self._fail(client, f"{self.cohort.registry.label(node)}: {reason}")

    def _fail(self, client: int, reason: str) -> None:
        if client not in self.failures:
            self.failures[client] = told(reason)
            self.cohort.say(f"client {client}: {self.failures[client]}")

    def _enough(self, nodes: Any, what: str) -> None:
        if len(nodes) < max(self.threshold, LEAST_PARTIES):
            reasons = "; ".join(f"client {c}: {r.rstrip('.')}" for c, r in sorted(self.failures.items()))
            raise RunError(
                f"secure aggregation: {len(nodes)} of {self.parties} nodes {what}, and {max(self.threshold, LEAST_PARTIES)} "
                f"are needed so that no single node's numbers show" + (f" ({reasons})." if reasons else ".")
            )

    def _metrics(self, sums: Mapping[str, float], clients: Sequence[int]) -> dict[str, float]:
        share = sum(self.weights[c] for c in clients) or 1.0
        count = sum(g.mean.numel() for g in self.start.gaussians.values()) or 1
        return {n: float(v) / share * (count if n == "kl" else 1) for n, v in sums.items()}

    def _statistics(self, present: Sequence[int]) -> dict[str, Any]:
        number = FixedPoint(self.experiment.transport.mask_bits, self.parties)
        return {
            "seconds": self.cohort.clock() - self.began,
            "nodes": len(present),
            "wire": f"masked, {self.experiment.transport.mask_bits} bits",
            "mask_error": number.error,
            "failures": [{"client": c, "reason": r} for c, r in sorted(self.failures.items())],
            "bytes": account(self.traffic),
        }


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} in place of bytes")
    return value
