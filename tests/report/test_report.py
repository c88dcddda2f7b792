"""The report of one run and of several: what stands in it, that it needs nothing else, that its tables are honest."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("sklearn")

from make_run import make_run

from fedbayes import report, uncertainty
from fedbayes.errors import RunError
from fedbayes.report import prose, tables
from fedbayes.report.runs import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One full run, with its report."""
    path = make_run(tmp_path_factory.mktemp("one") / "run", rounds=5)
    report.write([path])
    return path


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    """Three settings with two seeds each, with the report of the comparison."""
    root = tmp_path_factory.mktemp("grid")
    for rule, kind, collapse in (
        ("nwa", "flipout", False),
        ("ws", "flipout", True),
        ("fedavg", "deterministic", False),
    ):
        for seed in range(2):
            make_run(root / f"{rule}-{seed}", seed=seed, rule=rule, kind=kind, collapse=collapse, rounds=5, ood=False)
    report.write([root])
    return root


class Page(HTMLParser):
    """Collects what a browser would load, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self._skip = 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._skip += tag == "style"
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "data", "poster", "srcset"):
                (self.links if tag == "a" else self.loads).append(value or "")

    def handle_endtag(self, tag):
        self._skip -= tag == "style"

    def handle_data(self, data):
        if not self._skip:
            self.text += data


def read(path: Path) -> tuple[str, Page]:
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def test_page_needs_nothing_else(folder, grid):
    for path in (folder / "report.html", grid / "report.html"):
        html, page = read(path)
        assert all(a.startswith(("data:", "#")) for a in page.loads), page.loads
        assert "script" not in page.tags
        assert not re.search(r"url\((?!#)|@import", html)
        assert page.tags.count("svg") >= 8
        assert html.count("<!doctype html>") == 1
        assert not re.search(r"(?<![a-z])nan(?![a-z])|None|Undefined", page.text), (
            "an undefined number leaked into the text"
        )


def test_every_link_leads_to_a_file(folder, grid):
    for path in (folder / "report.html", grid / "report.html"):
        for link in read(path)[1].links:
            if not link.startswith("#"):
                assert (path.parent / link).is_file(), link


def test_anchors_exist(folder):
    html, page = read(folder / "report.html")
    for link in page.links:
        if link.startswith("#"):
            assert f'id="{link[1:]}"' in html


def test_every_figure_is_saved_three_ways_with_its_numbers(folder):
    stems = {f.stem for f in (folder / "figures").iterdir()}
    expected = {
        "learning-accuracy",
        "learning-nll",
        "learning-ece",
        "learning-epistemic",
        "reliability",
        "retained",
        "partition",
        "sigma",
    }
    expected |= {f"histogram-{u}" for u in uncertainty.UNCERTAINTIES} | {"confusion", "finding-errors"}
    expected |= {f"example-{g}-{k}" for g in ("surest-right", "surest-wrong", "least-sure") for k in (1, 2, 3)}
    assert expected <= stems
    for stem in stems:
        for ending, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            assert (folder / "figures" / f"{stem}.{ending}").read_bytes().startswith(magic)
        with open(folder / "figures" / f"{stem}.csv", newline="") as f:
            rows = list(csv.reader(f))
        assert len(rows) > 1, stem
        assert all(len(r) == len(rows[0]) for r in rows), stem


def test_figures_hold_the_runs_numbers(folder):
    run = Run(folder)
    test = run.predictions("test")
    assert test is not None
    with open(folder / "figures" / "learning-accuracy.csv", newline="") as f:
        rows = [r for r in csv.DictReader(f) if r["series"] == "test"]
    assert [float(r["accuracy"]) for r in rows] == pytest.approx(
        [e["metrics"]["accuracy"] for e in run.evaluations("test")]
    )
    per_round = sum(c["examples"] for c in run.partition["clients"])
    assert [float(r["examples_seen"]) for r in rows] == [per_round * k for k in range(1, 6)]
    with open(folder / "figures" / "retained.csv", newline="") as f:
        rows = [r for r in csv.DictReader(f) if r["uncertainty"] == "entropy"]
    p = test.probabilities.astype(float)
    mean = p.mean(0)
    entropy = -(mean * np.log(mean)).sum(1)
    correct = (mean.argmax(1) == test.labels)[np.argsort(entropy, kind="stable")]
    plain = correct.cumsum() / np.arange(1, len(correct) + 1)
    for r in rows[::20]:
        k = round(float(r["retained"]) * len(correct))
        assert float(r["accuracy"]) == pytest.approx(plain[k - 1], abs=1e-6)
    with open(folder / "figures" / "confusion.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert sum(int(r["count"]) for r in rows) == len(test.labels)
    assert sum(int(r["count"]) for r in rows if r["true"] == r["answered"]) == correct.sum()
    with open(folder / "figures" / "partition.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert sum(int(r["examples"]) for r in rows) == per_round


def test_text_states_the_numbers(folder):
    text = read(folder / "report.html")[1].text.replace("\u00a0", " ")
    run = Run(folder)
    assert f"{run.headline['accuracy'] * 100:.1f} %" in text
    assert "Ten clients held" in text
    assert "In five rounds each client trained a Bayesian MLP (Flipout) for one epoch" in text
    assert "naive weighted averaging (NWA), weighted by how many examples each holds" in text
    assert "Set the least sure fifth aside" in text
    assert f"{run.headline['ece'] * 100:.1f} %" in text
    assert "shuffled" in text


def test_examples_are_the_extremes(folder):
    run = Run(folder)
    from fedbayes.report.examples import pick

    test = run.predictions("test")
    chosen = pick(test)
    entropy, correct = test.per_example["entropy"], test.per_example["correct"]
    assert entropy[chosen["surest-right"][0]] == entropy[correct].min()
    assert entropy[chosen["surest-wrong"][0]] == entropy[~correct].min()
    assert entropy[chosen["least-sure"][0]] == entropy.max()


def test_colours_follow_the_scheme(folder):
    html = (folder / "report.html").read_text()
    figures = html[html.index("<svg") : html.rindex("</svg>")]
    assert "prefers-color-scheme: dark" in html
    assert "var(--ink)" in figures
    assert "#1b1f24" not in figures  # ink of the light scheme: nothing drawn may keep it
    assert "@media print" in html


def test_collapse_is_said(tmp_path):
    path = make_run(tmp_path / "run", rule="ws", collapse=True, rounds=6, ood=False, predictions=False)
    _, page = read(report.write([path]))
    assert "has collapsed" in page.text
    assert "point model in all but name" in page.text


def test_repaired_weights_are_said(tmp_path):
    path = make_run(tmp_path / "run", rounds=4, ood=False, predictions=False)
    assert "were repaired" not in read(report.write([path]))[1].text
    events = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for event in events:
        if event["kind"] == "round" and event["round"] > 1:
            event["fusion"]["repaired"] = 0.08 / event["round"]
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    _, page = read(report.write([path]))
    assert "In three rounds some weights" in page.text
    assert re.search(r"were repaired: 4\s% of all at most, in round\s2\.", page.text)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "deterministic", "rule": "fedavg"},
        {"kind": "dropout", "rule": "fedavg"},
        {"validation": False, "ood": False, "predictions": False},
        {"finished": False, "predictions": False},
    ],
)
def test_runs_of_every_kind_get_a_page(tmp_path, options):
    path = make_run(tmp_path / "run", **{"rounds": 2, **options})
    _, page = read(report.write([path]))
    assert "Learning" in page.text
    assert not re.search(r"(?<![a-z])nan(?![a-z])|None", page.text)


def test_all_right_and_all_alike(tmp_path):
    """A perfect and perfectly sure network: no errors to find, every uncertainty zero."""
    path = make_run(tmp_path / "run", rounds=1, ood=False, validation=False)
    labels = np.arange(10).repeat(3)
    np.savez(
        path / "predictions-test.npz",
        probabilities=np.eye(10, dtype=np.float32)[labels][None],
        labels=labels,
        indices=np.arange(30),
    )
    _, page = read(report.write([path]))
    assert "100.0" in page.text
    assert "nan" not in page.text


def test_torn_last_line_is_forgiven_and_a_broken_one_is_named(tmp_path):
    path = make_run(tmp_path / "run", rounds=2, finished=False, predictions=False)
    file = path / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"kind":"rou')
    report.write([path])
    file.write_text('{"kind":"rou\n' + whole)
    with pytest.raises(RunError, match="line 1"):
        report.write([path])


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "bits", "list"])
@pytest.mark.parametrize("name", ["config.toml", "partition.json", "predictions-test.npz"])
def test_a_damaged_file_is_named_in_one_sentence(folder, tmp_path, name, damage):
    file = shutil.copytree(folder, tmp_path / "run") / name
    whole = file.read_bytes()
    middle = len(whole) // 2
    broken = {"half": whole[:middle], "bits": whole[:middle] + bytes(99) + whole[middle + 99 :], "list": b"[1, 2]"}
    file.write_bytes({"empty": b"", "garbage": b"\xff{[" * 50, **broken}[damage])
    if (name, damage) == ("config.toml", "empty"):  # valid TOML that sets nothing
        report.write([tmp_path / "run"])
        return
    with pytest.raises(RunError, match=name) as caught:
        report.write([tmp_path / "run"])
    assert "\n" not in str(caught.value)


def test_predictions_and_labels_that_do_not_match_are_refused(folder, tmp_path):
    file = shutil.copytree(folder, tmp_path / "run") / "predictions-test.npz"
    stored = dict(np.load(file))
    np.savez(file, **stored | {"labels": stored["labels"][:5]})
    with pytest.raises(RunError, match=r"predictions-test\.npz .*do not match"):
        report.write([tmp_path / "run"])


def words_of(path, **changes):
    file = path / "config.toml"
    settings = {f'{name} = "{old}"': f'{name} = "{new}"' for name, (old, new) in changes.items()}
    text = file.read_text()
    for old, new in settings.items():
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    return prose.opening(Run(path))


def test_the_opening_says_what_was_done(tmp_path):
    path = make_run(tmp_path / "run", rounds=1, predictions=False)
    assert prose.spread_of(Run(path)).endswith("after round 1.")
    assert "few examples of few classes" in words_of(path, scheme=("dirichlet", "odd-one"))
    assert "a Monte-Carlo-dropout " in words_of(path, kind=("flipout", "dropout"))
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"clients": 10', '"clients": 1'))
    alone = prose.opening(Run(path))
    assert "in one place" in alone
    assert "fused" not in alone


def test_all_right_is_no_certainty(tmp_path):
    path = make_run(tmp_path / "run", rounds=1)
    stored = dict(np.load(path / "predictions-test.npz"))
    n = len(stored["labels"])
    right = np.eye(10, dtype=np.float32)[stored["labels"]][None]
    np.savez(path / "predictions-test.npz", **stored | {"probabilities": right})
    said = prose.cards(Run(path))[0][2]
    assert said == f"{100 * n / (n + 1.96**2):.1f} to 100.0 %: 95 % interval from {n:,} inputs"


def test_wrong_folders_get_one_sentence(tmp_path):
    with pytest.raises(RunError, match="is not there"):
        report.write([tmp_path / "nothing"])
    with pytest.raises(RunError, match="holds no run"):
        report.write([tmp_path])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "start", "schema": 1}) + "\n")
    with pytest.raises(RunError, match="no round has ended"):
        report.write([tmp_path])


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_missing_extra_is_named(tmp_path, monkeypatch, missing):
    path = make_run(tmp_path / "run", rounds=1)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RunError, match=r'pip install "fedbayes\[report\]"'):
        report.write([path])


def test_out_and_figures_elsewhere(tmp_path):
    path = make_run(tmp_path / "runs" / "a", rounds=1, predictions=False)
    out = report.write([path], tmp_path / "pages" / "a.html")
    assert out == tmp_path / "pages" / "a.html"
    for link in read(out)[1].links:
        if not link.startswith("#"):
            assert (out.parent / link).is_file()


def test_sections_can_be_added(tmp_path, monkeypatch):
    path = make_run(tmp_path / "run", rounds=1, predictions=False)
    monkeypatch.setitem(
        report.sections, "queue", report.Section("queue", "The queue", lambda run: f"<p>first of {run.name}</p>")
    )
    monkeypatch.setitem(report.sections, "silent", report.Section("silent", "Silent", lambda run: None))
    (path / "report-extra.html").write_text("<p>by hand</p>")
    html, page = read(report.write([path]))
    assert "first of digits" in page.text
    assert "by hand" in page.text
    assert 'id="queue"' in html
    assert "Silent" not in page.text


def test_names_are_escaped(tmp_path):
    path = make_run(tmp_path / "run", rounds=1, predictions=False)
    for file in ("metrics.jsonl", "config.toml", "partition.json"):
        f = path / file
        f.write_text(f.read_text().replace('"digits"', '"<b>x</b>&"').replace('"client 0"', '"<i>y</i>"'))
    html, page = read(report.write([path]))
    assert "b" not in page.tags
    assert "<i>y" not in html


HOSTILE = [
    "$\\frac{$",
    "<script>alert(1)</script>",
    "x\ny",
    "\u202egnorw",
    "%s {0}",
    '"&amp;',
    "a" * 300,
    "日本",
    "$x^2$",
    "",
]


@pytest.mark.filterwarnings("ignore:Glyph")  # the PNG's font has no Japanese letters; the page's has
def test_any_name_can_stand_in_the_page(tmp_path):
    """No name of a class, client or data set is markup, a formula, or able to turn the text around it."""
    path = make_run(tmp_path / "a$<b>&x", rounds=1)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"classes": HOSTILE, "name": "<i>name</i> $\\bad{$"}
    lines.append({"kind": "note", "round": 1, "text": "<script>2</script>\u202e"})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads((path / "partition.json").read_text())
    for client, name in zip(record["clients"], HOSTILE):
        client["name"] = name
    (path / "partition.json").write_text(json.dumps(record | {"classes": HOSTILE}))
    html, page = read(report.write([path]))
    assert not {"script", "i", "b"} & set(page.tags)
    assert "\u202e" not in html
    assert "<script>2</script>" in page.text
    assert "$x^2$" in html, "no formula: written as it is"


def test_pictures_of_other_inputs_are_not_shown(tmp_path):
    """The data set found now is not the one the run was judged on: better no pictures than wrong ones."""
    path = make_run(tmp_path / "run", rounds=1, ood=False, validation=False)
    assert "data found now are not those" in read(report.write([path]))[1].text


def test_rivals_have_the_same_problem(tmp_path):
    """Two partitions, two rules: best is marked within each partition, and each has figures of its own."""
    for alpha in (0.1, 10.0):
        for rule in ("nwa", "lp"):
            for seed in range(2):
                name = f"{alpha}-{rule}-{seed}"
                make_run(tmp_path / name, seed=seed, rule=rule, alpha=alpha, rounds=1, ood=False, predictions=False)
    groups = tables.group(report.find_runs([tmp_path]))
    assert [(g.label, g.problem[:13]) for g in groups] == [
        ("lp", "dirichlet 0.1"), ("nwa", "dirichlet 0.1"), ("lp", "dirichlet 10."), ("nwa", "dirichlet 10."),
    ]  # fmt: skip
    assert groups[0].number == groups[2].number != groups[1].number  # a method keeps its colour
    table = tables.table(groups)
    first, second = [[row[0] for row in table.cells][k : k + 2] for k in (0, 2)]
    assert any(c.best for c in first)
    assert any(c.best for c in second)
    assert max(c.mean for c in first) < min(c.mean for c in second)  # and yet the harder problem has a best of its own
    html, page = read(report.write([tmp_path]))
    assert page.text.count("dirichlet 0.1, 10 clients") >= 3
    assert "figures/compare-accuracy-dirichlet-0.1-10-clients.png" in html
    assert "figures/compare-accuracy-dirichlet-10.0-10-clients.png" in html


def test_unequal_rounds_are_also_compared_by_work(tmp_path):
    for epochs in (1, 3):
        path = make_run(tmp_path / str(epochs), rounds=2, ood=False, predictions=False)
        (path / "config.toml").write_text(
            (path / "config.toml").read_text().replace("epochs = 1", f"epochs = {epochs}")
        )
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["kind"] == "round":
                line["seen"] = epochs * line["examples"]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write([tmp_path])
    with open(tmp_path / "figures" / "compare-effort.csv", newline="") as f:
        rows = [(r["group"], float(r["examples_seen"])) for r in csv.DictReader(f)]
    one, three = [[x for g, x in rows if g.endswith(n)] for n in ("1", "3")]
    assert three == [3 * x for x in one]


def test_comparison_groups_by_what_differs(grid):
    groups = tables.group(report.find_runs([grid]))
    assert sorted((g.label, len(g.runs)) for g in groups) == [("fedavg", 2), ("nwa", 2), ("ws", 2)]
    assert next(g for g in groups if g.label == "ws").collapsed
    assert not next(g for g in groups if g.label == "nwa").collapsed
    text = read(grid / "report.html")[1].text
    cells = [row[0] for row in tables.table(groups).cells]  # the column of accuracies
    level = all(cell is not None and cell.best for cell in cells)
    assert ("No difference in accuracy" in text) == level
    assert ("Best accuracy: " in text) != level
    assert "The posterior of ws has collapsed" in text
    with open(grid / "figures" / "table.csv", newline="") as f:
        rows = {r["fusion.rule"]: r for r in csv.DictReader(f)}
    for g in groups:
        found = [r.headline["accuracy"] for r in g.runs]
        assert float(rows[g.label]["accuracy"]) == pytest.approx(np.mean(found))
        assert float(rows[g.label]["accuracy_sd"]) == pytest.approx(np.std(found, ddof=1))


def test_alpha_is_another_row_and_seed_is_not(tmp_path):
    for alpha, seed in ((0.5, 0), (0.5, 1), (5.0, 0)):
        make_run(tmp_path / f"{alpha}-{seed}", seed=seed, alpha=alpha, rounds=1, predictions=False)
    groups = tables.group(report.find_runs([tmp_path]))
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("dirichlet 0.5, 10 clients", 2),
        ("dirichlet 5.0, 10 clients", 1),
    ]


def marks(samples, better=1):
    return [(c.best, c.tie) if c else None for c in tables.compare(samples, better)]


def test_best_and_ties():
    assert marks([[0.9, 0.92], [0.5, 0.52], [0.905, 0.915]]) == [(True, True), (False, False), (True, True)]
    assert marks([[0.9, 0.901], [0.8, 0.801]]) == [(True, False), (False, False)]
    assert marks([[0.9, 0.901], [0.8, 0.801]], better=-1) == [(False, False), (True, False)]
    assert marks([[0.9], [0.8]]) == [(False, False), (False, False)]  # one run each: nothing can be said
    assert marks([[0.9, 0.8], [0.88]]) == [(True, True), (True, True)]  # the single run borrows the spread
    assert marks([[0.9, 0.901], [0.88]]) == [(True, False), (False, False)]
    assert marks([[0.9, 0.91], []]) == [(False, False), None]
    assert marks([[0.9, 0.91], [0.1, 0.2]], better=0) == [(False, False)] * 2


def test_single_runs_are_not_ranked(tmp_path):
    for rule in ("nwa", "lp"):
        make_run(tmp_path / rule, rule=rule, rounds=1, ood=False, predictions=False)
    html, page = read(report.write([tmp_path]))
    assert "Every row is a single run" in page.text
    assert "est accuracy" not in page.text
    assert 'class="tie"' not in html
    assert not re.search(r'<td class="[^"]*best', html)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_partition_figure(tmp_path, ending):
    counts = np.array([[5, 0, 3], [0, 9, 1]])
    path = report.partition_figure(counts, ["a", "b", "c"], ["one", "two"], tmp_path / f"p.{ending}")
    assert path.stat().st_size > 1000
    report.partition_figure(
        np.ones((300, 12), int),
        [str(i) for i in range(12)],
        [f"client {i}" for i in range(300)],
        tmp_path / f"q.{ending}",
    )
    with pytest.raises(RunError, match="must end in"):
        report.partition_figure(counts, ["a", "b", "c"], ["one", "two"], tmp_path / "p.html")


def test_nodes_with_data_of_their_own_tell_no_classes(tmp_path):
    run = make_run(tmp_path / "run")
    held = json.loads((run / "partition.json").read_text())
    for client in held["clients"]:
        client["counts"] = []
    (run / "partition.json").write_text(json.dumps(held))
    page = report.write([run]).read_text()
    assert "of which classes was not told" in page
    rows = (run / "figures" / "partition.csv").read_text().splitlines()
    assert rows[1].endswith(f",all,{held['clients'][0]['examples']}")


def test_pages_repeat(tmp_path):
    """The same run gives the same page, byte for byte."""
    path = make_run(tmp_path / "run", rounds=1, predictions=False)
    first = report.write([path]).read_bytes()
    assert report.write([path]).read_bytes() == first
