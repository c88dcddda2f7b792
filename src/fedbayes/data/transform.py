"""From stored inputs to what the network sees: scaling, mean subtraction and augmentation, batched on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, nearest
from ..own import own_name
from .examples import Examples

if TYPE_CHECKING:
    from ..experiment import Data

_CHUNK = 4096


class Augmentation(Protocol):
    """A random change of inputs whose random numbers are drawn beforehand, on the host."""

    def draw(self, rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
        """Draw the numbers for ``n`` examples: arrays whose first axis is n."""
        ...

    def __call__(self, inputs: Tensor, **numbers: Tensor) -> Tensor:
        """Change inputs of shape (..., *sample) by numbers of shape (..., ...) as ``draw`` gives them."""
        ...


@dataclass(frozen=True)
class CropFlip:
    """Zero-pad by ``pad``, crop to the old size at the given offset, then mirror left-right where asked.

    ``out[i, j] = padded[i + dy, (W - 1 - j if flip else j) + dx]`` with offsets (dy, dx) in 0 ... 2·pad. Done by
    one gather from the unpadded image, so it costs one pass over memory whatever the offsets are.
    """

    pad: int = 4
    flip: bool = True

    def draw(self, rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
        """Draw offsets (n, 2) and flips (n,)."""
        numbers: dict[str, np.ndarray] = {"offsets": rng.integers(0, 2 * self.pad + 1, size=(n, 2), dtype=np.int64)}
        if self.flip:
            numbers["flips"] = rng.random(n) < 0.5
        return numbers

    def __call__(self, inputs: Tensor, **numbers: Tensor) -> Tensor:
        """Apply the crop and flip to images (..., C, H, W)."""
        offsets, flips = numbers["offsets"].long(), numbers.get("flips")
        height, width = inputs.shape[-2:]
        rows = torch.arange(height, device=inputs.device) + offsets[..., 0:1] - self.pad  # (..., H)
        columns = torch.arange(width, device=inputs.device).expand(*offsets.shape[:-1], width)
        if flips is not None:
            columns = torch.where(flips.bool().unsqueeze(-1), width - 1 - columns, columns)
        columns = columns + offsets[..., 1:2] - self.pad  # (..., W)
        inside = ((rows >= 0) & (rows < height)).unsqueeze(-1) & ((columns >= 0) & (columns < width)).unsqueeze(-2)
        index = rows.clamp(0, height - 1).unsqueeze(-1) * width + columns.clamp(0, width - 1).unsqueeze(-2)
        flat = inputs.flatten(-2)
        index = index.flatten(-2).unsqueeze(-2).expand(flat.shape)
        return torch.where(inside.unsqueeze(-3), flat.gather(-1, index).view(inputs.shape), 0.0)


AugmentationMaker = Callable[[Examples, Tensor], Augmentation]
AUGMENTATIONS: dict[str, AugmentationMaker] = {}
"""Makers of augmentations by name; each is given the training examples (their shape, what their columns say) and the
factors by which stored values are scaled."""


def register_augmentation(name: str) -> Callable:
    """Register the decorated maker (training examples, scale -> ``Augmentation``) under ``name``."""

    def add(make: AugmentationMaker) -> AugmentationMaker:
        AUGMENTATIONS[name] = make
        return make

    return add


def get_augmentation(name: str) -> AugmentationMaker | None:
    """Return the maker of that name, None for ``none``; ``package.module:name`` imports the module first, for augmentations of your own."""
    name = own_name(name, "augmentation")
    if name == "none":
        return None
    if name == "sonar" and name not in AUGMENTATIONS:
        from . import sonar  # noqa: F401 - registers it
    if name not in AUGMENTATIONS:
        raise ConfigError(f"there is no augmentation '{name}'; {nearest(name, ('none', 'sonar', *AUGMENTATIONS))}")
    return AUGMENTATIONS[name]


def _images_only(train: Examples) -> None:
    shape = tuple(train.inputs.shape[1:])
    if len(shape) != 3:
        raise DataError(f"data.augment: crops and flips are for images, but one input has shape {shape}; use 'none'.")


@register_augmentation("crop-flip")
def _crop_flip(train: Examples, scale: Tensor) -> Augmentation:
    _images_only(train)
    return CropFlip(flip=True)


@register_augmentation("crop")
def _crop(train: Examples, scale: Tensor) -> Augmentation:
    _images_only(train)
    return CropFlip(flip=False)


@dataclass(frozen=True, eq=False)
class Transform:
    """Stored inputs to network inputs, on whatever device they are, under any number of leading axes.

    In this order: conversion to float, scaling, mean subtraction (together ``raw * scale + shift``), then
    augmentation. Zero-padding therefore happens after mean subtraction, as in the Keras example that Fischer and
    Loomis followed: the border has the value of the mean image. ``shift`` has one row per client and a last one
    for the server, or a single row when all share one mean. Nothing here waits for the device, so the call can
    be compiled and captured.
    """

    scale: Tensor
    shift: Tensor
    augmentation: Augmentation | None = None

    @property
    def sample_dims(self) -> int:
        """Number of axes of one input."""
        return self.shift.ndim - 1

    def draw(self, rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
        """Draw the augmentation's numbers for ``n`` examples (nothing when there is none), on the host."""
        return self.augmentation.draw(rng, n) if self.augmentation is not None else {}

    def __call__(
        self,
        raw: Tensor,
        *,
        client: Tensor | int | None = None,
        offsets: Tensor | None = None,
        flips: Tensor | None = None,
        **numbers: Tensor | None,
    ) -> Tensor:
        """Transform ``raw`` (..., *sample); augment only when the numbers that ``draw`` gives are passed.

        ``client`` selects whose mean is subtracted: one number for all, or a tensor whose axes are the first of
        ``raw``'s leading axes (one client a lane). -1 and None mean the server's.
        """
        out = raw.to(self.scale.dtype) * self.scale + self._shift(client, raw.ndim)
        given = {"offsets": offsets, "flips": flips, **numbers}
        given = {name: value for name, value in given.items() if value is not None}
        return self.augmentation(out, **given) if self.augmentation is not None and given else out

    def _shift(self, client: Tensor | int | None, dims: int) -> Tensor:
        if self.shift.shape[0] == 1 or client is None:
            return self.shift[-1]
        shift = self.shift[client]
        if isinstance(client, Tensor):
            batch = dims - client.ndim - self.sample_dims
            shift = shift.view(*client.shape, *(1,) * batch, *self.shift.shape[1:])
        return shift

    def to(self, device: torch.device | str) -> Transform:
        """Return the same transform with its tensors on another device."""
        return replace(self, scale=self.scale.to(device), shift=self.shift.to(device))


