"""Spectra against brute force and closed forms."""

import numpy as np
import pytest
import torch

from fedbayes.data.sonar.pictures import CEILING, FLOOR, make_picture
from fedbayes.data.sonar.spectra import (
    blade_rate,
    decimate,
    demon,
    lofar,
    mel,
    mel_filters,
    modulation_spectrum,
    spectrogram,
    split_window,
)
from fedbayes.errors import ConfigError
from fedbayes.experiment import Sonar


def white(n, samples, seed=0):
    return torch.randn(n, samples, generator=torch.Generator().manual_seed(seed))


def test_white_noise_has_its_variance_as_density():
    power = spectrogram(2.0 * white(8, 64000), 256, 128)
    assert float(power[:, 1:-1].mean()) == pytest.approx(4.0, rel=0.02)


def test_spectrogram_equals_a_loop():
    x = white(1, 700).double()
    taper = np.hanning(65)[:64]
    got = spectrogram(x, 64, 48)[0].numpy()
    for frame in range(got.shape[1]):
        piece = x[0, frame * 48 : frame * 48 + 64].numpy() * taper
        assert np.allclose(got[:, frame], np.abs(np.fft.rfft(piece)) ** 2 / (taper**2).sum())


def brute_split_window(row, half, gap, threshold):
    n = len(row)
    first = np.empty(n)
    for k in range(n):
        near = [row[j] for j in range(max(0, k - half), min(n, k + half + 1)) if abs(j - k) > gap]
        first[k] = np.mean(near)
    clipped = np.where(row > threshold * first, first, row)
    second = [clipped[max(0, k - half) : min(n, k + half + 1)].mean() for k in range(n)]
    return row / np.array(second)


@pytest.mark.parametrize(("half", "gap"), [(6, 1), (10, 3), (40, 2)])
def test_split_window_equals_its_definition(half, gap):
    rng = np.random.default_rng(3)
    rows = rng.rayleigh(size=(4, 50))
    rows[2, 20] += 30
    got = split_window(torch.from_numpy(rows.T[None]), half, gap)[0].numpy().T
    for mine, row in zip(got, rows, strict=True):
        assert np.allclose(mine, brute_split_window(row, half, gap, 2.0), rtol=1e-9)


def test_split_window_takes_out_any_smooth_spectrum():
    smooth = torch.exp(torch.linspace(0, 4, 400))[None, :, None].double()
    flat = split_window(smooth, 8, 2)
    assert float((flat[:, 8:-8] - 1).abs().max()) < 0.01


def test_mel_filters_are_densities_inside_the_band_only():
    weights = mel_filters(40, 1024, 16000, 100.0, 4000.0).numpy()
    frequencies = np.arange(513) * 16000 / 1024
    assert np.allclose(weights.sum(1), 1, atol=1e-5)
    assert weights[:, (frequencies < 100) | (frequencies > 4000)].sum() == 0
    centres = (weights * frequencies).sum(1)
    assert (np.diff(centres) > 0).all()
    wide = weights[20:]  # where bands are wider than a bin, centres are evenly spaced in mel
    steps = np.diff(mel((wide * frequencies).sum(1)))
    assert np.allclose(steps, steps.mean(), rtol=0.1)


def test_lofar_finds_lines_where_they_are():
    rate, seconds = 16000, 8
    t = torch.arange(rate * seconds) / rate
    lines = [63.0, 150.5, 481.0]
    x = sum(0.15 * torch.sin(2 * torch.pi * f * t) for f in lines) + white(1, rate * seconds)
    ratio, hertz = lofar(x, rate, low=10, high=1000, resolution=1.0, frames=8, half_hz=30, gap_hz=4)
    profile = ratio[0].mean(-1)
    top = hertz[profile.topk(12).indices]
    for f in lines:
        assert float((top - f).abs().min()) <= 1.0
    away = torch.stack([(hertz - f).abs() > 5 for f in lines]).all(0)
    assert float(profile[away].max()) < 2.0
    assert float(profile[away].mean()) == pytest.approx(1.0, abs=0.1)


def test_decimation_keeps_what_is_below():
    rate = 16000
    t = torch.arange(rate).double() / rate
    x = torch.sin(2 * torch.pi * 200 * t) + torch.sin(2 * torch.pi * 6000 * t)
    y, lower = decimate(x[None], rate, 1000.0)
    assert lower < rate
    assert lower >= 2500
    expected = torch.sin(2 * torch.pi * 200 * torch.arange(lower).double() / lower)
    assert torch.allclose(y[0], expected, atol=1e-9)


def test_modulation_depth_is_read_off():
    rate, seconds, depth, rotation = 250.0, 40, 0.4, 7.5
    t = torch.arange(int(rate * seconds)) / rate
    magnitude, hertz = modulation_spectrum(3.0 * (1 + depth * torch.cos(2 * torch.pi * rotation * t))[None], rate)
    peak = int(magnitude[0].argmax())
    assert float(hertz[peak]) == pytest.approx(rotation, abs=0.05)
    assert float(magnitude[0, peak]) == pytest.approx(depth / 2, rel=0.01)


