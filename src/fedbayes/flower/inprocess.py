"""A Flower grid without a network: nodes are Flower ClientApps called in this process, one at a time.

For tests of apps and for measurements. Messages, records, contexts and error replies are Flower's own; only the
SuperLink is missing. Replies can be held back, reordered or lost to see what a server does then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


@dataclass
class VirtualNode:
    """One node: its number, its node config, the app it runs, and the state Flower keeps for it."""

    node: int
    config: Mapping[str, Any]
    app: Callable[[Message, Context], Message]
    online: bool = True
    silent: bool = False  # takes messages and never answers
    activations: int = 1
    state: RecordDict = field(default_factory=RecordDict)


class InProcessGrid(Grid):
    """Call ``app`` for every message when its reply is pulled, so that at most one reply is in memory.

    ``configs`` gives one node config each; ``run_config`` is what every node's context holds. ``before`` is called
    with the node and the message before each call: raise from it, or change the node, to stage a failure.
    """

    def __init__(
        self,
        app: ClientApp | Callable[[Message, Context], Message],
        configs: Sequence[Mapping[str, Any]],
        *,
        run_config: Mapping[str, Any] | None = None,
        before: Callable[[VirtualNode, Message], None] | None = None,
    ) -> None:
        self.nodes = {1000 + i: VirtualNode(1000 + i, c, app) for i, c in enumerate(configs)}
        self.run_config, self.before = dict(run_config or {}), before
        self._numbers = itertools.count(1)
        self._out: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # Flower's processes set these

    def set_run(self, run: Any) -> None:
        """Accept a run; there is only one."""

    @property
    def run(self) -> Any:
        """The only run there is."""
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message (Flower's deprecated form)."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Numbers of the nodes that are online."""
        return [n.node for n in self.nodes.values() if n.online]

    def get_nodes(self) -> Iterable[Any]:
        """What the SuperLink would say of the nodes that are online."""
        return [
            SimpleNamespace(node_id=n.node, last_activated_at=str(n.activations), name=str(n.config.get("name", "")))
            for n in self.nodes.values()
            if n.online
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep messages for their nodes."""
        identities = []
        for message in messages:
            identity = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = identity
            self._out[identity] = message
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Have the nodes answer these messages; a node that is silent stays silent, one that is away is reported."""
        return [reply for i in message_ids if i in self._out for reply in self._answer(i)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push and pull at once."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, identity: str) -> list[Message]:
        message = self._out[identity]
        node = self.nodes[message.metadata.dst_node_id]
        if not node.online:
            del self._out[identity]
            return [Message(Error(ErrorCode.NODE_UNAVAILABLE, "the node is not connected"), reply_to=message)]
        try:
            if self.before is not None:
                self.before(node, message)
            if node.silent:
                return []
            del self._out[identity]
            context = Context(
                run_id=1, node_id=node.node, node_config=dict(node.config), state=node.state, run_config=self.run_config
            )
            reply = node.app(message, context)
        except Exception as error:
            self._out.pop(identity, None)
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{error!r}"), reply_to=message)
        return [reply]
