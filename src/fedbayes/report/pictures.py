"""``Picture``: one figure with its words and numbers, and how it is saved (PNG, SVG, CSV) and put into the page."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import RunError
from . import style


@dataclass(frozen=True)
class Picture:
    """A drawn figure: file name without ending, title, caption, matplotlib figure, and its numbers as a table."""

    name: str
    title: str
    caption: str
    figure: Any
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = field(default_factory=list)
    wide: bool = False

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG document in the light scheme, the same text for the same numbers."""
        buffer = io.StringIO()
        engine = self.figure.get_layout_engine()
        if engine is not None:  # lay out once, not again for every file
            with _rc():
                engine.execute(self.figure)
            self.figure.set_layout_engine("none")
        with _rc({"svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        return buffer.getvalue()

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.png, NAME.svg and NAME.csv into ``folder`` and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{self.name}.{ending}" for ending in ("png", "svg", "csv")]
        files[1].write_text(self.svg, encoding="utf-8")
        with _rc():
            self.figure.savefig(files[0], dpi=160, metadata={"Software": None})
        with open(files[2], "w", newline="", encoding="utf-8") as f:
            writer = csv.writer(f)
            writer.writerow(self.header)
            writer.writerows([_cell(v) for v in row] for row in self.rows)
        return files

    def html(self, folder: Path | None = None, page: Path | None = None) -> str:
        """The figure as an HTML fragment; with a folder its files are saved there and linked from the page."""
        links = ""
        if folder is not None:
            files = self.save(folder)
            base = page.parent if page else folder.parent
            links = " ".join(f'<a href="{os.path.relpath(f, base)}">{f.suffix[1:].upper()}</a>' for f in files)
            links = f'<span class="files">{links}</span>'
        kind = ' class="wide"' if self.wide else ""
        caption = f"<figcaption>{style._attribute(self.caption)} {links}</figcaption>" if self.caption or links else ""
        return f'<figure{kind}><div class="drawing">{style.themed(self.svg, self.title)}</div>{caption}</figure>'


def matplotlib_modules() -> Any:
    """Return matplotlib, or say in one sentence how to get it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise RunError(
            'figures need matplotlib, which is not installed: pip install "fedbayes[report]" brings it.'
        ) from None
    return matplotlib


def _rc(extra: dict[str, Any] | None = None) -> Any:
    return matplotlib_modules().rc_context(style.RC | (extra or {}))


def panel(size: tuple[float, float] = style.PANEL, **axes: Any) -> tuple[Any, Any]:
    """Return a new figure of one panel and its axes, in the house style; draw inside ``with drawing():``."""
    mpl = matplotlib_modules()
    figure = mpl.figure.Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot(**axes)


def drawing() -> Any:
    """Context in which figures are drawn: the house style, and nothing global changed afterwards."""
    return _rc()


def inline_figure(
    figure: Any,
    *,
    name: str,
    title: str,
    caption: str = "",
    header: Sequence[str] = (),
    rows: Sequence[Sequence[Any]] = (),
    folder: Path | None = None,
    wide: bool = False,
) -> str:
    """Return any matplotlib figure as an HTML fragment that follows the page's colours (see ``style``'s palette).

    With ``folder`` (usually ``run.path / "figures"``) it is also saved there as PNG, SVG and CSV.
    """
    return Picture(name, title, caption, figure, header, list(rows), wide).html(folder)


def _cell(value: Any) -> Any:
    return (
        format(value, ".8g")
        if isinstance(value, float) or (hasattr(value, "dtype") and value.dtype.kind == "f")
        else value
    )
