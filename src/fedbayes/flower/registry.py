"""Who hosts whom: the server's book of nodes, their clients, and nodes that were refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from .. import __version__
from ..errors import PosteriorError, RunError
from .client import layout_difference
from .codecs import Layout
from .records import told


@dataclass
class Member:
    """One node: its number at Flower, its name there, and the clients that live on it."""

    node: int
    name: str
    clients: tuple[int, ...]
    sizes: Mapping[int, int]
    placed: bool
    own_data: bool

    @property
    def label(self) -> str:
        """How the node is called in messages."""
        return f"node {self.name}" if self.name else f"node {self.node}"


class Registry:
    """Learns from census replies which node hosts which clients.

    ``total`` clients exist in the experiment; the registry is complete when each has a node (or when ``nodes``
    nodes have come, if that is asked for). After that, clients and sizes are fixed; nodes may come and go. ``expected``
    are the sizes that clients have by the server's own reckoning: a node that finds others has other data.
    """

    def __init__(self, total: int, layout: Layout, nodes: int = 0, expected: Sequence[int] | None = None) -> None:
        self.total, self.layout, self.nodes, self.expected = total, layout, nodes, expected
        self.members: dict[int, Member] = {}
        self.refused: dict[int, str] = {}
        self._refused_at: dict[int, str] = {}  # stamps
        self.stamps: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self.complete = False
        self._home: dict[int, int] = {}

    # -- presence ------------------------------------------------------------------------------------------------

    def look(self, grid: Grid) -> list[int]:
        """Ask the SuperLink who is connected; return nodes to be met. A stamp changes when a node is restarted."""
        try:
            infos = {i.node_id: i for i in grid.get_nodes()}
            self.stamps = {n: i.last_activated_at or "online" for n, i in infos.items()}
            self.names |= {n: i.name for n, i in infos.items() if i.name}
        except (AttributeError, NotImplementedError):  # hosts whose grid only lists numbers
            self.stamps = dict.fromkeys(grid.get_node_ids(), "online")
        for node in [n for n in self.refused if self.stamp(n) not in ("", self._refused_at[n])]:
            del self.refused[node]  # it was started again, perhaps with what it lacked
        return sorted(self.stamps.keys() - self.members.keys() - self.refused.keys())

    def stamp(self, node: int) -> str:
        """When the node was last started, as Flower says; empty while it is not connected."""
        return self.stamps.get(node, "")

    def label(self, node: int) -> str:
        """How a node is called in messages."""
        name = self.names.get(node, "")
        return f"node {name}" if name else f"node {node}"

    # -- membership ----------------------------------------------------------------------------------------------

    def enter(self, node: int, reply: RecordDict | str) -> list[str]:
        """Take a node's answer to the census; return sentences worth telling (why it was refused, say)."""
        try:
            reason = self._objection(reply)
        except (KeyError, TypeError, ValueError):
            reason = "its answer to the census cannot be read."
        if reason:
            self.refused[node] = reason = told(reason)
            self._refused_at[node] = self.stamp(node)
            return [f"{self.label(node)} is refused: {reason}"]
        assert isinstance(reply, RecordDict)
        about = reply.config_records["census"]
        clients, sizes = _numbers(about["clients"]), _numbers(about["sizes"])
        member = Member(
            node,
            self.names.get(node, ""),
            clients,
            dict(zip(clients, sizes)),
            bool(about["placed"]),
            bool(about["own-data"]),
        )
        self.members[node] = member
        return self._place(member) if member.placed or self.complete else []

    def _objection(self, reply: RecordDict | str) -> str:
        """Why a node cannot take part; empty when it can."""
        if isinstance(reply, str):
            return f"its app failed: {reply}"
        if isinstance(refusal := reply.get("refusal"), ConfigRecord):
            return str(refusal["reason"])
        about = reply.get("census")
        if not isinstance(about, ConfigRecord):
            return "it answered the census with something else; does it run another app?"
        if about["version"] != __version__:
            return f"it runs fedbayes {about['version']} and the server {__version__}; install the same on both."
        try:
            theirs = Layout.parse(str(about["layout"]))
        except PosteriorError:
            return "its model layout cannot be read."
        clients, sizes = _numbers(about["clients"]), _numbers(about["sizes"])
        if len(clients) != len(sizes) or len(set(clients)) != len(clients) or min((*clients, *sizes), default=0) < 0:
            raise ValueError
        if not isinstance(about["own-data"], bool) or not isinstance(about["placed"], bool):
            raise TypeError
        said = layout_difference(theirs, self.layout, "it", "the server")
        return said or ("" if about["own-data"] else self._other_data(dict(zip(clients, sizes))))

    def _other_data(self, sizes: Mapping[int, int]) -> str:
        """Say where a node's shards of the experiment's data are not the server's; empty when they are."""
        for client, size in sizes.items():
            if client >= self.total:
                return f"it hosts client {client}, and the experiment has clients 0 to {self.total - 1}."
            if self.expected is not None and size != self.expected[client]:
                return (
                    f"it holds {size} examples of client {client} and the server {self.expected[client]}: their data "
                    "(or data-dir) differ."
                )
        return ""

    def _place(self, member: Member) -> list[str]:
        """Put a node's clients into the book; the newest claim wins once the run is under way."""
        said = []
        clients = member.clients
        if not member.placed:
            clients = self._orphans(member)
            member.clients = clients
        for client in clients:
            other = self.members.get(self._home.get(client, -1))
            if other is not None and other.node != member.node and other.node in self.stamps:
                if not self.complete:
                    raise RunError(
                        f"client {client} lives on two nodes, {other.label} and {member.label}; give each its own "
                        "partition-id (or clients) in the node config."
                    )
                said.append(f"client {client} has moved from {other.label} to {member.label}.")
            self._home[client] = member.node
            if not self.complete:
                self.sizes[client] = member.sizes[client]
        return said

    def _orphans(self, member: Member) -> tuple[int, ...]:
        """Clients whose node is gone, for a node that came later and does not say who it is."""
        gone = [c for c in self.sizes if self._home.get(c, -1) not in self.stamps]
        return tuple(gone[:1]) if member.own_data else tuple(c for c in gone if c in member.clients)

    def settle(self) -> bool:
        """Finish the book if everybody needed is there: give clients to nodes that do not say who they are."""
        waiting = [m for m in self.members.values() if not m.placed]
        if self.nodes and len(self.members) < self.nodes:
            return False
        if waiting and not self.nodes:
            raise RunError(
                f"{waiting[0].label} has no 'partition-id' in its node config; say how many nodes there are "
                "(transport.nodes=3), so that the clients can be shared out among them, or start each with "
                '--node-config "partition-id=0 num-partitions=3".'
            )
        self._share_out(sorted(waiting, key=lambda m: m.node))
        own = [m for m in self.members.values() if m.own_data]
        expected = set(self.sizes) if own and self.nodes else set(range(self.total))
        if not expected or expected - self._home.keys():
            return False
        self.sizes = dict(sorted(self.sizes.items()))
        self.complete = True
        return True

    def _share_out(self, members: list[Member]) -> None:
        """Give the free clients to nodes without a number, in order of their (random) Flower numbers."""
        free = [c for c in range(max(self.total, len(members))) if c not in self._home]
        for i, member in enumerate(members):
            if member.own_data:
                if not free:
                    raise RunError(f"{member.label} brings its own data, but every client is taken by another node.")
                client = free.pop(0)
                member.clients, member.sizes = (client,), {client: next(iter(member.sizes.values()))}
            else:
                member.clients = tuple(free[i :: len(members)])
        for member in members:
            member.placed = True
            self._place(member)

    def expect(self, sizes: Mapping[int, int]) -> None:
        """Take over the clients of a checkpoint; nodes must still be met before they can be asked to train."""
        self.sizes, self.complete = dict(sorted(sizes.items())), True

    def hosts(self, clients: Iterable[int]) -> dict[int, list[int]]:
        """Group clients by the node they live on; clients without a known node are left out."""
        found: dict[int, list[int]] = {}
        for client in sorted(clients):
            if client in self._home:
                found.setdefault(self._home[client], []).append(client)
        return found

    def missing(self) -> str:
        """Say who is not there yet, for messages to people."""
        absent = [c for c in range(self.total) if c not in self._home]
        parts = [
            f"{len(self.members)} of {self.nodes} nodes are there"
            if self.nodes
            else f"{len(self.members)} nodes are there"
        ]
        if absent:
            parts.append(
                f"clients without a node: {', '.join(map(str, absent[:20]))}{' ...' if len(absent) > 20 else ''}"
            )
        parts += [f"{self.label(n)} was refused ({r.rstrip('.')})" for n, r in self.refused.items()]
        return "; ".join(parts) + "."


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(isinstance(v, int) for v in values):
        raise TypeError(f"{values!r} are no whole numbers")
    return tuple(values)
