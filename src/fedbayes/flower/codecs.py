"""How a posterior becomes arrays on the wire: exactly, or in 16 or 8 bits relative to a posterior both sides know.

The exact codec keeps every bit. The lossy ones send a client's answer in coordinates relative to the global
posterior it started from, (mu_k - mu_g) / sigma_g and log(var_k / var_g), where numbers are of order one and the
rounding is a known share of the uncertainty itself: they are for the way up; the way down is the reference, so exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, PosteriorError, nearest
from ..posterior import Gaussian, Posterior

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """What the arrays hold: (kind, name, dtype, shape) of every tensor, in order. Equal models have equal layouts."""

    entries: tuple[tuple[str, str, str, tuple[int, ...]], ...]

    @staticmethod
    def of(posterior: Posterior) -> Layout:
        """Return the layout of a posterior: Gaussians by name, then points by name."""
        rows = [("gaussian", n, _dtype_name(g.mean), tuple(g.mean.shape)) for n, g in posterior.gaussians.items()]
        rows += [("point", n, _dtype_name(t), tuple(t.shape)) for n, t in posterior.points.items()]
        return Layout(tuple(sorted(rows)))

    @staticmethod
    def parse(text: str) -> Layout:
        """Read what ``dumps`` wrote; anything else raises ``PosteriorError``."""
        try:
            rows = [(str(k), str(n), str(d), tuple(int(i) for i in s)) for k, n, d, s in json.loads(text)]
        except (ValueError, TypeError, RecursionError):
            raise PosteriorError("the layout that came with the arrays cannot be read.") from None
        if any(k not in ("gaussian", "point") or d not in _DTYPES or min(s, default=0) < 0 for k, _, d, s in rows):
            raise PosteriorError("the layout that came with the arrays names a type or shape that does not exist.")
        return Layout(tuple(rows))

    def dumps(self) -> str:
        """Write the layout as JSON."""
        return json.dumps(self.entries, separators=(",", ":"))

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that differ when names, shapes or types differ."""
        return sha256(self.dumps().encode()).hexdigest()[:12]


class Exact:
    """Every bit of every tensor, tensors of one type joined into one vector (few large arrays travel fastest)."""

    name = "float32"

    def encode(self, posterior: Posterior, reference: Posterior | None, rng: np.random.Generator | None) -> Arrays:
        """Return one vector for each of mean, variance, point and data type."""
        parts: dict[str, list[Tensor]] = {}
        for kind, name, dtype, _ in Layout.of(posterior).entries:
            if kind == "gaussian":
                g = posterior.gaussians[name]
                parts.setdefault(f"mean.{dtype}", []).append(g.mean)
                parts.setdefault(f"variance.{dtype}", []).append(g.variance)
            else:
                parts.setdefault(f"point.{dtype}", []).append(posterior.points[name])
        return {key: _to_numpy(torch.cat([_flat(t) for t in tensors])) for key, tensors in parts.items()}

    def decode(self, arrays: Mapping[str, np.ndarray], layout: Layout, reference: Posterior | None) -> Posterior:
        """Return the posterior that was encoded, bit for bit."""
        reader = _Reader(arrays)
        gaussians, points = {}, {}
        for kind, name, dtype, shape in layout.entries:
            if kind == "gaussian":
                mean = reader.take(f"mean.{dtype}", dtype, shape)
                gaussians[name] = Gaussian(mean, reader.take(f"variance.{dtype}", dtype, shape))
            else:
                points[name] = reader.take(f"point.{dtype}", dtype, shape)
        reader.finish()
        return Posterior(gaussians, points)


