"""Vessels: what each class of ship sounds like at one metre, and how one ship of a class is drawn.

A ship radiates lines (multiples of the shaft rate and, strongest, of the blade rate; the firing rate of its engines;
its electrical supply) and cavitation noise whose loudness beats at the shaft and blade rates. All lines that hang on
the shaft drift together, as the turns do. Ranges are those of the open literature (Urick 1983, ch. 10; Ross 1976,
ch. 8; Arveson and Vendittis 2000), rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from .ambient import Spectrum, noise


@dataclass(frozen=True)
class VesselClass:
    """What ships of a class have in common: ranges from which one ship is drawn.

    ``shaft`` is in turns per second, ``firing`` the engine's firing rate in Hz (0, 0: no such lines), ``electric`` the
    supply's lines in Hz (empty: none), ``cavitation`` the share of the power that is cavitation noise, ``depth`` of
    modulation, ``peak`` the frequency in Hz at which cavitation noise is strongest, ``slope`` its fall above in dB
    per decade, ``draught`` the depth of the propeller, ``drift`` the relative wander of the turns.
    """

    name: str
    shaft: tuple[float, float]
    blades: tuple[int, ...]
    firing: tuple[float, float] = (0.0, 0.0)
    electric: tuple[float, ...] = ()
    cavitation: tuple[float, float] = (0.6, 0.9)
    depth: tuple[float, float] = (0.3, 0.7)
    peak: tuple[float, float] = (60.0, 120.0)
    slope: tuple[float, float] = (-22.0, -18.0)
    draught: tuple[float, float] = (3.0, 6.0)
    speed: tuple[float, float] = (4.0, 8.0)
    drift: float = 0.003


@dataclass(frozen=True)
class Vessel:
    """One ship. Every number that a test can look for in its sound is here."""

    name: str
    label: str
    shaft_rate: float
    blades: int
    machinery: tuple[tuple[float, tuple[float, ...]], ...]
    """Lines that do not hang on the shaft: each a fundamental in Hz and the relative amplitudes of its multiples."""
    shaft_harmonics: tuple[float, ...]
    """Relative amplitudes of the 1st, 2nd, ... multiple of the shaft rate, the blade rate's among them."""
    cavitation: float
    depth: float
    peak: float
    slope: float
    draught: float
    speed: float
    drift: float

    def line_frequencies(self) -> list[float]:
        """Return the frequency in Hz of every line: multiples of the shaft rate, then of each machine's."""
        rotations = [(self.shaft_rate, self.shaft_harmonics), *self.machinery]
        return [k * hertz for hertz, amplitudes in rotations for k in range(1, len(amplitudes) + 1)]

    @property
    def blade_rate(self) -> float:
        """Blades times turns per second, Hz."""
        return self.blades * self.shaft_rate


CLASSES = MappingProxyType(
    {
        c.name: c
        for c in (
            VesselClass("cargo", (1.2, 2.0), (4, 5), (6.0, 12.0), (60.0,), (0.6, 0.85), (0.4, 0.7), (40.0, 80.0), (-22.0, -19.0), (5.0, 9.0), (5.0, 9.0)),
            VesselClass("ferry", (2.2, 3.6), (4, 5), (24.0, 40.0), (50.0,), (0.6, 0.85), (0.3, 0.6), (80.0, 160.0), (-20.0, -17.0), (3.0, 5.0), (7.0, 11.0)),
            VesselClass("tug", (3.0, 4.6), (3, 4), (50.0, 75.0), (), (0.75, 0.95), (0.5, 0.9), (120.0, 260.0), (-18.0, -14.0), (2.0, 4.0), (2.0, 5.0)),
            VesselClass("trawler", (4.5, 7.0), (3, 4), (14.0, 24.0), (), (0.45, 0.75), (0.3, 0.6), (150.0, 350.0), (-20.0, -16.0), (2.0, 3.5), (2.0, 5.0)),
            VesselClass("motorboat", (12.0, 20.0), (3,), (80.0, 160.0), (), (0.7, 0.95), (0.3, 0.7), (300.0, 900.0), (-14.0, -10.0), (0.5, 1.2), (6.0, 14.0), 0.01),
            VesselClass("submarine", (1.0, 1.8), (7,), (0.0, 0.0), (50.0, 100.0, 300.0, 400.0), (0.02, 0.08), (0.05, 0.15), (60.0, 150.0), (-22.0, -18.0), (40.0, 90.0), (2.0, 5.0), 0.0005),
            VesselClass("waterjet", (20.0, 34.0), (6,), (180.0, 320.0), (), (0.92, 0.99), (0.0, 0.05), (900.0, 2000.0), (-12.0, -8.0), (0.4, 1.0), (12.0, 20.0), 0.01),
        )
    }
)  # fmt: skip
"""The classes of the synthetic sea by name; the last two serve as never seen in training."""

KNOWN = ("cargo", "ferry", "tug", "trawler", "motorboat")
UNSEEN = ("submarine", "waterjet")


