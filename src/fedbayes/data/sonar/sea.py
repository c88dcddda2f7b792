"""A synthetic sea: listening sites, ships that pass them, and what each hydrophone records. Everything by seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError
from ...seeds import numpy_rng
from ..splits import linked
from .ambient import noise, sea_state_wind, wenz
from .propagation import Geometry, closest_point_track, propagate
from .recordings import libraries
from .splits import choose_test
from .vessels import CLASSES, KNOWN, Vessel, draw_vessel, radiate

if TYPE_CHECKING:
    from ...experiment import Sonar

VERSION = 1  # of the sea: part of the key of cached pictures
SNR_BAND = 20.0  # Hz: the signal-to-noise ratio counts everything from here to half the sampling rate
PASSES = 2  # how often a ship is heard: at two sites where there are two


@dataclass(frozen=True)
class Hydrophone:
    """What the sensor and its recorder do to the sound: gain, band edges, a tilt, noise of their own.

    Gain in dB, corners in Hz (first order below, second order above), tilt in dB per decade about 1 kHz, self-noise
    in dB re 1 µPa²/Hz at the water.
    """

    gain: float = 0.0
    low_corner: float = 5.0
    high_corner: float = 40000.0
    tilt: float = 0.0
    self_noise: float = 20.0

    def response(self, hertz: np.ndarray) -> np.ndarray:
        """Return the amplitude response at each frequency (phase left out: pictures do not see it)."""
        f = np.maximum(np.asarray(hertz, dtype=np.float64), 0.5)
        high_pass = f / np.hypot(f, self.low_corner)
        low_pass = 1.0 / np.sqrt(1.0 + (f / self.high_corner) ** 4)
        return 10 ** ((self.gain + self.tilt * np.log10(f / 1000.0)) / 20) * high_pass * low_pass


@dataclass(frozen=True)
class Site:
    """A listening site: its sea, its hydrophone, how far ships pass, and what traffic it has (share of each class)."""

    name: str
    sea_state: int
    shipping: float
    water_depth: float
    receiver_depth: float
    bottom_loss: float
    hydrophone: Hydrophone
    distances: tuple[float, float]
    traffic: tuple[float, ...]


@dataclass(frozen=True)
class Passage:
    """One ship passing one site once: a recording. ``label`` is the ship's class."""

    recording: str
    vessel: Vessel
    site: Site
    snr: float
    seed: int

    @property
    def label(self) -> str:
        """The class of the ship."""
        return self.vessel.label


@dataclass(frozen=True)
class Heard:
    """A synthetic recording and the two parts that it is the sum of."""

    samples: np.ndarray
    vessel: np.ndarray
    noise: np.ndarray


def draw_site(number: int, classes: int, seed: int, traffic: float = 0.0) -> Site:
    """Draw a site's conditions; ``traffic`` is the Dirichlet concentration of its classes (0: all alike)."""
    rng = numpy_rng(seed, "sea", "site", number)
    depth = rng.uniform(40.0, 250.0)
    near = rng.uniform(150.0, 500.0)
    shares = rng.dirichlet(np.full(classes, traffic)) if traffic > 0 else np.full(classes, 1 / classes)
    return Site(
        name=f"site-{number:02d}",
        sea_state=int(rng.integers(0, 6)),
        shipping=rng.uniform(0.1, 0.9),
        water_depth=depth,
        receiver_depth=depth * rng.uniform(0.3, 0.9),
        bottom_loss=rng.uniform(6.0, 15.0),
        hydrophone=Hydrophone(
            gain=rng.uniform(-10.0, 10.0),
            low_corner=rng.uniform(2.0, 20.0),
            high_corner=rng.uniform(5000.0, 40000.0),
            tilt=rng.uniform(-3.0, 3.0),
            self_noise=rng.uniform(15.0, 35.0),
        ),
        distances=(near, near * rng.uniform(2.0, 5.0)),
        traffic=tuple(shares.tolist()),
    )


def sites(sonar: Sonar, seed: int, classes: int = len(KNOWN)) -> list[Site]:
    """Draw all sites of a sea."""
    return [draw_site(i, classes, seed, sonar.traffic) for i in range(sonar.sites)]


