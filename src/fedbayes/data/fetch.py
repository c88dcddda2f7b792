"""Getting canonical files from their publishers, and checking the ones that are there."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..errors import DataError, FedBayesError
from .files import find
from .holdings import align
from .sources import PATH_SOURCES, Remote, Request, Source, data_directory, get_source, sources

_BLOCK = 1 << 20
_ATTEMPTS = 4
_TIMEOUT = 30.0


class _Broken(Exception):
    """A transfer that stopped early or was refused; worth another attempt or another address."""


class _Progress:
    """A progress bar on standard error, or nothing."""

    def __init__(self, show: bool, label: str, total: int, done: int) -> None:
        self._bar = None
        if show:
            try:
                from tqdm import tqdm  # only the command line needs it
            except ImportError:
                return
            self._bar = tqdm(
                desc=label, total=total or None, initial=done, unit="B", unit_scale=True, unit_divisor=1024
            )

    def add(self, n: int) -> None:
        if self._bar is not None:
            self._bar.update(n)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def fetch(name: str, data_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> list[Path]:
    """Download what is missing of a data set and return the paths of its files (none for sets that need no file).

    A broken transfer is resumed, also by a later call; every file is verified before it gets its name, so a file
    that has its canonical name is whole. A file that is there but damaged is replaced.
    """
    source, root = get_source(name), data_directory(data_dir)
    if source.name in PATH_SOURCES:
        raise DataError(f"'{name}' is a file of your own; there is nothing to fetch.")
    if source.hint and not source.files:
        raise DataError(f"'{name}' cannot be fetched: {source.hint}")
    complete = find(root, source.alternatives)
    if complete is not None:
        return [complete]
    return [_have(remote, root) or download(remote, root, progress) for remote in source.files]


def _have(remote: Remote, root: Path) -> Path | None:
    """Return the path of a file that is there and sound (in another form: there)."""
    for path in (root / p for p in (remote.path, *remote.also)):
        if path.is_file() and _fault(path, remote) == "":
            return path
    return find(root, remote.forms)


def download(remote: Remote, root: Path, progress: bool = False) -> Path:
    """Download one file to its place: from the first address that works, resumed, verified, then renamed."""
    target = root / remote.path
    partial = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    faults = []
    for url in remote.urls:
        fault = _from_address(url, remote, partial, progress)
        if fault == "":
            os.replace(partial, target)
            return target
        faults.append(f"{url}: {fault}")
    raise DataError(
        f"{remote.path} could not be fetched ({'; '.join(faults)}). Put the file at {target} by hand, or try again: what has arrived is kept."
    )


def _from_address(url: str, remote: Remote, partial: Path, progress: bool) -> str:
    """Fill the partial file from one address; return "" when it is whole and sound, else what went wrong."""
    fault, fresh_start = "", False
    for _ in range(_ATTEMPTS):
        try:
            _transfer(url, remote, partial, progress)
        except (_Broken, OSError, http.client.HTTPException) as error:
            fault = str(error) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404, 410):
                break  # asking again will not help
            continue
        fault = _fault(partial, remote)
        if fault == "":
            return ""
        partial.unlink(missing_ok=True)  # whole but wrong: of no use
        if fresh_start:
            break
        fresh_start = True  # what was resumed may have been wrong; a second whole copy settles it
    return fault


def _transfer(url: str, remote: Remote, partial: Path, progress: bool) -> None:
    """Append what is missing to the partial file; raise when the connection ends before the file does."""
    have = partial.stat().st_size if partial.exists() else 0
    if remote.size and have > remote.size:
        partial.unlink()
        have = 0
    if remote.size and have == remote.size:
        return
    request = urllib.request.Request(url, headers={"User-Agent": "fedbayes", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing at that offset: what is here is not a beginning of the file
            partial.unlink(missing_ok=True)
            raise _Broken("the server has nothing to resume from") from None
        raise
    with response:
        if have and not _resumes(response, have):
            have = 0
        length = response.headers.get("Content-Length")
        total = remote.size or (have + int(length) if length else 0)
        with open(partial, "ab" if have else "wb") as file, _Progress(progress, partial.stem, total, have) as bar:
            while block := response.read(_BLOCK):
                file.write(block)
                bar.add(len(block))
                have += len(block)
                if remote.size and have > remote.size:
                    break  # not the file we asked for; the check that follows says so
            file.flush()
            os.fsync(file.fileno())
    if total and have < total:
        raise _Broken(f"the transfer broke off after {have:,} of {total:,} bytes")


def _resumes(response: http.client.HTTPResponse, start: int) -> bool:
    """Whether the server continues where we stopped (else it sends the file from its beginning)."""
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _fault(path: Path, remote: Remote) -> str:
    """Compare a file with what its publisher made: "" when it is sound, else what differs."""
    size = path.stat().st_size
    if remote.size and size != remote.size:
        return f"{size:,} bytes instead of {remote.size:,}"
    if not remote.checksum:
        return ""
    kind, _, wanted = remote.checksum.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    return "" if found == wanted else f"{kind} checksum {found} instead of {wanted}"


@dataclass(frozen=True)
class FileCheck:
    """What ``check`` found about one file. ``sound`` is None when it could not be compared with anything."""

    path: str
    present: bool
    size: int
    sound: bool | None
    note: str = ""


def check(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[FileCheck]:
    """Report for every file of a data set whether it is there, how large it is, and whether it is the canonical one."""
    source, root = get_source(name), data_directory(data_dir)
    if not source.files:
        return [_readable(source, name, root)]
    unpacked = find(root, source.alternatives)
    if unpacked is not None:
        return [_readable(source, name, root, str(unpacked))]
    rows = [_check_file(remote, root) for remote in source.files]
    packed = find(root, source.partial)
    if packed is not None:
        rows.append(FileCheck(str(packed), True, _size(packed), None, "serves for the test part only"))
    return rows


def _check_file(remote: Remote, root: Path) -> FileCheck:
    path = find(root, (remote.path, *remote.also))
    if path is not None:
        fault = _fault(path, remote)
        return FileCheck(str(path), True, _size(path), (fault == "") if remote.checksum else None, fault)
    other = find(root, remote.forms)
    if other is not None:
        return FileCheck(str(other), True, _size(other), None, "in another form than published, so without a checksum")
    part = root / (remote.path + ".part")
    note = f"{part.stat().st_size:,} bytes fetched so far" if part.exists() else "missing"
    return FileCheck(str(root / remote.path), False, 0, None, note)


def _readable(source: Source, name: str, root: Path, where: str = "") -> FileCheck:
    """Check a set without canonical files by reading it whole."""
    carried = bool(source.size) and not source.alternatives
    if source.hint and not source.alternatives:
        folder = root / source.name
        where = where or str(folder)
        if not folder.exists():
            return FileCheck(where, False, 0, None, source.hint)
    where = where or (
        "in the package" if carried else str(root / source.alternatives[0]) if source.alternatives else name
    )
    if source.alternatives and find(root, source.alternatives) is None:
        return FileCheck(where, False, 0, None, source.hint or "missing")
    if not (carried or source.alternatives or source.hint or source.name in PATH_SOURCES):
        return FileCheck("no file", True, 0, True, "made by the program")
    try:
        dataset = source.read(Request(name, root, 0))
    except FedBayesError as error:
        return FileCheck(where, Path(where).exists(), 0, False, str(error))
    note = f"read: {len(dataset.train):,} + {len(dataset.test):,} examples"
    return FileCheck(where, True, source.size if carried else _size(Path(where)), True, note)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size if path.exists() else 0


@dataclass(frozen=True)
class SourceRow:
    """One line of ``fedbayes data list``."""

    name: str
    summary: str
    examples: str
    classes: int
    bytes: int
    licence: str
    present: str
    """``yes``, ``no``, ``part`` (some of its files), or ``built in``."""


def describe_sources(data_dir: str | os.PathLike[str] | None = None) -> list[SourceRow]:
    """Describe every data set that can be named, and whether it is there (looking only whether files exist)."""
    root = data_directory(data_dir)
    return [
        SourceRow(s.name, s.summary, s.examples, s.classes, s.bytes, s.licence, _presence(s, root))
        for s in sources().values()
        if s.name not in PATH_SOURCES
    ]


def _presence(source: Source, root: Path) -> str:
    if source.hint and not source.files and not source.alternatives:
        return "yes" if (root / source.name).exists() else "no"
    if not source.files and not source.alternatives:
        return "built in"
    if find(root, source.alternatives) is not None:
        return "yes"
    found = [find(root, (r.path, *r.also, *r.forms)) is not None for r in source.files]
    if found and all(found):
        return "yes"
    return "part" if any(found) or find(root, source.partial) is not None else "no"


def human_size(n: int) -> str:
    """Write a number of bytes for people: 162.6 MB."""
    size, unit = float(n), "B"
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def render_sources(rows: Sequence[SourceRow]) -> str:
    """Return the table of ``fedbayes data list`` as text."""
    head = ["name", "examples", "classes", "size", "here", "licence", "what"]
    body = [
        [
            r.name,
            r.examples,
            str(r.classes or "·"),
            human_size(r.bytes) if r.bytes else "·",
            r.present,
            r.licence,
            r.summary,
        ]
        for r in rows
    ]
    return align(head, body, left=(0, 4, 5, 6))


def render_checks(rows: Sequence[FileCheck]) -> str:
    """Return the table of ``fedbayes data check`` as text."""
    words = {True: "yes", False: "NO", None: "·"}
    body = [[r.path, words[r.present], human_size(r.size) if r.present else "·", words[r.sound], r.note] for r in rows]
    return align(["file", "there", "size", "sound", "note"], body, left=(0, 4))
