"""Recipes: the loader's checks, the readings, the scales."""

from importlib import resources

import pytest

from fedbayes import config, recipes
from fedbayes.errors import ConfigError
from fedbayes.recipes.grid import digest, parse_recipe
from fedbayes.recipes.published import place
from fedbayes.schedule import learning_rate


def cell(recipe, **at):
    return next(c.experiment for c in recipe.cells if c.at == place(at))


@pytest.mark.parametrize("name", recipes.recipe_names())
@pytest.mark.parametrize("scale", ["full", "quick", "smoke"])
def test_every_recipe_loads_at_every_scale_and_its_experiments_are_possible(name, scale):
    recipe = recipes.load_recipe(name, scale)
    assert recipe.cells
    for c in recipe.cells:
        config.check(c.experiment)
        assert config.loads(config.dumps(c.experiment)) == c.experiment
    if recipe.kind == "table":
        assert recipe.published is not None


def test_fischer_table_2_is_the_papers_grid():
    recipe = recipes.load_recipe("fischer-table-2")
    assert len(recipe.cells) == 60
    assert recipe.seeds == 3
    e = cell(recipe, model="flipout", rule="lp", weighting="max-discrepancy", partition="2-class")
    assert (e.rounds, e.local.epochs, e.local.batch_size, e.local.learning_rate) == (400, 1, 32, 1e-3)
    assert (e.fusion.rule, e.fusion.weighting) == ("lp", "max-discrepancy-nearest")
    assert (e.partition.scheme, e.partition.classes_per_client, e.partition.clients) == ("shards", 2, 10)
    assert (e.model.name, e.model.kind, e.objective.prior_std, e.model.dropout) == ("resnet20", "flipout", 10.0, 0.2)
    assert (e.schedule.name, e.schedule.silent, e.schedule.decay, e.schedule.reading) == (
        "exponential",
        50,
        0.04,
        "exp",
    )


@pytest.mark.parametrize("name", recipes.published_names())
def test_every_option_of_every_reading_can_be_taken(name):
    for reading in recipes.load_recipe(name).readings:
        for option in recipes.READINGS[reading].options:
            recipes.load_recipe(name, readings={reading: option})


def test_clients_of_unequal_speed_are_shrunk_like_the_others():
    for scale, epochs in (("full", 20), ("quick", 3), ("smoke", 0)):
        assert {c.experiment.local.epochs_max for c in recipes.load_recipe("fedbe-table-4", scale).cells} == {epochs}


def test_a_round_chosen_on_validation_data_has_validation_data():
    """Without any the choice would be the last round, silently."""
    taken = {"reported_round": "best-validation-nll"}
    names = [n for n in recipes.recipe_names() if "reported_round" in recipes.load_recipe(n, "smoke").readings]
    cells = [c for n in names for c in recipes.load_recipe(n, readings=taken).cells]
    assert min(c.experiment.data.validation for c in cells) == 0.05


def test_a_refreshed_batch_norm_brings_the_images_it_needs():
    without, some = (
        recipes.load_recipe(n, readings={"batchnorm": "refresh"}) for n in ("reyes-table-2", "fischer-table-4")
    )
    assert {c.experiment.data.validation for c in (*without.cells, *some.cells)} == {0.05}
    held = (
        recipes.load_recipe("loomis-table-4.1", readings={"batchnorm": "refresh"}).cells[0].experiment.data.validation
    )
    assert held == 0.1


def test_readings_change_what_they_name_and_only_where_they_apply():
    at = {"model": "flipout", "rule": "ws", "weighting": "max-discrepancy", "partition": "dirichlet-0.5"}
    plain = cell(recipes.load_recipe("fischer-table-2"), **at)
    other = cell(
        recipes.load_recipe("fischer-table-2", readings={"max_discrepancy": "farthest", "dirichlet": "unequal"}), **at
    )
    changed = {k for k, v in config.flatten(other).items() if config.get(plain, k) != v}
    assert changed == {"fusion.weighting", "partition.scheme"}
    iid = {**at, "partition": "iid"}
    assert (
        cell(recipes.load_recipe("fischer-table-2", readings={"dirichlet": "unequal"}), **iid).partition.scheme == "iid"
    )


