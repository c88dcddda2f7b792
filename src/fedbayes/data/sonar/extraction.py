"""From recordings to pictures: streamed, cut into segments, pictured in batches, cached by content."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from .pictures import Picture
from .recordings import SILENCE, Recording, Skipped, Unreadable, judge_silence, stream

BATCH_SAMPLES = 4_000_000  # samples pictured together: 16 MB, so memory is bounded whatever the length of a file
SHORTEST = 0.2  # seconds: a file shorter than this is skipped, one shorter than a segment is repeated to fill it

ABANDONED = 3600.0  # seconds after which a half-written file of the cache is nobody's any more


@dataclass(frozen=True, eq=False)
class Features:
    """Pictures of many recordings: which recording each was cut from, where it starts, and what was left out."""

    inputs: Tensor
    owner: np.ndarray
    start: np.ndarray
    skipped: tuple[Skipped, ...] = ()


def segments(
    blocks: Iterable[np.ndarray], size: int, stride: int, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut a stream of blocks into segments: yield (n, size) samples and the n positions they start at.

    What is left at the end becomes a last segment that ends with the recording, if it is at least half a stride. A
    recording shorter than a segment is repeated to fill one: padding it with silence would give its length away.
    """
    buffer, offset, following, heard = np.zeros(0, np.float32), 0, 0, 0
    ready: list[np.ndarray] = []
    starts: list[int] = []
    for block in blocks:
        heard += len(block)
        buffer = np.concatenate([buffer, block])
        while following + size <= heard:
            ready.append(buffer[following - offset : following - offset + size])
            starts.append(following)
            following += stride
            if len(ready) == batch:
                yield np.stack(ready), np.array(starts)
                ready, starts = [], []
        keep = max(0, min(following, heard - size) - offset)
        buffer, offset = buffer[keep:], offset + keep
    if 0 < heard < size:
        ready, starts = [np.resize(buffer, size)], [0]
    elif heard >= size and heard - (following - stride + size) >= max(1, stride // 2):
        ready.append(buffer[-size:])
        starts.append(heard - size)
    if ready:
        yield np.stack(ready), np.array(starts)


def stride_of(picture: Picture, overlap: float) -> int:
    """Return the samples from one segment's start to the next's."""
    return max(1, round(picture.samples * (1 - overlap)))


def picture_blocks(
    blocks: Iterable[np.ndarray], picture: Picture, overlap: float, device: torch.device | str = "cpu"
) -> tuple[Tensor, np.ndarray]:
    """Return the stored pictures of a stream of samples and the seconds they start at; silent segments are left out."""
    pictures, starts, heard = [], [], 0
    batch = max(1, BATCH_SAMPLES // picture.samples)
    for samples, positions in segments(blocks, picture.samples, stride_of(picture, overlap), batch):
        heard += len(samples)
        level, samples = at_unit_power(samples)
        sounding = level >= SILENCE
        if sounding.any():
            made = picture(torch.from_numpy(samples[sounding]).to(device))
            pictures.append(picture.quantise(made).cpu())
            starts.append(positions[sounding] / picture.rate)
    if heard == 0:
        raise Unreadable("is empty")
    if not pictures:
        judge_silence(0.0)
    return torch.cat(pictures), np.concatenate(starts)


def at_unit_power(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's level (root mean square without its mean) and the rows brought to level 1; silence stays 0.

    Floating-point recordings come in pascal, in counts, in anything: at unit power no picture can over- or underflow.
    The peak is taken out first, so that the squares cannot either.
    """
    samples = samples - samples.mean(axis=1, keepdims=True)
    peak = np.maximum(samples.max(axis=1, keepdims=True), -samples.min(axis=1, keepdims=True))
    samples /= np.where(peak > 0, peak, 1)
    relative = np.sqrt(np.einsum("ns,ns->n", samples, samples, dtype=np.float64) / samples.shape[1])[:, None]
    samples /= np.where(relative > 0, relative, 1).astype(np.float32)
    return (peak * relative)[:, 0], samples


def _checked(blocks: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    heard = 0
    for block in blocks:
        heard += len(block)
        yield block
    if heard < SHORTEST * rate:
        raise Unreadable(f"lasts {heard / rate:.2f} s; at least {SHORTEST:g} s are needed")


def content_hash(path: Path) -> str:
    """Return the BLAKE2b hash of a file's bytes, read in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def cache_file(folder: Path, *parts: object) -> Path:
    """Return the cache's file for a content and settings; another content or setting is another file."""
    text = "\n".join(str(p) for p in parts)
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npz"


def cached(file: Path | None, make: Callable[[], tuple[Tensor, np.ndarray]]) -> tuple[Tensor, np.ndarray]:
    """Return what ``make`` gives, from the cache where it is there and whole; written atomically otherwise."""
    if file is not None and file.exists():
        try:
            with np.load(file) as stored:
                return torch.from_numpy(stored["pictures"]), stored["starts"]
        except Exception:  # whatever is wrong with a damaged file, it is made anew
            pass
    pictures, starts = make()
    if file is not None:
        _write(file, pictures, starts)
    return pictures, starts


def _write(file: Path, pictures: Tensor, starts: np.ndarray) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for left in file.parent.glob("*.part"):  # by a run that was killed, and not by one that is writing now
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink(missing_ok=True)
        partial = file.with_name(f"{uuid.uuid4().hex}.part")  # not ``mkstemp``: others share the cache and must read it
        try:
            with open(partial, "xb") as f:
                np.savez(f, pictures=pictures.numpy(), starts=starts)
            os.replace(partial, file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError:
        return  # a cache that cannot be written costs time, not results


def extract(
    recordings: Sequence[Recording],
    picture: Picture,
    *,
    overlap: float = 0.5,
    channel: int = -1,
    cache: Path | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Features:
    """Picture every recording: decoded and resampled as a stream, so only one batch of segments is ever in memory.

    Files that are broken, silent, too short or sampled below the picture's band are left out and named in ``skipped``.
    ``cache`` is a folder; a file whose content and settings were seen before is read from it.
    """
    inputs, owner, start, skipped = [], [], [], []
    for number, recording in enumerate(_bar(recordings, progress, "pictures")):
        try:
            pictures, starts = _one(recording, picture, overlap, channel, cache, device)
        except Unreadable as error:
            skipped.append(Skipped(recording.path, str(error)))
            continue
        inputs.append(pictures)
        owner.append(np.full(len(pictures), number))
        start.append(starts + recording.start)
    if not inputs:
        reasons = "; ".join(str(s) for s in skipped[:3])
        raise DataError(f"none of the {len(recordings)} recordings can be used: {reasons}.")
    return Features(torch.cat(inputs), np.concatenate(owner), np.concatenate(start), tuple(skipped))


def _one(
    recording: Recording, picture: Picture, overlap: float, channel: int, cache: Path | None, device: torch.device | str
) -> tuple[Tensor, np.ndarray]:
    def make() -> tuple[Tensor, np.ndarray]:
        blocks = stream(recording, picture.rate, channel, low=picture.low)
        return picture_blocks(_checked(blocks, picture.rate), picture, overlap, device)

    if cache is None or not recording.path.is_file():  # a pipe would be waited for
        return make()
    try:
        content = content_hash(recording.path)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror or error})") from None
    return cached(
        cache_file(cache, content, recording.start, recording.stop, channel, overlap, picture.key()), make
    )  # fmt: skip


def _bar(items: Sequence[Recording], show: bool, what: str) -> Iterable[Recording]:
    """Return the items behind a progress bar, on a terminal and where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, unit=" files", leave=False, disable=None if show else True)
