"""The sea without a vessel: ambient noise after Wenz, in closed form, and noise of any given spectrum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Spectrum = Callable[[np.ndarray], np.ndarray]
"""Power density in micropascal squared per hertz (linear) as a function of frequency in hertz."""


def wenz_levels(hertz: np.ndarray, *, wind: float, shipping: float) -> dict[str, np.ndarray]:
    """Return the four parts of ambient noise in dB re 1 µPa²/Hz: turbulence, shipping, wind, thermal.

    Coates' empirical fit of Wenz (1962), f in kHz, wind w in m/s, distant shipping s from 0 to 1 (Coates 1990;
    Stojanovic 2007, eq. 6):
    ``17 - 30 log f``; ``40 + 20 (s - 0.5) + 26 log f - 60 log(f + 0.03)``;
    ``50 + 7.5 w^0.5 + 20 log f - 40 log(f + 0.4)``; ``-15 + 20 log f``.
    """
    f = np.maximum(np.asarray(hertz, dtype=np.float64), 0.1) / 1000.0
    return {
        "turbulence": 17 - 30 * np.log10(f),
        "shipping": 40 + 20 * (shipping - 0.5) + 26 * np.log10(f) - 60 * np.log10(f + 0.03),
        "wind": 50 + 7.5 * np.sqrt(wind) + 20 * np.log10(f) - 40 * np.log10(f + 0.4),
        "thermal": -15 + 20 * np.log10(f),
    }


def wenz(wind: float, shipping: float) -> Spectrum:
    """Return the power density of ambient noise: the sum of Wenz's four parts."""

    def density(hertz: np.ndarray) -> np.ndarray:
        parts = wenz_levels(hertz, wind=wind, shipping=shipping).values()
        return np.sum([10.0 ** (p / 10.0) for p in parts], axis=0)

    return density


def sea_state_wind(state: int) -> float:
    """Return a wind speed in m/s typical of a sea state from 0 (calm) to 6 (very rough): the middle of its Beaufort range."""
    winds = (0.5, 2.5, 4.5, 6.8, 9.4, 12.4, 15.5)
    if not 0 <= state < len(winds):
        raise ValueError(f"sea state must be 0 to 6, not {state}")
    return winds[state]


def noise(density: Spectrum, samples: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Draw Gaussian noise of a one-sided power density (units²/Hz): white noise shaped in the frequency domain.

    Below 1 Hz there is nothing. A record of white noise of variance rate/2 has density 1, so the shaped one has the
    density asked for at every frequency.
    """
    white = rng.standard_normal(samples, dtype=np.float32) * np.float32(np.sqrt(rate / 2.0))
    spectrum = np.fft.rfft(white)
    frequencies = np.fft.rfftfreq(samples, 1.0 / rate)
    gain = np.where(frequencies >= 1.0, np.sqrt(density(np.maximum(frequencies, 1.0))), 0.0)
    return np.fft.irfft(spectrum * gain.astype(np.float32), n=samples).astype(np.float32)
