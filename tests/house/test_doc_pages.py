"""The Python of the documentation's pages runs as it is written, page by page from top to bottom."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedbayes
from fedbayes import config
from fedbayes.data import load

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", ["data.md", "engine.md", "fusion.md", "networks.md"])
def test_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    (tmp_path / "ward.csv").write_text("age,smoker,diagnosis,ward\n61,yes,ill,A\n40,,well,B\n,no,well,A\n55,no,ill,B\n")
    for code in snippets(page):
        known = "import pandas" not in code or find_spec("pandas") is not None
        if known and not code.startswith("# my_"):  # a module of one's own, which the tests of its room import
            exec(compile(code, page, "exec"), names)


def test_uncertainty_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = config.override(config.read("digits"), {"rounds": 1, "evaluation.samples": 3})
    fedbayes.run(experiment, tmp_path / "runs" / "digits-001", report=False)
    numbers, _, using = snippets("uncertainty.md")
    names = {"images": load(experiment.data).test.inputs[:20]}
    for code in (numbers, using):
        exec(compile(code, "uncertainty.md", "exec"), names)
    assert len(names["each"]["epistemic"]) == 360
    assert names["found"].rejected(0.1).sum() == 2