def test_loomis_fedavg_is_a_reading_for_gaussians_only():
    recipe = recipes.load_recipe("loomis-table-4.2", readings={"fedavg_flipout": "ws"})
    assert cell(recipe, model="flipout", prior="10", rule="fedavg", partition="iid").fusion.rule == "ws"
    assert cell(recipe, model="deterministic", prior="none", rule="fedavg", partition="iid").fusion.rule == "fedavg"
    flip1 = cell(recipe, model="flipout", prior="1", rule="fediv", partition="iid")
    assert (flip1.data.augment, flip1.objective.prior_std, flip1.fusion.rule) == ("none", 1.0, "conflation")


@pytest.mark.parametrize("name", ["loomis-table-4.1", "loomis-table-4.2", "loomis-figure-4.5"])
def test_the_schedule_that_loomis_does_not_state_is_a_reading(name):
    plain = recipes.load_recipe(name).cells[0].experiment
    constant = recipes.load_recipe(name, readings={"schedule": "constant"}).cells[0].experiment
    assert (plain.schedule.name, plain.schedule.silent, plain.evaluation.every) == ("exponential", 50, 10)
    assert {learning_rate(constant, r) for r in (1, 60, 200)} == {1e-3}
    if name != "loomis-table-4.1":
        assert recipes.load_recipe(name, readings={"evaluated_rounds": "1"}).cells[0].experiment.evaluation.every == 1


def test_both_signs_of_precision_weighting():
    at = {"batch": 200, "dataset": "mnist", "rule": "precision"}
    for sign, recipe in (
        ("inverse", recipes.load_recipe("reyes-table-2")),
        ("fisher", recipes.load_recipe("reyes-table-2", readings={"sign": "fisher"})),
    ):
        assert [o for o in cell(recipe, **at).fusion.options if o.startswith("sign=")] == [f"sign={sign}"]


def test_fedbe_methods_share_their_clients():
    recipe = recipes.load_recipe("fedbe-table-1")
    at = {"partition": "step", "network": "fedbe-convnet"}
    be, avg = cell(recipe, method="fedbe", **at), cell(recipe, method="fedavg", **at)
    assert be.distill.enabled
    assert be.distill.swa == "cyclical"
    assert not avg.distill.enabled
    assert be.data.validation + be.distill.fraction == avg.data.validation == 0.2
    assert be.local == avg.local
    one = next(c for c in recipe.cells if dict(c.at)["method"] == "1-ensemble")
    assert (one.model, one.experiment.rounds, one.experiment.local.epochs) == ("1-ensemble", 1, 200)
    mixed = cell(recipes.load_recipe("fedbe-table-2"), method="fedbe+fedprox", **at)
    assert mixed.distill.enabled
    assert mixed.objective.proximal == 0.01
    assert mixed.fusion.server_momentum == 0
    assert cell(recipes.load_recipe("fedbe-table-2"), method="fedavgm", **at).fusion.server_momentum == 0.9


def test_figures_use_the_cells_of_their_tables():
    table = {digest(c.experiment) for c in recipes.load_recipe("fischer-table-2").cells}
    figure = recipes.load_recipe("fischer-figure-7")
    assert {digest(c.experiment) for c in figure.cells} <= table
    assert {(dict(c.at)["model"], dict(c.at)["rule"]) for c in figure.cells} == {("dropout", "nwa"), ("flipout", "ws")}
    assert len(figure.cells) == 4


def minimal(**changes):
    rules = [{"at": {"rule": r}, "set": {"fusion.rule": r}} for r in ("nwa", "ws", "lp", "wc", "conflation")]
    table = {
        "title": "t", "paper": "p", "kind": "table", "published": "fischer-table-5",
        "axis": [{"value": [{"at": {"partition": "iid"}}]}, {"value": rules}],
    }  # fmt: skip
    return {**table, **changes}


def test_a_grid_that_matches_its_table_is_taken():
    assert len(parse_recipe("mine", minimal()).cells) == 5


