"""``FlowerCohort``: clients on other machines behind the protocol of the round loop.

One census when a node is first seen, then one message per node and round. Updates are handed to the round loop as
they arrive, one reply in memory at a time; the sums they go into do not depend on their order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from .. import __version__, config
from ..cohort import Assignment, Update
from ..errors import ConfigError, RunError
from ..experiment import Experiment
from ..federation import options
from ..fusion import get_rule
from ..posterior import Posterior
from .codecs import Int8, Layout, get_codec
from .records import account, payload_bytes, put_assignments, put_posterior, share_out, take_updates, told
from .registry import Member, Registry

POLL_SECONDS = 0.3
"""How often the SuperLink is asked for replies (Flower's own strategies: 3 s)."""
LOOK_SECONDS = 2.0
"""How often, while a round is under way, we look who is connected."""
MOST_TRIES = 4
"""How often one assignment is sent in a round, at most."""
_LOST = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


class FlowerCohort:
    """The clients of one federation, hosted on Flower nodes; implements ``fedbayes.cohort.Cohort``.

    ``layout`` is that of the first global posterior: nodes whose network differs are refused. ``clients`` is how many
    the experiment has, and ``sizes`` how many examples each holds where the experiment shares them out (None: not checked);
    ``classes`` (their names) and ``shape`` describe the network's task to nodes with their own data.
    ``say`` is told, in sentences, of nodes that come, fail or are refused.
    """

    remote = True
    """Clients are on other machines: randomness that protects them must not come from a seed (see ``privacy``)."""
    adds_noise = False
    """Whether the totals this cohort gives carry the noise of differential privacy already."""

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        layout: Layout,
        *,
        clients: int,
        classes: Sequence[str],
        shape: Sequence[int],
        sizes: Sequence[int] | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid, self.experiment, self.say = grid, experiment, say
        self.clock, self.sleep = clock, sleep
        self._about = ConfigRecord(
            {
                "toml": config.dumps(experiment),
                "classes": list(classes),
                "shape": ",".join(map(str, shape)),
                "version": __version__,
            }
        )
        rule = get_rule(experiment.fusion.rule, **options(experiment))
        if isinstance(get_codec(experiment.transport.wire), Int8) and rule.allows_zero_variance:
            raise ConfigError(
                f"transport.wire = int8: the rule '{rule.name}' takes variances of any size, and means in units of their roots "
                "spread too far for eight bits; use bf16 or float32."
            )
        self.registry = Registry(clients, layout, experiment.transport.nodes, sizes)
        self._trained: dict[int, int] = {}
        self._start: tuple[Posterior, RecordDict] | None = None  # the round's global posterior, encoded once
        self._statistics: dict[str, Any] = {}

    # -- who is there --------------------------------------------------------------------------------------------

    def sizes(self, run: int = 0) -> Mapping[int, int]:
        """Examples of each client, by client number; waits until all are hosted when asked for the first time.

        Once known, the clients stay the same for the whole run, so that who is drawn in which round does not depend
        on who happens to be connected.
        """
        self._meet()
        if not self.registry.complete:
            self._wait_for_all()
        return self.registry.sizes

    def _wait_for_all(self) -> None:
        end = self.clock() + self.experiment.transport.wait
        told = False
        while not self.registry.settle():
            if self.clock() > end:
                raise RunError(
                    f"after {self.experiment.transport.wait:g} s ('transport.wait') {self.registry.missing()}"
                )
            if not told:
                self.say(f"waiting for nodes: {self.registry.missing()}")
                told = True
            self.sleep(POLL_SECONDS)
            self._meet()

    def _meet(self) -> None:
        """Ask nodes that were never seen for their description."""
        unknown = self.registry.look(self.grid)
        if not unknown:
            return
        question = RecordDict({"experiment": self._about})
        replies = self._exchange([Message(question, n, MessageType.QUERY) for n in unknown], seconds=120)
        for node, reply in replies:
            for sentence in self.registry.enter(node, reply):
                self.say(sentence)

    def _exchange(self, messages: Sequence[Message], seconds: float) -> Iterator[tuple[int, RecordDict | str]]:
        """Send messages, yield (node, content or reason) as replies arrive; silent nodes are left out.

        A node that was restarted meanwhile has lost its message and counts as silent.
        """
        pushed = {i: m.metadata.dst_node_id for m in messages for i in self.grid.push_messages([m])}
        nodes = {i: n for i, n in pushed.items() if i is not None}  # None: Flower does not know the node any more
        stamps = {n: self.registry.stamp(n) for n in nodes.values()}
        looked = self.clock()
        end = looked + seconds
        while nodes and self.clock() < end:
            if self.clock() - looked >= LOOK_SECONDS:
                self.registry.look(self.grid)
                nodes = {i: n for i, n in nodes.items() if self.registry.stamp(n) in ("", stamps[n])}
                looked = self.clock()
            before = len(nodes)
            for message_id in list(nodes):
                for reply in self.grid.pull_messages([message_id]):
                    content = reply.content if reply.has_content() else str(reply.error.reason)
                    yield nodes.pop(message_id), content
            if nodes and len(nodes) == before:
                self.sleep(POLL_SECONDS)

    # -- one round -----------------------------------------------------------------------------------------------

    def train(self, assignments: Sequence[Assignment]) -> Iterator[Update]:
        """Send the assignments to their nodes and yield updates as they arrive.

        The round ends when every client has answered; or, once the quorum is met, at ``participation.deadline`` or
        when only nodes that cannot be reached are missing. Below the quorum it waits ``transport.wait`` seconds for
        nodes to come back (they get their assignment again), and then ends with what there is: the round loop says
        whether that suffices.
        """
        if not assignments:
            return
        round = Round(self, assignments)
        try:
            yield from round.run()
        finally:
            self._statistics = round.statistics()
            self._trained |= dict.fromkeys(round.arrived, assignments[0].round)

    def message(self, member: Member, assignments: Sequence[Assignment], ttl: float | None) -> Message:
        """Make the message that carries one node's assignments."""
        record = RecordDict({"experiment": self._about})
        start = assignments[0].start
        if self._start is None or self._start[0] is not start:
            self._start = (start, RecordDict())
            put_posterior(self._start[1], "start", start)
        put_assignments(record, assignments, self.experiment.transport.wire, self._start[1])
        for a in assignments:
            record.config_records["wire"][f"trained-{a.client}"] = self._trained.get(a.client, 0)
        return Message(record, member.node, MessageType.TRAIN, ttl=ttl, group_id=str(assignments[0].round))

    def statistics(self) -> Mapping[str, Any]:
        """Bytes sent down and up (in all and by client), seconds, and who failed and why."""
        return self._statistics

    def state(self) -> dict[str, Any]:
        """Who the clients are and when each trained last: what a resumed run must not ask anew."""
        return {"sizes": dict(self.registry.sizes), "trained": dict(self._trained)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the clients of a checkpoint; a simulation's names none: they are those that the nodes have told."""
        if "sizes" not in state:
            if state.get("optimizers"):
                raise RunError(
                    "the run was begun as a simulation, and with 'local.keep_state' its clients' optimisers are not on the "
                    "nodes: resume it with `fedbayes run`, or start again in another directory."
                )
            if any(m.own_data for m in self.registry.members.values()):
                raise RunError(
                    "the run was begun as a simulation, but the nodes bring their own data: choose another directory."
                )
            return
        self.registry.expect({int(c): int(n) for c, n in state["sizes"].items()})
        self._trained = {int(c): int(r) for c, r in state["trained"].items()}


@dataclass(frozen=True)
class Out:
    """A message under way: to which node, for which clients, and the node's stamp when it was sent."""

    node: int
    clients: list[int]
    stamp: str


class Round:
    """One round's exchange: which messages are out, who has answered, who is missing and why."""

    def __init__(self, cohort: FlowerCohort, assignments: Sequence[Assignment]) -> None:
        self.cohort, self.grid, self.assignments = cohort, cohort.grid, {a.client: a for a in assignments}
        self.deadline = cohort.experiment.participation.deadline
        self.needed = quorum_of(cohort.experiment, len(assignments))
        self.arrived: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self.unfit: set[int] = set()  # clients whose answer came and was none: refused, not out of reach
        self.lost: set[int] = set()  # clients whose node could not be reached
        self.out: dict[str, Out] = {}
        self.tries: dict[int, int] = {}
        self.traffic: dict[int, dict[str, int]] = {}
        self.began = cohort.clock()

    def run(self) -> Iterator[Update]:
        """Push everything, then pull until the round may end."""
        for node, clients in self.cohort.registry.hosts(self.assignments).items():
            self._push(node, clients)
        for client in self.assignments.keys() - {c for o in self.out.values() for c in o.clients}:
            self._lose(client, "no node that hosts it is connected")
        lost_since = looked = self.cohort.clock()
        while self.out or self.lost:
            progress = False
            for message_id in list(self.out):
                for reply in self.grid.pull_messages([message_id]):
                    progress = True
                    yield from self._take(message_id, reply)
            now = self.cohort.clock()
            lost_since = now if self.out else lost_since
            if self._over() or now - lost_since > self.cohort.experiment.transport.wait:
                return
            if now - looked >= LOOK_SECONDS:
                self._look_around()
                looked = self.cohort.clock()
            if not progress and (self.out or self.lost):
                self.cohort.sleep(POLL_SECONDS)

    def _over(self) -> bool:
        """Whether the quorum is met and nothing that can still come is worth waiting for."""
        if len(self.arrived) + len(self.unfit) < self.needed:
            return False
        late = self.deadline > 0 and self.cohort.clock() - self.began >= self.deadline
        if late:
            for out in self.out.values():
                for client in out.clients:
                    self._fail(client, f"no answer within {self.deadline:g} s ('participation.deadline')")
        return late or not self.out

    def _push(self, node: int, clients: Sequence[int]) -> None:
        """Send a node its assignments: one message for each posterior they start from."""
        for group in alike([self.assignments[c] for c in clients]):
            message = self.cohort.message(self.cohort.registry.members[node], group, None)
            size, group_clients = payload_bytes(message.content), [a.client for a in group]
            for message_id in self.grid.push_messages([message]):
                if message_id is None:
                    self.lost |= set(group_clients)
                    continue
                self.out[message_id] = Out(node, group_clients, self.cohort.registry.stamp(node))
                share_out(self.traffic, group_clients, "down", size)
                for a in group:
                    self.tries[a.client] = self.tries.get(a.client, 0) + 1

    def _take(self, message_id: str, reply: Message) -> Iterator[Update]:
        out = self.out.pop(message_id)
        label = self.cohort.registry.label(out.node)
        if not reply.has_content():
            for client in out.clients:
                if reply.error.code in _LOST and self.tries[client] < MOST_TRIES:
                    self._lose(client, f"{label}: {reply.error.reason}")
                else:
                    self._fail(client, f"{label}: {reply.error.reason}")
            return
        answered = set()
        for found in take_updates(reply.content, self.assignments[out.clients[0]].start):
            client = found.client if isinstance(found, Update) else found[0]
            if client not in out.clients or client in answered:
                self.cohort.say(f"{label} answered for client {client}, which it was not asked for; ignored.")
                continue
            answered.add(client)
            if client in self.arrived:
                continue  # its assignment had been sent twice
            if isinstance(found, Update) and (objection := self._objection(found)):
                self._refuse(client, f"{label}: {objection}")
            elif isinstance(found, Update):
                sent = (f"posterior-{client}", f"posterior-{client}-layout", f"update-{client}")
                share_out(self.traffic, [client], "up", payload_bytes(reply.content, sent))
                self.arrived[client] = out.node
                self.failures.pop(client, None)
                self.unfit.discard(client)
                self.lost.discard(client)
                yield replace(
                    found, examples=self.cohort.registry.sizes[client]
                )  # as the census said: weights use that
            elif f"update-{client}" in reply.content:
                self._refuse(client, f"{label}: {found[1]}")
            else:
                self._fail(client, f"{label}: {found[1]}")
        for client in set(out.clients) - answered:
            self._refuse(client, f"{label}: its answer does not mention this client")

    def _objection(self, update: Update) -> str:
        """Why an update is no answer to its assignment; empty when it is."""
        asked = self.assignments[update.client]
        if (update.round, update.run) != (asked.round, asked.run):
            return f"its answer is for round {update.round} of run {update.run}, not round {asked.round} of run {asked.run}"
        if update.examples < 1:
            return f"it says that it trained on {update.examples} examples"
        return ""

    def _lose(self, client: int, reason: str) -> None:
        self.lost.add(client)
        self._fail(client, reason)

    def _refuse(self, client: int, reason: str) -> None:
        self.unfit.add(client)
        self._fail(client, reason)

    def _fail(self, client: int, reason: str) -> None:
        self.failures[client] = told(reason)
        self.cohort.say(f"round {self.assignments[client].round}: client {client}: {self.failures[client]}")

    def _look_around(self) -> None:
        """Send assignments again to nodes that were restarted (they lost theirs) or have come back."""
        self.cohort._meet()
        registry = self.cohort.registry
        for message_id, out in list(self.out.items()):
            now = registry.stamp(out.node)
            if now and out.stamp and now != out.stamp:
                del self.out[message_id]
                self.lost |= {c for c in out.clients if c not in self.arrived}
        if not self.lost:
            return
        for node, clients in registry.hosts(self.lost).items():
            if registry.stamp(node):
                self.cohort.say(f"{registry.label(node)} is back: {_list(clients)} sent again.")
                self.lost -= set(clients)
                self._push(node, clients)

    def statistics(self) -> dict[str, Any]:
        """What the exchange cost, by client and in all."""
        return {
            "seconds": self.cohort.clock() - self.began,
            "nodes": len(set(self.arrived.values())),
            "wire": self.cohort.experiment.transport.wire,
            "failures": [
                {"client": c, "reason": r, "answered": c in self.unfit} for c, r in sorted(self.failures.items())
            ],
            "bytes": account(self.traffic),
        }


def quorum_of(experiment: Experiment, clients: int) -> int:
    """Return how many of a round's clients suffice."""
    return max(1, math.ceil(experiment.participation.quorum * clients - 1e-9))


def alike(assignments: Sequence[Assignment]) -> list[list[Assignment]]:
    """Group assignments that start from the same posterior under the same prior: one message carries each group."""
    groups: list[list[Assignment]] = []
    for a in assignments:
        for group in groups:
            b = group[0]
            if a.start is b.start and (a.prior is b.prior or (a.prior and b.prior and a.prior.same_bits(b.prior))):
                group.append(replace(a, prior=b.prior))
                break
        else:
            groups.append([a])
    return groups


def _list(clients: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(clients)))