def _counts(site: Site, total: int) -> list[int]:
    """Share out a site's passages among the classes: whole numbers nearest to its traffic that sum to ``total``."""
    exact = np.asarray(site.traffic) * total
    counts = np.floor(exact).astype(int)
    for i in np.argsort(counts - exact, kind="stable")[: total - counts.sum()]:
        counts[i] += 1
    return counts.tolist()


def plan(sonar: Sonar, seed: int, classes: Sequence[str] = KNOWN, recordings: int | None = None) -> list[Passage]:
    """Plan who passes where, how loud: ``recordings`` per class and site on average, each ship heard ``PASSES`` times.

    Nothing is computed yet; ``hear`` makes the sound of one passage.
    """
    per_class = sonar.recordings if recordings is None else recordings
    if per_class < 1 or sonar.sites < 1:
        raise ConfigError("'sonar.recordings' and 'sonar.sites' must be at least 1.")
    if not -100 <= sonar.snr[0] <= sonar.snr[1] <= 100:
        low, high = sonar.snr
        raise ConfigError(f"'sonar.snr' runs from {low:g} to {high:g} dB; it must rise, between -100 and 100.")
    if not 0.1 <= sonar.length <= 3600:
        raise ConfigError(f"'sonar.length' is {sonar.length:g}; a recording of the sea lasts 0.1 to 3600 seconds.")
    if not 0 <= sonar.traffic < math.inf:
        raise ConfigError(f"'sonar.traffic' is {sonar.traffic:g}; it must be 0 (classes alike at each site) or above.")
    places = sites(sonar, seed, len(classes)) if sonar.traffic > 0 else sites(sonar, seed)
    shares = [_counts(s, per_class * len(classes)) if sonar.traffic > 0 else [per_class] * len(classes) for s in places]
    passages = []
    for c, label in enumerate(classes):
        slots = [site for site, share in zip(places, shares, strict=True) for _ in range(share[c])]
        rng = numpy_rng(seed, "sea", "plan", label)
        order = rng.permutation(len(slots))
        for n, slot in enumerate(order):
            ship = f"{label}-{n // PASSES:03d}"
            vessel = draw_vessel(CLASSES[label], ship, numpy_rng(seed, "sea", "vessel", ship))
            name = f"{ship}-{'abcdefgh'[n % PASSES]}"
            passages.append(Passage(name, vessel, slots[slot], float(rng.uniform(*sonar.snr)), seed))
    return passages


def band_power(samples: np.ndarray, rate: int, low: float = SNR_BAND) -> float:
    """Return the power (mean square) above ``low`` Hz."""
    spectrum = np.square(np.abs(np.fft.rfft(samples)))
    spectrum[1 : -1 if len(samples) % 2 == 0 else None] *= 2
    frequencies = np.fft.rfftfreq(len(samples), 1.0 / rate)
    return float(spectrum[frequencies >= low].sum(dtype=np.float64)) / len(samples) ** 2


def hear(passage: Passage, seconds: float, rate: int) -> Heard:
    """Return what the site's hydrophone records of the passage.

    The ship passes on a straight line, nearest somewhere within the recording. Its sound is carried along that track
    (direct path, surface, bottom), the sea's noise is added, both go through the hydrophone, the recorder's own noise
    comes on top. The ship is then scaled so that the band-wide ratio of its power to all noise is the passage's.
    """
    site, vessel = passage.site, passage.vessel
    rng = numpy_rng(passage.seed, "sea", "passage", passage.recording)
    samples = round(seconds * rate)
    wind = sea_state_wind(site.sea_state)
    start = Geometry(
        source_depth=min(vessel.draught, 0.8 * site.water_depth),
        receiver_depth=site.receiver_depth,
        distance=0.0,
        roughness=0.0015 * wind**2,  # a quarter of the significant wave height 0.006 w² (fully grown sea)
        water_depth=site.water_depth,
        bottom_loss=site.bottom_loss,
    )
    track = closest_point_track(
        samples, rate, closest=rng.uniform(*site.distances), speed=vessel.speed, at=rng.uniform(0, seconds), start=start
    )
    arriving = propagate(radiate(vessel, samples, rate, rng), rate, track)
    ambient = noise(wenz(wind, site.shipping), samples, rate, rng)
    frequencies = np.fft.rfftfreq(samples, 1.0 / rate)
    response = site.hydrophone.response(frequencies).astype(np.float32)
    signal = np.fft.irfft(np.fft.rfft(arriving) * response, n=samples).astype(np.float32)
    background = np.fft.irfft(np.fft.rfft(ambient) * response, n=samples).astype(np.float32)
    own = 10 ** (site.hydrophone.self_noise / 20) * np.sqrt(rate / 2) * 10 ** (site.hydrophone.gain / 20)
    background += np.float32(own) * rng.standard_normal(samples, dtype=np.float32)
    ratio = band_power(background, rate) / band_power(signal, rate)
    signal *= np.float32(np.sqrt(ratio * 10 ** (passage.snr / 10)))
    return Heard(signal + background, signal, background)


