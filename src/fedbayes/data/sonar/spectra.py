"""The three spectra of passive sonar, as batched tensor functions that run wherever the samples lie.

All take waveforms (N, samples) and give (N, frequencies, times) of linear power or magnitude; ``pictures`` turns them
into what a network sees.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def power_of_two(samples: float) -> int:
    """Return the power of two nearest to ``samples`` (on the logarithmic scale), at least 16."""
    return 2 ** max(4, round(math.log2(max(1.0, samples))))


def spectrogram(waveforms: Tensor, window: int, hop: int) -> Tensor:
    """Return the power density (N, window//2 + 1, times) of Hann-windowed frames; white noise of variance v gives v.

    Frames lie wholly inside the segment: no padding, so no edges that a network could learn to look at.
    """
    taper = torch.hann_window(window, dtype=waveforms.dtype, device=waveforms.device)
    frames = torch.stft(waveforms, window, hop, window=taper, center=False, return_complex=True)
    return torch.view_as_real(frames).square().sum(-1) / taper.square().sum()


def mel(hertz: np.ndarray | float) -> np.ndarray:
    """Hertz to mel, O'Shaughnessy's formula: 2595 log10(1 + f/700)."""
    return 2595.0 * np.log10(1.0 + np.asarray(hertz, dtype=np.float64) / 700.0)


@functools.lru_cache(maxsize=32)
def mel_filters(bands: int, window: int, rate: int, low: float, high: float) -> Tensor:
    """Return triangular filters (bands, window//2 + 1) between ``low`` and ``high`` Hz, each of unit sum.

    Of unit sum so that a band holds a density: white noise is flat, whatever the bandwidths. Where the bands are
    narrower than the FFT's resolution (at low frequencies) a triangle is widened to one bin on either side. Bins
    outside of [low, high] have weight zero in every filter: what lies there cannot reach the picture.
    """
    frequencies = np.arange(window // 2 + 1) * rate / window
    edges = 700.0 * (10.0 ** (np.linspace(mel(low), mel(high), bands + 2) / 2595.0) - 1.0)
    centre, resolution = edges[1:-1, None], rate / window
    below = np.maximum(centre - edges[:-2, None], resolution)
    above = np.maximum(edges[2:, None] - centre, resolution)
    rising, falling = 1 - (centre - frequencies) / below, 1 - (frequencies - centre) / above
    weights = np.clip(np.minimum(rising, falling), 0.0, None)
    weights[:, (frequencies < low) | (frequencies > high)] = 0.0
    if (weights.sum(1) == 0).any():
        raise ValueError(f"the band {low:g} to {high:g} Hz holds no bin of {resolution:g} Hz for some of {bands} bands")
    return torch.from_numpy((weights / weights.sum(1, keepdims=True)).astype(np.float32))


def _windowed(values: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return sums over ``2*half + 1`` neighbours along dimension -2, cut off at the ends, and how many they are."""
    count = values.shape[-2]
    total = functional.pad(values.double().cumsum(-2), (0, 0, 1, 0))
    index = torch.arange(count, device=values.device)
    upper, lower = (index + half + 1).clamp(max=count), (index - half).clamp(min=0)
    sums = total.index_select(-2, upper) - total.index_select(-2, lower)
    return sums, (upper - lower).double().unsqueeze(-1)


def split_window(magnitude: Tensor, half: int, gap: int, threshold: float = 2.0) -> Tensor:
    """Divide a spectrum by its background, estimated by the two-pass split window (TPSW; Struzinski and Lowe 1984).

    Along dimension -2 (frequency) the background of bin k is the mean over bins k - half ... k + half. First pass: the
    middle ``2*gap + 1`` bins are left out, so a line does not raise its own background; every bin above ``threshold``
    times that mean is replaced by it. Second pass: the plain mean of what is left. The result is 1 where there is
    only noise and a line's magnitude over the noise where there is a line; any smooth spectrum (of a hydrophone, of
    the sea) divides out. For Rayleigh noise a threshold of 2 clips 4 % of the bins.
    """
    outer, outer_count = _windowed(magnitude, half)
    inner, inner_count = _windowed(magnitude, gap)
    first = (outer - inner) / (outer_count - inner_count).clamp(min=1.0)
    clipped = torch.where(magnitude.double() > threshold * first, first, magnitude.double())
    sums, count = _windowed(clipped, half)
    return (magnitude / (sums / count).clamp(min=1e-20)).to(magnitude.dtype)


def lofar(
    waveforms: Tensor,
    rate: int,
    *,
    low: float,
    high: float,
    resolution: float,
    frames: int,
    half_hz: float,
    gap_hz: float,
) -> tuple[Tensor, Tensor]:
    """Return the normalised narrow-band spectrogram (N, bins, frames) in magnitude over background, and its Hz.

    ``resolution`` is the spacing of bins in Hz; the window lasts its inverse. The split window is ``half_hz`` to
    either side with ``gap_hz`` left out.
    """  # fmt: skip
    waveforms, rate = decimate(waveforms, rate, high)
    window = min(power_of_two(rate / resolution), waveforms.shape[-1])
    window -= window % 2
    hop = max(1, (waveforms.shape[-1] - window) // max(1, frames - 1))
    spacing = rate / window
    magnitude = spectrogram(waveforms, window, hop)[..., :frames].sqrt()
    frequencies = torch.arange(window // 2 + 1, device=waveforms.device) * spacing
    keep = (frequencies >= low) & (frequencies <= high)
    half, gap = max(4, round(half_hz / spacing)), max(2, round(gap_hz / spacing))
    if (bins := int(keep.sum())) < gap + 2:  # of which the split window leaves nothing
        held = f"{bins or 'no'} bin{'s' * (bins > 1)} of {spacing:g} Hz"
        raise ValueError(f"the band {low:g} to {high:g} Hz holds {held}; {gap + 2} or more leave a background")
    return split_window(magnitude[:, keep], half, gap), frequencies[keep]


def decimate(waveforms: Tensor, rate: int, high: float) -> tuple[Tensor, int]:
    """Reduce the rate by a whole divisor while ``high`` stays below 0.4 of it (brick-wall in the frequency domain)."""
    samples = waveforms.shape[-1]
    factors = [f for f in range(1, rate // max(1, math.ceil(2.5 * high)) + 1) if rate % f == 0 and samples % f == 0]
    factor = max(factors, default=1)
    if factor == 1:
        return waveforms, rate
    spectrum = torch.fft.rfft(waveforms)[..., : samples // factor // 2 + 1]
    return torch.fft.irfft(spectrum, n=samples // factor) / factor, rate // factor


def envelopes(waveforms: Tensor, rate: int, edges: Tensor | np.ndarray, window: int, hop: int) -> Tensor:
    """Return the power of every carrier band over time, (N, bands, times): square-law detection of band-passed noise."""
    power = spectrogram(waveforms, window, hop)
    frequencies = np.arange(window // 2 + 1) * rate / window
    limits = np.asarray(edges, dtype=np.float64)
    rows = [(frequencies >= a) & (frequencies < b) for a, b in itertools.pairwise(limits)]
    weights = np.stack(rows).astype(np.float32)
    if (weights.sum(1) == 0).any():
        raise ValueError(f"carrier bands of {limits[1] - limits[0]:g} Hz are narrower than the {rate / window:g} Hz of a bin")  # fmt: skip
    return torch.matmul(torch.from_numpy(weights).to(waveforms), power)


def modulation_spectrum(envelope: Tensor, frame_rate: float, padding: int = 2) -> tuple[Tensor, Tensor]:
    """Return the magnitude spectrum (..., bins) of envelopes (..., times) relative to their mean, and its Hz.

    A sinusoidal modulation of depth m gives m/2 at its rate: the numbers are modulation indices, not loudness.
    """
    times = envelope.shape[-1]
    taper = torch.hann_window(times, dtype=envelope.dtype, device=envelope.device)
    # the mean under the taper, so that nothing is left at 0 Hz to leak into the lowest rates
    mean = (envelope * taper).sum(-1, keepdim=True) / taper.sum()
    length = padding * times
    magnitude = torch.fft.rfft((envelope / mean.clamp(min=1e-30) - 1) * taper, n=length).abs() / taper.sum()
    return magnitude, torch.arange(length // 2 + 1, device=envelope.device) * frame_rate / length


def demon_window(rate: int, highest: float) -> int:
    """Return the samples of a window short enough to follow modulation at ``highest`` Hz: a third of its period."""
    return power_of_two(rate / (3 * highest))


def demon(
    waveforms: Tensor,
    rate: int,
    *,
    low: float,
    high: float,
    carriers: int = 1,
    lowest: float = 0.5,
    highest: float = 40.0,
) -> tuple[Tensor, Tensor]:
    """Return the DEMON spectrum (N, carriers, bins) and its Hz: how the envelope of noise in each carrier band beats.

    Detection of envelope modulation on noise (Nielsen 1991): cavitating blades make the noise louder each time they
    pass the slow water behind the hull, so the envelope's lines are the shaft rate, the blade rate and multiples.
    The bands divide [low, high] evenly; the envelope is sampled at four times ``highest`` or more (below a rate of
    1.3 kHz at less: no window is shorter than 16 samples).
    """  # fmt: skip
    window = demon_window(rate, highest)
    hop = max(1, window // 2)
    edges = np.linspace(low, high, carriers + 1)
    envelope = envelopes(waveforms, rate, edges, window, hop)
    magnitude, frequencies = modulation_spectrum(envelope, rate / hop)
    keep = (frequencies >= lowest) & (frequencies <= highest)
    if (bins := int(keep.sum())) < 4:  # of which the split window leaves nothing
        raise ValueError(f"a segment of {waveforms.shape[-1] / rate:g} s tells only {bins} rate(s) of modulation apart")
    return magnitude[..., keep], frequencies[keep]


def blade_rate(magnitude: Tensor, frequencies: Tensor, harmonics: int = 3) -> float:
    """Estimate the fundamental of a DEMON spectrum (bins,) in Hz: the strongest sum over its first harmonics.

    A harmonic sum alone also likes half the true rate, which shares every second line; the estimate is therefore
    the highest rate whose own line is strong and whose sum is within a twentieth of the best.
    """
    spectrum = magnitude.double() / magnitude.double().median()
    spacing = float(frequencies[1] - frequencies[0])
    first = float(frequencies[0])
    last = len(spectrum) - 1
    scores = torch.zeros(len(spectrum), dtype=torch.float64)
    for k in range(len(spectrum)):
        for h in range(1, harmonics + 1):
            centre = round((h * float(frequencies[k]) - first) / spacing)
            if centre <= last:
                scores[k] += float(spectrum[max(0, centre - 1) : centre + 2].max()) / math.sqrt(h)
    own = spectrum >= 0.5 * spectrum.max()
    good = own & (scores >= 0.95 * scores[own].max())
    best = int(torch.nonzero(good)[-1])
    lo, hi = max(0, best - 2), min(last, best + 2) + 1
    return float(frequencies[lo + int(spectrum[lo:hi].argmax())])
