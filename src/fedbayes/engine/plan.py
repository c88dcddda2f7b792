"""What a client's round consists of, drawn on the host: which examples each step sees, and how they are augmented.

Everything here is NumPy seeded by address, so a client sees the same examples in the same order whatever the number
of lanes, the device, the thread count or the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, DataError
from ..seeds import numpy_rng

Draw = Callable[[np.random.Generator, int], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Batches:
    """All batches of one client in one round.

    ``indices`` (steps, batch) point into the cohort's examples, ``real`` (steps, batch) is 1 for an example that counts
    in the loss and 0 for one that completes a short batch; ``augmentation`` holds the transform's numbers, (steps,
    batch, ...) each. ``tail`` is the number of steps of the last epoch (whose loss is reported).
    """

    indices: np.ndarray
    real: np.ndarray
    augmentation: Mapping[str, np.ndarray]
    tail: int

    @property
    def steps(self) -> int:
        """Optimiser steps of the round."""
        return len(self.indices)


MOST_PADDING = 100
"""How many times larger than a client a batch may be; sizes up to ``ORDINARY`` are never refused."""

ORDINARY = 1 << 16


def batches_per_epoch(examples: int, batch_size: int) -> int:
    """Return how many batches hold ``examples``; the last may be short."""
    return -(-examples // batch_size)


def count_steps(examples: int, batch_size: int, epochs: int, steps: int) -> int:
    """Return the optimiser steps of a client's round: ``steps`` where positive, else whole epochs.

    Every batch is completed to its size, lest results depend on who else trains: what that would waste is refused.
    """
    if batch_size > max(ORDINARY, MOST_PADDING * examples):
        raise ConfigError(
            f"local.batch_size is {batch_size}, but a client holds {examples} examples and every batch is completed to "
            "that size; for full batches give the number of the largest client's examples."
        )
    return steps if steps > 0 else epochs * batches_per_epoch(examples, batch_size)


def draw_batches(
    indices: np.ndarray, batch_size: int, *, epochs: int, steps: int, seed: int, round: int, client: int, draw: Draw
) -> Batches:
    """Draw a client's batches for one round.

    Each epoch is a fresh shuffle, addressed (seed, "order", round, client, epoch). A short last batch, or a client
    smaller than a batch, is completed with examples of the same epoch's order, from its beginning, repeated as often
    as needed; they weigh nothing. Augmentation is addressed (seed, "augment", round, client, epoch).
    """
    if len(indices) == 0:
        raise DataError(f"client {client} holds no examples, so it cannot train; leave it out of the round.")
    if steps <= 0 and epochs <= 0:
        raise ConfigError(f"client {client}: epochs is {epochs} and steps is {steps}; one of them must be positive.")
    per_epoch = batches_per_epoch(len(indices), batch_size)
    total = count_steps(len(indices), batch_size, epochs, steps)
    count = batches_per_epoch(total, per_epoch)  # epochs begun
    drawn = [
        _epoch(indices, batch_size, per_epoch, (seed, round, client, epoch), draw) for epoch in range(count)
    ]  # fmt: skip
    real = np.zeros(per_epoch * batch_size, dtype=np.float32)
    real[: len(indices)] = 1
    return Batches(
        np.concatenate([order for order, _ in drawn])[:total],
        np.tile(real.reshape(per_epoch, batch_size), (count, 1))[:total],
        {key: np.concatenate([numbers[key] for _, numbers in drawn])[:total] for key in drawn[0][1]},
        total - (count - 1) * per_epoch,
    )


def _epoch(
    indices: np.ndarray, batch_size: int, per_epoch: int, address: tuple[int, int, int, int], draw: Draw
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    seed, round, client, epoch = address
    shape = (per_epoch, batch_size)
    order = numpy_rng(seed, "order", round, client, epoch).permutation(indices)
    numbers = draw(numpy_rng(seed, "augment", round, client, epoch), per_epoch * batch_size)
    return (
        np.resize(order, shape).astype(np.int64, copy=False),
        {key: np.asarray(value).reshape(*shape, *np.shape(value)[1:]) for key, value in numbers.items()},
    )
