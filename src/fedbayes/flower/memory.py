"""A client's optimiser kept between rounds, on its node, in the state Flower keeps there for a run.

It never travels. A node that was restarted, or a run that was started again, has lost it: then the client says so
instead of training on as if nothing had happened.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ..errors import RunError

if TYPE_CHECKING:
    from ..cohort import Cohort

KEPT = 2
"""Rounds remembered: the last, and the one before it in case a round is repeated."""


def remember(cohort: Cohort, state: RecordDict, client: int, round: int) -> None:
    """Keep what must survive until the client trains again."""
    from ..checkpoint import pack

    tensors, rest = pack(cohort.state())
    state[_name(client, round)] = ArrayRecord({k: Array(t.detach().cpu().numpy()) for k, t in tensors.items()})
    state[_name(client, round) + "-rest"] = ConfigRecord({"json": json.dumps(rest)})
    rounds = sorted(int(n.rpartition("-")[2]) for n in state.array_records if n.startswith(f"memory-{client}-"))
    for old in rounds[:-KEPT]:
        del state[_name(client, old)], state[_name(client, old) + "-rest"]


def recall(cohort: Cohort, state: RecordDict, client: int, round: int) -> None:
    """Give the client back what it had after ``round``."""
    from ..checkpoint import unpack

    arrays = state.get(_name(client, round))
    rest = state.get(_name(client, round) + "-rest")
    if not isinstance(arrays, ArrayRecord) or not isinstance(rest, ConfigRecord):
        raise RunError(
            f"client {client} should continue with its optimiser's state of round {round}, which this node has lost "
            "(it was restarted, or the run was resumed); set 'local.keep_state' to false to train without it."
        )
    tensors = {k: torch.from_numpy(a.numpy().copy()) for k, a in arrays.items()}
    cohort.restore(unpack(tensors, json.loads(str(rest["json"]))))


def _name(client: int, round: int) -> str:
    return f"memory-{client}-{round}"
