"""Augmentation of sonar examples: time shift, gain, band noise and SpecAugment's masks, batched on the device.

Every random number is drawn on the host by ``draw``; the functions themselves are deterministic, so lanes, devices and
thread counts see the same examples. They act on transformed inputs (scaled, mean subtracted) under any number of
leading axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from ..examples import Examples
from ..transform import register_augmentation
from .pictures import CEILING, FLOOR

_QUIET = -1000.0  # dB: a noise level that changes nothing


def _per(values: Tensor, dims: int) -> Tensor:
    """Append axes of length one, so that per-example numbers broadcast over ``dims`` axes of an input."""
    return values.reshape(*values.shape, *(1,) * dims)


def hashed(seeds: Tensor, count: int, salt: int) -> Tensor:
    """Return uniform numbers (..., count) in (0, 1) that depend on the seeds alone: integer mixing, alike everywhere.

    Two rounds of a 32-bit multiply and xor-shift (the finaliser of MurmurHash3) on a counter.
    """
    counter = torch.arange(count, device=seeds.device, dtype=torch.int64) * 0x9E3779B1 + salt * 0x85EBCA6B
    h = (counter + seeds.long().unsqueeze(-1) * 0x27D4EB2F) & 0xFFFFFFFF
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    return ((h & 0xFFFFFF).to(torch.float32) + 0.5) / float(1 << 24)


def _inside(length: int, begin: Tensor, width: Tensor) -> Tensor:
    """Return whether each of ``length`` places lies in the stretch [begin, begin + width) given as shares: (..., length)."""
    place = (torch.arange(length, device=begin.device) + 0.5) / length
    return (place >= begin.unsqueeze(-1)) & (place < (begin + width).unsqueeze(-1))


def roll(inputs: Tensor, share: Tensor) -> Tensor:
    """Turn each example around its last axis by a share of its length; what leaves at the end comes in at the front."""
    length = inputs.shape[-1]
    steps = (share * length).long()
    index = (torch.arange(length, device=inputs.device) + steps.unsqueeze(-1)) % length
    index = index.reshape(*share.shape, *(1,) * (inputs.ndim - share.ndim - 1), length)
    return inputs.gather(-1, index.expand(inputs.shape))


@dataclass(frozen=True)
class _Sonar:
    """The numbers common to pictures and waveforms, and how they are drawn."""

    gain: float = 3.0
    """Largest change of level, dB either way: what level normalisation leaves of distance and hydrophone."""
    noise: tuple[float, float] = (-20.0, 3.0)
    """Level of the band noise against the mean spectrum, dB: half of the examples get some."""
    widest: float = 0.15
    """Widest mask, as a share of the axis (SpecAugment, Park et al. 2019, by one mask each in time and frequency)."""
    timeless: bool = False
    """Whether the last axis is not time (DEMON pictures): then nothing is shifted."""

    def draw(self, rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
        """Draw shift (n,), gain in dB (n,), band (n, 4: level in dB, begin, width, seed), masks (n, 4: begin, width, twice)."""
        noisy = rng.random(n) < 0.5
        level = np.where(noisy, rng.uniform(*self.noise, n), _QUIET)
        width = rng.uniform(0.1, 0.6, n)
        band = np.stack([level, rng.random(n) * (1 - width), width, rng.integers(0, 1 << 20, n)], axis=1)
        widths = rng.uniform(0.0, self.widest, (n, 2))
        begins = rng.random((n, 2)) * (1 - widths)
        masks = np.stack([begins[:, 0], widths[:, 0], begins[:, 1], widths[:, 1]], axis=1)
        return {
            "shift": (0.0 if self.timeless else 1.0) * rng.random(n),
            "gain": rng.uniform(-self.gain, self.gain, n),
            "band": band,
            "masks": masks,
        }


@dataclass(frozen=True)
class SonarPictures(_Sonar):
    """Augment pictures (..., 1, rows, columns): rows are frequency (or carriers), columns time (or modulation)."""

    decibels: float = CEILING - FLOOR
    """Decibels of one unit of the scaled pictures: 100 for ``data.scale = "unit"``."""

    def __call__(self, inputs: Tensor, **numbers: Tensor) -> Tensor:
        """Shift in time, add band noise as power, change the level, mask a band and a stretch (by the mean, which is 0)."""
        shift, gain = numbers["shift"].to(inputs.dtype), numbers["gain"].to(inputs.dtype)
        band, masks = numbers["band"], numbers["masks"].to(inputs.dtype)
        rows, columns = inputs.shape[-2:]
        out = roll(inputs, shift)
        out = self._noise(out, band, rows, columns)
        out = out + _per(gain / self.decibels, 3)
        hidden = _inside(rows, masks[..., 0], masks[..., 1]).unsqueeze(-1)
        hidden = hidden | _inside(columns, masks[..., 2], masks[..., 3]).unsqueeze(-2)
        return torch.where(hidden.unsqueeze(-3), torch.zeros((), dtype=out.dtype, device=out.device), out)

    def _noise(self, inputs: Tensor, band: Tensor, rows: int, columns: int) -> Tensor:
        """Add powers: in decibels over the mean picture, ``10 log(10^(x/10) + 10^(n/10))``, in the band only."""
        seeds = band[..., 3].long()
        cells = rows * columns
        looks = -(hashed(seeds, cells, 1).log() + hashed(seeds, cells, 2).log()) / 2  # mean power of two looks
        level = band[..., 0:1].to(inputs.dtype) + 10 * torch.log10(looks.clamp(min=1e-6))
        floor = level.unflatten(-1, (rows, columns)).to(inputs.dtype) / self.decibels
        begin, width = band[..., 1].to(inputs.dtype), band[..., 2].to(inputs.dtype)
        floor = torch.where(_inside(rows, begin, width).unsqueeze(-1), floor, _QUIET / self.decibels).unsqueeze(-3)
        nepers = self.decibels * math.log(10) / 10
        return torch.logaddexp(inputs * nepers, floor.to(inputs.dtype) * nepers) / nepers


@dataclass(frozen=True)
class SonarWaveforms(_Sonar):
    """Augment waveforms (..., 1, samples) of about unit power."""

    def __call__(self, inputs: Tensor, **numbers: Tensor) -> Tensor:
        """Shift in time, add noise in a band, change the level, take out a band and a stretch."""
        dtype = inputs.dtype
        shift, gain = numbers["shift"].to(dtype), numbers["gain"].to(dtype)
        band, masks = numbers["band"], numbers["masks"].to(dtype)
        samples = inputs.shape[-1]
        spectrum = torch.fft.rfft(roll(inputs, shift))
        bins = spectrum.shape[-1]
        seeds = band[..., 3].long()
        radius = (-2 * hashed(seeds, samples, 1).log()).sqrt()
        gaussian = (radius * torch.cos(2 * math.pi * hashed(seeds, samples, 2))).to(dtype).unsqueeze(-2)
        begin, width = band[..., 1].to(dtype), band[..., 2].to(dtype)
        # noise of the level asked for in its band: the band holds the share ``width`` of white noise's power
        amplitude = (10 ** (band[..., 0].to(dtype) / 20)) / width.clamp(min=1e-3).sqrt()
        extra = torch.fft.rfft(gaussian) * _per(amplitude, 2) * _inside(bins, begin, width).unsqueeze(-2)
        spectrum = (spectrum + extra) * ~_inside(bins, masks[..., 0], masks[..., 1]).unsqueeze(-2)
        out = torch.fft.irfft(spectrum, n=samples) * _per(10 ** (gain / 20), 2)
        return out * ~_inside(samples, masks[..., 2], masks[..., 3]).unsqueeze(-2)


@register_augmentation("sonar")
def make_augmentation(train: Examples, scale: Tensor) -> SonarPictures | SonarWaveforms:
    """Return the augmentation for pictures (1, rows, columns) or waveforms (1, samples); DEMON pictures have no time axis."""
    shape = tuple(train.inputs.shape[1:])
    kinds = np.unique(train.columns["picture"]) if "picture" in train.columns else []
    if len(shape) == 3:
        return SonarPictures(timeless="demon" in kinds, decibels=(CEILING - FLOOR) / 255 / float(scale.reshape(-1)[0]))
    if len(shape) == 2:
        return SonarWaveforms()
    raise DataError(f"data.augment 'sonar' is for pictures and waveforms, but one input has shape {shape}; use 'none'.")
