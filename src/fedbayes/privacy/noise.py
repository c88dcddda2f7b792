"""Gaussian noise that nobody can subtract: drawn from the operating system, not from a seeded generator."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18
"""Numbers drawn at a time, so that a long vector needs no long run of random bytes in memory."""


def secret_normal(size: int) -> Tensor:
    """Return ``size`` standard normal numbers (float64) that no seed reproduces.

    Seeded generators do not protect: torch's keeps 32 bits of its seed on a CPU, and the state of others follows from their
    output. Each number is half the sum of four Box-Muller draws on ``os.urandom``, so that what floating point leaves of
    a single draw in its last bits (Mironov 2012) cannot be searched for (Holohan & Braghin 2021).
    """
    found = np.empty(size)
    for start in range(0, size, CHUNK):
        part = found[start : start + CHUNK]
        part[:] = _box_muller(4 * len(part)).reshape(4, -1).sum(axis=0) / 2
    return torch.from_numpy(found)


def _box_muller(count: int) -> np.ndarray:
    pairs = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * pairs), dtype="<u8") >> np.uint64(11)
    first, second = words[:pairs], words[pairs:]
    radius = np.sqrt(-2 * np.log((first + 1.0) * 2.0**-53))
    angle = 2 * np.pi * (second * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