def hear_all(
    passages: Sequence[Passage], seconds: float, rate: int, workers: int = 2
) -> Iterator[tuple[Passage, Heard]]:
    """Yield every passage with its sound, in order, made by a few threads; the result does not depend on how many."""
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        window = 4 * max(1, workers)  # no more sounds in memory than this
        for i in range(0, len(passages), window):
            chunk = passages[i : i + window]
            yield from zip(chunk, pool.map(lambda p: hear(p, seconds, rate), chunk), strict=True)


def write_sea(
    folder: str | Path,
    sonar: Sonar,
    seed: int = 0,
    classes: Sequence[str] = KNOWN,
    *,
    unseen: Sequence[str] = (),
    hold_out: bool = False,
) -> list[Path]:
    """Write a sea as ``folder/site-00/CLASS/RECORDING.flac`` with ``recordings.csv``, a folder a site; return the folders.

    For rehearsals over real machines: each node is given its site's folder. With ``hold_out`` the ships that a run on
    this sea would test (``sonar.test``, by ``seed``) lie in ``folder/test`` instead, as do those of ``unseen`` classes,
    and ``folder/recordings.csv`` lists everything for whoever judges. The peak of each file is at half scale.
    """  # fmt: skip
    soundfile, _ = libraries()
    passages = plan(sonar, seed, classes)
    held = _held_out(passages, classes, sonar, seed) if hold_out else set()
    passages = passages + (plan(sonar, seed, unseen, recordings=max(1, sonar.recordings // 3)) if unseen else [])
    lists: dict[str, list[str]] = {}
    everything: list[str] = []
    for passage, heard in hear_all(passages, sonar.length, sonar.sample_rate):
        apart = hold_out and (passage.recording in held or passage.label in unseen)
        home = "test" if apart else passage.site.name
        file = f"{passage.label}/{passage.recording}.flac"
        path = Path(folder) / home / file
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(str(path), 0.5 * heard.samples / np.abs(heard.samples).max(), sonar.sample_rate)
        row = f"{passage.label},{passage.recording},{passage.site.name},{passage.vessel.name}"
        lists.setdefault(home, []).append(f"{file},{row}")
        everything.append(f"{home}/{file},{row},{'test' if apart else 'train'}")
    for home, rows in lists.items():
        _write_list(Path(folder) / home, "file,class,recording,site,vessel", rows)
    if hold_out:
        _write_list(Path(folder), "file,class,recording,site,vessel,split", everything)
    return [Path(folder) / home for home in sorted(lists) if home != "test"]


def _write_list(folder: Path, header: str, rows: list[str]) -> None:
    """Write a list in the order in which a folder is read, so that both number the recordings alike."""
    (folder / "recordings.csv").write_text("\n".join([header, *sorted(rows)]) + "\n", encoding="utf-8")


def _held_out(passages: Sequence[Passage], classes: Sequence[str], sonar: Sonar, seed: int) -> set[str]:
    """Return the recordings that a run on this sea tests: those of ships held out by seed."""
    names = [np.array(column) for column in zip(*((p.recording, p.vessel.name) for p in passages), strict=True)]
    labels = np.array([list(classes).index(p.label) for p in passages])
    share = {"share": sonar.test, "folds": sonar.folds, "fold": sonar.fold, "seed": seed}
    test = choose_test(linked(names), labels, np.ones(len(passages)), **share)
    return {p.recording for p, t in zip(passages, test, strict=True) if t}
