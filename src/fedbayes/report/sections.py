"""Further sections of a run's page, registered by name: how a kind of data shows what only it has.

A section is a function ``(run: Run) -> str | None`` that returns an HTML fragment (or None: nothing to say for this
run). Register it with the decorator, or name it as ``"module:function"`` so that it is imported only when needed::

    @report.section("operator-queue", title="Least sure recordings first")
    def queue(run):
        if not run.setting("data.name", "").startswith("sonar"):
            return None
        return "<p>...</p>"

The page's own styles apply: ``<div class="figures">`` lays out ``<figure>`` elements in a grid, tables go into
``<div class="scroll">``, ``<p class="note">`` is a remark, ``<p class="lead">`` the sentence that matters.
``report.inline_figure(matplotlib_figure, name=..., title=..., ...)`` gives a figure that follows the colour scheme.
Images and audio must be ``data:`` addresses (the page's policy refuses everything else, scripts included). A run
directory may also hold a ready fragment, ``report-extra.html``; it is shown as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape

from ..errors import FedBayesError
from .runs import Run

SectionFunction = Callable[[Run], "str | None"]


@dataclass(frozen=True)
class Section:
    """A registered section: its name (also its anchor), heading, and the function or ``module:function`` behind it."""

    name: str
    title: str
    function: SectionFunction | str

    def render(self, run: Run) -> str | None:
        """Return the fragment for a run."""
        function = self.function
        if isinstance(function, str):
            module, _, attribute = function.partition(":")
            function = getattr(importlib.import_module(module), attribute)
        return function(run)


sections: dict[str, Section] = {}
"""Registered sections by name, in the order in which they appear on the page."""


def register(name: str, function: SectionFunction | str, title: str = "") -> None:
    """Add a section to every later page (a section of the same name is replaced)."""
    sections[name] = Section(name, title or name.replace("-", " ").capitalize(), function)


register("operator-queue", "fedbayes.report.sonar:queue", "The operator's queue")
register("privacy", "fedbayes.privacy.section:section", "What the models give away")
register("transport", "fedbayes.flower.section:section", "What was sent")
register("variance-analysis", "fedbayes.moments:section", "What precision weighting weighs by")


def section(name: str, title: str = "") -> Callable[[SectionFunction], SectionFunction]:
    """Decorator form of ``register``."""

    def add(function: SectionFunction) -> SectionFunction:
        register(name, function, title)
        return function

    return add


def extras(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield (anchor, heading, HTML) of every section that has something to say about a run."""
    for entry in sections.values():
        try:
            html = entry.render(run)
        except (FedBayesError, ImportError) as error:  # what cannot be shown is said; the page does not fail over it
            html = f'<p class="remark">This section could not be made: {escape(str(error))}</p>'
        if html:
            yield entry.name, entry.title, html
    file = run.path / "report-extra.html"
    if file.exists():
        yield "extra", "", file.read_text(encoding="utf-8")
