"""The synthetic sea against physics: lines, beats, ratios, nulls, slopes."""

import numpy as np
import pytest
import torch

from fedbayes.data.sonar import sea
from fedbayes.data.sonar.ambient import noise, sea_state_wind, wenz, wenz_levels
from fedbayes.data.sonar.propagation import (
    Geometry,
    closest_point_track,
    frames,
    lloyd_nulls,
    propagate,
    thorp,
    transfer,
)
from fedbayes.data.sonar.spectra import blade_rate, demon
from fedbayes.data.sonar.vessels import CLASSES, KNOWN, UNSEEN, draw_vessel, radiate
from fedbayes.experiment import Sonar
from fedbayes.seeds import numpy_rng


def welch(x, rate, window):
    taper = np.hanning(window)
    pieces = np.lib.stride_tricks.sliding_window_view(x, window)[:: window // 2] * taper
    power = (np.abs(np.fft.rfft(pieces, axis=1)) ** 2).mean(0) * 2 / (rate * (taper**2).sum())
    return np.fft.rfftfreq(window, 1 / rate), power


# ---- ambient noise


def test_wenz_slopes_and_the_rule_of_fives():
    def level(part, hertz, **kw):
        return float(wenz_levels(np.array([hertz]), **({"wind": 5.0, "shipping": 0.5} | kw))[part][0])

    assert level("turbulence", 1) - level("turbulence", 10) == pytest.approx(30, abs=1e-9)
    assert level("thermal", 100_000) - level("thermal", 10_000) == pytest.approx(20, abs=1e-9)
    # far above 400 Hz the wind's noise falls by 20 dB a decade; far below it rises by as much
    assert level("wind", 20_000) - level("wind", 200_000) == pytest.approx(20, abs=0.4)
    assert level("wind", 10) - level("wind", 1) == pytest.approx(20, abs=0.9)
    assert level("wind", 1000, wind=16.0) - level("wind", 1000, wind=4.0) == pytest.approx(15, abs=1e-9)
    assert level("shipping", 60, shipping=1.0) - level("shipping", 60, shipping=0.0) == pytest.approx(20, abs=1e-9)
    # distant shipping rules near 100 Hz, wind near 1 kHz, thermal noise near 200 kHz: Wenz's picture
    for hertz, ruler in ((5, "turbulence"), (100, "shipping"), (2000, "wind"), (300_000, "thermal")):
        levels = wenz_levels(np.array([hertz]), wind=5.0, shipping=0.5)
        assert max(levels, key=lambda name: levels[name][0]) == ruler


@pytest.mark.parametrize(("wind", "shipping"), [(2.0, 0.2), (12.0, 0.9)])
def test_noise_has_the_density_asked_for(wind, shipping):
    rate = 8000
    x = noise(wenz(wind, shipping), 60 * rate, rate, np.random.default_rng(1))
    hertz, power = welch(x, rate, 1024)
    wanted = wenz(wind, shipping)(hertz)
    for low, high in ((100, 300), (300, 1000), (1000, 3500)):
        band = (hertz >= low) & (hertz < high)
        assert 10 * np.log10(power[band].mean() / wanted[band].mean()) == pytest.approx(0, abs=0.3)


def test_sea_states_grow():
    winds = [sea_state_wind(s) for s in range(7)]
    assert winds == sorted(winds)
    with pytest.raises(ValueError, match="0 to 6"):
        sea_state_wind(7)


# ---- propagation


def test_lloyds_mirror_has_its_nulls_where_geometry_says():
    g = Geometry(source_depth=6.0, receiver_depth=60.0, distance=400.0)
    nulls = lloyd_nulls(g, 4000.0)
    # by hand: R2 - R1 for the image source above the surface
    difference = np.sqrt(400**2 + 66**2) - np.sqrt(400**2 + 54**2)
    assert nulls[0] == pytest.approx(1500 / difference)
    assert len(nulls) == int(4000 * difference / 1500)
    hertz = np.arange(1.0, 4000.0)
    level = 20 * np.log10(np.abs(transfer(g, hertz)))
    for null in nulls:
        near = (hertz > null - 60) & (hertz < null + 60)
        assert hertz[near][level[near].argmin()] == pytest.approx(null, abs=1.0)
        peak = np.interp(null - nulls[0] / 2, hertz, level)
        assert peak - level[near].min() > 25
    # midway between the nulls both paths add: twice the pressure of one
    peak = np.abs(transfer(g, np.array([nulls[0] / 2])))[0]
    assert peak == pytest.approx(2 / 403.6, rel=0.02)


def test_far_away_the_mirror_costs_forty_decibels_a_decade():
    def level(distance):
        g = Geometry(source_depth=4.0, receiver_depth=20.0, distance=distance)
        return 20 * np.log10(np.abs(transfer(g, np.array([50.0])))[0])

    assert level(3000.0) - level(30000.0) == pytest.approx(40, abs=1.5)


def test_a_rough_sea_reflects_less():
    calm = Geometry(6.0, 60.0, 400.0)
    rough = Geometry(6.0, 60.0, 400.0, roughness=1.5)
    null = lloyd_nulls(calm, 4000.0)[-1:]
    assert np.abs(transfer(rough, null))[0] > 20 * np.abs(transfer(calm, null))[0]
    assert np.abs(transfer(rough, null))[0] == pytest.approx(1 / np.hypot(400, 54), rel=0.25)


def test_without_reflections_it_is_spherical_spreading_and_thorp():
    deep = Geometry(source_depth=5e5, receiver_depth=5e5, distance=1000.0)
    for hertz in (100.0, 1000.0, 5000.0):
        loss = -20 * np.log10(np.abs(transfer(deep, np.array([hertz])))[0])
        assert loss == pytest.approx(60 + float(thorp(np.array([hertz]))[0]), abs=0.05)
    assert float(thorp(np.array([10_000.0]))[0]) == pytest.approx(1.187, abs=0.02)  # Thorp at 10 kHz, dB/km


def test_single_and_double_precision_agree():
    g = Geometry(9.0, 90.0, 300.0, 0.1, 120.0, 8.0)
    hertz = np.linspace(1, 8000, 4000)
    difference = np.abs(transfer(g, hertz.astype(np.float32)) - transfer(g, hertz))
    assert difference.max() < 1e-3 * np.abs(transfer(g, hertz)).max()


def test_a_signal_that_travels_is_filtered_by_the_transfer_function():
    rate, samples = 8000, 40000
    g = Geometry(6.0, 60.0, 400.0)
    t = np.arange(samples) / rate
    for hertz in (300.0, 1234.0):
        got = propagate(np.cos(2 * np.pi * hertz * t).astype(np.float32), rate, [g] * frames(samples))
        middle = got[10000:30000]
        amplitude = np.abs(transfer(g, np.array([hertz])))[0]
        assert np.sqrt(2 * np.mean(middle**2)) == pytest.approx(amplitude, rel=0.01)


def test_a_passage_is_nearest_when_it_should_be():
    start = Geometry(5.0, 50.0, 0.0)
    track = closest_point_track(80000, 8000, closest=200.0, speed=10.0, at=4.0, start=start)
    assert len(track) == frames(80000)
    nearest = min(range(len(track)), key=lambda i: track[i].distance)
    assert nearest * 4096 / 8000 == pytest.approx(4.0, abs=0.3)
    assert track[0].distance == pytest.approx(np.hypot(200, 40))


# ---- vessels


@pytest.mark.parametrize("label", ["cargo", "ferry", "tug", "submarine"])
def test_lines_are_where_the_parameters_say(label):
    rate, seconds = 4000, 30
    vessel = draw_vessel(CLASSES[label], "x", np.random.default_rng(2))
    x = radiate(vessel, rate * seconds, rate, np.random.default_rng(3))
    taper = np.hanning(len(x))
    spectrum = np.abs(np.fft.rfft(x * taper))
    hertz = np.fft.rfftfreq(len(x), 1 / rate)

    def stands_out(f, width):
        near = np.abs(hertz - f) <= width
        around = (np.abs(hertz - f) <= 6) & ~near
        return spectrum[near].max() / np.median(spectrum[around])

    for k in (1, 2):
        assert stands_out(k * vessel.blade_rate, 0.1 + 3 * vessel.drift * k * vessel.blade_rate) > 4
    for f, amplitudes in vessel.machinery:
        loudest = int(np.argmax(amplitudes)) + 1
        assert stands_out(loudest * f, 0.1 + vessel.drift * loudest * f) > 4
    assert vessel.blade_rate in [pytest.approx(f) for f in vessel.line_frequencies()]


def test_no_line_where_there_should_be_none():
    rate, seconds = 4000, 30
    vessel = draw_vessel(CLASSES["tug"], "x", np.random.default_rng(2))
    x = radiate(vessel, rate * seconds, rate, np.random.default_rng(3))
    spectrum = np.abs(np.fft.rfft(x * np.hanning(len(x))))
    hertz = np.fft.rfftfreq(len(x), 1 / rate)
    lines = np.array(vessel.line_frequencies())
    free = [f for f in np.arange(900.0, 1500.0, 7.3) if np.abs(lines - f).min() > 3]
    for f in free:
        near = np.abs(hertz - f) <= 0.3
        assert spectrum[near].max() < 6 * np.median(spectrum[np.abs(hertz - f) <= 6])


@pytest.mark.parametrize("label", ["cargo", "ferry", "tug", "trawler"])
def test_demon_recovers_the_blade_rate_in_the_sea(label):
    site = sea.draw_site(0, 5, seed=1)
    hits = 0
    for n in range(4):
        vessel = draw_vessel(CLASSES[label], f"{label}-{n}", numpy_rng(9, label, n))
        heard = sea.hear(sea.Passage(f"{label}-{n}", vessel, site, 12.0, 1), 20.0, 16000)
        magnitude, hertz = demon(torch.from_numpy(heard.samples)[None], 16000, low=1000, high=7200)
        hits += abs(blade_rate(magnitude[0, 0], hertz) - vessel.blade_rate) <= 0.03 * vessel.blade_rate
    assert hits >= 3


@pytest.mark.parametrize("label", KNOWN + UNSEEN)
def test_a_ship_radiates_unit_power_within_its_class(label):
    kind = CLASSES[label]
    for n in range(5):
        vessel = draw_vessel(kind, "x", np.random.default_rng(n))
        assert kind.shaft[0] <= vessel.shaft_rate <= kind.shaft[1]
        assert vessel.blades in kind.blades
    x = radiate(vessel, 16000, 8000, np.random.default_rng(0))
    assert float(np.mean(x**2)) == pytest.approx(1.0, rel=0.25)
    assert np.isfinite(x).all()


# ---- the whole


@pytest.mark.parametrize("snr", [-12.0, 0.0, 20.0])
def test_the_ratio_is_what_was_asked(snr):
    rate = 8000
    vessel = draw_vessel(CLASSES["ferry"], "x", np.random.default_rng(1))
    heard = sea.hear(sea.Passage("x", vessel, sea.draw_site(3, 5, 0), snr, 0), 8.0, rate)
    assert np.allclose(heard.samples, heard.vessel + heard.noise)
    hertz, signal = welch(heard.vessel, rate, 2048)
    _, background = welch(heard.noise, rate, 2048)
    band = hertz >= 20
    assert 10 * np.log10(signal[band].sum() / background[band].sum()) == pytest.approx(snr, abs=0.5)


def test_the_sea_is_the_same_for_any_number_of_threads_and_differs_by_seed():
    sonar = Sonar(sites=2, recordings=1, length=2.0, sample_rate=4000)
    one = [h.samples for _, h in sea.hear_all(sea.plan(sonar, 5), 2.0, 4000, workers=1)]
    three = [h.samples for _, h in sea.hear_all(sea.plan(sonar, 5), 2.0, 4000, workers=3)]
    other = [h.samples for _, h in sea.hear_all(sea.plan(sonar, 6), 2.0, 4000, workers=1)]
    assert all(np.array_equal(a, b) for a, b in zip(one, three, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_plan_has_what_was_asked():
    passages = sea.plan(Sonar(sites=4, recordings=3), seed=0)
    assert len(passages) == 4 * 3 * 5
    assert len({p.recording for p in passages}) == len(passages)
    counts = {(p.label, p.site.name) for p in passages}
    assert len(counts) == 20
    ships: dict[str, list] = {}
    for p in passages:
        ships.setdefault(p.vessel.name, []).append(p)
    assert {len(v) for v in ships.values()} == {sea.PASSES}
    for pair in ships.values():  # one ship is one ship: the same numbers each time it passes
        assert pair[0].vessel == pair[1].vessel
    assert all(3.0 <= p.snr <= 18.0 for p in passages)


def test_unequal_traffic_keeps_the_total():
    even, skewed = (sea.plan(Sonar(sites=5, recordings=8, traffic=a), 0) for a in (0.0, 0.2))
    assert len(even) == len(skewed) == 5 * 8 * 5
    per_site = {s: [p.label for p in skewed if p.site.name == s] for s in {p.site.name for p in skewed}}
    assert {len(v) for v in per_site.values()} == {40}
    assert max(max(v.count(c) for c in KNOWN) for v in per_site.values()) > 16


def test_sites_differ_in_everything():
    places = sea.sites(Sonar(), 0)
    assert len({p.water_depth for p in places}) == len({p.hydrophone for p in places}) == 10
    assert len({p.sea_state for p in places}) >= 3


def test_a_hydrophone_does_what_its_numbers_say():
    h = sea.Hydrophone(gain=6.0, low_corner=10.0, high_corner=10000.0, tilt=3.0, self_noise=0.0)
    level = 20 * np.log10(h.response(np.array([10.0, 100.0, 1000.0, 10000.0])))
    assert level[2] == pytest.approx(6.0, abs=0.01)
    assert level[0] == pytest.approx(6.0 - 6.0 - 3.01, abs=0.05)
    assert level[3] == pytest.approx(6.0 + 3.0 - 3.01, abs=0.05)


def test_a_sea_on_disk_is_a_folder_per_site(tmp_path):
    from fedbayes.data.sonar.layouts import catalogue

    sonar = Sonar(sites=3, recordings=2, length=1.0, sample_rate=4000)
    homes = sea.write_sea(tmp_path, sonar, 0)
    assert [h.name for h in homes] == ["site-00", "site-01", "site-02"]
    by_csv = catalogue(homes[1] / "recordings.csv")
    assert len(by_csv) == 10
    assert {r.site for r in by_csv} == {"site-01"}
    assert {(r.label, r.path.stem) for r in catalogue(homes[1])} == {(r.label, r.recording) for r in by_csv}
