"""Pictures: what a network is shown of a segment of sound, and with what settings.

A picture is stored as 8-bit grey values over a fixed range of 100 decibels. One step is 0.4 dB, far below the
scatter of a spectral estimate (5.6 dB for a single look), so nothing is lost; it takes a quarter of the memory of
float32 and half that of float16, and a picture is then an ordinary image to everything else in the house: scaled to
[0, 1], one unit is 100 dB.
Waveforms, for the one-dimensional network, are stored as float16 at unit power.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from .spectra import demon, demon_window, lofar, mel, mel_filters, power_of_two, spectrogram, split_window

if TYPE_CHECKING:
    from ...experiment import Sonar

FLOOR, CEILING = -40.0, 60.0  # decibels of grey values 0 and 255
VERSION = 4  # of the pictures: part of the key of the cache, to be raised when their numbers change


@dataclass(frozen=True)
class Picture:
    """How a segment becomes a picture. The defaults of each kind are in ``make_picture``, with the reasons.

    ``low`` and ``high`` bound the band that can reach the picture at all.
    ``window`` (s) is logmel's; ``resolution``, ``half_hz`` and ``gap_hz`` (Hz) are lofar's; ``highest`` (Hz) is demon's.
    """

    kind: str
    rate: int
    seconds: float
    low: float
    high: float
    bands: int
    frames: int
    window: float = 0.064
    resolution: float = 2.0
    half_hz: float = 40.0
    gap_hz: float = 6.0
    highest: float = 40.0

    @property
    def samples(self) -> int:
        """Samples of one segment."""
        return round(self.rate * self.seconds)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one picture: (1, bands, frames), or (1, samples) for waveforms."""
        return tuple(self(torch.zeros(1, self.samples)).shape[1:])

    def __call__(self, waveforms: Tensor) -> Tensor:
        """Return the pictures (N, 1, bands, frames) of waveforms (N, samples), in decibels (waveforms: as they are)."""
        return _MAKERS[self.kind](self, waveforms.to(torch.float32))

    def quantise(self, pictures: Tensor) -> Tensor:
        """Return pictures as grey values (uint8), waveforms as float16."""
        if self.kind == "waveform":
            return pictures.to(torch.float16)
        scaled = (pictures - FLOOR) * (255.0 / (CEILING - FLOOR))
        return scaled.round().clamp(0, 255).to(torch.uint8)

    def decibels(self, grey: Tensor) -> Tensor:
        """Return the decibels that grey values stand for: the inverse of ``quantise`` up to one step."""
        return grey.to(torch.float32) * ((CEILING - FLOOR) / 255.0) + FLOOR

    def key(self) -> str:
        """Return a text that changes whenever the pictures would."""
        return f"{VERSION}:{self!r}"


def _level(decibels: Tensor) -> Tensor:
    """Subtract each picture's median: the gain of the recording chain and the distance do not show.

    The median and not the mean power, which one strong line or the rumble of a wave would set.
    """
    median = decibels.flatten(1).median(dim=1).values
    return decibels - median[:, None, None]


def _to_db(power: Tensor) -> Tensor:
    return 10.0 * torch.log10(power.clamp(min=1e-20))


