"""The page itself: what stands in it, in which order, put into one HTML file that needs nothing else."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import uncertainty
from ..errors import RunError
from . import comparison, examples, figures, matrices, prose, style, tables
from .pictures import Picture, matplotlib_modules
from .runs import Run, find_runs
from .sections import extras

PACKAGE = "fedbayes.report"
SAMPLES_SHOWN = ("entropy", "aleatoric", "epistemic", "mutual_information")


@dataclass(frozen=True)
class Text:
    """One cell of a table."""

    text: str
    best: bool = False
    tie: bool = False
    gone: bool = False
    href: str = ""


@dataclass(frozen=True)
class Grid:
    """A table of the page; the first ``text_columns`` are words, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[Text]]
    text_columns: int = 1
    headings: Mapping[int, str] = field(default_factory=dict)
    """Words above a row, by its number: where another block begins."""


@dataclass(frozen=True)
class Part:
    """A section of the page."""

    anchor: str
    title: str
    words: Sequence[str] = ()
    figures: Sequence[str] = ()
    groups: Sequence[tuple[str, Sequence[str]]] = ()
    table: Grid | None = None
    html: str = ""
    remark: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.figures or self.table or self.html or any(f for _, f in self.groups) or any(self.words))


@dataclass
class Page:
    """A page in the making: where it goes, where its figures go."""

    out: Path
    folder: Path
    context: dict[str, Any] = field(default_factory=dict)

    def draw(self, *pictures: Picture | None) -> list[str]:
        """Save pictures beside the page and return them as fragments; None is left out."""
        return [p.html(self.folder, self.out) for p in pictures if p is not None]

    def render(self) -> Path:
        """Write the file, whole or not at all."""
        html = _template().render(**self.context, css=_css(), folder=os.path.relpath(self.folder, self.out.parent))
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_name(self.out.name + ".part")
        partial.write_text(html, encoding="utf-8")
        os.replace(partial, self.out)
        return self.out


