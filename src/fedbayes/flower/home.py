"""What a node knows of itself: which clients live on it and where its data are. Read from Flower's node config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, DataError, FedBayesError, nearest

if TYPE_CHECKING:
    from ..data import Dataset
    from ..experiment import Experiment
    from ..setup import Setup

KEYS = ("partition-id", "num-partitions", "clients", "data", "data-dir", "private")


@dataclass(frozen=True)
class Home:
    """A node's own description, from ``flower-supernode --node-config "partition-id=0 num-partitions=3"``.

    ``partition-id`` (with ``num-partitions``): of the experiment's clients, those whose number leaves this
    remainder; ``clients``: the clients themselves, "0,3,6"; ``data``: an .npz file of the node's own examples,
    or a folder (or CSV) of its recordings, which makes it one client and never leaves it; ``data-dir``: where data sets lie on this node;
    ``private=true``: whatever the server asks, this node sends masked sums only. A node that says
    neither ``partition-id`` nor ``clients`` is given its clients by the server.
    """

    partition: int | None = None
    partitions: int | None = None
    named: tuple[int, ...] | None = None
    data: str | None = None
    data_dir: str | None = None
    private: bool = False

    @staticmethod
    def read(config: Mapping[str, object]) -> Home:
        """Read a node config; keys that are not ours belong to Flower or the host and are left alone."""
        for key in config:
            close = nearest(str(key), KEYS)
            if key not in KEYS and str(key).replace("_", "-") in KEYS:
                raise ConfigError(f"node config: unknown key '{key}'; {close}")
        data = config.get("data")
        if data is not None and not Path(str(data)).expanduser().exists():
            raise DataError(
                f"node config: data='{data}' is not on this node; it should be an .npz of arrays, or a folder (or CSV) of "
                "recordings."
            )
        return Home(
            _whole(config, "partition-id"),
            _whole(config, "num-partitions"),
            _list(config.get("clients")),
            None if data is None else str(Path(str(data)).expanduser()),
            None if config.get("data-dir") is None else str(config["data-dir"]),
            _yes(config.get("private", False)),
        )

    def refuse_open(self) -> None:
        """Refuse to send a posterior in the open where the node's owner wants sums only."""
        if self.private:
            raise ConfigError(
                "this node sends masked sums only (private=true in its node config), and the experiment asks for its "
                "posterior in the open; set fusion.private = true."
            )

    @property
    def placed(self) -> bool:
        """Whether the node says itself which clients live on it."""
        return self.named is not None or self.partition is not None

    def given(self, client: int) -> Home:
        """The same home after the server has said which client it is, where it did not know itself."""
        return self if self.placed or self.data is None else dataclasses.replace(self, named=(client,))

    def clients(self, total: int) -> tuple[int, ...]:
        """The clients that live here, of ``total`` in the experiment (own data: the one this node is)."""
        if self.named is not None:
            if self.data is not None and len(self.named) != 1:
                raise ConfigError(
                    f"node config: a node with its own data is one client, but clients='{','.join(map(str, self.named))}' "
                    f"names {len(self.named)}."
                )
            beyond = [c for c in self.named if c >= total]
            if beyond and self.data is None:
                raise ConfigError(
                    f"node config: client {beyond[0]} does not exist; the experiment has {total} clients."
                )
            return self.named
        if self.partition is None:
            return ()
        if self.data is not None or self.partitions is None:
            return (self.partition,) if self.data is not None or self.partition < total else ()
        if not 0 <= self.partition < self.partitions:
            raise ConfigError(
                f"node config: partition-id={self.partition} must be below num-partitions={self.partitions}."
            )
        return tuple(range(self.partition, total, self.partitions))


_FOLDERS = re.compile(r"(?<![\w:/.])~?(?:/[^\s/'\"]+)*/(?=[^\s/])")


def sentence(error: Exception, node_config: Mapping[str, object]) -> str:
    """What the server is told of an error: it may name a file of this node, but not the folders the file lies in."""
    text = str(error) if isinstance(error, FedBayesError) else f"{type(error).__name__}: {error}"
    for key in ("data", "data-dir"):
        folder = Path(str(node_config.get(key, ""))).expanduser().parent
        if folder.name:
            text = text.replace(f"{folder}/", "")
    return _FOLDERS.sub("", text)


@lru_cache(maxsize=2)
def prepare_home(toml: str, home: Home, classes: int, shape: tuple[int, ...], names: tuple[str, ...] = ()) -> Setup:
    """Make the experiment ready on this node: its data, the network, the transform. Pure, so processes agree.

    A node without data of its own prepares exactly what the server prepares and keeps to its own clients' shards;
    a node with an .npz file trains the experiment's network on that file's examples. ``names`` are the server's classes.
    """
    from .. import config, runner

    experiment = config.loads(toml, "the server's experiment")
    engine = dataclasses.replace(experiment.engine, lanes=1)
    data = dataclasses.replace(experiment.data, ood="")
    experiment = dataclasses.replace(experiment, engine=engine, data=data)
    if experiment.distill.data:  # the server's own inputs, which a node neither needs nor has
        experiment = dataclasses.replace(experiment, distill=dataclasses.replace(experiment.distill, enabled=False))
    if home.data is None:
        return runner.prepare(experiment, data_dir=home.data_dir)
    return _prepare_own(experiment, home, classes, shape, names)


