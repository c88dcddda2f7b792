"""Who gets what: partitions of the training examples among clients, each a short function registered by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, DataError, nearest
from ..seeds import numpy_rng
from .examples import Examples

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


def partition(config: Partition, train: Examples, seed: int) -> list[np.ndarray]:
    """Share the training examples out: one ascending array of positions per client, by the seed alone."""
    if config.scheme not in SCHEMES:
        raise ConfigError(f"partition.scheme '{config.scheme}' does not exist; {nearest(config.scheme, SCHEMES)}")
    shards = SCHEMES[config.scheme](config, train, numpy_rng(seed, "partition"))
    return [np.sort(np.asarray(shard, dtype=np.int64)) for shard in shards]


def _enough(config: Partition, n: int) -> None:
    if config.clients < 1:
        raise ConfigError(f"partition.clients must be at least 1, not {config.clients}.")
    if config.clients > n:
        raise DataError(f"{n} examples cannot be shared among {config.clients} clients; ask for at most {n} clients.")


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
    n, k = len(train), config.clients
    _enough(config, n)
    labels = train.labels.cpu().numpy()
    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    left = np.array([len(pool) for pool in pools])
    shards: list[np.ndarray] = []
    for client in range(k):
        counts = _fill(draw_dirichlet(rng, config.alpha, len(pools)), left, n // k + (client < n % k), rng)
        shards.append(np.concatenate([pool[r - c : r] for pool, r, c in zip(pools, left, counts)]))
        left = left - counts
    return [shards[i] for i in rng.permutation(k)]


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
