"""Small line and scatter drawings as inline SVG, with nothing but the standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 300, 56, 44, 28, 150
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#7b4b94", "#b8860b", "#34495e", "#a23b72", "#2e86ab")
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def chart(
    lines: Mapping[str, Points], title: str, x_label: str, y_label: str, *, marks: bool = False, x_log: bool = False
) -> str:
    """Return one chart as SVG: a line (or, with ``marks``, points) per named series; series without points are left out."""
    drawn = {n: [(x, y) for x, y in points if _ok(x, x_log) and math.isfinite(y)] for n, points in lines.items()}
    drawn = {n: p for n, p in drawn.items() if p}
    if not drawn:
        return ""
    xs = [_x(x, x_log) for p in drawn.values() for x, _ in p]
    ys = [y for p in drawn.values() for _, y in p]
    (x0, x1), (y0, y1) = _range(xs), _range(ys)

    def spot(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (_x(x, x_log) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>',
        *_axes((x0, x1), (y0, y1), x_label, y_label, x_log),
    ]
    for i, (name, points) in enumerate(drawn.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[(i // len(COLOURS)) % len(DASHES)]
        places = [spot(x, y) for x, y in points]
        if not marks:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>')
        if marks or len(places) < 3:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        y = TOP + 8 + 15 * i
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 10}" x2="{WIDTH - RIGHT + 28}" y1="{y}" y2="{y}" stroke="{colour}" stroke-dasharray="{dash}"/>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{y + 4}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _ok(x: float, log: bool) -> bool:
    return math.isfinite(x) and (x > 0 or not log)


def _x(x: float, log: bool) -> float:
    return math.log10(x) if log else x


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) * 0.04 or max(abs(high), 1.0) * 0.05
    return low - pad, high + pad


def _axes(xr: tuple[float, float], yr: tuple[float, float], x_label: str, y_label: str, x_log: bool) -> list[str]:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<path d="M{LEFT},{TOP} V{floor} H{right}" fill="none" stroke="currentColor" stroke-opacity=".5"/>']
    for v in _ticks(*yr):
        y = floor - (v - yr[0]) / (yr[1] - yr[0]) * (floor - TOP)
        parts.append(f'<path d="M{LEFT},{y:.1f} H{right}" stroke="currentColor" stroke-opacity=".12"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{v:g}</text>')
    for v in _ticks(*xr):
        x = LEFT + (v - xr[0]) / (xr[1] - xr[0]) * (right - LEFT)
        label = f"{10**v:.0e}" if x_log else f"{v:g}"
        parts.append(f'<text x="{x:.1f}" y="{floor + 15}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{(TOP + floor) / 2}" text-anchor="middle" transform="rotate(-90 14 {(TOP + floor) / 2})">{escape(y_label)}</text>'
    )
    return parts


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [round(k * step, 12) for k in range(first, math.floor(high / step) + 1)]
