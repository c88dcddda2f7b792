"""How much a sequence of noisy sums tells about one client: the account is kept by Google's ``dp-accounting``.

A release is a sum to which each client adds a vector of norm at most C and which carries Gaussian noise of standard
deviation z·C: the Gaussian mechanism with noise multiplier z. ``dp_accounting.rdp.RdpAccountant`` (which Flower's own
``RdpAccountant`` wraps) adds up its Rényi divergences and converts them to (ε, δ). Extra ``privacy``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..errors import ConfigError


def library() -> Any:
    """Return ``dp_accounting`` with its Rényi accountant, or say how to get it."""
    try:
        package = import_module("dp_accounting")
        import_module("dp_accounting.rdp")
    except ImportError:
        raise ConfigError(
            "privacy.noise: epsilon is counted by the package 'dp-accounting', which is not installed; "
            "pip install 'fedbayes[privacy]'."
        ) from None
    return package


def epsilon_of(noise: float, releases: int, delta: float) -> float:
    """Return ε at ``delta`` after so many releases with noise multiplier ``noise`` (infinite without noise)."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta = {delta}: it must be between 0 and 1.")
    if releases == 0:
        return 0.0
    if noise <= 0:
        return math.inf
    dp = library()
    account = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    account.compose(dp.GaussianDpEvent(noise), releases)
    return float(account.get_epsilon(delta))


@dataclass
class Accountant:
    """Keeps account of the releases one client may have contributed to.

    ``noise`` is the noise multiplier z. No amplification by sampling is claimed: who is drawn in a round follows from
    the experiment's seed, which every node knows, so being drawn is no secret. Instead only those releases count
    that a client took part in: ``epsilon`` speaks of the client that was drawn most often.
    """

    noise: float
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.noise > 0:
            library()  # missed before the first round rather than after it

    def release(self, clients: Iterable[int]) -> None:
        """Enter one round's sum and the clients that were drawn for it."""
        for client in clients:
            self.counts[client] = self.counts.get(client, 0) + 1

    def epsilon(self, delta: float) -> float:
        """Return ε at ``delta`` of everything released so far."""
        return epsilon_of(self.noise, max(self.counts.values(), default=0), delta)
