"""Layouts: how public sets and one's own folders say which file is what. The first that recognises a folder reads it.

To add one: a function ``folder -> list[Recording]``, a function ``folder -> bool`` that recognises it, one line in
``LAYOUTS``.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError, nearest
from .recordings import Recording, Unreadable, audio_files, facts
from .workbook import read_workbook

DEEPSHIP_CLASSES = {"Cargo": "Cargo", "Passengership": "Passengership", "Passenger": "Passengership", "Tanker": "Tanker", "Tug": "Tug"}  # fmt: skip
SHIPSEAR_GROUPS = {
    "A": "workboat",
    "B": "motorboat",
    "C": "passenger",
    "D": "liner-or-roro",
    "E": "ambient",
}  # the five classes of Santos-Domínguez et al. 2016, Table 3, by their letter
SHIPSEAR_TYPES = {
    "fishboat": "A", "trawler": "A", "mussel boat": "A", "tugboat": "A", "dredger": "A",
    "motorboat": "B", "pilot ship": "B", "sailboat": "B", "passengers": "C", "passenger": "C",
    "ocean liner": "D", "roro": "D", "ro-ro": "D", "natural ambient noise": "E",
}  # fmt: skip
SHIPSEAR_NAME = re.compile(r"^(?:[A-Za-z ]+_)?(\d{1,3})__(?:(\d\d_\d\d_\d\d)_|[A-Z]__)(.+)$")
WATKINS_NAME = re.compile(r"^\d{5}[0-9A-Z]{3}(?: ?\(\d+\))?$")
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "file": ("file", "filename", "path", "wav", "audio"),
    "class": ("class", "label", "type", "species"),
    "recording": ("recording", "record", "recording_id", "id"),
    "site": ("site", "location", "station", "hydrophone"),
    "vessel": ("vessel", "ship", "mmsi", "name"),
    "start": ("start", "begin", "onset"),
    "stop": ("stop", "end", "offset"),
    "split": ("split", "subset"),
}


@dataclass(frozen=True)
class Layout:
    """A way of laying recordings out: its name, whether a folder follows it, and how to read one that does."""

    name: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], list[Recording]]


def catalogue(source: str | Path, layout: str = "auto") -> list[Recording]:
    """List what a folder or CSV holds, without decoding any audio.

    ``layout`` is ``auto`` (the first that recognises the folder) or the name of one; a CSV is recognised by its name.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; give a folder of recordings or a CSV that lists them.")
    if path.is_file():
        if path.suffix.lower() not in (".csv", ".tsv"):
            raise DataError(f"{path} is neither a folder of recordings nor a CSV with columns file, class, recording.")
        return read_csv(path)
    if layout == "auto":
        chosen = next(entry for entry in LAYOUTS.values() if entry.recognises(path))
    elif layout in LAYOUTS:
        chosen = LAYOUTS[layout]
    else:
        raise DataError(f"Unknown sonar.layout '{layout}'; {nearest(layout, LAYOUTS)}")
    recordings = chosen.read(path)
    if not recordings:
        raise DataError(f"{path} holds no recordings (looked for WAV, FLAC, ... in class/recording folders).")
    return recordings


# ---- a CSV ---------------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[Recording]:
    """Read a table with columns file and class, and where known recording, site, vessel, start, stop, split.

    Paths are relative to the CSV. Without a recording column every file is its own recording. A row that is there
    twice counts once.
    """
    rows = _read_table(path)
    if not rows:
        raise DataError(f"{path} has no rows; it needs a header with file and class, and a row for each file.")
    names = {n.strip().lower(): n for n in rows[0][1] if n}
    found = {key: next((names[a] for a in aliases if a in names), "") for key, aliases in COLUMNS.items()}
    for key in ("file", "class"):
        if not found[key]:
            raise DataError(
                f"{path} has no column '{key}'; its columns are: {', '.join(names)}. A CSV lists recordings; a "
                "table of your own is given as an .npz file."
            )
    listed = [(line, _from_row(path, line, row, found)) for line, row in rows]
    _refuse_contradictions(path, listed)
    return list(dict.fromkeys(recording for _, recording in listed))


