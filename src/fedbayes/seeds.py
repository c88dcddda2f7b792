"""Every random draw has an address: seeds derive from names and numbers, never from order, process or global state."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(*address: int | str) -> int:
    """Return the 63-bit seed that belongs to an address such as ``(experiment seed, "round", 3, "client", 7, "noise")``.

    The same address gives the same seed on every machine and Python version; different addresses give
    independent seeds (BLAKE2b of the written-out address).
    """
    text = "/".join(f"{type(part).__name__[0]}:{part}" for part in address)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_rng(*address: int | str) -> np.random.Generator:
    """Return a NumPy generator seeded by the address: for partitions, shuffles, client sampling."""
    return np.random.Generator(np.random.PCG64(derive(*address)))


def torch_rng(*address: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator on ``device`` seeded by the address: for noise drawn outside of layers."""
    return torch.Generator(device=device).manual_seed(derive(*address))
