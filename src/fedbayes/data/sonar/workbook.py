"""The first sheet of an ``.xlsx`` workbook as rows: ShipsEar's table comes as one, and this is all it takes to read it."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from xml.etree import ElementTree

from ...errors import DataError

_NS = {"m": "http://schemas.openxmlformats.org/spreadsheetml/2006/main"}


def read_workbook(path: Path) -> list[dict[str, str]]:
    """Return the rows of the first sheet as dictionaries by the names in its first row; numbers stay as written."""
    try:
        with zipfile.ZipFile(path) as archive:
            shared = _shared_strings(archive)
            sheets = [n for n in archive.namelist() if re.fullmatch(r"xl/worksheets/sheet\d+\.xml", n)]
            first = min(sheets, key=lambda n: int(re.findall(r"\d+", n)[-1]))
            sheet = ElementTree.fromstring(archive.read(first))
    except (zipfile.BadZipFile, ElementTree.ParseError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} is not a workbook that can be read ({error}); save the sheet as CSV instead."
        ) from None
    rows = [_cells(row, shared) for row in sheet.findall(".//m:row", _NS)]
    if not rows:
        return []
    header = rows[0]
    return [{header[c]: v for c, v in row.items() if header.get(c)} for row in rows[1:] if row]


def _shared_strings(archive: zipfile.ZipFile) -> list[str]:
    if "xl/sharedStrings.xml" not in archive.namelist():
        return []
    tree = ElementTree.fromstring(archive.read("xl/sharedStrings.xml"))
    return ["".join(t.text or "" for t in item.iter(f"{{{_NS['m']}}}t")) for item in tree.findall("m:si", _NS)]


def _cells(row: ElementTree.Element, shared: list[str]) -> dict[str, str]:
    cells = {}
    for cell in row.findall("m:c", _NS):
        column = re.match(r"[A-Z]+", cell.get("r", ""))
        if cell.get("t") == "inlineStr":
            text = "".join(t.text or "" for t in cell.iter(f"{{{_NS['m']}}}t"))
        else:
            value = cell.find("m:v", _NS)
            text = value.text or "" if value is not None else ""
            text = shared[int(text)] if cell.get("t") == "s" and text else text
        if column and text:
            cells[column.group()] = text.strip()
    return cells
