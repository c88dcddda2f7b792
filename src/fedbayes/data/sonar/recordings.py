"""Recordings: what a folder or a CSV holds, read as a stream at one sampling rate, whatever the files are.

A *file* is what lies on the disk; a *recording* is one uninterrupted listening, which may be several files (clips cut
from one tape); a *vessel* is who was heard, where that is known; a *site* is where it was heard. Splits and clients
never cut through a recording or a vessel, so these names matter more than the audio does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError

AUDIO_SUFFIXES = frozenset(
    {
        ".wav",
        ".wave",
        ".flac",
        ".ogg",
        ".oga",
        ".opus",
        ".aif",
        ".aiff",
        ".aifc",
        ".w64",
        ".rf64",
        ".au",
        ".caf",
        ".mp3",
    }
)
BLOCK_SECONDS = 20.0  # decoded at a time: bounds the memory, whatever the length of the file
BLOCK_VALUES = 4_000_000  # and so many values at most, whatever its rate and channels: 16 MB
LOUDEST = 1e30  # beyond this (in whatever unit) a number is no sound, and its square no float32
SILENCE = 1e-6  # root mean square below which a file holds no sound: -120 dB of full scale, far below one 16-bit step


@dataclass(frozen=True)
class Recording:
    """One file and what is known of it.

    ``recording`` names the listening that the file belongs to (several files may share it), ``vessel`` and ``site``
    are empty where unknown; ``start`` and ``stop`` cut a part out of the file (seconds; ``stop`` 0: to its end);
    ``split`` is ``train``, ``test`` or empty (decided by seed; training where others of the list are marked).
    """

    path: Path
    label: str
    recording: str
    site: str = ""
    vessel: str = ""
    start: float = 0.0
    stop: float = 0.0
    split: str = ""


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why: shown to the user by name, never passed over in silence."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{str(self.path).encode(errors='backslashreplace').decode()}: {self.reason}"


class Unreadable(Exception):
    """A file that cannot be used; the message says why. Caught by whoever reads many files, and named."""


def audio_files(folder: Path) -> list[Path]:
    """Return every audio file below ``folder``, sorted by path.

    Hidden files and folders are left alone (and ``__MACOSX``, what archives made on a Mac leave behind). Folders that
    are links are followed, for recordings often lie on another disk; each real folder is entered once.
    """
    found: list[Path] = []
    entered: set[str] = set()
    for here, inner, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in entered:
            inner.clear()
            continue
        entered.add(real)
        inner[:] = [n for n in inner if not n.startswith(".") and n != "__MACOSX"]
        inner.sort(key=lambda n: (os.path.islink(os.path.join(here, n)), n))  # what is really here comes first
        paths = (Path(here, n) for n in names if not n.startswith("."))
        found += [p for p in paths if p.suffix.lower() in AUDIO_SUFFIXES and p.is_file()]
    return sorted(found)


def libraries() -> tuple[Any, Any]:
    """Import soundfile and soxr; raise ``DataError`` that says what to install where they are missing."""
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise DataError(
            f"Reading recordings needs the package '{error.name}'; install it with: pip install 'fedbayes[sonar]'."
        ) from None
    except OSError as error:  # soundfile is there, the C library it wraps is not
        raise DataError(
            f"Reading recordings needs libsndfile ({error}); install it with your system's packages."
        ) from None
    return soundfile, soxr


def mix(block: np.ndarray, channel: int) -> np.ndarray:
    """Return one channel of (samples, channels): that channel, or their mean for ``channel = -1``.

    The mean is a beam at broadside: right for hydrophones side by side and for the two sides of a stereo recorder.
    """
    if channel < 0:
        return block.mean(axis=1, dtype=np.float32)
    if channel >= block.shape[1]:
        raise Unreadable(f"has {block.shape[1]} channel(s), channel {channel} was asked for (they count from 0)")
    return np.ascontiguousarray(block[:, channel])


def stream(
    recording: Recording, rate: int, channel: int = -1, seconds: float = BLOCK_SECONDS, *, low: float = 0.0
) -> Iterator[np.ndarray]:
    """Yield the recording as blocks of float32 samples at ``rate``, decoded and resampled on the way.

    Resampling is band-limited (soxr, high quality), so nothing folds down from above the new Nyquist frequency.
    Raises ``Unreadable`` for a file that is broken, holds NaN, has no such channel, or whose rate leaves nothing above
    ``low`` Hz; silence is judged by whoever has heard all of it.
    """
    soundfile, soxr = libraries()
    if not recording.path.is_file():
        raise Unreadable("is not a file" if recording.path.exists() else "is not there")
    try:
        str(recording.path).encode()  # a column of names has to hold it, and a report to show it
    except UnicodeEncodeError:
        raise Unreadable("has a name that is not text in UTF-8; rename it") from None
    try:
        with soundfile.SoundFile(str(recording.path)) as file:
            _refuse_torn(file)
            if file.samplerate / 2 <= low:
                raise Unreadable(
                    f"has a rate of {file.samplerate} Hz: nothing above {file.samplerate / 2:g} Hz, below the picture's band "
                    f"from {low:g} Hz"
                )
            yield from _decode(file, soxr, recording, rate, channel, seconds)
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise Unreadable(f"cannot be decoded ({_why(error, recording.path)})") from None


def _why(error: Exception, path: Path) -> str:
    """Return libsndfile's reason without the path; a file that is there but no sound is not "does not exist"."""
    reason = str(error).removeprefix(f"Error opening {str(path)!r}: ").strip().rstrip(".")
    return "Format not recognised" if reason.startswith("File does not exist") else reason