def _read_table(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return a table's rows by their column names, each with the line it ends at; rows of empty cells are left out."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as CSV in UTF-8.") from None  # fmt: skip
    if "\0" in text:
        raise DataError(f"{path} is not a CSV: it holds bytes that are not text; save it as CSV in UTF-8.")
    delimiter = max(",;\t", key=(text.splitlines() or [""])[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, row) for row in reader if any(isinstance(v, str) and v.strip() for v in row.values())]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not a row of a CSV ({error}).") from None


def _from_row(path: Path, line: int, row: Mapping[str, str], found: Mapping[str, str]) -> Recording:
    value = {key: (row.get(column) or "").strip() if column else "" for key, column in found.items()}
    for key in ("file", "class"):
        if not value[key]:
            raise DataError(f"{path}, line {line}: '{found[key]}' is empty; every row needs a file and its class.")
    split = value["split"].lower() if value["split"].lower() in ("train", "test") else ""
    if value["split"] and not split:
        raise DataError(f"{path}, line {line}: split is '{value['split']}'; it must be train, test or empty.")
    start, stop = _span(path, line, value["start"], value["stop"])
    file = Path(value["file"])
    return Recording(
        path=file if file.is_absolute() else path.parent / file,
        label=value["class"],
        recording=value["recording"] or os.path.normpath(file.with_suffix("")),
        site=value["site"],
        vessel=value["vessel"],
        start=start,
        stop=stop,
        split=split,
    )


def _span(path: Path, line: int, start: str, stop: str) -> tuple[float, float]:
    try:
        span = float(start or 0.0), float(stop or 0.0)
    except ValueError:
        span = math.nan, math.nan
    if not (0 <= span[0] < math.inf and 0 <= span[1] < math.inf and (span[1] == 0 or span[0] < span[1])):
        raise DataError(
            f"{path}, line {line}: start and stop must be seconds, not '{start}', '{stop}'; start comes before stop, and no "
            "stop means to the end."
        )
    return span


def _refuse_contradictions(path: Path, listed: list[tuple[int, Recording]]) -> None:
    """Refuse a table that gives the same sound two classes: one of the rows is wrong, and only its author knows which."""
    by_file: dict[str, list[tuple[int, Recording]]] = {}
    for line, recording in listed:
        by_file.setdefault(os.path.realpath(recording.path), []).append((line, recording))
    for rows in by_file.values():
        rows.sort(key=lambda row: row[1].start)
        reach: dict[str, tuple[float, int]] = {}  # of each class: how far its parts go, and which row goes there
        for line, r in rows:
            for label, (end, other) in reach.items():
                if label != r.label and r.start < end:
                    a, b = sorted([(other, label), (line, r.label)])
                    raise DataError(
                        f"{path}, lines {a[0]} and {b[0]}: the same part of '{r.path.name}' is '{a[1]}' and '{b[1]}'; it "
                        "can have one class only."
                    )
            reach[r.label] = max(reach.get(r.label, (0.0, line)), (r.stop or math.inf, line))


# ---- class/recording -----------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> list[Recording]:
    """Read ``class/recording.wav`` or ``class/recording/*.wav``: the first folder is the class, the next the recording."""
    recordings = []
    for path in audio_files(folder):
        parts: list[str] = list(path.relative_to(folder).parts)
        if len(parts) == 1:
            raise DataError(
                f"{path} lies outside of any class folder; expected {folder.name}/CLASS/{path.name}, or a CSV that names the class."
            )
        name = "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/{path.stem}"
        recordings.append(Recording(path, label=parts[0], recording=name))
    return recordings


# ---- DeepShip ------------------------------------------------------------------------------------------------------


def is_deepship(folder: Path) -> bool:
    """Whether the class folders are DeepShip's, with numbered recordings or a metafile."""
    classes = [p for p in folder.iterdir() if p.is_dir() and p.name in DEEPSHIP_CLASSES]
    others = [p for p in folder.iterdir() if p.is_dir() and p not in classes and audio_files(p)]
    names = [Path(p.relative_to(c).parts[0]).stem for c in classes for p in audio_files(c)]
    numbered = bool(names) and all(name.isdigit() for name in names)
    return bool(classes) and not others and (numbered or any(_metafile(c) for c in classes))


def read_deepship(folder: Path) -> list[Recording]:
    """Read DeepShip (Irfan et al. 2021): ``Tanker/17.wav`` or ``Tanker/17/*.wav``, with the class's metafile.

    The ship's name is taken from the metafile only where the file lasts as long as its row says and only for a class
    in which at least nine of ten files do: in the public part the tankers' metafile belongs to other recordings.
    """
    recordings = []
    for directory in sorted(p for p in folder.iterdir() if p.is_dir() and p.name in DEEPSHIP_CLASSES):
        label = DEEPSHIP_CLASSES[directory.name]
        files = audio_files(directory)
        ships = _deepship_ships(directory, files)
        for path in files:
            inner = path.relative_to(directory).parts
            name = f"{label}/{inner[0] if len(inner) > 1 else path.stem}"
            recordings.append(Recording(path, label, name, vessel=ships.get(path, "")))
    return recordings


def _metafile(directory: Path) -> Path | None:
    return next(iter(sorted(directory.glob("*metafile*"))), None)


def _deepship_ships(directory: Path, files: list[Path]) -> dict[Path, str]:
    metafile = _metafile(directory)
    if metafile is None:
        return {}
    rows: dict[str, list[tuple[str, float]]] = {}
    for line in metafile.read_text(encoding="utf-8", errors="replace").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 6 and cells[0].isdigit() and cells[5].replace(".", "", 1).isdigit():
            rows.setdefault(cells[0], []).append((cells[2], float(cells[5])))
    ships, numbered = {}, 0
    for path in files:
        key = path.stem if path.parent == directory else path.relative_to(directory).parts[0]
        if key not in rows:
            continue
        numbered += 1
        try:
            seconds = facts(path).seconds
        except Unreadable:
            continue
        agreeing = {name for name, length in rows[key] if abs(length - seconds) <= 1.5}
        if len(agreeing) == 1:
            ships[path] = agreeing.pop()
    return ships if ships and len(ships) >= 0.9 * numbered else {}


# ---- ShipsEar ------------------------------------------------------------------------------------------------------


def is_shipsear(folder: Path) -> bool:
    """Whether most files are named as ShipsEar's are: ``6__10_07_13_marDeCangas_Entra.wav``."""
    files = audio_files(folder)
    return bool(files) and sum(SHIPSEAR_NAME.match(p.stem) is not None for p in files) > len(files) / 2


def read_shipsear(folder: Path) -> list[Recording]:
    """Read ShipsEar (Santos-Domínguez et al. 2016): flat or in folders A to E, with ``shipsEar.xlsx`` or a CSV of it.

    Classes are the paper's five groups. The vessel is the name in the file's name; where that is only a kind of boat
    (zodiac, lancha) the vessel is unknown.
    """
    table = _shipsear_table(folder)
    recordings = []
    for path in audio_files(folder):
        match = SHIPSEAR_NAME.match(path.stem)
        if match is None:
            continue
        number, row = match.group(1).lstrip("0"), table.get(match.group(1).lstrip("0"), {})
        label = SHIPSEAR_GROUPS.get(path.parent.name.upper().removeprefix("CLASS_").removeprefix("CLASS "), "")
        label = label or SHIPSEAR_GROUPS.get(SHIPSEAR_TYPES.get(row.get("type", "").lower(), ""), "")
        if not label and path.parent != folder:
            label = path.parent.name
        if not label:
            raise DataError(
                f"{path}: its class is unknown; put shipsEar.xlsx (or a CSV with ID and Type) beside it, or sort the files into A to E."
            )
        recordings.append(
            Recording(path, label, number, site=row.get("location", ""), vessel=_shipsear_vessel(match.group(3)))
        )
    return recordings


def _shipsear_vessel(name: str) -> str:
    words = [w for w in re.split(r"[_\s]+", re.sub(r"^H\d_", "", name)) if w]
    generic = {"zodiac", "lancha", "velero", "yate", "motora", "pesquero", "barco", "ruido", "ambiente", "agua", "flujo", "viento", "lluvia", "mejilloneros", "motorboat"}  # fmt: skip
    first = re.sub(r"\d+$", "", words[0]) if words else ""
    return "" if first.lower() in generic else first


def _shipsear_table(folder: Path) -> dict[str, dict[str, str]]:
    candidates = [
        p
        for p in sorted(folder.rglob("*"))
        if p.suffix.lower() in (".csv", ".tsv", ".xlsx") and "shipsear" in p.name.lower()
    ]
    for path in candidates:
        if path.suffix.lower() == ".xlsx":
            rows = read_workbook(path)
        else:
            rows = [row for _, row in _read_table(path)]
        rows = [{(k or "").strip().lower(): (v or "").strip() for k, v in row.items() if k} for row in rows]
        if rows and "id" in rows[0] and "type" in rows[0]:
            return {str(row["id"]).removesuffix(".0").lstrip("0"): row for row in rows}
    return {}


# ---- Watkins -------------------------------------------------------------------------------------------------------


def is_watkins(folder: Path) -> bool:
    """Whether the files lie in species folders and are named as in the Watkins database: ``6202200E.wav``."""
    files = audio_files(folder)
    names = [p.stem.upper() for p in files]
    lettered = any(not n.isdigit() for n in names)  # eight digits alone could as well be a date
    return (
        bool(files)
        and lettered
        and sum(WATKINS_NAME.match(n) is not None for n in names) >= 0.9 * len(names)
        and all(p.parent != folder for p in files)
    )


def read_watkins(folder: Path) -> list[Recording]:
    """Read the Watkins marine mammal sounds: ``species/6202200E.wav``; the first five characters are the recording.

    A recording heard in two species' folders stays one recording, so neither split nor client can part its clips.
    """
    return [
        Recording(p, label=p.relative_to(folder).parts[0], recording=p.stem[:5])
        for p in audio_files(folder)
        if p.parent != folder
    ]


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("deepship", is_deepship, read_deepship),
        Layout("shipsear", is_shipsear, read_shipsear),
        Layout("watkins", is_watkins, read_watkins),
        Layout("folder", lambda folder: True, read_folder),
    )
}