def side_by_side(transforms: Sequence[Transform]) -> tuple[Transform, tuple[int, ...]]:
    """Return one transform for the clients of several runs on the same data, and the row of each run's first client.

    They differ in nothing but the clients' means: run r's client c has row ``rows[r] + c``, the server's stays the last.
    """
    first = transforms[0]
    if all(t.shift is first.shift or torch.equal(t.shift, first.shift) for t in transforms):
        return first, (0,) * len(transforms)
    clients = [t.shift[:-1] for t in transforms]
    rows = np.cumsum([0, *map(len, clients[:-1])])
    return replace(first, shift=torch.cat([*clients, transforms[-1].shift[-1:]])), tuple(map(int, rows))


def make_transform(
    data: Data, train: Examples, shards: Sequence[np.ndarray], test: Examples | None = None
) -> Transform:
    """Measure the statistics an experiment's ``data`` section asks for and return the transform.

    ``shards`` are the clients' positions in ``train`` (for ``mean = "client"``), ``test`` the examples whose mean
    the server subtracts then.
    """
    scale, offset = _scaling(data.scale, train.inputs)
    means = _means(data.mean, train, shards, test)
    # (raw * scale + offset) minus its mean is raw * scale + shift with shift = offset - (mean * scale + offset)
    shift = offset.expand(train.inputs.shape[1:])[None] if means is None else -means * scale
    make = get_augmentation(data.augment)
    return Transform(scale.float(), shift.float().contiguous(), make(train, scale) if make else None)


def _scaling(how: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, offset) in float64, per channel (images, waveforms) or per column (tables)."""
    shape = (inputs.shape[1], *(1,) * (inputs.ndim - 2))
    one, zero = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    if how == "none":
        return one, zero
    if how == "unit" and inputs.dtype == torch.uint8:
        return one / 255, zero
    others = tuple(d for d in range(inputs.ndim) if d != 1)
    if how == "unit":
        low, high = inputs.amin(others).double().cpu(), inputs.amax(others).double().cpu()
        width = torch.where(high > low, high - low, 1.0)
        return (1 / width).view(shape), (-low / width).view(shape)
    if how == "standard":
        mean, deviation = _moments(inputs)
        return (1 / deviation).view(shape), (-mean / deviation).view(shape)
    raise ConfigError(f"data.scale '{how}' does not exist; valid are: unit, standard, none.")


def _sum(inputs: Tensor, power: int = 1) -> Tensor:
    """Sum inputs (or their squares) over the examples, in float64; exactly, when they are 8-bit."""
    if inputs.dtype == torch.uint8:
        # 256 squares of at most 255² stay below 2²⁴, where float32 is still exact, and float32 is fast.
        parts = (part.float().pow(power).sum(0).double() for part in inputs.split(256))
    else:
        parts = (part.double().pow(power).sum(0) for part in inputs.split(_CHUNK))
    total = torch.zeros(inputs.shape[1:], dtype=torch.float64, device=inputs.device)
    for part in parts:
        total += part
    return total.cpu()


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel or column, in float64; a constant one has deviation 1."""
    n, within = inputs.numel() // inputs.shape[1], tuple(range(1, inputs.ndim - 1))
    mean = _over(_sum(inputs), within) / n
    if inputs.dtype == torch.uint8:
        squares = _over(_sum(inputs, 2), within) - n * mean.square()
    else:  # about the mean, so that nothing cancels
        centre = mean.to(inputs.device).view(1, -1, *(1,) * (inputs.ndim - 2))
        parts = [(p.double() - centre).square().sum(0) for p in inputs.split(_CHUNK)]
        squares = _over(torch.stack(parts).sum(0).cpu(), within)
    deviation = (squares / n).clamp_min(0).sqrt()
    return mean, torch.where(deviation > 0, deviation, 1.0)


def _over(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor


def _means(which: str, train: Examples, shards: Sequence[np.ndarray], test: Examples | None) -> Tensor | None:
    """Return the mean inputs in stored units: None, one row, or a row per client and the server's last."""
    if which == "none":
        return None
    if which == "global":
        return _mean(train.inputs)[None]
    if which == "client":
        server = _mean((train if test is None or len(test) == 0 else test).inputs)
        return torch.stack([*(_mean(train.inputs[torch.as_tensor(shard)]) for shard in shards), server])
    raise ConfigError(f"data.mean '{which}' does not exist; valid are: none, global, client.")


def _mean(inputs: Tensor) -> Tensor:
    if len(inputs) == 0:  # a client that holds nothing here (it lives on another machine) has no mean to subtract
        return torch.zeros(inputs.shape[1:], dtype=torch.float64)
    return _sum(inputs) / len(inputs)
