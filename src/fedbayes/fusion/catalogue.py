"""The rules and weightings in words: a Markdown table for the documentation, a listing for the command line."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from .rule import Rule, rules
from .weighting import weightings


def markdown_table() -> str:
    """Return the registered rules as a Markdown table: what ``docs/fusion.md`` holds."""
    lines = [
        "| rule | also called | formula | papers | the variance | when | previous global |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rules():
        previous = "needed" if r.needs_previous else "–"
        cells = (f"`{r.name}`", ", ".join(r.aliases), r.formula, r.papers, r.effect, r.when, previous)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def listing(width: int = 100) -> str:
    """Return what ``fedbayes rules`` prints: every rule and weighting with aliases, formula, papers, effect on the variance and when to use it."""
    blocks = ["FUSION RULES (fusion.rule = NAME or an alias)", *(_rule(r, width) for r in rules())]
    blocks.append("CLIENT WEIGHTS (fusion.weighting = NAME or an alias)")
    for w in weightings():
        needs = "every client's posterior" if w.uses_individuals else "nothing but sizes"
        if w.needs_previous:
            needs += ", the previous global posterior"
        rows = [("formula", w.formula), ("papers", w.papers), ("when", w.when), ("needs", needs)]
        blocks.append(_block(w.name, w.aliases, rows, width))
    return "\n\n".join(blocks)


def _rule(rule: type[Rule], width: int) -> str:
    settings = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(rule))
    rows = [
        ("formula", rule.formula),
        ("variance", rule.effect),
        ("when", rule.when),
        ("papers", rule.papers),
        ("needs previous global", "yes" if rule.needs_previous else "no"),
        ("options", settings),
    ]
    return _block(rule.name, rule.aliases, rows, width)


def _block(name: str, aliases: Sequence[str], rows: Sequence[tuple[str, str]], width: int) -> str:
    head = name + (f"   (also {', '.join(aliases)})" if aliases else "")
    lines = [head]
    for label, text in rows:
        if text:
            start = f"  {label}: "
            lines.append(textwrap.fill(start + text, width, subsequent_indent=" " * 6))
    return "\n".join(lines)
