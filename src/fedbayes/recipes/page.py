"""One page per reproduction: the paper's number, ours, the difference in units of the combined spread, the verdict."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import write_atomically
from . import figures
from .grid import SMOKE, Recipe
from .measures import AGREES_WITHIN, Verdict
from .published import Coordinates
from .readings import READINGS

if TYPE_CHECKING:
    from .runner import Reproduction

PERCENT = ("accuracy", "ece", "reliability")
WORDS = {
    "agrees": f"our number lies within {AGREES_WITHIN:g} combined spreads of the paper's",
    "differs": "it does not",
    "no number": "what has run does not give it (one round has no spread over rounds)",
    "not run": "no finished run",
}


def number(value: float | None, metric: str) -> str:
    """Write a number of a metric: shares as percent, the rest plain, unknown as a dash."""
    if value is None or math.isnan(value):
        return "–"
    if metric in PERCENT:
        return f"{100 * value:.2f}"
    if metric == "rounds":
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1e-3 and value else f"{value:.3f}"


def with_spread(value: float, spread: float | None, metric: str) -> str:
    """Write value ± spread, the spread only where it is known."""
    if math.isinf(value):
        return "not reached"
    known = spread is not None and not math.isnan(spread)
    return number(value, metric) + (f" ± {number(spread, metric)}" if known else "")


def scale_words(recipe: Recipe, changed: bool = False) -> str:
    """Say what the verdicts of this scale can mean."""
    if not recipe.trains:
        return "Drawn from the rules alone: nothing is run."
    if changed:
        return "Fields of the recipe were overridden: the verdicts compare this run with the paper, not a reproduction of it."
    if recipe.scale == "smoke":
        return (
            f"Smoke scale: {SMOKE['data.limit']} training and {SMOKE['data.test_limit']} test examples, one round. "
            "The verdicts only show that the machinery works."
        )
    if recipe.scale == "quick":
        return (
            "Quick scale: fewer examples, rounds and seeds than the paper. Read the order of the rows, not the verdicts: "
            "a difference here does not speak against the paper."
        )
    return "Full scale: the paper's data, rounds and seeds."


def as_text(made: Reproduction) -> str:
    """Return the verdicts as a table for the terminal, and where the page is."""
    rows = [("cell", "metric", "paper", "ours", "difference", "verdict")]
    rows += [_row(v) for v in made.verdicts if v.ours is not None]
    widths = [max(len(r[i]) for r in rows) for i in range(6)]
    lines = [f"{made.recipe.title} ({made.recipe.paper}{_where(made.recipe)}), {made.recipe.scale} scale", ""]
    if len(rows) > 1:
        lines += ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows] + [""]
    if made.recipe.trains:
        done = sum(bool(p) for p, _ in made.runs.values())
        lines.append(_tally(made.verdicts) or f"{done} of {len(made.runs)} cells run.")
    lines += [f"not run: {cell}: {reason}" for cell, reason in list(made.skipped.items())[:5]]
    if len(made.skipped) > 5:
        lines.append(f"... and {len(made.skipped) - 5} more cells without their data.")
    return "\n".join([*lines, scale_words(made.recipe, made.changed), f"page: {made.page}"])


def _row(v: Verdict) -> tuple[str, str, str, str, str, str]:
    ours = with_spread(v.ours.value, v.ours.spread, v.metric) if v.ours else "–"
    label = " ".join(f"{k}={x}" for k, x in v.at)
    gap = "–" if math.isnan(v.difference) else f"{v.difference:+.1f}"
    return label, v.metric, with_spread(v.paper, v.paper_spread, v.metric), ours, gap, v.word


def _where(recipe: Recipe) -> str:
    return f", {recipe.published.where}" if recipe.published else ""


def _tally(verdicts: Sequence[Verdict]) -> str:
    count = Counter(v.word for v in verdicts)
    return ", ".join(f"{w}: {count[w]}" for w in WORDS) + f" (of {len(verdicts)} printed numbers)" if verdicts else ""


def write_page(
    recipe: Recipe,
    verdicts: Sequence[Verdict],
    runs: Mapping[Coordinates, tuple[Sequence[Path], str]],
    skipped: Mapping[str, str],
    out: Path,
    changed: bool = False,
) -> Path:
    """Write ``NAME-SCALE.html`` (readings taken otherwise in its name) and its numbers as CSV beside it; return its path."""
    stem = recipe.stem
    _write_csv(verdicts, out / f"{stem}.csv")
    body = [
        f"<h1>{escape(recipe.title)}</h1>",
        f'<p class="lead">{escape(recipe.paper + _where(recipe))}. {escape(scale_words(recipe, changed))}</p>',
        f"<p>{escape(recipe.published.caption)}.</p>" if recipe.published else "",
        f"<p>{escape(recipe.note)}</p>" if recipe.note else "",
        f"<p><strong>{_tally(verdicts)}</strong></p>" if verdicts else "",
        _verdict_table(verdicts),
        '<div class="figures">' + "".join(f"<figure>{svg}</figure>" for svg in figures.draw(recipe, runs)) + "</div>",
        _readings_table(recipe),
        _run_list(runs, skipped, out) if recipe.trains else "",
    ]
    page = out / f"{stem}.html"
    write_atomically(page, _document(recipe.title, "\n".join(b for b in body if b)).encode())
    return page


def _verdict_table(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    head = "".join(f"<th>{h}</th>" for h in ("cell", "metric", "paper", "ours", "seeds", "difference", "verdict"))
    rows = []
    for v in verdicts:
        label, metric, paper, ours, gap, word = _row(v)
        cells = (label, metric, paper, ours, str(v.ours.seeds) if v.ours else "–", gap, word)
        css = word.replace(" ", "-")
        rows.append(f'<tr class="{css}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    legend = "; ".join(f"<em>{w}</em>: {t}" for w, t in WORDS.items())
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="note">Accuracy, ECE and reliability in percent. Difference in units of the combined spread '
        f"sqrt(paper² + ours²), at least the noise of the metric. {legend}.</p>"
    )


def _readings_table(recipe: Recipe) -> str:
    if not recipe.readings:
        return ""
    rows = "".join(
        f"<tr><td>{escape(k)}</td><td>{escape(v)}</td><td>{escape(', '.join(READINGS[k].options))}</td>"
        f"<td>{escape(READINGS[k].question)}</td></tr>"
        for k, v in recipe.readings.items()
    )
    return (
        "<h2>What the paper leaves open</h2>"
        '<div class="scroll"><table><thead><tr><th>reading</th><th>taken</th><th>options</th><th>why it is open</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def _run_list(runs: Mapping[Coordinates, tuple[Sequence[Path], str]], skipped: Mapping[str, str], out: Path) -> str:
    items = []
    for at, (paths, _) in runs.items():
        label = escape(" ".join(f"{k}={v}" for k, v in at)) or "(one cell)"
        links = ", ".join(f'<a href="{escape(_link(p, out))}">{escape(p.name)}</a>' for p in paths)
        items.append(
            f"<li>{label}: {links or 'not run'}{escape(' – ' + skipped[label]) if label in skipped else ''}</li>"
        )
    return f"<details><summary>Runs (<code>fedbayes report</code> with a run's folder writes its page)</summary><ul>{''.join(items)}</ul></details>"


def _link(run: Path, out: Path) -> str:
    """Return where a run can be looked at: its report where one was written (``fedbayes report RUN``), else its folder."""
    place = run.relative_to(out).as_posix()
    return f"{place}/report.html" if (run / "report.html").is_file() else f"{place}/"


def _write_csv(verdicts: Sequence[Verdict], path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(
            ["cell", "metric", "paper", "paper spread", "ours", "our spread", "seeds", "difference", "verdict"]
        )
        for v in verdicts:
            mine = (v.ours.value, v.ours.spread, v.ours.seeds) if v.ours else ("", "", 0)
            label = " ".join(f"{k}={x}" for k, x in v.at)
            writer.writerow([label, v.metric, v.paper, v.paper_spread, *mine, v.difference, v.word])


CSS = """
:root { color-scheme: light dark; --soft: #8883; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; } .lead { font-size: 1.05rem; } .note { opacity: .75; font-size: .85rem; }
table { border-collapse: collapse; font-size: .88rem; } th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid var(--soft); }
td:nth-child(n+3) { font-variant-numeric: tabular-nums; }
tr.agrees td:last-child { color: #2e8540; } tr.differs td:last-child { color: #c8553d; } tr.not-run, tr.no-number { opacity: .55; }
.scroll { overflow-x: auto; } .figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; } svg { width: 100%; height: auto; font-size: 11px; fill: currentColor; } svg .title { font-weight: 600; }
polyline { stroke-width: 1.6; } svg line { stroke-width: 2; }
"""


def _document(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>{body}</body></html>"
    )
