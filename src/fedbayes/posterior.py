"""``Posterior``: the one value that travels between clients and server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as _to_bytes
from torch import Tensor

from .atomic import write_atomically
from .errors import PosteriorError


class Gaussian(NamedTuple):
    """A tensor of independent Gaussians: mean and *variance* (not sigma, not rho), of one shape."""

    mean: Tensor
    variance: Tensor


def least_positive(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a type, below which no variance falls: not the smallest *normal* one, 6e-5 in float16."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


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
        for table in (self.gaussians, self.points):
            if not isinstance(table, Mapping):
                raise PosteriorError(f"a posterior's tensors must be a dictionary by name, not {type(table).__name__}.")
            for name in table:
                if not isinstance(name, str):
                    raise PosteriorError(f"{name!r} is the name of a tensor; it must be text.")
        object.__setattr__(self, "gaussians", {n: _gaussian(n, g) for n, g in self.gaussians.items()})
        object.__setattr__(self, "points", dict(self.points))
        for name, t in self.points.items():
            if not isinstance(t, Tensor):
                raise PosteriorError(f"'{name}' is a {type(t).__name__}; a point must be a torch tensor.")
            _dense(name, t)
            if name in self.gaussians:
                raise PosteriorError(f"'{name}' is both a Gaussian and a point; it must be one of them.")

    def __repr__(self) -> str:
        weights, numbers = (
            sum(g.mean.numel() for g in self.gaussians.values()),
            sum(t.numel() for t in self.points.values()),
        )
        return (
            f"Posterior({len(self.gaussians)} Gaussian tensors of {weights:,} weights, {len(self.points)} point tensors of "
            f"{numbers:,} numbers{f', {self.metadata}' if self.metadata else ''})"
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Posterior:
        """Return a copy on another device or in another floating-point type (integer points keep theirs).

        A positive variance below the least positive number of the type becomes that number, not 0.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise PosteriorError(f"a posterior's numbers cannot be of type {dtype}; take a floating-point one.")

        def move(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype if t.is_floating_point() else None)

        def spread(v: Tensor) -> Tensor:
            moved = move(v)
            if dtype is None or not v.is_floating_point():
                return moved
            return torch.where(v.to(moved.device) > 0, moved.clamp(min=least_positive(dtype)), moved)

        return Posterior(
            {n: Gaussian(move(g.mean), spread(g.variance)) for n, g in self.gaussians.items()},
            {n: move(t) for n, t in self.points.items()},
            self.metadata,
        )

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> Path:
        """Write a safetensors file, atomically: a reader finds the old file or the whole new one, never a torn one."""
        path = Path(path)
        write_atomically(path, self.to_bytes(metadata))
        return path

    def to_bytes(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the content of the file that ``save`` writes."""
        tensors = {f"mean/{n}": g.mean for n, g in self.gaussians.items()}
        tensors |= {f"variance/{n}": g.variance for n, g in self.gaussians.items()}
        tensors |= {f"point/{n}": t for n, t in self.points.items()}
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        try:
            header = json.dumps({**self.metadata, **(metadata or {})})
        except TypeError as error:
            raise PosteriorError(
                f"a posterior's metadata must be text by name, to be written to a file ({error})."
            ) from None
        try:
            return _to_bytes(tensors, metadata={"fedbayes": header})
        except KeyError as error:  # complex128, for one
            raise PosteriorError(f"a file of a posterior holds no numbers of type {error}.") from None

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> Posterior:
        """Read a file written by ``save``."""
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as f:
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict
                metadata = json.loads((f.metadata() or {}).get("fedbayes", "{}"))
            return Posterior._from_flat(tensors, metadata)
        except FileNotFoundError:
            raise PosteriorError(f"{path}: no such file; a posterior is a .safetensors file of a run.") from None
        except Exception as error:
            raise PosteriorError(f"{path} is not a posterior written by fedbayes ({str(error).rstrip('.')}).") from None

    @staticmethod
    def _from_flat(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Posterior:
        kinds: dict[str, dict[str, Tensor]] = {"mean": {}, "variance": {}, "point": {}}
        for key, t in tensors.items():
            kind, _, name = key.partition("/")
            if kind not in kinds:
                raise PosteriorError(f"it holds a tensor '{key}'; names begin with mean/, variance/ or point/")
            kinds[kind][name] = t
        lonely = sorted(kinds["mean"].keys() ^ kinds["variance"].keys())
        if lonely:
            raise PosteriorError(f"'{lonely[0]}' needs both a mean and a variance")
        gaussians = {n: Gaussian(t, kinds["variance"][n]) for n, t in kinds["mean"].items()}
        return Posterior(gaussians, kinds["point"], metadata)

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


def _gaussian(name: str, pair: tuple[Tensor, Tensor]) -> Gaussian:
    """Return a pair of tensors as a Gaussian, or say what is wrong with it."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)):
        kinds = [type(t).__name__ for t in pair] if isinstance(pair, tuple | list) else type(pair).__name__
        raise PosteriorError(f"'{name}' is {kinds}; a Gaussian must be a pair of torch tensors, mean and variance.")
    g = Gaussian(*pair)
    _dense(name, g.mean)
    _dense(name, g.variance)
    if g.mean.shape != g.variance.shape:
        raise PosteriorError(
            f"'{name}': mean has shape {tuple(g.mean.shape)} and variance {tuple(g.variance.shape)}; they must be equal."
        )
    return g


def _dense(name: str, t: Tensor) -> None:
    if t.layout is not torch.strided or t.is_meta:
        raise PosteriorError(f"'{name}' is {'on meta' if t.is_meta else t.layout}; a tensor must hold all its numbers.")


def alike(q: Posterior, p: Posterior) -> None:
    """Raise unless both have Gaussians of the same names and shapes, as a KL between them needs."""
    for given in (q, p):
        if not isinstance(given, Posterior):
            raise PosteriorError(f"a KL is between two posteriors; this is a {type(given).__name__}.")
    for name in sorted(q.gaussians.keys() ^ p.gaussians.keys()):
        raise PosteriorError(f"'{name}' is Gaussian in one posterior and not in the other; KL needs the same names.")
    for name, g in q.gaussians.items():
        if g.mean.shape != p.gaussians[name].mean.shape:
            shapes = f"{tuple(g.mean.shape)} and {tuple(p.gaussians[name].mean.shape)}"
            raise PosteriorError(f"'{name}' has shapes {shapes} in the two posteriors; KL needs the same shapes.")


def kl(q: Posterior, p: Posterior) -> Tensor:
    """KL(q‖p) summed over every Gaussian weight of the model, in float64; points do not count.

    With r = σ_q²/σ_p² - 1 a weight's share is ½ (r - log(1 + r) + (μ_q - μ_p)²/σ_p²): no cancellation where q is near p.
    """
    total = torch.zeros((), dtype=torch.float64)
    alike(q, p)
    positive = {}
    for name, g in q.gaussians.items():
        mq, vq = g.mean.double(), g.variance.double()
        mp, vp = p.gaussians[name].mean.to(mq), p.gaussians[name].variance.to(vq)
        r = (vq - vp) / vp
        log = torch.where(r.abs() < 0.5, torch.log1p(r), torch.log(vq) - torch.log(vp))
        total = total.to(mq.device) + 0.5 * (r - log + (mq - mp) ** 2 / vp).sum()
        positive[name] = (torch.minimum(vq, vp) > 0).all()
    for name, fit in positive.items():  # after the loop, which then waits for no device
        if not fit:
            raise PosteriorError(f"'{name}' has a variance that is not positive; a KL needs positive ones.")
    return total


class Refusal(PosteriorError):
    """A client's posterior that cannot be fused: names the client, the tensor and the reason."""

    def __init__(self, client: int | str, tensor: str, reason: str) -> None:
        where = f": '{tensor}' {reason}" if tensor else f": {reason}"
        super().__init__(f"client {client} is refused{where}.")
        self.client, self.tensor, self.reason = client, tensor, reason


def check(
    posterior: Posterior, reference: Posterior, client: int | str = "?", *, allow_zero_variance: bool = False
) -> None:
    """Raise ``Refusal`` unless the posterior has the reference's names and shapes, finite numbers and positive variances.

    Running variances (points named ``...running_var``) must not be negative. The common case costs one reduction over the model and
    one transfer; only when it fails are tensors looked at one by one for the sentence.
    """
    for name, reason in _layout_faults(posterior, reference):
        raise Refusal(client, name, reason)
    if _healthy(posterior, allow_zero_variance):
        return
    for name, reason in _number_faults(posterior, allow_zero_variance):
        raise Refusal(client, name, reason)


def _healthy(posterior: Posterior, allow_zero_variance: bool) -> bool:
    """Whether all numbers are fit, by extremes of a few flat vectors (a NaN makes the extremes NaN and every comparison false)."""
    low = 0.0 if allow_zero_variance else 5e-324
    groups = [(-math.inf, [g.mean for g in posterior.gaussians.values()])]
    groups.append((low, [g.variance for g in posterior.gaussians.values()]))
    groups.append((0.0, [t for n, t in posterior.points.items() if n.endswith("running_var")]))
    groups.append((-math.inf, [t for t in posterior.points.values() if t.is_floating_point()]))
    bounds = []
    for least, tensors in groups:
        flat = [t.detach().reshape(-1) for t in tensors if t.numel()]
        if flat:
            lowest, highest = torch.aminmax(torch.cat(flat))
            lowest, highest = lowest.double(), highest.double()
            bounds.append((lowest >= least) & (lowest > -math.inf) & (highest < math.inf))
    return not bounds or bool(torch.stack(bounds).all())


def _layout_faults(posterior: Posterior, reference: Posterior) -> Iterator[tuple[str, str]]:
    kinds = [
        (
            "Gaussian",
            {n: g.mean for n, g in posterior.gaussians.items()},
            {n: g.mean for n, g in reference.gaussians.items()},
        )
    ]
    kinds.append(("point", dict(posterior.points), dict(reference.points)))
    for kind, mine, expected in kinds:
        for name in sorted(expected.keys() - mine.keys()):
            other = name in posterior.points or name in posterior.gaussians
            yield name, f"should be a {kind} tensor but is not" if other else "is missing"
        for name in sorted(mine.keys() - expected.keys()):
            yield name, "is not a tensor of this model"
        for name, t in expected.items():
            if mine[name].shape != t.shape:
                yield name, f"has shape {tuple(mine[name].shape)} where {tuple(t.shape)} is expected"
            if mine[name].dtype.is_floating_point != t.dtype.is_floating_point:
                yield name, f"has type {mine[name].dtype} where {t.dtype} is expected"
            dtype = mine[name].dtype
            if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 2):
                yield name, f"has type {dtype}; numbers must be real, of 16 bits or more"
    for name, g in posterior.gaussians.items():
        for what, t in (("means", g.mean), ("variances", g.variance)):
            if not t.is_floating_point():
                yield name, f"has {what} of type {t.dtype}; a Gaussian's numbers must be floating-point"