def draw_vessel(kind: VesselClass, name: str, rng: np.random.Generator) -> Vessel:
    """Draw one ship of a class; everything about it follows from the generator."""
    shaft, blades = rng.uniform(*kind.shaft), int(rng.choice(kind.blades))
    harmonics = np.zeros(4 * blades)
    for k in range(1, 4 * blades + 1):
        strength = 1.0 / (k // blades) if k % blades == 0 else 0.12 / np.sqrt(k)
        harmonics[k - 1] = strength * rng.lognormal(0.0, 0.3)
    machinery: list[tuple[float, tuple[float, ...]]] = []
    if kind.firing[1] > 0:
        strengths = rng.lognormal(0.0, 0.3, 8) / np.sqrt(np.arange(1, 9))
        machinery.append((rng.uniform(*kind.firing), tuple(strengths.tolist())))
    for supply in kind.electric:
        strengths = 0.5 * rng.lognormal(0.0, 0.3, 4) / np.arange(1, 5)
        machinery.append((supply * rng.uniform(0.998, 1.002), tuple(strengths.tolist())))
    return Vessel(
        name=name,
        label=kind.name,
        shaft_rate=shaft,
        blades=blades,
        machinery=tuple(machinery),
        shaft_harmonics=tuple(float(h) for h in harmonics),
        cavitation=rng.uniform(*kind.cavitation),
        depth=rng.uniform(*kind.depth),
        peak=rng.uniform(*kind.peak),
        slope=rng.uniform(*kind.slope),
        draught=rng.uniform(*kind.draught),
        speed=rng.uniform(*kind.speed),
        drift=kind.drift,
    )


def wander(samples: int, rate: int, relative: float, rng: np.random.Generator) -> np.ndarray:
    """Return a slow random walk about 1 of the given relative deviation: the turns of a shaft.

    An Ornstein-Uhlenbeck process of 20 s correlation time, drawn ten times a second and joined by straight lines.
    """
    steps = int(np.ceil(samples / rate * 10)) + 2
    keep = np.exp(-0.1 / 20.0)
    shocks = rng.standard_normal(steps) * np.sqrt(1 - keep**2)
    walk = np.empty(steps)
    walk[0] = rng.standard_normal()
    for i in range(1, steps):
        walk[i] = keep * walk[i - 1] + shocks[i]
    return 1.0 + relative * np.interp(np.arange(samples) / rate, np.arange(steps) / 10.0, walk)


def shaft_phase(vessel: Vessel, samples: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Return the shaft's angle over time in radians: the integral of its wandering turns."""
    turns = vessel.shaft_rate * wander(samples, rate, vessel.drift, rng)
    return 2 * np.pi * (np.cumsum(turns) / rate + rng.random())


def cavitation_density(vessel: Vessel) -> Spectrum:
    """Return the shape of cavitation noise: rising 6 dB per octave to its peak, then falling by ``slope`` per decade."""

    def density(hertz: np.ndarray) -> np.ndarray:
        ratio = np.asarray(hertz, dtype=np.float64) / vessel.peak
        return ratio**2 / (1.0 + ratio ** (2.0 - vessel.slope / 10.0))

    return density


def radiate(vessel: Vessel, samples: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Return the ship's pressure at one metre, at unit power: lines and beating cavitation noise.

    The envelope is 1 + depth · Σ a_k cos(k φ) over the shaft's multiples, a_k strongest at the blade rate; lines at
    or above 0.45 of the rate are left out.
    """
    phase = shaft_phase(vessel, samples, rate, rng)
    beats = np.zeros(3 * vessel.blades)
    for k, a in ((1, 0.25), (vessel.blades, 1.0), (2 * vessel.blades, 0.45), (3 * vessel.blades, 0.2)):
        beats[k - 1] = a / 1.2
    envelope = 1.0 + vessel.depth * _comb(phase, vessel.shaft_rate, tuple(beats), rate, rng)
    rough = noise(cavitation_density(vessel), samples, rate, rng) * np.clip(envelope, 0.0, None)
    tones = _lines(vessel, phase, samples, rate, rng)
    return (np.sqrt(vessel.cavitation) * _unit(rough) + np.sqrt(1 - vessel.cavitation) * _unit(tones)).astype(np.float32)  # fmt: skip


def _lines(vessel: Vessel, phase: np.ndarray, samples: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    out = _comb(phase, vessel.shaft_rate, vessel.shaft_harmonics, rate, rng)
    if vessel.machinery:
        slow = 2 * np.pi * np.cumsum(wander(samples, rate, vessel.drift / 5, rng)) / rate
        for hertz, amplitudes in vessel.machinery:
            out += _comb(hertz * slow, hertz, amplitudes, rate, rng)
    return out


def _comb(
    phase: np.ndarray, hertz: float, amplitudes: tuple[float, ...], rate: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the multiples of one rotation with random phases; powers of exp(iφ) spare a cosine for each."""
    turn = np.exp(1j * phase).astype(np.complex64)
    power, out = np.ones_like(turn), np.zeros(len(phase), dtype=np.float32)
    for k, amplitude in enumerate(amplitudes, start=1):
        power = power * turn
        offset = np.complex64(amplitude * np.exp(2j * np.pi * rng.random()))
        if k * hertz < 0.45 * rate:
            out += (power * offset).real
    return out


def _unit(signal: np.ndarray) -> np.ndarray:
    power = float(np.mean(np.square(signal)))
    return signal / np.sqrt(power) if power > 0 else signal
