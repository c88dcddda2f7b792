"""How much a sequence of noisy sums tells about one client: Rényi differential privacy of the Gaussian mechanism.

A release is a sum to which each client adds a vector of norm at most C and which carries Gaussian noise of standard
deviation z·C. Its Rényi divergence of order α is α / (2 z²) (Mironov 2017, Prop. 7); releases add up; and
(ε, δ) follows by Canonne, Kamath & Steinke 2020, Prop. 12, minimised over α.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import ConfigError

ORDERS: tuple[float, ...] = tuple(1 + x / 10 for x in range(1, 100)) + tuple(map(float, range(11, 65))) + (
    80.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 2048.0, 4096.0,
)  # fmt: skip
"""Orders α over which ε is minimised."""


def rdp_gaussian(noise: float, order: float) -> float:
    """Rényi divergence of order α between N(0, z²) and N(1, z²): α / (2 z²)."""
    return order / (2 * noise**2)


def rdp_sampled_gaussian(rate: float, noise: float, order: int) -> float:
    """Rényi divergence of the Gaussian mechanism on a Poisson sample (Mironov, Talwar & Zhang 2019, eq. 5 and §3.3).

    ``rate`` is the probability with which each client is drawn, secretly and independently; ``order`` is an integer α ≥ 2:
    log Σₖ C(α, k) (1-q)^(α-k) q^k exp(k (k-1) / (2 z²)) / (α-1).
    """
    if not (isinstance(order, int) and order >= 2):
        raise ConfigError(f"the sampled Gaussian is accounted for at whole orders of at least 2, not {order}.")
    if rate == 0:
        return 0.0
    if rate == 1:
        return rdp_gaussian(noise, order)
    logs = [
        math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        + (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
        for k in range(order + 1)
    ]  # fmt: skip
    top = max(logs)
    return (top + math.log(math.fsum(math.exp(x - top) for x in logs))) / (order - 1)


def epsilon_of(divergences: Iterable[tuple[float, float]], delta: float) -> float:
    """Return the least ε that pairs (order, Rényi divergence) prove for ``delta`` (Canonne, Kamath & Steinke 2020)."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta = {delta}: it must be between 0 and 1.")
    found = [
        rho + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        for order, rho in divergences
        if order > 1 and math.isfinite(rho)
    ]
    return max(0.0, min(found, default=math.inf))


@dataclass
class Accountant:
    """Keeps account of the releases one client may have contributed to.

    ``noise`` is the noise multiplier z. No amplification by sampling is claimed: who is drawn in a round follows from
    the experiment's seed, which every node knows, so being drawn is no secret. Instead only those releases count
    that a client took part in: ``epsilon`` speaks of the client that was drawn most often.
    """

    noise: float
    counts: dict[int, int] = field(default_factory=dict)

    def release(self, clients: Iterable[int]) -> None:
        """Enter one round's sum and the clients that were drawn for it."""
        for client in clients:
            self.counts[client] = self.counts.get(client, 0) + 1

    def epsilon(self, delta: float) -> float:
        """Return ε at ``delta`` of everything released so far (infinite without noise)."""
        most = max(self.counts.values(), default=0)
        if most == 0:
            return 0.0
        if self.noise <= 0:
            return math.inf
        return epsilon_of(((a, most * rdp_gaussian(self.noise, a)) for a in ORDERS), delta)
