"""Every recipe runs, end to end, on a few hundred real images."""

from pathlib import Path

import pytest

from fedbayes import recipes
from fedbayes.rundir import is_finished


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reproduced")


ABSENT = {"svhn", "cifar100", "tiny-imagenet.npz"}
ORDER = sorted(recipes.recipe_names(), key=lambda n: ("figure" in n, n))  # tables first: figures use their runs


@pytest.mark.parametrize("name", ORDER)
def test_smoke(name, out, data_dir):
    made = recipes.reproduce(name, "smoke", (), out, data_dir, changes={"engine.device": "cpu", "engine.lanes": 1})
    assert not made.skipped
    page = made.page.read_text()
    assert made.recipe.title.split("'")[0].split("&")[0] in page
    assert "http" not in page.split("<body>")[1].replace("http://www.w3.org/2000/svg", "")
    if made.recipe.figures == ("fused-densities",):
        assert page.count("<svg") == (4 if name.endswith("2") else 1)
        return
    done = [p for paths, _ in made.runs.values() for p in paths]
    assert done
    assert all(is_finished(p) for p in done)  # of its own, and of the cells it shares with recipes before it
    if made.recipe.kind == "table":
        words = {v.word for v in made.verdicts}
        ran = [v for v in made.verdicts if v.ours is not None]
        # one round reaches no target and has no spread over rounds, so these two tables stay empty
        assert ran or {v.metric for v in made.verdicts} <= {"rounds", "reliability"}
        assert words <= {"agrees", "differs", "no number", "not run"}
        assert "not run" in words or len(made.recipe.cells) == 1


def test_a_second_call_runs_nothing_again(out, data_dir):
    ran = []
    made = recipes.reproduce(
        "reyes-table-1", "smoke", (), out, data_dir, changes={"engine.device": "cpu", "engine.lanes": 1},
        run_many=lambda items: ran.extend(items),
    )  # fmt: skip
    assert all(is_finished(path) for _, _, path in ran)
    assert any(v.ours is not None for v in made.verdicts)