_CLAIM = re.compile(r"^ *(?:data|SSND|Data Size|riff) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
_CLAIM_RF64 = re.compile(r"frame count (\d+) does not match value from 'ds64' chunk of (\d+)")


def _refuse_torn(file: Any) -> None:
    """Refuse a file that ends before its header says: libsndfile reads what is left and only notes it in its log.

    Sizes near 2^31 and 2^32 are what recorders write that never came back to fill them in: no claim. So is a wrong
    size of the whole file (``RIFF``), where that of the sound is right.
    """
    log = file.extra_info
    claims = [(int(said), int(there), "bytes") for said, there in _CLAIM.findall(log)]
    claims += [(int(said), int(there), "samples") for there, said in _CLAIM_RF64.findall(log)]
    for said, there, unit in claims:
        if there < said and not any(top - 0x1000 <= said < top for top in (1 << 31, 1 << 32)):
            raise Unreadable(f"is cut off: its header says {said} {unit} of sound, {there} are there")
    if "Last page lacks an end-of-stream bit" in log:
        raise Unreadable("is cut off: its last page is missing")
    if file.format == "RAW":  # what libsndfile makes of some endings where there is no header
        raise Unreadable("cannot be decoded (it has no header)")


def _decode(
    file: Any, soxr: Any, recording: Recording, rate: int, channel: int, seconds: float
) -> Iterator[np.ndarray]:
    original = int(file.samplerate)
    if original <= 0 or file.frames <= 0:
        raise Unreadable("is empty (its header says that it holds no samples)")
    first, last = (round(min(s * original, file.frames)) for s in (recording.start, recording.stop or math.inf))
    if first >= last:
        end = f"{recording.stop:g} s" if recording.stop else "its end"
        raise Unreadable(
            f"has {file.frames / original:.2f} s, the part from {recording.start:g} s to {end} lies outside"
        )
    most = max(1, min(int(seconds * original), BLOCK_VALUES // file.channels))
    _go_to(file, first, most)
    resample = soxr.ResampleStream(original, rate, 1, dtype="float32", quality="HQ") if original != rate else None
    left, offset = last - first, None
    while left:
        block = file.read(min(left, most), dtype="float32", always_2d=True)
        if len(block) == 0:
            raise Unreadable(f"ends {left / original:.2f} s before its header says")
        left -= len(block)
        mono = mix(block, channel)
        if not (np.abs(mono) < LOUDEST).all():
            raise Unreadable(f"holds samples that are not finite numbers (or beyond {LOUDEST:g})")
        # a recorder's constant would ring where the recording begins and ends: it goes around the filter
        offset = mono[0] if offset is None else offset
        yield mono if resample is None else resample.resample_chunk(mono - offset, last=left == 0) + offset


def _go_to(file: Any, first: int, most: int) -> None:
    """Move to a sample: by seeking, or by decoding up to it where the coding (GSM, ADPCM, ...) cannot seek."""
    if first and file.seekable():
        file.seek(first)
        return
    while first:
        passed = len(file.read(min(first, most), dtype="float32", always_2d=True))
        if passed == 0:
            raise Unreadable("ends before the part asked for begins")
        first -= passed


def read(recording: Recording, rate: int, channel: int = -1) -> np.ndarray:
    """Return the whole recording at ``rate``: for short files, figures and listening; ``stream`` is for the rest."""
    blocks = list(stream(recording, rate, channel))
    samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    judge_silence(float(np.square(samples - samples.mean(), dtype=np.float64).mean()) if len(samples) else 0.0)
    return samples


def judge_silence(power: float) -> None:
    """Raise ``Unreadable`` when the power (mean square without the constant part) is that of silence."""
    if power < SILENCE**2:
        raise Unreadable("is silent (or its channels cancel when averaged: choose one with sonar.channel)")


@dataclass(frozen=True)
class Facts:
    """What a file's header says, without decoding it."""

    rate: int
    channels: int
    seconds: float
    subtype: str


def facts(path: Path) -> Facts:
    """Read a file's header; raises ``Unreadable`` when it has none that can be read."""
    soundfile, _ = libraries()
    try:
        info = soundfile.info(str(path))
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise Unreadable(f"cannot be decoded ({_why(error, path)})") from None
    return Facts(info.samplerate, info.channels, info.frames / max(1, info.samplerate), info.subtype)
