"""``fedbayes data list | fetch | check``: what the command line prints."""

from __future__ import annotations

import os

from .fetch import check, describe_sources, human_size
from .fetch import fetch as _fetch
from .fetch import render_checks as _render_checks
from .fetch import render_sources as _render_sources
from .sources import data_directory

DataDir = str | os.PathLike[str] | None


def render_sources(data_dir: DataDir = None) -> str:
    """Return the table of all data sets and the folder they are looked for in."""
    return f"{_render_sources(describe_sources(data_dir))}\n\nData directory: {data_directory(data_dir)}"


def fetch(name: str, data_dir: DataDir = None, progress: bool = True) -> str:
    """Fetch a data set and return a sentence on where it is."""
    paths = _fetch(name, data_dir, progress)
    if not paths:
        return f"'{name}' needs no file: it comes with the program."
    size = sum(p.stat().st_size for p in paths if p.is_file())
    return "\n".join(
        [f"'{name}' is here ({human_size(size)}):" if size else f"'{name}' is here:", *(f"  {p}" for p in paths)]
    )


def render_check(name: str, data_dir: DataDir = None) -> tuple[str, bool]:
    """Return the table of a data set's files, and whether all are there and none is unsound."""
    rows = check(name, data_dir)
    return _render_checks(rows), all(row.present and row.sound is not False for row in rows)