class BFloat16:
    """Sixteen bits for each number in relative coordinates: eight significant bits, any magnitude.

    Weights that are points travel as their move from the reference; vectors among the points (biases, batch-norm
    statistics) and counters travel exactly, as they are few and some must stay positive.
    """

    name = "bf16"

    def encode(self, posterior: Posterior, reference: Posterior | None, rng: np.random.Generator | None) -> Arrays:
        """Return the relative coordinates in bfloat16 (as their 16-bit patterns) and the exact remainder."""
        moved, rest = _relative(posterior, _needed(reference, self.name))
        arrays = Exact().encode(Posterior(points=rest), None, None)
        if moved:
            patterns = torch.cat([t.reshape(-1) for t in moved.values()]).to(torch.bfloat16).view(torch.int16)
            arrays["relative.bf16"] = patterns.numpy()
        return arrays

    def decode(self, arrays: Mapping[str, np.ndarray], layout: Layout, reference: Posterior | None) -> Posterior:
        """Return the posterior, each number within 2^-9 of its relative coordinate."""
        patterns = arrays.get("relative.bf16", np.zeros(0, np.int16))
        if patterns.dtype != np.int16:
            raise PosteriorError(f"the relative coordinates came as {patterns.dtype}, not as 16-bit patterns.")
        flat = torch.from_numpy(patterns.copy()).view(torch.bfloat16).to(torch.float32)
        return _absolute(flat, arrays, layout, _needed(reference, self.name), {"relative.bf16"})


class Int8:
    """Eight bits for each number in relative coordinates: 255 steps across each tensor's largest coordinate.

    Rounding is stochastic with a seeded generator, so its mean is the number itself and a sum over clients averages
    the error away. Exactly sent points are as for bf16.
    """

    name = "int8"

    def encode(self, posterior: Posterior, reference: Posterior | None, rng: np.random.Generator | None) -> Arrays:
        """Return signed bytes, one scale for each tensor, and the exact remainder."""
        moved, rest = _relative(posterior, _needed(reference, self.name))
        rng = rng or np.random.default_rng()
        arrays = Exact().encode(Posterior(points=rest), None, None)
        codes, scales = [], []
        for tensor in moved.values():
            values = tensor.reshape(-1).numpy().astype(np.float64)
            scale = float(np.abs(values).max(initial=0.0)) / 127
            scales.append(scale)
            if not np.isfinite(scale) or scale == 0:  # NaN travels as the scale, and is refused where it arrives
                codes.append(np.zeros(values.shape, np.int8))
                continue
            steps = np.floor(values / scale + rng.random(values.shape))
            codes.append(np.clip(steps, -127, 127).astype(np.int8))
        if moved:
            arrays |= {"relative.int8": np.concatenate(codes), "relative.scale": np.array(scales, np.float32)}
        return arrays

    def decode(self, arrays: Mapping[str, np.ndarray], layout: Layout, reference: Posterior | None) -> Posterior:
        """Return the posterior, each coordinate within one step (its tensor's scale) of what was sent."""
        codes = arrays.get("relative.int8", np.zeros(0, np.int8))
        scales = arrays.get("relative.scale", np.zeros(0, np.float32))
        sizes = [_count(shape) for _, shape in _lossy_slots(layout)]
        if codes.dtype != np.int8 or len(codes) != sum(sizes) or len(scales) != len(sizes):
            raise PosteriorError("the 8-bit arrays do not fit the layout that came with them.")
        with np.errstate(invalid="ignore"):  # a NaN scale stands for a tensor that is not finite
            flat = torch.from_numpy(codes.astype(np.float32) * np.repeat(scales, sizes).astype(np.float32))
        return _absolute(flat, arrays, layout, _needed(reference, self.name), {"relative.int8", "relative.scale"})


CODECS: dict[str, Exact | BFloat16 | Int8] = {c.name: c for c in (Exact(), BFloat16(), Int8())}


def get_codec(name: str) -> Exact | BFloat16 | Int8:
    """Return the codec of this name, or say which there are."""
    if name not in CODECS:
        raise ConfigError(f"'{name}' is no way of sending posteriors; {nearest(name, CODECS)}")
    return CODECS[name]