def _number_faults(posterior: Posterior, allow_zero_variance: bool) -> Iterator[tuple[str, str]]:
    numbers = [(n, "mean", g.mean) for n, g in posterior.gaussians.items()]
    numbers += [(n, "variance", g.variance) for n, g in posterior.gaussians.items()]
    numbers += [(n, "value", t) for n, t in posterior.points.items()]
    for name, what, t in numbers:
        for word, bad in (("NaN", torch.isnan(t)), ("infinite", torch.isinf(t))):
            if bool(bad.any()):
                yield name, f"has {int(bad.sum())} {what}s that are {word} (of {t.numel()})"
    for name, what, t in numbers:
        if what == "variance":
            bad = t < 0 if allow_zero_variance else t <= 0
            if bool(bad.any()):
                kind = "negative" if allow_zero_variance else "zero or negative"
                yield (
                    name,
                    f"has {int(bad.sum())} variances that are {kind} (of {t.numel()}; least {float(t.min()):.3g})",
                )
        elif what == "value" and name.endswith("running_var") and bool((t < 0).any()):
            yield name, f"has {int((t < 0).sum())} running variances that are negative (of {t.numel()})"


QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
_QUANTILE_SAMPLE = 2**20


def sigma_statistics(
    posterior: Posterior, previous: Posterior | None = None, floor: float = 1e-6
) -> dict[str, float | dict[str, float]]:
    """Return what ``metrics.jsonl`` says of sigma: mean, quantiles, ratio to the previous round's, share below a floor, layers.

    ``ratio`` is the geometric mean over weights of sigma / previous sigma (absent without a previous posterior). Quantiles of more than about a
    million weights come from every n-th one.
    """
    names = [n for n, g in posterior.gaussians.items() if g.mean.numel()]
    if not names:
        return {}
    sigmas = [posterior.gaussians[n].variance.reshape(-1).double().sqrt() for n in names]
    flat = torch.cat(sigmas)
    layers = torch.stack([s.mean() for s in sigmas])
    sample = flat[:: max(1, -(-flat.numel() // _QUANTILE_SAMPLE))]
    q = torch.quantile(sample, torch.tensor(QUANTILES, dtype=sample.dtype, device=sample.device))
    numbers = [flat.mean()[None], (flat < floor).double().mean()[None], q, layers]
    if previous is not None:
        before = torch.cat([previous.gaussians[n].variance.reshape(-1).double() for n in names]).to(flat.device)
        numbers.append((torch.log(flat) - 0.5 * torch.log(before)).mean().exp()[None])
    mean, below, *rest = torch.cat(numbers).tolist()
    result: dict[str, float | dict[str, float]] = {"mean": mean}
    result |= {f"q{round(100 * p):02d}": x for p, x in zip(QUANTILES, rest)}
    if previous is not None:
        result["ratio"] = rest[-1]
    result["floor_share"] = below
    result["layers"] = dict(zip(names, rest[len(QUANTILES) :]))
    return result


def snr(posterior: Posterior) -> dict[str, Tensor]:
    """Return the signal-to-noise ratio |μ|/σ of every Gaussian weight: below about 1 a weight can be pruned without loss."""
    return {n: g.mean.abs() / g.variance.sqrt() for n, g in posterior.gaussians.items()}