@pytest.mark.parametrize("rotation", [3.2, 8.8, 17.0])
def test_demon_finds_the_beat_of_noise_and_not_of_steady_noise(rotation):
    rate, seconds = 16000, 12
    t = torch.arange(rate * seconds) / rate
    beating = white(1, rate * seconds) * (1 + 0.6 * torch.cos(2 * torch.pi * rotation * t))
    magnitude, hertz = demon(beating, rate, low=1000, high=7200)
    assert blade_rate(magnitude[0, 0], hertz) == pytest.approx(rotation, abs=0.12)
    steady, _ = demon(white(1, rate * seconds, 5), rate, low=1000, high=7200)
    # square-law detection: (1 + m cos)^2 beats at its rate with amplitude 2m / (1 + m²/2), so the line is half of that
    assert float(magnitude[0, 0].max()) == pytest.approx(0.6 / (1 + 0.18), rel=0.1)
    assert float(steady[0, 0].max()) < 0.1


@pytest.mark.parametrize("kind", ["logmel", "lofar", "demon", "waveform"])
def test_pictures_do_not_see_what_is_outside_of_the_band_nor_the_gain(kind):
    rate = 8000
    picture = make_picture(Sonar(picture=kind, sample_rate=rate, low=400.0, high=1600.0))
    x = white(2, picture.samples)
    t = torch.arange(picture.samples) / rate
    outside = 3 * torch.sin(2 * torch.pi * 3000 * t) * (1 + torch.sin(2 * torch.pi * 9 * t))
    base, louder, disturbed = picture(x), picture(17.0 * x), picture(x + outside)
    assert torch.allclose(base, louder, atol=2e-3)
    scale = base.std()
    assert float((base - disturbed).abs().median() / scale) < 0.02


@pytest.mark.parametrize("kind", ["logmel", "lofar", "demon"])
def test_stored_pictures_lose_at_most_half_a_step(kind):
    picture = make_picture(Sonar(picture=kind, sample_rate=8000))
    decibels = picture(white(3, picture.samples))
    stored = picture.quantise(decibels)
    assert stored.dtype == torch.uint8
    assert stored.shape[1:] == picture.shape
    inside = (decibels > FLOOR) & (decibels < CEILING)
    assert inside.double().mean() > 0.999
    assert float((picture.decibels(stored) - decibels)[inside].abs().max()) <= (CEILING - FLOOR) / 255 / 2 + 1e-4


@pytest.mark.parametrize("seconds", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("rate", [4000, 16000, 44100])
def test_shapes_do_not_depend_on_rate_and_length(seconds, rate):
    assert make_picture(Sonar(seconds=seconds, sample_rate=rate)).shape == (1, 64, 64)


def test_a_long_segment_leaves_no_sound_between_its_frames():
    picture = make_picture(Sonar(seconds=20.0, sample_rate=4000))
    clicks = torch.zeros(40, picture.samples)
    for i in range(40):
        clicks[i, 1000 + i * 1900] = 1000.0
    shown = picture(clicks + white(1, picture.samples))
    assert (shown.amax((1, 2, 3)) - shown.flatten(1).median(1).values > 12).all()


@pytest.mark.parametrize("rate", [2000, 4000, 8000, 16000, 48000])
def test_white_noise_gives_a_flat_demon_picture(rate):
    picture = make_picture(Sonar(picture="demon", sample_rate=rate))
    mean = picture(white(60, picture.samples)).mean((0, 1))
    assert float(mean.mean(1).max() - mean.mean(1).min()) < 1.0  # no carrier stands out
    assert float(mean.mean(0)[6:].max() - mean.mean(0)[6:].min()) < 2.5  # nor any rate
    assert float(mean.mean(0)[:6].max() - mean.mean(0)[6:].mean()) < 2.0  # least of all the slowest, by leakage


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 900.0, "high": 300.0}, "'sonar.low' and 'sonar.high'"),
        ({"high": 9000.0}, "below half the sample rate"),
        ({"picture": "demon", "bands": 500}, "narrower than"),
        ({"picture": "demon", "low": 1500.1, "high": 1500.2}, "narrower than"),
        ({"picture": "demon", "sample_rate": 100, "seconds": 0.2}, r"0.2 s tells only 1 rate\(s\) of modulation"),
        ({"picture": "logmel", "low": 500.1, "high": 500.2}, r"500.1 to 500.2 Hz holds no bin of 15.625 Hz"),
        ({"picture": "lofar", "low": 500.1, "high": 500.2}, r"500.1 to 500.2 Hz holds no bin of 1.5625 Hz"),
        ({"picture": "lofar", "low": 499.0, "high": 506.0}, "holds 4 bins of 1.5625 Hz; 6 or more"),
        ({"picture": "waveform", "low": 500.1, "high": 500.2}, "500.1 to 500.2 Hz holds no bin of 0.333"),
        ({"overlap": 1.0}, "'sonar.overlap' is 1"),
        ({"seconds": 0.0}, "'sonar.seconds' is 0"),
        ({"sample_rate": 10}, "'sonar.sample_rate' is 10"),
        ({"picture": "lofa"}, "'sonar.picture' is 'lofa'"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_picture(Sonar(**settings))
