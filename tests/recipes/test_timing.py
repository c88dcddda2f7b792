"""Projected times: counts against hand arithmetic; the list names what is there."""

import pytest

from fedbayes import recipes
from fedbayes.recipes import timing


def test_examples_of_a_published_run_by_hand():
    cell = recipes.load_recipe("fischer-table-2").cells[0].experiment  # deterministic, IID
    trained, passes = timing.examples_of(cell)
    assert trained == 400 * 10 * 157 * 32  # 5,000 images a client are 157 batches of 32
    assert passes == 40 * 10_000  # every tenth round, one pass


def test_examples_of_a_distilling_run_by_hand():
    recipe = recipes.load_recipe("fedbe-table-1")
    e = next(c.experiment for c in recipe.cells if dict(c.at)["method"] == "fedbe")
    trained, passes = timing.examples_of(e)
    assert trained == pytest.approx(40 * 10 * 20 * 100 * 40 + 40 * 20 * 10_000)
    assert passes == pytest.approx(8 * 10_000 + 40 * 21 * 10_000 + 8 * 31 * 10_000)


def test_examples_of_a_server_with_another_data_set():
    quick, full = (recipes.load_recipe("fedbe-table-3", scale) for scale in ("quick", "full"))
    for recipe, inputs in ((quick, 2000), (full, 50_000)):
        mine, other = (
            timing.examples_of(next(c.experiment for c in recipe.cells if dict(c.at)["server"] == server))
            for server in ("cifar10", "cifar100")
        )
        e = recipe.cells[0].experiment
        held = 0.2 * (e.data.limit or 50_000)
        assert other[0] - mine[0] == pytest.approx(e.rounds * e.distill.epochs * (inputs - held))
        assert other[1] > mine[1]


def test_projection_adds_cells_and_seeds():
    recipe = recipes.load_recipe("fischer-table-5")
    works = {timing.work_of(c.experiment) for c in recipe.cells}
    assert len(works) == 1
    speed = timing.Speed(0.001, 0.0001)
    trained, passes = timing.examples_of(recipe.cells[0].experiment)
    assert timing.seconds(recipe, {works.pop(): speed}) == pytest.approx(2 * 5 * (trained * 0.001 + passes * 0.0001))


def test_measuring_gives_positive_times():
    work = timing.Work("mlp", "deterministic", (1, 8, 8))
    speed = timing.measure([work], budget=0.05, device="cpu")[work]
    assert speed.train > 0
    assert speed.example > 0


def test_the_list_names_every_recipe_and_what_is_absent(data_dir):
    text = recipes.list_recipes(data_dir, budget=0)
    for name in recipes.recipe_names():
        assert name in text
    line = next(x for x in text.splitlines() if x.startswith("ozer-table-10-clients"))
    assert "svhn (absent)" in line
    assert "fashion-mnist " in line


@pytest.mark.parametrize(("seconds", "words"), [(42, "42 s"), (600, "10 min"), (7200, "2 h"), (400_000, "5 days")])
def test_durations(seconds, words):
    assert timing.duration(seconds) == words
