"""``Posterior``: the one value that travels between clients and server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as _to_bytes
from torch import Tensor

from .errors import PosteriorError


class Gaussian(NamedTuple):
    """A tensor of independent Gaussians: mean and *variance* (not sigma, not rho), of one shape."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, eq=False)
class Posterior:
    """A distribution over a network's state: named Gaussian tensors and named point tensors.

    ``gaussians`` holds mean and variance of every weight that has a distribution; ``points`` holds everything
    else a network needs: deterministic layers, batch-norm affine parameters, running statistics, counters.
    It knows nothing of networks, rounds or transports. ``metadata`` is a small dictionary of strings that
    travels with the file.
    """

    gaussians: Mapping[str, Gaussian] = field(default_factory=dict)
    points: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaussians", {n: Gaussian(*g) for n, g in self.gaussians.items()})
        object.__setattr__(self, "points", dict(self.points))
        for name, g in self.gaussians.items():
            if g.mean.shape != g.variance.shape:
                raise PosteriorError(
                    f"'{name}': mean has shape {tuple(g.mean.shape)} and variance {tuple(g.variance.shape)}; "
                    "they must be equal."
                )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Posterior:
        """Return a copy on another device or in another floating-point type (integer points keep theirs)."""

        def move(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype if t.is_floating_point() else None)

        return Posterior(
            {n: Gaussian(move(g.mean), move(g.variance)) for n, g in self.gaussians.items()},
            {n: move(t) for n, t in self.points.items()},
            self.metadata,
        )

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> Path:
        """Write a safetensors file, atomically: a reader finds the old file or the whole new one, never a torn one."""
        path = Path(path)
        blob = self.to_bytes(metadata)
        partial = path.with_name(path.name + ".part")
        try:
            with open(partial, "wb") as f:
                f.write(blob)
                f.flush()
                os.fsync(f.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        return path

    def to_bytes(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the content of the file that ``save`` writes."""
        tensors = {f"mean/{n}": g.mean for n, g in self.gaussians.items()}
        tensors |= {f"variance/{n}": g.variance for n, g in self.gaussians.items()}
        tensors |= {f"point/{n}": t for n, t in self.points.items()}
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        header = {"fedbayes": json.dumps({**self.metadata, **(metadata or {})})}
        return _to_bytes(tensors, metadata=header)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> Posterior:
        """Read a file written by ``save``."""
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as f:
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict
                metadata = json.loads((f.metadata() or {}).get("fedbayes", "{}"))
        except FileNotFoundError:
            raise PosteriorError(f"{path}: no such file; a posterior is a .safetensors file of a run.") from None
        except Exception as error:
            raise PosteriorError(f"{path} is not a posterior written by fedbayes ({error}).") from None
        return Posterior._from_flat(tensors, metadata)

    @staticmethod
    def _from_flat(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Posterior:
        means = {n[5:]: t for n, t in tensors.items() if n.startswith("mean/")}
        points = {n[6:]: t for n, t in tensors.items() if n.startswith("point/")}
        gaussians = {n: Gaussian(t, tensors[f"variance/{n}"]) for n, t in means.items()}
        return Posterior(gaussians, points, metadata)

    def same_bits(self, other: Posterior) -> bool:
        """Whether both hold the same names and, bit for bit, the same numbers."""

        def equal(a: Tensor, b: Tensor) -> bool:
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())

        return (
            self.gaussians.keys() == other.gaussians.keys()
            and self.points.keys() == other.points.keys()
            and all(
                equal(g.mean, other.gaussians[n].mean) and equal(g.variance, other.gaussians[n].variance)
                for n, g in self.gaussians.items()
            )
            and all(equal(t, other.points[n]) for n, t in self.points.items())
        )


def kl(q: Posterior, p: Posterior) -> Tensor:
    """KL(q‖p) summed over every Gaussian weight of the model, in float64; points do not count."""
    total = torch.zeros((), dtype=torch.float64)
    for name, g in q.gaussians.items():
        mq, vq = g.mean.double(), g.variance.double()
        mp, vp = p.gaussians[name].mean.double(), p.gaussians[name].variance.double()
        total = total.to(mq.device) + 0.5 * ((vq + (mq - mp) ** 2) / vp - 1 - torch.log(vq / vp)).sum()
    return total
