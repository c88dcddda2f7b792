"""Who gets what: partitions of the training examples among clients, each a short function registered by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import ConfigError, DataError, nearest
from ..own import own_name
from ..seeds import numpy_rng
from .examples import GROUP_COLUMN, Examples
from .splits import group_codes, group_of, stratified_order

if TYPE_CHECKING:
    from ..experiment import Partition

Scheme = Callable[["Partition", Examples, np.random.Generator], list[np.ndarray]]
SCHEMES: dict[str, Scheme] = {}


def register_scheme(name: str) -> Callable[[Scheme], Scheme]:
    """Register the decorated function as the partition scheme ``name``."""

    def add(scheme: Scheme) -> Scheme:
        SCHEMES[name] = scheme
        return scheme

    return add


def get_scheme(name: str) -> Scheme:
    """Return the partition scheme of that name; ``package.module:name`` imports the module first, for schemes of your own."""
    name = own_name(name, "partition scheme")
    if name not in SCHEMES:
        raise ConfigError(f"there is no partition scheme '{name}'; {nearest(name, SCHEMES)}")
    return SCHEMES[name]


def partition(config: Partition, train: Examples, seed: int) -> list[np.ndarray]:
    """Share the training examples out: one ascending array of positions per client, by the seed alone.

    Every example goes to exactly one client (but for ``step`` with ``duplicates``). Examples cut from one recording stay together: then the scheme
    deals whole recordings, and its numbers (sizes, ``minimum``) count recordings.
    """
    scheme = get_scheme(config.scheme)
    rng = numpy_rng(seed, "partition")
    groups = group_of(train)
    if groups is None or config.scheme == "column":
        shards = scheme(config, train, rng)
        if groups is not None:
            _whole(shards, groups, config)
    else:
        shards = _by_group(scheme, config, train, groups, rng)
    return [np.sort(np.asarray(shard, dtype=np.int64)) for shard in shards]


def _by_group(
    scheme: Scheme, config: Partition, train: Examples, groups: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Deal recordings instead of examples, each recording with the class of its first example."""
    first = np.unique(groups, return_index=True)[1]
    units = Examples(
        torch.empty(len(first), 0),
        train.labels.cpu()[torch.from_numpy(first)],
        {n: v[first] for n, v in train.columns.items()},
    )
    try:
        dealt = scheme(config, units, rng)
    except DataError as error:
        raise DataError(
            f"{error} (Counted in {GROUP_COLUMN}s: the {len(train)} examples were cut from {len(first)} of them, "
            "and each stays whole.)"
        ) from None
    return [np.flatnonzero(np.isin(groups, unit)) for unit in dealt]


def _whole(shards: list[np.ndarray], groups: np.ndarray, config: Partition) -> None:
    """Refuse a partition by a column that would tear a recording apart."""
    owner = np.full(groups.max(initial=-1) + 1, -1)
    for client, shard in enumerate(shards):
        mine = np.unique(groups[shard])
        if (owner[mine] >= 0).any():
            raise DataError(
                f"partition.column '{config.column}' tears a {GROUP_COLUMN} apart; choose a column that is the same throughout each."
            )
        owner[mine] = client


def _enough(config: Partition, n: int, each: int = 1) -> None:
    """Refuse a number of clients that leaves one of them with fewer than ``each`` examples."""
    if config.clients < 1:
        raise ConfigError(f"partition.clients must be at least 1, not {config.clients}.")
    if each < 1:
        raise ConfigError(f"partition.minimum must be at least 1 (a client without examples cannot train), not {each}.")
    if config.clients * each > n:
        way_out = f"ask for at most {n // each} clients" if n >= each else f"even one client would need {each}"
        raise DataError(
            f"{n} examples cannot be shared among {config.clients} clients with at least {each} each; {way_out}."
        )


def _concentration(config: Partition) -> float:
    if not 0 < config.alpha < float("inf"):
        raise ConfigError(f"partition.alpha must be a positive number, not {config.alpha}.")
    return config.alpha


