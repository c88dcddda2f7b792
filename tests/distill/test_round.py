"""Distillation inside the round loop, on the embedded digits."""

import dataclasses

import pytest
import torch

from fedbayes import config, runner
from fedbayes.data import Examples
from fedbayes.distill import check_unlabelled, distill
from fedbayes.errors import ConfigError, DataError, RunError
from fedbayes.setup import share_a_launch

SMALL = {
    "rounds": 2, "data.limit": 240, "data.test_limit": 80, "partition.clients": 3, "partition.alpha": 0.3,
    "model.name": "mlp", "model.kind": "deterministic", "fusion.rule": "fedavg", "local.epochs": 2,
    "evaluation.samples": 2, "distill.enabled": True, "distill.samples": 2, "distill.epochs": 4, "distill.batch_size": 16,
    "distill.swa_start": 2, "distill.swa_cycle": 3, "engine.device": "cpu", "engine.lanes": 1,
}  # fmt: skip


def experiment(**changes):
    return config.override(config.Experiment(), {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}})


@pytest.mark.parametrize(
    ("distribution", "kind", "members"),
    [("gaussian", "deterministic", 6), ("dirichlet", "deterministic", 6), ("clients", "deterministic", 3),
     ("gaussian-released", "deterministic", 6), ("posterior", "flipout", 6), ("gaussian", "flipout", 6)],
)  # fmt: skip
def test_every_distribution_runs_in_the_loop_and_logs_its_predictors(distribution, kind, members):
    rule = "fedavg" if kind == "deterministic" else "nwa"
    result = runner.run(
        experiment(distill__distribution=distribution, model__kind=kind, fusion__rule=rule), write=False
    )
    distilled = [e for e in result.events if e["kind"] == "distill"]
    assert [e["round"] for e in distilled] == [1, 2]
    assert distilled[0]["members"] == members
    assert distilled[0]["snapshots"] >= 1
    models = {e["model"] for e in result.events if e["kind"] == "evaluation" and e["split"] == "test"}
    assert models == {"global", "average", "1-ensemble", "ensemble"}
    if kind == "flipout":
        mid = next(iter(result.posterior.gaussians.values()))
        assert float(mid.variance.min()) > 0


def test_ensemble_predictions_are_the_members_predictions():
    result = runner.run(experiment(), write=False)
    sizes = {e["model"]: e["samples"] for e in result.events if e["kind"] == "evaluation" and e["split"] == "test"}
    assert sizes == {"global": 1, "average": 1, "1-ensemble": 3, "ensemble": 6}


@pytest.mark.parametrize("rule", ["fedavg", "precision"])
def test_a_point_model_has_no_posterior_to_draw_from(rule, tmp_path):
    """Precision weighting's variances are Adam's moments: nothing is drawn from them, and nothing is trained first."""
    with pytest.raises(ConfigError, match="no Gaussian weights"):
        runner.run(experiment(distill__distribution="posterior", fusion__rule=rule), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_student_that_diverges_is_told_from_clients_that_do():
    with pytest.raises(RunError, match=r"distillation has diverged.*distill\.learning_rate"):
        runner.run(experiment(distill__learning_rate=1e30, distill__swa="none"), write=False)


def test_runs_repeat_bit_for_bit():
    a, b = (runner.run(experiment(rounds=1), write=False) for _ in range(2))
    assert a.posterior.same_bits(b.posterior)


def test_identical_clients_teach_the_student_nothing():
    """All members equal to the average: the loss is zero from the first step, so the student stays where it is."""
    setup = runner.prepare(experiment())
    settings = dataclasses.replace(setup.experiment.distill, distribution="dirichlet", weight_decay=0.0, swa="none")
    made = distill(
        setup.model, setup.start, [setup.start] * 3, [1, 2, 3], setup.start, setup.unlabelled, setup.transform,
        settings, (0, "distill", 1), setup.experiment.engine,
    )  # fmt: skip
    assert made.record["last_loss"] == pytest.approx(0, abs=1e-6)
    for name, t in setup.start.points.items():
        torch.testing.assert_close(made.posterior.points[name], t, atol=1e-4, rtol=0)


def test_batchnorm_statistics_are_measured_on_the_servers_inputs():
    setup = runner.prepare(
        experiment(
            model__name="resnet20", data__limit=120, distill__epochs=1, distill__swa_start=0, distill__swa_cycle=1
        )
    )
    made = distill(
        setup.model, setup.start, [setup.start] * 2, [1, 1], setup.start, setup.unlabelled, setup.transform,
        setup.experiment.distill, (0, "distill", 1), setup.experiment.engine,
    )  # fmt: skip
    moved = [n for n, t in setup.start.points.items() if n.endswith("running_var")]
    assert moved
    assert all(not torch.equal(made.posterior.points[n], setup.start.points[n]) for n in moved)
    assert all(float(made.posterior.points[n].min()) >= 0 for n in moved)


def test_inputs_of_another_shape_are_refused():
    train = Examples(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), {})
    other = Examples(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), {})
    with pytest.raises(DataError, match=r"\(1, 28, 28\).*\(3, 32, 32\)"):
        check_unlabelled(other, train)
    with pytest.raises(DataError, match="no unlabelled inputs"):
        check_unlabelled(train.take([]), train)
    check_unlabelled(train, train)


def test_variational_sampling_is_refused_for_point_models():
    with pytest.raises(ConfigError, match="no Gaussian"):
        runner.run(experiment(distill__distribution="posterior"), write=False)


def test_a_schedule_that_averages_nothing_is_refused_before_the_first_round():
    events = []
    with pytest.raises(ConfigError, match="would average no snapshot"):
        runner.run(experiment(distill__swa_start=500), write=False, listeners=[events.append])
    assert not any(e["kind"] == "round" for e in events)


def test_federations_of_one_launch_distil_together_as_each_would_alone():
    """Three methods whose clients share lanes: every student and every event is the one of a run of its own."""
    methods = [
        {"distill__distribution": "clients", "distill__swa": "none"},
        {"distill__distribution": "gaussian"},
        {"distill__enabled": False, "data__validation": 0.2},
    ]
    several = [experiment(engine__lanes=2, **m) for m in methods]
    setups = [runner.prepare(e) for e in several]
    assert share_a_launch(setups[0], setups[1])
    assert share_a_launch(setups[0], setups[2])  # the server's validation set does not change the clients' training
    together = runner.run_setups([runner.Launch(s) for s in setups], report=False)
    for e, result in zip(several, together, strict=True):
        alone = runner.run(e, write=False)
        for name, t in alone.posterior.points.items():
            torch.testing.assert_close(result.posterior.points[name], t, atol=1e-4, rtol=1e-3)
        kinds = [[x["kind"] for x in r.events] for r in (alone, result)]
        assert kinds[0] == kinds[1]