def _logmel(p: Picture, waveforms: Tensor) -> Tensor:
    window = min(power_of_two(p.window * p.rate), p.samples)
    hop = max(1, (p.samples - window) // max(1, p.frames - 1))
    # where frames lie far apart, several looks are averaged into each, half a window apart: no sound falls between
    looks = 1 if hop <= 0.75 * window else -(-hop // (window // 2))
    hop = max(1, (p.samples - window) // max(1, p.frames * looks - 1))
    power = spectrogram(waveforms, window, hop)[..., : p.frames * looks]
    bands = torch.matmul(mel_filters(p.bands, window, p.rate, p.low, p.high).to(power), power)
    if looks > 1:
        bands = bands.unflatten(-1, (-1, looks)).mean(-1)
    return _level(_to_db(bands)).unsqueeze(1)


def _pool(values: Tensor, bands: int, dim: int) -> Tensor:
    """Reduce a dimension to ``bands`` by the maximum of neighbours: a narrow line survives, an average would drown it."""
    count = values.shape[dim]
    if count <= bands:
        return values
    moved = values.movedim(dim, -1)
    return torch.nn.functional.adaptive_max_pool1d(moved.flatten(0, -2), bands).unflatten(0, moved.shape[:-1]).movedim(-1, dim)  # fmt: skip


def _lofar(p: Picture, waveforms: Tensor) -> Tensor:
    ratio, _ = lofar(
        waveforms, p.rate, low=p.low, high=p.high, resolution=p.resolution, frames=p.frames, half_hz=p.half_hz, gap_hz=p.gap_hz
    )  # fmt: skip
    return 2.0 * _to_db(_pool(ratio, p.bands, dim=1)).unsqueeze(1)


def _demon(p: Picture, waveforms: Tensor) -> Tensor:
    magnitude, frequencies = demon(waveforms, p.rate, low=p.low, high=p.high, carriers=p.bands, highest=p.highest)
    spacing = float(frequencies[1] - frequencies[0])
    half = max(4, round(4.0 / spacing))
    ratio = split_window(magnitude.transpose(1, 2), half, max(2, round(0.7 / spacing))).transpose(1, 2)
    return 2.0 * _to_db(_pool(ratio, p.frames, dim=2)).unsqueeze(1)


def _waveform(p: Picture, waveforms: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(waveforms)
    frequencies = torch.fft.rfftfreq(waveforms.shape[-1], 1.0 / p.rate, device=waveforms.device)
    inside = (frequencies >= p.low) & (frequencies <= p.high)
    if not inside.any():
        raise ValueError(f"the band {p.low:g} to {p.high:g} Hz holds no bin of {p.rate / waveforms.shape[-1]:g} Hz")
    spectrum = spectrum * inside
    limited = torch.fft.irfft(spectrum, n=waveforms.shape[-1])
    return (limited / limited.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-20)).unsqueeze(1)


_MAKERS = {"logmel": _logmel, "lofar": _lofar, "demon": _demon, "waveform": _waveform}

_POSSIBLE = (
    ("sample_rate", lambda v: 100 <= v <= 1_000_000, "100 to 1000000 Hz"),
    ("seconds", lambda v: 0.1 <= v <= 600, "0.1 to 600: the length of a segment"),
    ("overlap", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("bands", lambda v: 0 <= v <= 4096, "0 (the picture's own) to 4096"),
    ("frames", lambda v: 0 <= v <= 4096, "0 (the picture's own) to 4096"),
    ("resolution", lambda v: v > 0, "above 0 Hz"),
    ("channel", lambda v: v >= -1, "a channel from 0, or -1 for the mean of all"),
)


def make_picture(sonar: Sonar) -> Picture:
    """Return the picture that a configuration asks for; 0 for ``low``, ``high``, ``bands`` or ``frames`` is the kind's own.

    - ``logmel``: 20 Hz to half the rate, 64 bands, 64 frames, windows of 64 ms: 16 Hz apart, fine enough for the
      mel bands at low frequencies, short enough to show single blade beats. What networks for ship noise are mostly
      fed with.
    - ``lofar``: 10 to 1000 Hz, where shaft, blade and machinery lines live; bins of 2 Hz (windows of half a second),
      the background from 40 Hz to either side without the middle 6, then the strongest of neighbouring bins so that
      128 rows remain. Longer segments allow a finer ``resolution``.
    - ``demon``: carriers from 1 kHz (below, lines beat with each other and look like blades) to 0.9 of half the rate,
      16 of them where the rate allows, modulation from 0.5 to 40 Hz: shafts of 60 to 600 turns a minute with three to seven blades. A
      segment of 3 s tells rates 0.7 Hz apart; 10 s or more is better.
    - ``waveform``: 20 Hz to half the rate, unit power.
    """
    for name, possible, words in _POSSIBLE:
        if not possible(value := getattr(sonar, name)):
            raise ConfigError(f"'sonar.{name}' is {value:g}; it must be {words}.")
    nyquist = sonar.sample_rate / 2.0
    own = {
        "logmel": (20.0, nyquist, 64, 64),
        "lofar": (10.0, min(1000.0, nyquist), 128, 32),
        "demon": (min(1000.0, nyquist / 4), 0.9 * nyquist, 16, 96),
        "waveform": (20.0, nyquist, 0, 0),
    }
    if sonar.picture not in own:
        raise ConfigError(f"'sonar.picture' is '{sonar.picture}'; it must be one of {', '.join(own)}.")
    low, high, bands, frames = own[sonar.picture]
    low, high = sonar.low or low, sonar.high or high
    if sonar.picture == "demon":  # no carrier band narrower than a bin
        spacing = sonar.sample_rate / demon_window(sonar.sample_rate, Picture.highest)
        bands = max(1, min(bands, int((high - low) / spacing)))
    if not 0 <= low < high <= nyquist:
        raise ConfigError(
            f"'sonar.low' and 'sonar.high' give the band {low:g} to {high:g} Hz; it must be rising and lie below "
            f"half the sample rate ({nyquist:g} Hz)."
        )
    picture = Picture(
        sonar.picture, sonar.sample_rate, sonar.seconds, low, high,
        sonar.bands or bands, sonar.frames or frames, resolution=sonar.resolution,
    )  # fmt: skip
    try:
        _ = picture.shape
    except (ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"a {sonar.picture} picture cannot be made with these sonar settings: {error}.") from None
    return picture


@dataclass(frozen=True)
class Axes:
    """How a picture is labelled: what its columns and rows are, and at which row each frequency lies."""

    x_label: str
    x_range: tuple[float, float]
    y_label: str
    y_ticks: tuple[tuple[float, str], ...]


def axes_of(picture: Picture) -> Axes:
    """Return the labels of a picture's axes, for figures."""
    if picture.kind == "waveform":
        return Axes("seconds", (0.0, picture.seconds), "", ())
    if picture.kind == "logmel":
        span = (mel(picture.low), mel(picture.high))
        places = [f for f in (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000) if picture.low <= f <= picture.high]
        rows = [float((mel(f) - span[0]) / (span[1] - span[0]) * picture.bands) for f in places]
    else:
        places = [round(float(f), -1) for f in np.linspace(picture.low, picture.high, 5)]
        rows = [(f - picture.low) / (picture.high - picture.low) * picture.shape[1] for f in places]
    ticks = tuple(zip(rows, (f"{f:g}" if f < 1000 else f"{f / 1000:.3g}k" for f in places), strict=True))
    if picture.kind == "demon":
        return Axes("modulation, Hz", (0.5, picture.highest), "carrier, Hz", ticks)
    return Axes("seconds", (0.0, picture.seconds), "Hz", ticks)