def _pools(train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the positions of each class that occurs, each in random order."""
    labels = train.labels.cpu().numpy()
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def _deal(pools: list[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Cut each class's pool among the clients by ``counts`` (clients, classes)."""
    cuts = [np.split(pool, np.cumsum(column)[:-1]) for pool, column in zip(pools, counts.T)]
    return [np.concatenate([cut[client] for cut in cuts]) for client in range(len(counts))]


@register_scheme("iid")
def iid(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal all examples at random; sizes differ by at most one."""
    _enough(config, len(train))
    return np.array_split(rng.permutation(len(train)), config.clients)


def draw_dirichlet(rng: np.random.Generator, alpha: float, size: int) -> np.ndarray:
    """Draw from the symmetric Dirichlet(alpha), for any alpha > 0, without ever giving NaN.

    A Gamma(alpha) variate is Gamma(alpha + 1)·U^(1/alpha); taken in logarithms it cannot underflow to 0/0.
    """
    alpha = max(alpha, 1e-100)
    logs = np.log(rng.standard_gamma(min(alpha, 1e100) + 1, size)) + np.log1p(-rng.random(size)) / alpha
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


@register_scheme("dirichlet")
def dirichlet(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """Equal sizes, class mixes drawn from Dirichlet(alpha) (Hsu et al. 2019; Fischer, Loomis).

    Client after client draws its examples without replacement by its own mix; where a class is used up the mix
    is renormalised over the classes that remain. Clients are numbered at random, so the ones served last (whose
    mix is what was left) are not always the highest numbers. Sizes differ by at most one.
    """
    n, k, alpha = len(train), config.clients, _concentration(config)
    _enough(config, n)
    pools = _pools(train, rng)
    left = np.array([len(pool) for pool in pools])
    counts = np.zeros((k, len(pools)), dtype=np.int64)
    sizes = n // k + (np.arange(k) < n % k)
    for client, size in zip(rng.permutation(k), sizes):
        counts[client] = _fill(draw_dirichlet(rng, alpha, len(pools)), left, int(size), rng)
        left = left - counts[client]
    return _deal(pools, counts)


def _fill(mix: np.ndarray, left: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ``size`` examples by ``mix`` from classes with ``left`` examples: counts per class.

    Each pass either places everything or uses up at least one class, so there are at most as many passes as classes.
    """
    counts = np.zeros_like(left)
    while size > 0:
        open_ = left > counts
        mass = np.where(open_, mix, 0.0)
        if mass.sum() <= 0:  # the mix has no weight on what remains: go by what is there
            mass = (left - counts).astype(float)
        drawn = np.minimum(rng.multinomial(size, mass / mass.sum()), left - counts)
        counts += drawn
        size -= int(drawn.sum())
    return counts


_TRIES, _CELLS = 1000, 2_000_000
"""Draws of ``dirichlet-unequal`` before the best one so far is mended: so many, or as fill so many cells of the table
(clients x classes), which keeps the hopeless cases of a thousand clients to seconds."""


@register_scheme("dirichlet-unequal")
def dirichlet_unequal(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """Each class shared out by its own Dirichlet(alpha) over the clients, so sizes differ (NIID-Bench, Li et al. 2022).

    As there, a client that already holds its N/K gets nothing of further classes, and the draw is repeated until
    every client has ``minimum`` examples. Unlike there it always ends: after at most 1,000 draws the one whose smallest
    client is largest is mended by moving examples of the largest client's largest class to the smallest client.
    """
    n, k, alpha = len(train), config.clients, _concentration(config)
    _enough(config, n, config.minimum)
    pools = _pools(train, rng)
    best = np.zeros((k, len(pools)), dtype=np.int64)
    for _ in range(max(1, min(_TRIES, _CELLS // best.size))):
        counts = _niid_counts(np.array([len(pool) for pool in pools]), k, alpha, rng)
        if best.sum() == 0 or counts.sum(1).min() > best.sum(1).min():
            best = counts
        if best.sum(1).min() >= config.minimum:
            break
    return _deal(pools, _mend(best, config.minimum))


def _niid_counts(class_sizes: np.ndarray, k: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw one NIID-Bench table (clients, classes); its columns sum to the class sizes."""
    counts = np.zeros((k, len(class_sizes)), dtype=np.int64)
    fair = class_sizes.sum() / k
    for c, size in enumerate(class_sizes):
        share = draw_dirichlet(rng, alpha, k)
        hungry = share * (counts.sum(1) < fair)
        share = hungry / hungry.sum() if hungry.sum() > 0 else share
        cuts = np.minimum((np.cumsum(share)[:-1] * size).astype(np.int64), size)
        counts[:, c] = np.diff(np.concatenate([[0], cuts, [size]]))
    return counts


def _mend(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Move examples from the largest to the smallest client until each has ``minimum``."""
    counts = counts.copy()
    while (sizes := counts.sum(1)).min() < minimum:
        poor, rich = sizes.argmin(), sizes.argmax()
        c = counts[rich].argmax()
        moved = min(minimum - sizes[poor], sizes[rich] - minimum, counts[rich, c])
        counts[rich, c] -= moved
        counts[poor, c] += moved
    return counts


@register_scheme("shards")
def shards(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """k classes per client: the classes are cut into clients·k shards, each client gets k of different classes.

    Fischer et al. 2024: CIFAR-10 in 20 shards of 2,500, two of different classes for each of ten clients. Shards
    never mix classes. Where clients·k is not a multiple of the number of classes, larger classes are cut into
    more shards, so that the largest shard is as small as can be; sizes then differ.
    """
    _enough(config, len(train), max(1, config.classes_per_client))
    return [np.concatenate(hand) for hand in _hands(_pools(train, rng), config, rng)]


@register_scheme("step")
def step(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """FedBE's step partition: ``minor_examples`` of every class, and k major classes, for each client.

    The minor examples are taken out first; what is left of each class is cut into shards and dealt as in
    ``shards``. With 40,000 CIFAR-10 images, 10 clients, k = 2 and 10 minor examples every client holds 8 x 10
    and 2 x 1,960 images, the poster's numbers. With ``duplicates`` the minor examples stay in the shards too, as in
    the released code, so clients·m of each class are dealt twice; otherwise no example is.
    """
    m, k = config.minor_examples, config.clients
    _enough(config, len(train))
    if m < 0:
        raise ConfigError(f"partition.minor_examples must be at least 0, not {m}.")
    pools = _pools(train, rng)
    for c, pool in zip(np.unique(train.labels.cpu().numpy()), pools):
        if len(pool) < k * m:
            raise DataError(
                f"partition step: {k} clients with {m} minor examples of every class need {k * m} of each, but class "
                f"{c} has {len(pool)}; ask for at most {len(pool) // k} minor examples or {len(pool) // max(m, 1)} clients."
            )
    minor = [np.concatenate([pool[i * m : (i + 1) * m] for pool in pools]) for i in range(k)]
    used = 0 if config.duplicates else k * m
    rest = [rng.permutation(pool[used:]) for pool in pools if len(pool) > used]
    if len(rest) < config.classes_per_client:
        raise DataError(
            f"partition step: after {k} x {m} minor examples of every class only {len(rest)} classes have examples left "
            f"for {config.classes_per_client} major classes per client; lower partition.minor_examples."
        )
    major = _hands(rest, config, rng)
    return [np.concatenate([own, *hand]) for own, hand in zip(minor, major)]


def _hands(pools: list[np.ndarray], config: Partition, rng: np.random.Generator) -> list[list[np.ndarray]]:
    """Cut class pools into clients·k shards of one class each and deal k of different classes to every client."""
    clients, k, classes = config.clients, config.classes_per_client, len(pools)
    if not 1 <= k <= classes:
        raise DataError(
            f"partition.classes_per_client = {k}: it must be between 1 and the {classes} classes there are."
        )
    if clients * k < classes:
        raise DataError(
            f"{clients} clients with {k} classes each hold at most {clients * k} of the {classes} classes, and every "
            f"example must be used; ask for at least {-(-classes // k)} clients or {-(-classes // clients)} classes per client."
        )
    cuts = _shards_per_class(np.array([len(pool) for pool in pools]), clients, clients * k)
    stacks = [np.array_split(pool, n) for pool, n in zip(pools, cuts)]
    return [[stacks[c].pop() for c in hand] for hand in _different(cuts, clients, k, rng)]


def _shards_per_class(sizes: np.ndarray, most: int, total: int) -> np.ndarray:
    """Choose how many shards to cut each class into: at least 1, at most ``most``, the largest shard smallest."""
    cuts, room = np.ones(len(sizes), dtype=np.int64), np.minimum(most, sizes)
    if room.sum() < total:
        raise DataError(
            f"{total} shards of one class each cannot be cut: the classes have {', '.join(map(str, sizes))} examples "
            f"and a client takes only one shard of a class; ask for fewer clients or fewer classes per client."
        )
    for _ in range(total - len(sizes)):
        cuts[np.where(cuts < room, sizes / cuts, -1.0).argmax()] += 1
    return cuts


def _different(cuts: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> list[list[int]]:
    """Give every client k different classes, class c to ``cuts[c]`` clients, at random.

    Greedy (each class to the clients with most room: possible whenever it is possible at all, Gale-Ryser), then
    mixed by random exchanges that keep the classes of a client different.
    """
    hands: list[list[int]] = [[] for _ in range(clients)]
    for c in sorted(rng.permutation(len(cuts)), key=lambda c: -cuts[c]):
        tie = rng.random(clients)
        for client in sorted(range(clients), key=lambda i: (len(hands[i]), tie[i]))[: cuts[c]]:
            hands[client].append(int(c))
    for _ in range(10 * clients * k):
        a, b = rng.integers(clients, size=2)
        i, j = rng.integers(k, size=2)
        if hands[b][j] not in hands[a] and hands[a][i] not in hands[b]:
            hands[a][i], hands[b][j] = hands[b][j], hands[a][i]
    return hands


@register_scheme("odd-one")
def odd_one(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """One client unlike the rest: few examples of few classes, while the others share everything else at random.

    Client 0 holds ``minor_examples`` of each of the first ``classes_per_client`` classes (Reyes et al. 2021, variance
    analysis: one small non-IID client beside three IID ones).
    """
    _enough(config, len(train))
    pools, m, k = _pools(train, rng), config.minor_examples, config.classes_per_client
    if config.clients < 2 or not 1 <= k <= len(pools) or not 1 <= m <= min(len(pool) for pool in pools[:k]):
        raise DataError(
            f"partition odd-one: one client of {m} examples of each of {k} classes beside {config.clients - 1} others cannot be "
            f"made of {len(train)} examples of {len(pools)} classes; ask for at least 2 clients and for fewer examples or classes."
        )
    odd = np.concatenate([pool[:m] for pool in pools[:k]])
    if len(train) - len(odd) < config.clients - 1:
        raise DataError(
            f"partition odd-one: {len(odd)} of {len(train)} examples go to the odd client, which leaves {len(train) - len(odd)} "
            f"for {config.clients - 1} others; ask for fewer clients."
        )
    rest = rng.permutation(np.setdiff1d(np.arange(len(train)), odd))
    return [odd, *np.array_split(rest, config.clients - 1)]


@register_scheme("quantity")
def quantity(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """Sizes skewed, classes alike: ``minimum`` each, the rest by one draw from Dirichlet(alpha).

    Every client's class mix is that of the whole, to within about one example a class.
    """
    n, k = len(train), config.clients
    _enough(config, n, config.minimum)
    exact = draw_dirichlet(rng, _concentration(config), k) * (n - k * config.minimum)
    sizes = config.minimum + np.floor(exact).astype(np.int64)
    sizes[np.argsort(np.floor(exact) - exact, kind="stable")[: n - sizes.sum()]] += 1  # largest remainders
    return np.split(stratified_order(train.labels.cpu().numpy(), rng), np.cumsum(sizes)[:-1])


@register_scheme("column")
def column(config: Partition, train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """Natural clients: one per value of a column, in sorted order (heart: four hospitals).

    With fewer clients than values, whole values are dealt, the largest first to the client with fewest examples.
    """
    return [np.flatnonzero(np.isin(_column_codes(config, train)[1], own)) for own in _owners(config, train)]


def _column_codes(config: Partition, train: Examples) -> tuple[np.ndarray, np.ndarray]:
    if config.column not in train.columns:
        have = ", ".join(f"'{name}'" for name in train.columns) or "none"
        raise DataError(f"partition.column '{config.column}' is not a column of the data; it has: {have}.")
    values = train.columns[config.column]
    return np.unique(values), group_codes(values)


def _owners(config: Partition, train: Examples) -> list[list[int]]:
    """Return the values (by number) that each client owns."""
    values, codes = _column_codes(config, train)
    clients = config.clients or len(values)
    if not 1 <= clients <= len(values):
        raise DataError(
            f"partition.clients = {config.clients}, but column '{config.column}' has {len(values)} values; "
            f"ask for at most {len(values)}, or 0 for one client per value."
        )
    if clients == len(values):
        return [[v] for v in range(len(values))]
    owned: list[list[int]] = [[] for _ in range(clients)]
    load, sizes = np.zeros(clients, dtype=np.int64), np.bincount(codes)
    for value in np.argsort(-sizes, kind="stable"):
        poorest = int(load.argmin())
        owned[poorest].append(int(value))
        load[poorest] += sizes[value]
    return [sorted(own) for own in owned]


def client_names(config: Partition, train: Examples) -> list[str]:
    """Name the clients: by the values of the column they own, else ``client 0``, ``client 1``, ..."""
    if config.scheme != "column":
        return [f"client {i}" for i in range(config.clients)]
    values = _column_codes(config, train)[0]
    return [" + ".join(str(values[v]) for v in own) for own in _owners(config, train)]