def _prepare_own(
    experiment: Experiment, home: Home, classes: int, shape: tuple[int, ...], names: tuple[str, ...]
) -> Setup:
    from ..data import make_transform
    from ..nn import posterior_of
    from ..setup import Setup, build_network, captures_moment, with_variances

    refuse_shared_statistics(experiment)
    dataset = _read_own(experiment, home, classes, names)
    if not len(dataset.train):
        raise DataError(f"{home.data}: holds no examples to train on.")
    found = tuple(dataset.train.inputs.shape[1:])
    if found != shape:
        raise DataError(f"{home.data}: one input has shape {found} here and {shape} on the server; they must agree.")
    most = int(dataset.train.labels.max())
    if most >= classes:
        raise DataError(
            f"{home.data}: holds label {most}, but the server knows {classes} classes (0 to {classes - 1})."
        )
    (client,) = home.clients(0) or (0,)
    everything, nothing = np.arange(len(dataset.train)), np.empty(0, dtype=np.int64)
    shards = [nothing] * client + [everything]
    model = build_network(experiment, classes, shape)
    transform = make_transform(experiment.data, dataset.train, shards, dataset.test)
    start = posterior_of(model)
    start = with_variances(start, model) if captures_moment(experiment) else start
    return Setup(experiment, dataset, shards, nothing, nothing, None, model, start, transform)


def _read_own(experiment: Experiment, home: Home, count: int, names: tuple[str, ...]) -> Dataset:
    """Read the node's file; every example trains (the server judges), unless the file itself has a test part."""
    from ..data import load
    from ..data.arrays import KEYS, as_labels, from_arrays, read_npz
    from ..data.loading import exclude_classes

    path = Path(str(home.data))
    if path.is_dir() or path.suffix.lower() in (".csv", ".tsv"):
        from ..data.sonar import read_site

        return read_site(path, experiment.sonar, experiment.seed)
    arrays = {k.lower(): v for k, v in read_npz(path).items()}
    found = {role: next((arrays[k] for k in spellings if k in arrays), None) for role, spellings in KEYS.items()}
    inputs, labels, classes = found["inputs"], found["labels"], found["classes"]
    excluded = experiment.data.exclude_classes
    if classes is not None:
        mine = tuple(c.decode() if isinstance(c, bytes) else str(c) for c in classes)
        kept = tuple(c for i, c in enumerate(mine) if i not in excluded)
        if names and kept != names:
            raise DataError(
                f"{path}: its classes are {_some(kept)} and the server's {_some(names)}; they must be the same."
            )
    if labels is not None and labels.dtype.kind in "USO" and classes is None:
        raise DataError(
            f"{path}: labels are names, and every node would number them in its own way; give whole numbers, or an array "
            "'classes' with the same names in the same order on every node."
        )
    if found["test_inputs"] is not None or inputs is None or labels is None:
        data = dataclasses.replace(experiment.data, name=str(path), limit=0, test_limit=0)
        return load(data, data_dir=home.data_dir, seed=experiment.seed)
    if classes is None:  # an owner may lack some classes
        count += len(set(excluded))
        most = int(as_labels(labels, f"{path}: labels").max(initial=0))
        if most >= count:
            raise DataError(f"{path}: holds label {most}, but the server knows classes 0 to {count - 1}.")
        mine = tuple(map(str, range(count)))
    dataset = from_arrays(inputs, labels, inputs, labels, classes=mine, name=path.stem)
    return exclude_classes(dataset, excluded) if excluded else dataset


def _some(names: tuple[str, ...], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")


def refuse_shared_statistics(experiment: Experiment) -> None:
    """Refuse settings that need every owner's data in one place, where each node keeps its own."""
    if experiment.data.mean == "global" or experiment.data.scale == "standard":
        what = "data.mean = global" if experiment.data.mean == "global" else "data.scale = standard"
        raise ConfigError(
            f"'{what}' is measured on everybody's data together, which never meet when nodes bring their own; "
            "use data.mean = none or client, and data.scale = unit or none."
        )


def _whole(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"node config: {key}={value!r} must be a whole number, 0 or more.")
    return number


def _yes(value: object) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ConfigError(f"node config: private={value!r} must be true or false.")
    return str(value).lower() == "true"


def _list(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        numbers = tuple(sorted({int(part) for part in str(value).split(",")}))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise ConfigError(f"node config: clients={value!r} must be client numbers such as '0,3,6'.")
    return numbers
