"""``client_app``: what runs on a node. It says which clients live there, and trains them when asked.

A thin app points at it (``examples/flower_app``). The node builds the experiment from what the server sends, finds
its data by its own config, trains with the same plain loop as a local run, and answers with posteriors.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import flwr
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from .. import __version__
from ..cohort import Assignment, Update
from ..errors import FedBayesError
from . import masked_client as masked
from .codecs import Layout
from .home import Home, prepare_home, sentence
from .memory import recall, remember
from .records import put_error, put_update, take_assignments

if TYPE_CHECKING:
    from ..setup import Setup

log = logging.getLogger("fedbayes.flower")
client_app = ClientApp()


@client_app.query()
def describe(message: Message, context: Context) -> Message:
    """Answer the census: which clients live here, how many examples each holds, which versions, which model."""
    reply = RecordDict()
    try:
        reply["census"] = ConfigRecord(census(message.content, context.node_config))
    except Exception as error:
        reply["refusal"] = ConfigRecord({"reason": sentence(error, context.node_config), "version": __version__})
    return Message(reply, reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Do the assignments in the message and answer with one update or one reason for each."""
    return Message(work(message.content, context.node_config, context.state), reply_to=message)


@client_app.train("keys")
def keys(message: Message, context: Context) -> Message:
    """Secure aggregation, first exchange."""
    return Message(masked.answer_keys(message.content, message.metadata.dst_node_id, context.state), reply_to=message)


@client_app.train("shares")
def shares(message: Message, context: Context) -> Message:
    """Secure aggregation, second exchange."""
    return Message(masked.answer_shares(message.content, context.state), reply_to=message)


@client_app.train("masked")
def masked_sum(message: Message, context: Context) -> Message:
    """Secure aggregation, third exchange: training happens here."""
    return Message(masked.answer_masked(message.content, context.node_config, context.state), reply_to=message)


@client_app.train("reveal")
def reveal(message: Message, context: Context) -> Message:
    """Secure aggregation, fourth exchange."""
    return Message(masked.answer_reveal(message.content, context.state), reply_to=message)


def census(asked: RecordDict, node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return this node's description; see ``cohort.Census`` for the reader's side."""
    versions = {"version": __version__, "flower": flwr.__version__, "python": platform.python_version()}
    about = asked.config_records["experiment"]
    if about["version"] != __version__:
        return {**versions, "clients": [], "sizes": [], "placed": True, "own-data": False, "layout": ""}
    home = Home.read(node_config)
    setup = _setup(asked, home)
    if not setup.experiment.fusion.private:
        home.refuse_open()
    clients = home.clients(len(setup.shards))
    shown = clients if home.placed else range(len(setup.shards))
    if home.data is not None and not home.placed:
        shown = (0,)
    return {
        **versions,
        "clients": list(shown),
        "sizes": [len(setup.shards[c]) for c in shown],
        "placed": home.placed,
        "own-data": home.data is not None,
        "layout": Layout.of(setup.start).dumps(),
    }


def work(asked: RecordDict, node_config: Mapping[str, Any], state: RecordDict) -> RecordDict:
    """Train every assignment of a message; a client that fails says why and the others go on."""
    reply = RecordDict()
    wire = asked.config_records["wire"]
    numbers = [int(n.rpartition("-")[2]) for n in asked.config_records if n.startswith("assignment-")]
    try:
        if wire["version"] != __version__:
            raise FedBayesError(
                f"the server runs fedbayes {wire['version']} and this node {__version__}; install the same on both."
            )
        Home.read(node_config).refuse_open()
        assignments = take_assignments(asked)
        setup = node_setup(asked, node_config, assignments[0].client)
    except FedBayesError as error:
        for number in numbers:
            put_error(reply, number, sentence(error, node_config))
        return reply
    for assignment in assignments:
        try:
            update = train_one(setup, assignment, state, last_trained(wire, assignment.client))
            put_update(reply, update, assignment.seed, str(wire["codec"]), assignment.start)
        except Exception as error:
            if not isinstance(error, FedBayesError):
                log.exception("client %d failed in round %d", assignment.client, assignment.round)
            put_error(reply, assignment.client, sentence(error, node_config))
    return reply


def train_one(setup: Setup, assignment: Assignment, state: RecordDict, trained: int) -> Update:
    """Train one client from its assignment, exactly as the plain loop of a local run does.

    ``trained`` is the last round this client trained in, whose optimiser state is wanted back where the experiment
    keeps it (``local.keep_state``).
    """
    from ..runner import local_cohort

    difference = layout_difference(Layout.of(setup.start), Layout.of(assignment.start), "this node", "the server")
    if difference:
        raise FedBayesError(difference)
    if assignment.client >= len(setup.shards) or not len(setup.shards[assignment.client]):
        raise FedBayesError(f"client {assignment.client} has no data on this node.")
    cohort = local_cohort([setup])
    if setup.experiment.local.keep_state and trained:
        recall(cohort, state, assignment.client, trained)
    (update,) = list(cohort.train([assignment]))
    if setup.experiment.local.keep_state:
        remember(cohort, state, assignment.client, assignment.round)
    return update


def last_trained(wire: ConfigRecord, client: int) -> int:
    """The last round a client trained in, as the server says (0: none yet)."""
    return int(str(wire.get(f"trained-{client}", 0)))


def layout_difference(one: Layout, other: Layout, here: str, there: str) -> str:
    """Say in one sentence how two models differ, naming both; empty when they do not."""
    if one == other:
        return ""
    mine, yours = {e[:2]: e[2:] for e in one.entries}, {e[:2]: e[2:] for e in other.entries}
    key = next(k for k in sorted(mine.keys() | yours.keys()) if mine.get(k) != yours.get(k))
    return (
        f"{here} has model layout {one.fingerprint} and {there} {other.fingerprint}; they first differ at '{key[1]}': "
        f"{_said(mine.get(key))} against {_said(yours.get(key))}."
    )


def _said(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if entry is None else f"{entry[0]} {tuple(entry[1])}"


def node_setup(asked: RecordDict, node_config: Mapping[str, Any], client: int) -> Setup:
    """Return the experiment made ready on this node, for the client it is to train."""
    return _setup(asked, Home.read(node_config).given(client))


def _setup(asked: RecordDict, home: Home) -> Setup:
    about = asked.config_records["experiment"]
    shape = tuple(int(n) for n in str(about["shape"]).split(",") if n)
    names = tuple(str(name) for name in about["classes"])  # type: ignore[union-attr]
    return prepare_home(str(about["toml"]), home, len(names), shape, names)
