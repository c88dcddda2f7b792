"""Flower's records and ours: posteriors, assignments and updates to and from ``RecordDict``.

One message to a node carries the round's global posterior once and the assignments of every client that lives
there; its reply carries one update for each. Names in a record: ``start``, ``prior``, ``assignment-3``, ``update-3``,
``posterior-3``, ``error-3``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from .. import __version__
from ..cohort import Assignment, Update
from ..errors import FedBayesError, PosteriorError
from ..posterior import Posterior
from ..seeds import numpy_rng
from .codecs import Layout, get_codec

LONGEST = 500
"""Characters of a node's sentence that are kept."""
_PLAIN = [f.name for f in dataclasses.fields(Assignment) if f.name not in ("start", "prior")]


def put_posterior(
    record: RecordDict,
    name: str,
    posterior: Posterior,
    codec: str = "float32",
    reference: Posterior | None = None,
    rng: np.random.Generator | None = None,
) -> None:
    """Add a posterior to ``record``: an ``ArrayRecord`` called ``name`` and a ``ConfigRecord`` ``name-layout``.

    ``codec`` float32 keeps every bit; bf16 and int8 are relative to ``reference`` (see ``codecs``).
    """
    arrays = get_codec(codec).encode(posterior, reference, rng)
    record[name] = ArrayRecord({key: Array(a) for key, a in arrays.items()})
    record[f"{name}-layout"] = ConfigRecord({"layout": Layout.of(posterior).dumps(), "codec": codec})


def take_posterior(record: RecordDict, name: str, reference: Posterior | None = None) -> Posterior:
    """Read what ``put_posterior`` wrote; whatever does not fit together raises ``PosteriorError``."""
    about, arrays = record.get(f"{name}-layout"), record.get(name)
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise PosteriorError(f"the message holds no posterior '{name}'.")
    try:
        plain = {key: a.numpy() for key, a in arrays.items()}
    except (ValueError, TypeError, OSError, EOFError):
        raise PosteriorError(f"the arrays of '{name}' cannot be read.") from None
    return get_codec(str(about["codec"])).decode(plain, Layout.parse(str(about["layout"])), reference)


def put_assignments(
    record: RecordDict, assignments: Sequence[Assignment], codec: str = "float32", start: RecordDict | None = None
) -> None:
    """Add the assignments of one node; they start from one posterior, which travels once, exactly.

    ``start`` is a record that holds that posterior already, so that a round's messages share its arrays.
    """
    first = assignments[0]
    if start is None:
        put_posterior(record, "start", first.start)
    else:
        record["start"], record["start-layout"] = start["start"], start["start-layout"]
    separate_prior = first.prior is not None and first.prior is not first.start
    if first.prior is not None and separate_prior:
        put_posterior(record, "prior", first.prior)
    for a in assignments:
        if a.start is not first.start or a.prior is not first.prior:
            raise ValueError("the assignments of one message must share their posteriors")
        plain: dict[str, Any] = {name: getattr(a, name) for name in _PLAIN}
        plain["prior"] = "none" if a.prior is None else "prior" if separate_prior else "start"
        record[f"assignment-{a.client}"] = ConfigRecord(plain)
    record["wire"] = ConfigRecord({"codec": codec, "version": __version__})


def take_assignments(record: RecordDict) -> list[Assignment]:
    """Read what ``put_assignments`` wrote, by client number."""
    start = take_posterior(record, "start")
    priors: dict[str, Posterior | None] = {"none": None, "start": start}
    if "prior" in record:
        priors["prior"] = take_posterior(record, "prior")
    found = []
    for name, plain in _numbered(record, "assignment"):
        values: dict[str, Any] = {n: plain[n] for n in _PLAIN}
        found.append(Assignment(start=start, prior=priors[str(plain["prior"])], **values))
        del name
    return sorted(found, key=lambda a: a.client)


