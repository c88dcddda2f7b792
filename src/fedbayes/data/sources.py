"""The registry of data sources: one function per set turns files (or nothing) into a ``Dataset``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError, nearest
from ..own import own_name
from .examples import Dataset

if TYPE_CHECKING:
    from ..experiment import Sonar

_ROOMS = ("embedded", "idx", "cifar", "svhn", "rocks", "arrays", "sonar")
"""Modules of this package that register sources; imported when a source is first looked up."""


@dataclass(frozen=True)
class Request:
    """What a source is asked: its name (or the user's path), where files lie, the seed, how sonar is pictured."""

    name: str
    data_dir: Path
    seed: int
    sonar: Sonar | None = None
    test_only: bool = False
    """Whether only the test part is wanted (a source may then leave the training part empty)."""


@dataclass(frozen=True)
class Remote:
    """A canonical file: where it lies in the data directory, its publisher's addresses, size and checksum.

    ``checksum`` is ``md5:...`` or ``sha256:...`` as the publisher or the community gives it (empty: not known,
    then only the size is compared). ``size`` is in bytes (0: not known). ``also`` names other paths at which the
    very same file is accepted, ``forms`` paths of the same content in another form (uncompressed).
    """

    path: str
    urls: tuple[str, ...]
    size: int = 0
    checksum: str = ""
    also: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name, and the facts ``fedbayes data list`` prints about it."""

    name: str
    read: Callable[[Request], Dataset]
    summary: str = ""
    examples: str = ""
    classes: int = 0
    licence: str = ""
    files: tuple[Remote, ...] = ()
    alternatives: tuple[str, ...] = ()
    """Other paths in the data directory, any of which serves as well as all ``files`` (an unpacked archive)."""
    partial: tuple[str, ...] = ()
    """Paths that serve for the test part alone."""
    hint: str = ""
    """For a set that cannot be fetched: where to get it and where to put it."""
    size: int = 0
    """Bytes; for sources with ``files`` their sum."""

    @property
    def bytes(self) -> int:
        """Bytes of the canonical files, or of the embedded one."""
        return self.size or sum(remote.size for remote in self.files)


_SOURCES: dict[str, Source] = {}


def register_source(
    name: str,
    *,
    summary: str = "",
    examples: str = "",
    classes: int = 0,
    licence: str = "",
    files: tuple[Remote, ...] = (),
    alternatives: tuple[str, ...] = (),
    partial: tuple[str, ...] = (),
    hint: str = "",
    size: int = 0,
) -> Callable[[Callable[[Request], Dataset]], Callable[[Request], Dataset]]:
    """Register the decorated function as the source ``name``; a second one of the same name replaces the first."""

    def add(read: Callable[[Request], Dataset]) -> Callable[[Request], Dataset]:
        _SOURCES[name] = Source(
            name=name,
            read=read,
            summary=summary,
            examples=examples,
            classes=classes,
            licence=licence,
            files=files,
            alternatives=alternatives,
            partial=partial,
            hint=hint,
            size=size,
        )
        return read

    return add


def _enter(room: str) -> None:
    """Import one module, which registers its sources."""
    module = f"{__package__}.{room}"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the room is there but something it needs is not: say so
            raise


def sources() -> Mapping[str, Source]:
    """Return every registered source by name."""
    for room in _ROOMS:
        _enter(room)
    return _SOURCES


def get_source(name: str) -> Source:
    """Return the source that loads ``name``: a registered one, an ``.npz`` file, or a folder (or CSV, TSV) of recordings.

    ``package.module:name`` imports the module first, for data sets of your own.
    """
    for room in _ROOMS:  # no further than needed: digits want nothing that reads audio
        if name in _SOURCES:
            return _SOURCES[name]
        _enter(room)
    known = _SOURCES
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.suffix.lower() == ".npz" and "npz" in known:
        return known["npz"]
    if (path.is_dir() or path.suffix.lower() in (".csv", ".tsv")) and "folder" in known:
        return known["folder"]
    module = name.rpartition(":")[0]
    if module != "python" and all(part.isidentifier() for part in module.split(".")) and not set("/\\") & set(name):
        name = own_name(name, "data set")
        if name in known:
            return known[name]
    where = ", and no folder of recordings is there" if os.sep in name else ""
    raise DataError(
        f"no data set is called '{name}'{where}: {nearest(name, [n for n in known if n not in PATH_SOURCES])}"
    )


PATH_SOURCES = ("npz", "folder")
"""Sources that read the path given as the data set's name."""


def data_directory(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of data files: the argument, else ``FEDBAYES_DATA``, else the user's cache folder."""
    given = data_dir or os.environ.get("FEDBAYES_DATA")
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "fedbayes"
