"""From the vessel to the hydrophone: spreading, absorption and the interference of direct and reflected sound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SOUND_SPEED = 1500.0  # m/s, of a homogeneous sea


@dataclass(frozen=True)
class Geometry:
    """Where source and receiver are: depths and horizontal range in metres, and how rough the surface is.

    ``roughness`` is the root mean square height of the waves; ``bottom_loss`` the dB lost at the bottom in
    ``water_depth`` (0: no bottom within reach).
    """

    source_depth: float
    receiver_depth: float
    distance: float
    roughness: float = 0.0
    water_depth: float = 0.0
    bottom_loss: float = 10.0


def thorp(hertz: np.ndarray) -> np.ndarray:
    """Return Thorp's absorption (1967) in dB/km, f in kHz: 0.11 f²/(1+f²) + 44 f²/(4100+f²) + 2.75e-4 f² + 0.003."""
    f2 = (np.asarray(hertz, dtype=np.float64) / 1000.0) ** 2
    return 0.11 * f2 / (1 + f2) + 44 * f2 / (4100 + f2) + 2.75e-4 * f2 + 0.003


def transfer(geometry: Geometry, hertz: np.ndarray) -> np.ndarray:
    """Return the complex pressure at the receiver per pressure at one metre from the source, at each frequency.

    Image sources: the direct path, the one by the surface (Lloyd's mirror: turned in phase, weakened by
    exp(-2 (k σ sin θ)²) where the sea is rough; Rayleigh), and where there is a bottom the one by it. Each is
    exp(-ikR)/R; the phase is taken relative to the direct path, and so is the absorption, whose difference between
    the paths is far below a decibel. Computed in the precision of ``hertz``.
    """
    g = geometry
    f = np.asarray(hertz)
    f = f if f.dtype == np.float32 else f.astype(np.float64)
    k = f * f.dtype.type(2 * np.pi / SOUND_SPEED)
    direct = float(np.hypot(g.distance, g.receiver_depth - g.source_depth))
    surface = float(np.hypot(g.distance, g.receiver_depth + g.source_depth))
    height = g.roughness * (g.receiver_depth + g.source_depth) / surface
    mirror = -np.exp(-2 * height**2 * np.square(k)) if height else np.full_like(k, -1.0)
    total = np.full(f.shape, 1.0 / direct, dtype=np.complex64 if f.dtype == np.float32 else np.complex128)
    total += mirror / surface * _turned(k * f.dtype.type(surface - direct))
    if g.water_depth > 0:
        bottom = float(np.hypot(g.distance, 2 * g.water_depth - g.receiver_depth - g.source_depth))
        total += 10 ** (-g.bottom_loss / 20) / bottom * _turned(k * f.dtype.type(bottom - direct))
    return total * np.exp(-thorp(f) * (direct / 1000.0 * np.log(10) / 20)).astype(f.dtype)


def _turned(angle: np.ndarray) -> np.ndarray:
    """exp(-i angle), in the angle's precision."""
    out = np.empty(angle.shape, dtype=np.complex64 if angle.dtype == np.float32 else np.complex128)
    out.real, out.imag = np.cos(angle), -np.sin(angle)
    return out


def lloyd_nulls(geometry: Geometry, highest: float) -> np.ndarray:
    """Return the frequencies in Hz at which Lloyd's mirror cancels: whole multiples of c / (R2 - R1)."""
    g = geometry
    difference = np.hypot(g.distance, g.receiver_depth + g.source_depth) - np.hypot(
        g.distance, g.receiver_depth - g.source_depth
    )
    return np.arange(1, int(highest * difference / SOUND_SPEED) + 1) * SOUND_SPEED / difference


def propagate(signal: np.ndarray, rate: int, track: list[Geometry], window: int = 8192) -> np.ndarray:
    """Carry a signal along a track: one geometry per half-overlapping Hann frame, overlap-added.

    ``track`` holds ``frames(len(signal), window)`` geometries; the frames are long against the delays between the
    paths, and the geometry hardly moves within one.
    """
    half = window // 2
    count = frames(len(signal), window)
    padded = np.zeros((count + 1) * half, dtype=np.float32)
    padded[half : half + len(signal)] = signal
    taper = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)
    blocks = np.lib.stride_tricks.sliding_window_view(padded, window)[::half] * taper
    hertz = np.fft.rfftfreq(2 * window, 1.0 / rate)
    response = np.stack([transfer(g, hertz.astype(np.float32)) for g in track])
    out_blocks = np.fft.irfft(np.fft.rfft(blocks, n=2 * window, axis=1) * response, n=2 * window, axis=1)
    out = np.zeros(len(padded) + window, dtype=np.float32)
    for i, block in enumerate(out_blocks):
        out[i * half : i * half + 2 * window] += block
    return out[half : half + len(signal)]


def frames(samples: int, window: int = 8192) -> int:
    """Return how many geometries ``propagate`` takes for a signal of this length."""
    return -(-samples // (window // 2)) + 1


def closest_point_track(
    samples: int, rate: int, *, closest: float, speed: float, at: float, start: Geometry, window: int = 8192
) -> list[Geometry]:
    """Return the geometries of a straight passage: nearest at ``closest`` metres, ``at`` seconds after the beginning."""
    times = (np.arange(frames(samples, window)) * (window // 2)) / rate
    distances = np.hypot(closest, speed * (times - at))
    g = start
    return [
        Geometry(g.source_depth, g.receiver_depth, float(d), g.roughness, g.water_depth, g.bottom_loss)
        for d in distances
    ]
