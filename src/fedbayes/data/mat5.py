"""A small reader of MATLAB 5 files: numeric arrays, compressed or not, which is all that SVHN needs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DataError

_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_MATRIX, _COMPRESSED = 14, 15
_COMPLEX = 0x0800


def read_mat5(path: Path) -> dict[str, np.ndarray]:
    """Return the real numeric arrays of a MATLAB 5 (also -v7) file by name; other variables are passed over."""
    blob = memoryview(path.read_bytes())
    mark = bytes(blob[126:128])
    if len(blob) < 128 or mark not in (b"IM", b"MI"):
        raise DataError(f"{path} is not a MATLAB 5 file (a file saved with -v7.3 is HDF5 and cannot be read).")
    order = "<" if mark == b"IM" else ">"
    arrays: dict[str, np.ndarray] = {}
    try:
        for kind, data in _elements(blob[128:], order):
            if kind == _COMPRESSED:
                kind, data = next(_elements(memoryview(zlib.decompress(data)), order))
            if kind == _MATRIX and (named := _matrix(data, order)) is not None:
                arrays[named[0]] = named[1]
    except (struct.error, ValueError, KeyError, StopIteration, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and fetch it again.") from None
    return arrays


def _elements(blob: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Walk over data elements: an 8-byte tag (or a small one that holds up to 4 bytes itself), then padded data."""
    at = 0
    while at + 8 <= len(blob):
        kind, size = struct.unpack_from(order + "II", blob, at)
        if kind >> 16:  # small element: size and type share the first word
            yield kind & 0xFFFF, blob[at + 4 : at + 4 + (kind >> 16)]
            at += 8
            continue
        if at + 8 + size > len(blob):
            raise ValueError(f"an element of {size:,} bytes reaches beyond the end")
        yield kind, blob[at + 8 : at + 8 + size]
        # Everything but compressed data is padded to a multiple of 8 bytes.
        at += 8 + size + (0 if kind == _COMPRESSED else -size % 8)


def _matrix(data: memoryview, order: str) -> tuple[str, np.ndarray] | None:
    """Decode flags, dimensions, name and real part of a matrix; None for cells, structs, text, sparse, complex."""
    parts = _elements(data, order)
    flags = struct.unpack_from(order + "I", next(parts)[1])[0]
    shape = np.frombuffer(next(parts)[1], order + "i4")
    name = bytes(next(parts)[1]).decode("ascii")
    if flags & 0xFF not in _CLASSES or flags & _COMPLEX:
        return None
    kind, real = next(parts)
    values = np.frombuffer(real, order + _TYPES[kind])
    # MATLAB may store an array in a smaller type than its class, and keeps columns together.
    return name, values.astype(_CLASSES[flags & 0xFF], copy=False).reshape(tuple(shape), order="F")