def put_update(record: RecordDict, update: Update, seed: int, codec: str, start: Posterior) -> None:
    """Add one client's update; lossy codecs round by the address (seed, "wire", round, client)."""
    rng = numpy_rng(seed, "wire", update.round, update.client)
    put_posterior(record, f"posterior-{update.client}", update.posterior, codec, start, rng)
    metrics = {k: float(v) for k, v in update.metrics.items()}
    record[f"update-{update.client}"] = ConfigRecord(
        {
            "client": update.client,
            "round": update.round,
            "run": update.run,
            "examples": update.examples,
            "metric-names": list(metrics),
            "metric-values": list(metrics.values()),
        }
    )


def put_error(record: RecordDict, client: int, sentence: str) -> None:
    """Say that a client could not do its work, and why."""
    record[f"error-{client}"] = ConfigRecord({"client": client, "reason": sentence})


def told(reason: object) -> str:
    """What a node said, as one line of bounded length: it stands in logs, where a line of its own could pass for ours."""
    return "".join(c if c.isprintable() else " " for c in str(reason)[:LONGEST])


def take_updates(record: RecordDict, start: Posterior) -> Iterator[Update | tuple[int, str]]:
    """Read a reply: an ``Update`` for each client that trained, ``(client, reason)`` for each that did not.

    A posterior that cannot even be put together is such a reason; one that is whole but wrong (NaN, other names)
    is an update like any other and is judged by the round loop.
    """
    for number, plain in _numbered(record, "error"):
        yield number, told(plain.get("reason", "it gave no reason"))
    for number, plain in _numbered(record, "update"):
        try:
            update = _update(record, number, plain, start)
        except (FedBayesError, TypeError, ValueError) as error:
            yield number, told(error)
            continue
        yield update


def _update(record: RecordDict, number: int, plain: ConfigRecord, start: Posterior) -> Update:
    names, values = plain.get("metric-names"), plain.get("metric-values")
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        raise PosteriorError("the update's metrics cannot be read.")
    if not all(isinstance(n, str) for n in names) or not all(isinstance(v, float) for v in values):
        raise PosteriorError("the update's metrics are not names and numbers.")
    client, round, examples, run = (_whole(plain, name) for name in ("client", "round", "examples", "run"))
    posterior = take_posterior(record, f"posterior-{number}", start)
    return Update(client, round, posterior, examples, dict(zip(names, values)), run)  # type: ignore[arg-type]


def _whole(plain: ConfigRecord, name: str) -> int:
    value = plain.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PosteriorError(f"the update's '{name}' is {value!r}, which is no whole number.")
    return value


def payload_bytes(record: RecordDict, only: Iterable[str] | None = None) -> int:
    """Bytes of what a record holds, names included (all of it, or the named records); gRPC's own frames are not counted."""
    names = list(record) if only is None else [n for n in only if n in record]
    return sum(len(n) + len(k) + _bytes_of(v) for n in names for k, v in record[n].items())


def _bytes_of(value: object) -> int:
    if isinstance(value, Array):
        return len(value.data)
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    if isinstance(value, str | bytes):
        return len(value.encode() if isinstance(value, str) else value)
    return 8


def share_out(traffic: dict[int, dict[str, int]], clients: Sequence[int], way: str, size: int) -> None:
    """Enter a message into the account of the clients it was for, in equal parts."""
    for i, client in enumerate(clients):
        entry = traffic.setdefault(client, {"down": 0, "up": 0})
        entry[way] += size // len(clients) + (i < size % len(clients))


def account(traffic: Mapping[int, Mapping[str, int]]) -> dict[str, Any]:
    """Bytes of a round as ``metrics.jsonl`` has them: in all, and by client, each way."""
    return {
        "down": sum(entry["down"] for entry in traffic.values()),
        "up": sum(entry["up"] for entry in traffic.values()),
        "clients": {str(c): dict(traffic[c]) for c in sorted(traffic)},
    }


def _numbered(record: RecordDict, kind: str) -> list[tuple[int, ConfigRecord]]:
    """Config records called ``kind-NUMBER``, by number."""
    found = []
    for name, value in record.config_records.items():
        head, _, number = name.rpartition("-")
        if head == kind and number.isdecimal():
            found.append((int(number), value))
    return sorted(found, key=lambda pair: pair[0])
