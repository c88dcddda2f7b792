"""Pictures: one self-contained HTML page for a run or for several, its figures as PNG, SVG and CSV beside it.

``write(paths)`` makes the page. Sections of one's own are added with ``section`` / ``register``.
"""

from .page import partition_figure, write
from .pictures import Picture, inline_figure
from .runs import Predictions, Run, find_runs, is_run
from .sections import Section, register, section, sections

__all__ = [
    "Picture",
    "Predictions",
    "Run",
    "Section",
    "find_runs",
    "inline_figure",
    "is_run",
    "partition_figure",
    "register",
    "section",
    "sections",
    "write",
]