def write(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one run, or of several compared, and return the path of the HTML file.

    ``paths`` are run directories or folders that hold some. One run: ``report.html`` in its directory; several:
    ``report.html`` in the folder they share (``out`` overrides both). Figures go to ``figures/`` beside the run or
    the comparison, each as PNG, SVG and CSV.
    """
    paths = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    matplotlib_modules()
    _template()
    runs = find_runs(paths)
    runs_with_rounds = [r for r in runs if r.rounds or r.kind("evaluation")]
    if not runs_with_rounds:
        raise RunError(f"{runs[0].path}: no round has ended yet; there is nothing to report.")
    if len(runs) == 1:
        return _one(runs[0], Path(out) if out else runs[0].path / "report.html")
    return _several(runs_with_rounds, Path(out) if out else _common(paths, runs) / "report.html")


def _common(paths: Sequence[Path], runs: Sequence[Run]) -> Path:
    """The folder of a comparison: the one that was named, or the nearest one that holds all runs."""
    if len(paths) == 1:
        return paths[0]
    return Path(os.path.commonpath([r.path.resolve() for r in runs]))


def _one(run: Run, out: Path) -> Path:
    page = Page(out, run.path / "figures")
    parts = [
        _learning(run, page), _trust(run, page), _knowing(run, page), _examples(run, page), _groups_of_inputs(run),
        _holding(run, page), _posterior(run, page),
        *(Part(anchor, title, html=html) for anchor, title, html in extras(run)),
        _cost(run), _configuration(run),
    ]  # fmt: skip
    state = "finished" if run.end else f"not finished: {len(run.rounds)} of {run.setting('rounds', '?')} rounds"
    bits = [run.start.get("time", "")[:16].replace("T", " "), state, run.start.get("device", ""), run.path.name]
    notes = list(dict.fromkeys(str(n.get("text", "")) for n in run.kind("note")))
    if prose.collapsed(run) and not any("collaps" in n for n in notes):
        notes.append(prose.spread_of(run))
    page.context = {
        "title": _title(run), "kicker": " · ".join(str(b) for b in bits if b), "opening": prose.opening(run),
        "findings": [], "notes": notes, "cards": prose.cards(run), "parts": [p for p in parts if not p.empty],
        "version": run.start.get("version", ""),
    }  # fmt: skip
    return page.render()


def _title(run: Run) -> str:
    rule = str(run.setting("fusion.rule", ""))
    return f"{run.name}: {rule}" if rule and rule not in run.name else run.name


def _learning(run: Run, page: Page) -> Part:
    drawn = page.draw(*(figures.learning_curve(run, m) for m in ("accuracy", "nll", "ece")))
    best = (run.end or {}).get("best_round")
    words = []
    if best and run.evaluations("validation"):
        words = [f"Round {best} was best on the validation data; it is the one that is judged here."]
    return Part("learning", "Learning", words, drawn)


def _trust(run: Run, page: Page) -> Part:
    drawn = page.draw(figures.reliability(run), matrices.confusion(run))
    m, words = run.headline, []
    if drawn:
        words = [
            f"Calibration error {prose.figure(m.get('ece'), 100)} % in {run.bins} bins of equal width, "
            f"{prose.figure(m.get('ece_mass'), 100)} % in bins of equal mass, {prose.figure(m.get('ece_classwise'), 100, 2)} % "
            f"averaged over all classes; Brier score {prose.figure(m.get('brier'), 1, 3)}."
        ]
    return Part("trust", "Can its confidence be taken at its word?", words, drawn)


def _knowing(run: Run, page: Page) -> Part:
    drawn = page.draw(
        figures.retained(run), figures.finding_errors(run), *(figures.histogram(run, n) for n in SAMPLES_SHOWN)
    )
    rows = prose.outlier_rows(run)
    grid = None
    if rows:
        grid = Grid(
            ("unknown inputs", "told apart by", "AUROC", "FPR at 95 %", "AUPR"),
            [
                [Text(r["set"]), Text(r["by"]), *(Text(prose.figure(r[k], 1, 3)) for k in ("auroc", "fpr95", "aupr"))]
                for r in rows
            ],
            2,
        )
    words = [prose.answering(run)]
    if rows:
        words.append(
            "Inputs of a kind it never saw, told from the test inputs by how unsure it is (AUROC: 1 always, 0.5 by chance):"
        )
    return Part("knowing", "Does it know when it does not know?", words, drawn, table=grid)


def _examples(run: Run, page: Page) -> Part:
    made = examples.pictures(run)
    if not any(made.values()):
        return Part("examples", "Examples")
    words = [
        "Each dot is the prediction of one sampled network, the ring their mean; blue is the true class, orange a wrong answer. "
        "Dots that lie apart are epistemic uncertainty: the networks disagree."
    ]
    problem = examples.test_inputs(run).problem
    groups = [(examples.GROUPS[g], page.draw(*pictures)) for g, pictures in made.items()]
    return Part("examples", "Examples", words, groups=groups, remark=problem)


def _groups_of_inputs(run: Run) -> Part:
    """A table per natural group of test inputs (hospital, site): accuracy and calibration of each."""
    test = run.predictions("test")
    inputs = examples.test_inputs(run) if test else None
    if test is None or inputs is None or not inputs.columns:
        return Part("groups", "")
    rows, owners = [], run.setting("partition.column", "")
    for column, every in inputs.columns.items():
        measured = np.asarray(every).dtype.kind == "f" and column != owners  # measurements are no groups
        if measured or len(every) <= int(test.indices.max()):
            continue
        here = np.asarray(every)[test.indices]
        names, codes = np.unique(here, return_inverse=True)  # by number, since NaN (not known) equals nothing
        if not 2 <= len(names) <= 20:
            continue
        for number, name in enumerate(names):
            mask = codes == number
            m = uncertainty.summarize(torch.as_tensor(test.probabilities[:, mask]), test.labels[mask], run.bins)
            rows.append([Text(column), Text(str(name)), Text(f"{int(mask.sum()):,}"), Text(prose.figure(m["accuracy"], 100)),
                         Text(prose.figure(m["nll"], 1, 3)), Text(prose.figure(m["ece"], 100)), Text(prose.figure(m["entropy"], 1, 3)),
                         Text(prose.small(m["epistemic"]))])  # fmt: skip
    if not rows:
        return Part("groups", "")
    head = ("by", "", "test inputs", "accuracy, %", "NLL", "ECE, %", "entropy", "epistemic")
    return Part(
        "groups",
        "Group by group",
        ["The same model, judged on each group of test inputs by itself."],
        table=Grid(head, rows, 2),
    )


def _holding(run: Run, page: Page) -> Part:
    return Part("holding", "Who held what", figures=page.draw(matrices.partition(run)))


def _posterior(run: Run, page: Page) -> Part:
    return Part(
        "posterior",
        "The posterior",
        [text for text in (prose.spread_of(run), prose.repairs_of(run)) if text],
        page.draw(figures.sigma(run), figures.learning_curve(run, "epistemic")),
    )


def _cost(run: Run) -> Part:
    if not run.rounds:
        return Part("cost", "")
    seconds = [float(e.get("seconds") or 0) for e in run.rounds]
    last = run.rounds[-1]
    engine, sent = last.get("engine") or {}, last.get("bytes") or {}
    words = [f"The round took {prose.duration(seconds[0])}."]
    if len(seconds) > 1:
        median = prose.duration(float(np.median(seconds)))
        words = [
            f"A round took {median} (median), the {prose.number(len(seconds))} rounds {prose.duration(sum(seconds))}."
        ]
    if run.shared:
        words[0] += " It trained in one launch with other runs: these times are the launch's, not its own."
    elif engine.get("lanes"):
        together = min(int(engine["lanes"]), len(last.get("clients", ())) or int(engine["lanes"]))
        words[0] += f" {prose.plural(together, 'client').capitalize()} trained at a time"
        words[0] += (
            f", {engine['occupancy'] * 100:.0f} % of the steps did real work." if engine.get("occupancy") else "."
        )
    if sent.get("up"):
        words[0] += (
            f" Each round {figures.short_count(sent['up'])} bytes went up and {figures.short_count(sent.get('down', 0))} down."
        )
    refused = sum(len((e.get("fusion") or {}).get("refused") or ()) for e in run.rounds)
    if refused:
        words.append(
            f"{prose.plural(refused, 'update')} from clients could not be used and were left out.".capitalize()
        )
    return Part("cost", "What it cost", words)


def _configuration(run: Run) -> Part:
    file = run.path / "config.toml"
    if not file.exists():
        return Part("configuration", "")
    text = style._attribute(file.read_text(encoding="utf-8"))
    return Part(
        "configuration",
        "Configuration",
        html=f"<details><summary>config.toml, complete</summary><pre>{text}</pre></details>",
    )


def _several(runs: Sequence[Run], out: Path) -> Path:
    groups = tables.group(runs)
    table = tables.table(groups)
    page = Page(out, out.parent / "figures")
    drawn = comparison.pictures(groups)
    made = {section: _blocks_of(page, drawn, section) for section in ("learning", "knowing", "trust")}
    words = {
        "learning": comparison.shown_words(groups),
        "knowing": "Accuracy on the inputs that are left when the least sure are set aside (Fischer et al. 2024, Figs. 2, 4, 6 and 7).",
        "trust": "",
    }
    titles = {
        "learning": "Learning",
        "knowing": "Do they know when they do not know?",
        "trust": "Can their confidence be taken at its word?",
    }
    parts = [
        Part("table", "The table", table=_grid(table), remark=_how_to_read(table)),
        *(Part(s, titles[s], [words[s]], *made[s]) for s in made if any(made[s])),
        Part("holding", "Who held what", figures=page.draw(matrices.partition(runs[0])) if _one_partition(runs) else ()),
        Part("runs", "The runs", table=_run_list(groups, out), remark=_own_pages(runs, out)),
    ]  # fmt: skip
    _table_csv(table, page.folder)
    names = sorted({r.name for r in runs})
    page.context = {
        "title": f"{names[0] if len(names) == 1 else out.parent.resolve().name}: {len(groups)} settings compared"
        if len(groups) > 1 else f"{names[0]}: {len(runs)} runs",
        "kicker": f"{len(runs)} runs in {out.parent.resolve().name}", "opening": comparison.opening(groups),
        "findings": tables.findings(table), "notes": [], "cards": [],
        "parts": [p for p in parts if not p.empty], "version": runs[0].start.get("version", ""),
    }  # fmt: skip
    return page.render()


def _blocks_of(
    page: Page, drawn: Mapping[str, Mapping[str, Sequence[Picture]]], section: str
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The figures of a section: plain where there is one problem, else under a heading for each."""
    made = [(problem, page.draw(*sections.get(section, ()))) for problem, sections in drawn.items()]
    made = [(problem, figures) for problem, figures in made if figures]
    return (made[0][1], []) if len(made) == 1 else ([], made)


def _own_pages(runs: Sequence[Run], out: Path) -> str:
    """How to get the pages of single runs, where there are none yet."""
    missing = next((r for r in runs if not (r.path / "report.html").exists()), None)
    if missing is None:
        return ""
    path = Path(out.parent.resolve().name, os.path.relpath(missing.path, out.parent))
    return f"Single inputs, errors and layers of one run: fedbayes report {shlex.quote(str(path))}"


def _one_partition(runs: Sequence[Run]) -> bool:
    """Whether all runs held the same: the picture of one is then that of all."""
    return all(r.partition == runs[0].partition for r in runs)


def _grid(table: tables.Table) -> Grid:
    rows, headings = [], {}
    for problem, groups in table.blocks:
        if problem:
            headings[len(rows)] = problem
        for g in groups:
            i = table.groups.index(g)
            keys = [Text(g.keys[k], gone=g.collapsed and n == 0) for n, k in enumerate(table.keys)]
            cells = [
                Text(table.text(i, j), best=bool(c and c.best), tie=bool(c and c.tie))
                for j, c in enumerate(table.cells[i])
            ]
            rows.append([*keys, Text(str(len(g.runs))), *cells])
    head = [*(tables.HEADINGS.get(k, k) for k in table.keys), "runs", *(c.heading for c in table.columns)]
    return Grid(head, rows, len(table.keys), headings)


def _how_to_read(table: tables.Table) -> str:
    common = [f"{tables.HEADINGS.get(k, k)} {v}" for k, v in table.groups[0].common.items() if v]
    same = f"The same in every row: {'; '.join(common)}. " if common else ""
    if any(r.shared for g in table.groups for r in g.runs) and any(c.key == "seconds" for c in table.columns):
        same += "No time is given for runs that trained in one launch with others. "
    if not table.repeated:
        return same + "One run per row: no spread is known, so nothing is marked as best."
    where = " on the same data and partition" if len({g.problem for g in table.groups}) > 1 else ""
    return same + (
        f"Mean ± standard deviation over runs with different seeds. Bold: the best{where}, and every row whose difference from "
        "it is smaller than the combined run-to-run spread √(sd² + sd²), which is a tie. Nothing is marked where no direction is "
        "better."
    )


def _table_csv(table: tables.Table, folder: Path) -> None:
    import csv

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "table.csv", "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        spread = [name for c in table.columns for name in (c.key, f"{c.key}_sd", f"{c.key}_best")]
        writer.writerow([*table.groups[0].keys, "runs", *spread])
        for g, row in zip(table.groups, table.cells):
            cells = [
                v for c in row for v in ((c.mean, "" if c.sd != c.sd else c.sd, int(c.best)) if c else ("", "", ""))
            ]
            writer.writerow([*g.keys.values(), len(g.runs), *cells])


def _run_list(groups: Sequence[tables.Group], out: Path) -> Grid:
    rows = []
    for g in groups:
        for run in g.runs:
            page = run.path / "report.html"
            href = os.path.relpath(page, out.parent) if page.exists() else ""
            m = run.headline
            rows.append([Text(run.path.name, href=href), Text(g.label), Text(str(run.setting("seed", ""))),
                         Text(f"{len(run.rounds)}" + ("" if run.end else " (unfinished)")), Text(prose.figure(m.get("accuracy"), 100, 2)),
                         Text(prose.figure(m.get("nll"), 1, 3)), Text(prose.figure(m.get("ece"), 100, 2))])  # fmt: skip
    return Grid(("run", "setting", "seed", "rounds", "accuracy, %", "NLL", "ECE, %"), rows, 2)


def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise RunError(
            'the report needs jinja2, which is not installed: pip install "fedbayes[report]" brings it.'
        ) from None
    source = resources.files(PACKAGE).joinpath("page.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_unbroken
    ).from_string(source)


def _unbroken(value: Any) -> Any:
    """Keep a number and its percent sign on one line."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


def _css() -> str:
    light, dark = style.css_variables()
    text = resources.files(PACKAGE).joinpath("page.css").read_text(encoding="utf-8")
    return text.replace("LIGHT", light).replace("DARK", dark)


def partition_figure(counts: Any, classes: Sequence[str], names: Sequence[str], path: str | Path) -> Path:
    """Draw who gets what (clients × classes) to ``path``; its ending (.png, .svg, .pdf) chooses the format."""
    path = Path(path)
    picture = matrices.partition_picture(np.asarray(counts), classes, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RunError(f"{path}: a picture's name must end in .png, .svg or .pdf.")
    picture.figure.savefig(path, dpi=160)
    return path
