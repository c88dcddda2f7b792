"""What ``reproduce`` runs, skips, shares and writes, with runs that are written instead of trained."""

import csv
import json

import pytest

from fedbayes import recipes
from fedbayes.errors import ConfigError
from fedbayes.rundir import is_finished


class Writer:
    """Stands in for training: leaves a finished run whose accuracy is given."""

    def __init__(self, accuracy=0.5):
        self.accuracy, self.items = accuracy, []

    def __call__(self, items):
        for label, experiment, path in items:
            self.items.append((label, experiment, path))
            path.mkdir(parents=True, exist_ok=True)
            metrics = {"accuracy": self.accuracy, "nll": 1.0, "ece": 0.1}
            events = [
                {"kind": "evaluation", "round": 1, "split": "test", "model": "global", "metrics": metrics},
                {"kind": "end", "rounds": 1, "best_round": 1, "seconds": 1},
            ]
            (path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def test_only_keeps_the_cells_that_hold_every_word(tmp_path, data_dir):
    writer = Writer()
    made = recipes.reproduce(
        "fischer-table-2", "quick", ["partition=2-class rule=w* weighting=size"], tmp_path, data_dir, run_many=writer
    )
    assert sorted(e.fusion.rule for _, e, _ in writer.items) == ["wc", "ws"]
    assert {e.partition.scheme for _, e, _ in writer.items} == {"shards"}
    assert sum(v.ours is not None for v in made.verdicts) == 4  # two cells, accuracy and NLL
    assert sum(v.word == "not run" for v in made.verdicts) == 116
    with open(tmp_path / "fischer-table-2-quick.csv") as f:
        before = sum(row["verdict"] != "not run" for row in csv.DictReader(f))
    piece = ["partition=2-class rule=nwa weighting=size"]
    made = recipes.reproduce("fischer-table-2", "quick", piece, tmp_path, data_dir, run_many=writer)
    after = sum(v.ours is not None for v in made.verdicts)
    assert before == 4 < after  # what an earlier piece ran stays on the page
    assert len(writer.items) == after / 2
    with pytest.raises(ConfigError, match="a cell is called 'model=deterministic partition=iid"):
        recipes.reproduce("fischer-table-2", "quick", ["rule=nothing"], tmp_path, data_dir, run_many=writer)


def test_seeds_are_runs_of_their_own_and_finished_ones_are_kept(tmp_path, data_dir):
    writer = Writer()
    only = ["rule=nwa"]
    recipes.reproduce("fischer-table-5", "full", only, tmp_path, data_dir, run_many=writer)
    assert [e.seed for _, e, _ in writer.items] == [0, 1]
    assert all(is_finished(p) for _, _, p in writer.items)
    made = recipes.reproduce("fischer-table-5", "full", only, tmp_path, data_dir, run_many=lambda items: None)
    ours = next(v.ours for v in made.verdicts if v.ours is not None)
    assert (ours.value, ours.seeds) == (0.5, 2)


def test_the_page_links_only_what_is_there(tmp_path, data_dir):
    writer = Writer()
    made = recipes.reproduce("fischer-table-5", "quick", ["rule=nwa"], tmp_path, data_dir, run_many=writer)
    run = writer.items[0][2].name
    assert f'href="runs/{run}/"' in made.page.read_text()
    (tmp_path / "runs" / run / "report.html").write_text("written by `fedbayes report`")
    made = recipes.reproduce("fischer-table-5", "quick", ["rule=nwa"], tmp_path, data_dir, run_many=lambda items: None)
    assert f'href="runs/{run}/report.html"' in made.page.read_text()


def test_a_figure_finds_the_runs_of_its_table(tmp_path, data_dir):
    only = ["model=flipout rule=ws weighting=size partition=iid"]
    first, second = Writer(), Writer()
    recipes.reproduce("fischer-table-2", "quick", only, tmp_path, data_dir, run_many=first)
    recipes.reproduce("fischer-figure-3", "quick", only, tmp_path, data_dir, run_many=second)
    assert first.items[0][2] == second.items[0][2]


def test_readings_make_runs_of_their_own(tmp_path, data_dir):
    one, two = Writer(), Writer()
    only = ["batch=200 dataset=mnist rule=precision"]
    read = recipes.reproduce("reyes-table-2", "quick", only, tmp_path, data_dir, run_many=one)
    other = recipes.reproduce(
        "reyes-table-2", "quick", only, tmp_path, data_dir, run_many=two, readings={"sign": "fisher", "dropout": "0.25"}
    )
    assert one.items[0][2] != two.items[0][2]
    assert read.page.name == "reyes-table-2-quick.html"
    assert other.page.name == "reyes-table-2-quick-sign=fisher.html"  # the first page stays; the default is no change
    assert read.page.exists()


def test_no_seed_is_refused_before_the_page_is_touched(tmp_path):
    for seeds in (0, -1):
        with pytest.raises(ConfigError, match="--seeds must be at least 1"):
            recipes.reproduce("fischer-table-5", "quick", (), tmp_path / "out", seeds=seeds, run_many=Writer())
    assert not (tmp_path / "out").exists()


def test_a_run_of_one_round_gives_no_index_but_is_not_unrun(tmp_path, data_dir):
    only = ["dataset=mnist"]
    made = recipes.reproduce("reyes-table-3", "smoke", only, tmp_path, data_dir, run_many=Writer())
    words = {dict(v.at)["dataset"]: set() for v in made.verdicts}
    for v in made.verdicts:
        words[dict(v.at)["dataset"]].add(v.word)
    assert words.pop("mnist") == {"no number"}
    assert set().union(*words.values()) == {"not run"}
    assert "Smoke scale: 100 training and 40 test examples" in str(made)
    assert 'class="no-number"' in made.page.read_text()


def test_what_is_drawn_from_the_rules_alone_speaks_of_no_runs(tmp_path):
    made = recipes.reproduce("ozer-figure-1", "quick", (), tmp_path)
    assert "nothing is run" in str(made)
    for text in (str(made), made.page.read_text()):
        assert "cells run" not in text
        assert "not run" not in text
    with pytest.raises(ConfigError, match="ozer-figure-2 is drawn without runs"):
        recipes.reproduce("ozer-figure-2", "quick", ["x"], tmp_path)


def test_words_that_fit_no_cell_are_refused(tmp_path, data_dir):
    with pytest.raises(ConfigError, match="'rule=wsx' fits no cell of fischer-table-5; a cell is called"):
        recipes.reproduce("fischer-table-5", "quick", ["rule=ws", "rule=wsx"], tmp_path, data_dir, run_many=Writer())


def test_cells_without_their_data_are_skipped_with_the_reason(tmp_path, data_dir):
    writer = Writer()
    made = recipes.reproduce("ozer-table-10-clients", "quick", (), tmp_path, data_dir, run_many=writer)
    assert len(made.skipped) == 3
    assert all("svhn" in cell for cell in made.skipped)
    assert {e.data.name for _, e, _ in writer.items} == {"fashion-mnist", "cifar10"}
    assert "svhn" in str(made)


def test_the_page_and_its_numbers(tmp_path, data_dir):
    writer = Writer(0.4384)
    made = recipes.reproduce("fischer-table-5", "full", (), tmp_path, data_dir, run_many=writer, seeds=1)
    page = made.page.read_text()
    assert made.page.name == "fischer-table-5-full.html"
    assert "Table 5, section 3.7" in page
    assert "43.54 ± 0.54" in page  # the paper's ws
    assert page.count('class="agrees"') == sum(v.word == "agrees" for v in made.verdicts) > 0
    assert page.count('class="differs"') == sum(v.word == "differs" for v in made.verdicts) > 0
    assert "what the paper leaves open" in page.lower()
    with open(tmp_path / "fischer-table-5-full.csv") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == 10
    ws = next(r for r in rows if "rule=ws" in r["cell"] and r["metric"] == "accuracy")
    assert float(ws["paper"]) == pytest.approx(0.4354)
    assert float(ws["difference"]) == pytest.approx((0.4384 - 0.4354) / 0.0054)
    assert ws["verdict"] == "agrees"


def test_shrunken_and_changed_runs_say_that_they_prove_nothing(tmp_path, data_dir):
    quick = recipes.reproduce("fischer-table-5", "quick", ["rule=ws"], tmp_path, data_dir, run_many=Writer())
    assert "Quick scale" in str(quick)
    changed = recipes.reproduce(
        "fischer-table-5", "full", ["rule=ws"], tmp_path, data_dir, run_many=Writer(), changes={"rounds": 3}
    )
    assert "were overridden" in str(changed)
    assert "were overridden" in changed.page.read_text()


def test_the_engine_is_chosen_on_the_command_line_and_changes_no_verdict(tmp_path, data_dir, monkeypatch, capsys):
    from fedbayes import cli
    from fedbayes.recipes import runner

    writer = Writer()
    monkeypatch.setattr(runner, "run_with_lanes", lambda *_: writer)
    command = [
        "reproduce",
        "reyes-table-2",
        "--engine.compile",
        "--only",
        "batch=200 dataset=mnist",
        "--out",
        str(tmp_path),
    ]
    assert cli.main([*command, "--data-dir", str(data_dir), "--engine.lanes", "7"]) == 0
    assert {(e.engine.compile, e.engine.lanes) for _, e, _ in writer.items} == {(True, 7)}
    assert "overridden" not in capsys.readouterr().out
    assert cli.main([*command, "--data-dir", str(data_dir), "--engine.precision", "bf16"]) == 0
    assert "were overridden" in capsys.readouterr().out  # other numbers, not another way to them
    assert cli.main([*command, "--data-dir", str(data_dir), "--rounds", "2"]) == 0
    assert writer.items[-1][1].rounds == 2
    assert "were overridden" in capsys.readouterr().out
