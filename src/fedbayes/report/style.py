"""How figures look: one palette in two schemes, and an SVG that follows the page's colours."""

from __future__ import annotations

import re
from typing import Any

INK, MUTED, GRID, PAPER = "#1b1f24", "#5c6672", "#e4e7eb", "#ffffff"
"""Text, secondary text, grid lines and background in the light scheme."""

SERIES = ("#0b6fb8", "#d1570a", "#0a8f6a", "#a8488f", "#8a6d00", "#6b7280", "#b0243c", "#4a55b8")
"""Colours of series: after Okabe and Ito, darkened until each has a contrast of 3:1 on white."""

SERIES_DARK = ("#5db2f5", "#ff9a55", "#3fcf9f", "#e59ad0", "#d9b93c", "#a6adb8", "#ff8796", "#a3adff")
"""The same colours for a dark background."""

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
"""Line styles: neighbours in a figure differ, so that likeness of hue never decides and a line on another shows through."""

ENTROPY, EPISTEMIC, ALEATORIC, INFORMATION = SERIES[0], SERIES[1], SERIES[2], SERIES[3]
UNCERTAINTY_COLOURS = {
    "entropy": ENTROPY,
    "aleatoric": ALEATORIC,
    "epistemic": EPISTEMIC,
    "mutual_information": INFORMATION,
}

PANEL = (4.3, 3.0)
"""Inches of one panel: about 410 pixels, which a phone shows without shrinking the letters."""

LARGEST = 1.45
"""Most pixels per point on the page: beyond, letters would be larger than the page's own."""

VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    colour: f"--s{i}" for i, colour in enumerate(SERIES)
}

RC = {
    "font.size": 10.5,
    "font.family": ["DejaVu Sans"],
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,  # names are names: a class called "$x$" is no formula
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "image.interpolation": "nearest",
}


def colour(index: int) -> str:
    """Colour of the series with this number."""
    return SERIES[index % len(SERIES)]


def dash(index: int) -> Any:
    """Line style of the series with this number."""
    return DASHES[(index + index // len(SERIES)) % len(DASHES)]


def marker(index: int) -> str:
    """Shape of the points of the series with this number, to be drawn hollow so that none hides another."""
    return "osD^v"[index % 5]


def themed(svg: str, label: str) -> str:
    """Turn a figure's SVG file into a fragment for the page: colours become CSS variables, letters the page's font.

    The light scheme's colours are the ones drawn, so the file on disk is right as it is; here each becomes a
    variable that the page sets by colour scheme. Prolog, metadata and the fixed size go.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    for colour_, variable in VARIABLES.items():
        svg = re.sub(re.escape(colour_), f"var({variable})", svg, flags=re.I)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)
    head_end = svg.index(">")
    view = re.search(r'viewBox="([^"]+)"', svg[:head_end])
    width = float(view.group(1).split()[2]) if view else 400.0
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{view.group(1) if view else ""}" role="img" aria-label="{_attribute(label)}" '
        f'style="max-width:{width * LARGEST:.0f}px"'
    )
    return head + svg[head_end:]


def _attribute(text: str) -> str:
    for raw, safe in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(raw, safe)
    return text


def css_variables() -> tuple[str, str]:
    """Declarations of the series' variables for the light and the dark scheme."""
    light = "".join(f"--s{i}:{c};" for i, c in enumerate(SERIES))
    dark = "".join(f"--s{i}:{c};" for i, c in enumerate(SERIES_DARK))
    return light, dark
