"""Finding canonical files in the data directory, and saying what to do when they are not there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import DataError


def find(data_dir: Path, candidates: Iterable[str]) -> Path | None:
    """Return the first of these paths that exists under the data directory."""
    return next((path for path in (data_dir / c for c in candidates) if path.exists()), None)


def need(data_dir: Path, name: str, candidates: Iterable[str], hint: str = "") -> Path:
    """Return the first candidate that exists, or say what is missing, where it was looked for and how to get it."""
    candidates = list(candidates)
    found = find(data_dir, candidates)
    if found is not None:
        return found
    raise DataError(
        f"'{name}' needs {candidates[0]}, which is not in {data_dir}; "
        + (
            hint
            or f"run `fedbayes data fetch {name}`, or name the folder that holds it with --data-dir or FEDBAYES_DATA."
        )
    )