def test_a_missing_cell_is_refused():
    table = minimal()
    table["axis"][1]["value"].pop()
    with pytest.raises(
        ConfigError, match=r"does not match Table 5.*lacks the cell partition=iid rule=conflation \(4 cells here, 5"
    ):
        parse_recipe("mine", table)


def test_an_extra_cell_is_refused():
    table = minimal()
    table["axis"][1]["value"].append({"at": {"rule": "aalv"}, "set": {}})
    with pytest.raises(ConfigError, match="was not printed: partition=iid rule=aalv"):
        parse_recipe("mine", table)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "tabel"}, "did you mean 'table'"),
        ({"sedes": 3}, "unknown key 'sedes'; did you mean 'seeds'"),
        ({"readings": {"lr_decays": "exp"}}, "did you mean 'lr_decay'"),
        ({"readings": {"lr_decay": "expo"}}, "did you mean 'exp'"),
        ({"base": {"fusion": {"rul": "ws"}}}, "fusion.rule"),
        ({"only": [{"rule": ["none-such"]}]}, "leaves no cell"),
    ],
)
def test_mistakes_are_one_sentence(changes, words):
    with pytest.raises(ConfigError, match=words):
        parse_recipe("mine", minimal(**changes))


def test_unknown_names():
    with pytest.raises(ConfigError, match="did you mean 'fischer-table-2'"):
        recipes.load_recipe("fisher-table-2")
    with pytest.raises(ConfigError, match="scale 'medium'"):
        recipes.load_recipe("fischer-table-2", "medium")
    with pytest.raises(ConfigError, match="no reading 'sign'"):
        recipes.load_recipe("fischer-table-2", readings={"sign": "fisher"})


def test_figures_shown_together_are_found_by_each_name():
    assert recipes.load_recipe("reyes-figure-8").name == recipes.load_recipe("reyes-figure-6").name == "reyes-figure-7"
    assert recipes.load_recipe("loomis-figure-4.4", "smoke").name == "loomis-figure-4.3"
    with pytest.raises(ConfigError, match="did you mean 'reyes-figure-8'"):
        recipes.load_recipe("reyes-figure8")


def test_every_reading_has_its_reason_above_it():
    for file in (resources.files("fedbayes.recipes") / "books").iterdir():
        above, inside = "", False
        for line in file.read_text(encoding="utf-8").splitlines():
            inside = line == "[readings]" if line.startswith("[") else inside
            if inside and "=" in line and not line.startswith("#"):
                assert above.startswith("# "), f"{file.name}: {line}"
            above = line


def test_runs_are_told_apart_by_what_they_compute():
    a = recipes.load_recipe("fischer-table-5").cells[0].experiment
    assert digest(a) == digest(config.override(a, {"name": "other", "checkpoint_every": 7}))
    assert digest(a) != digest(config.override(a, {"seed": 1}))


def test_options_of_a_rule_add_up_over_readings():
    at = {"batch": 200, "dataset": "mnist"}
    recipe = recipes.load_recipe("reyes-table-2", readings={"sign": "fisher", "epsilon": "keras"})
    assert set(cell(recipe, rule="precision", **at).fusion.options) == {
        "sign=fisher", "floor=1e-7", "bias_correction=true",
    }  # fmt: skip
    assert cell(recipe, rule="fedavg", **at).fusion.options == ()


def test_released_schedule_of_fedbe():
    recipe = recipes.load_recipe("fedbe-table-1", readings={"client_schedule": "released"})
    e = cell(recipe, method="fedavg", partition="step", network="resnet20")
    rates = [learning_rate(e, r) / e.local.learning_rate for r in (1, 2, 12, 13, 24, 25, 36, 37, 40)]
    assert rates == pytest.approx([0.5, 1, 1, 0.2, 0.2, 0.1, 0.1, 0.01, 0.01])


def test_factors_must_be_one_more_than_milestones():
    with pytest.raises(ConfigError, match=r"'schedule\.factors' must be one more than the milestones .* not 2 for 2"):
        config.override(config.Experiment(), {"schedule.name": "step", "schedule.factors": [1.0, 0.5]})