def _relative(posterior: Posterior, reference: Posterior) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split into relative coordinates (float32, in the layout's order) and points that travel exactly."""
    moved: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for kind, name, _, shape in Layout.of(posterior).entries:
        if kind == "gaussian":
            g, r = posterior.gaussians[name], _reference_gaussian(reference, name, shape)
            moved[f"mean/{name}"] = ((g.mean.double() - r.mean.double()) / r.variance.double().sqrt()).float().cpu()
            moved[f"variance/{name}"] = torch.log(g.variance.double() / r.variance.double()).float().cpu()
        elif _is_lossy_point(posterior.points[name].dtype, shape):
            old = _reference_point(reference, name, shape)
            moved[f"point/{name}"] = (posterior.points[name].double() - old.double()).float().cpu()
        else:
            rest[name] = posterior.points[name]
    return moved, rest


def _absolute(
    flat: Tensor, arrays: Mapping[str, np.ndarray], layout: Layout, reference: Posterior, used: set[str]
) -> Posterior:
    """Undo ``_relative``."""
    slots = _lossy_slots(layout)
    if len(flat) != sum(_count(shape) for _, shape in slots):
        raise PosteriorError("the relative coordinates do not fit the layout that came with them.")
    pieces = dict(zip((n for n, _ in slots), flat.split([_count(s) for _, s in slots])))
    exact = tuple(e for e in layout.entries if e[0] == "point" and f"point/{e[1]}" not in pieces)
    points = dict(Exact().decode({k: a for k, a in arrays.items() if k not in used}, Layout(exact), None).points)
    gaussians = {}
    for kind, name, dtype, shape in layout.entries:
        target = _DTYPES[dtype]
        if kind == "gaussian":
            r = _reference_gaussian(reference, name, shape)
            mean = r.mean.double() + pieces[f"mean/{name}"].double().reshape(shape) * r.variance.double().sqrt()
            variance = r.variance.double() * torch.exp(pieces[f"variance/{name}"].double().reshape(shape))
            gaussians[name] = Gaussian(mean.to(target), variance.to(target))
        elif f"point/{name}" in pieces:
            old = _reference_point(reference, name, shape).double()
            points[name] = (old + pieces[f"point/{name}"].double().reshape(shape)).to(target)
    return Posterior(gaussians, points)


def _lossy_slots(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    slots: list[tuple[str, tuple[int, ...]]] = []
    for kind, name, dtype, shape in layout.entries:
        if kind == "gaussian":
            slots += [(f"mean/{name}", shape), (f"variance/{name}", shape)]
        elif _is_lossy_point(_DTYPES[dtype], shape):
            slots.append((f"point/{name}", shape))
    return slots


def _is_lossy_point(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return dtype.is_floating_point and len(shape) >= 2


def _reference_gaussian(reference: Posterior, name: str, shape: tuple[int, ...]) -> Gaussian:
    g = reference.gaussians.get(name)
    if g is None or tuple(g.mean.shape) != shape:
        raise PosteriorError(f"'{name}' of shape {shape} is not in the posterior it should be relative to.")
    return Gaussian(g.mean.cpu(), g.variance.cpu())


def _reference_point(reference: Posterior, name: str, shape: tuple[int, ...]) -> Tensor:
    point = reference.points.get(name)
    if point is None or tuple(point.shape) != shape:
        raise PosteriorError(f"'{name}' of shape {shape} is not in the posterior it should be relative to.")
    return point.cpu()


def _needed(reference: Posterior | None, name: str) -> Posterior:
    if reference is None:
        raise PosteriorError(f"'{name}' sends coordinates relative to a posterior, and none was given.")
    return reference


class _Reader:
    """Cuts tensors off the front of named vectors and checks that everything is used."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays, self.used = arrays, dict.fromkeys(arrays, 0)

    def take(self, key: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        count, start = _count(shape), self.used.get(key, 0)
        vector = self.arrays.get(key)
        if vector is None or vector.ndim != 1 or start + count > len(vector):
            raise PosteriorError(f"the array '{key}' is missing or shorter than the layout that came with it says.")
        self.used[key] = start + count
        try:
            return _from_numpy(vector[start : start + count], dtype).reshape(shape)
        except (ValueError, TypeError, RuntimeError):
            raise PosteriorError(f"the array '{key}' came as {vector.dtype}, not as {dtype}.") from None

    def finish(self) -> None:
        for key, count in self.used.items():
            if count != len(self.arrays[key]):
                raise PosteriorError(f"the array '{key}' is longer than the layout that came with it says.")


_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16)
} | {"int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool}


def _dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise PosteriorError(f"a tensor of type {name} cannot be sent; convert it to float32.")
    return name


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _from_numpy(vector: np.ndarray, dtype: str) -> Tensor:
    tensor = torch.from_numpy(np.array(vector, copy=True))
    tensor = tensor.view(torch.bfloat16) if dtype == "bfloat16" and tensor.dtype == torch.int16 else tensor
    if tensor.dtype != _DTYPES[dtype]:
        raise TypeError(dtype)
    return tensor
