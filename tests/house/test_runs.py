"""Whole runs on embedded data: files, repeatability, shared launches, grids, pre-training, every rule by name."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes import Posterior, compare, config, runner
from fedbayes.data import from_arrays
from fedbayes.errors import ConfigError, RunError
from fedbayes.fusion import rules
from fedbayes.rundir import is_finished, read_events
from fedbayes.setup import share_a_launch

SMALL = {
    "rounds": 2, "partition.clients": 4, "data.limit": 300, "data.test_limit": 100, "evaluation.samples": 3,
    "engine.lanes": 1, "local.epochs": 1,
}  # fmt: skip


def small(**changes):
    named = {k.replace("__", "."): v for k, v in changes.items()}
    return config.override(config.read("digits"), {**SMALL, **named})


def test_a_run_leaves_its_files_and_repeats_to_the_bit(tmp_path):
    first = fedbayes.run(small(), tmp_path / "a", report=False)
    again = fedbayes.run(config.read(tmp_path / "a"), tmp_path / "b", report=False)
    assert again.posterior.same_bits(first.posterior)
    assert again.metrics() == first.metrics()
    kinds = [e["kind"] for e in read_events(tmp_path / "a")]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("round") == 2
    assert {p.name for p in (tmp_path / "a").iterdir()} >= {
        "config.toml", "metrics.jsonl", "final.safetensors", "best.safetensors", "checkpoint.safetensors",
        "partition.json", "predictions-test.npz", "predictions-validation.npz", "predictor.json",
    }  # fmt: skip
    assert Posterior.load(tmp_path / "a" / "final.safetensors").same_bits(first.posterior)


def test_a_lane_count_left_open_is_written_down_and_repeats(tmp_path):
    first = fedbayes.run(small(engine__lanes=0), tmp_path / "a", report=False)
    engine = config.read(tmp_path / "a").engine
    chosen, workers = engine.lanes, engine.workers
    assert chosen > 0
    assert workers > 0
    again = fedbayes.run(config.read(tmp_path / "a"), tmp_path / "b", report=False)
    assert again.posterior.same_bits(first.posterior)
    resumed = fedbayes.run(small(engine__lanes=0, rounds=3), tmp_path / "a", resume=True, report=False)
    assert config.read(tmp_path / "a").engine.lanes == chosen
    whole = fedbayes.run(small(engine__lanes=chosen, engine__workers=workers, rounds=3), write=False)
    assert resumed.posterior.same_bits(whole.posterior)


def test_a_batch_of_padding_is_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match="every batch is completed to that size"):
        fedbayes.run(small(local__batch_size=100_000), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_other_seeds_give_other_posteriors():
    assert not fedbayes.run(small(seed=1), write=False).posterior.same_bits(
        fedbayes.run(small(), write=False).posterior
    )


def test_threads_do_not_change_what_a_client_sees():
    before = torch.get_num_threads()
    shards = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        shards.append([s.tolist() for s in runner.prepare(small()).shards])
    torch.set_num_threads(before)
    assert shards[0] == shards[1]


@pytest.mark.parametrize("rule", [r.name for r in rules()])
def test_every_rule_runs_by_name(rule):
    kind = "deterministic" if rule in ("fedavg", "precision") else "flipout"
    result = fedbayes.run(small(fusion=rule, model__kind=kind, rounds=1), write=False)
    assert all(torch.isfinite(g.mean).all() and (g.variance > 0).all() for g in result.posterior.gaussians.values())
    assert 0 <= result.metrics()["accuracy"] <= 1


@pytest.mark.parametrize("kind", ["deterministic", "dropout", "flipout", "local", "sample"])
def test_every_kind_of_network_learns(kind):
    result = fedbayes.run(small(model__kind=kind, rounds=6, local__epochs=4, data__limit=0), write=False)
    assert result.metrics()["accuracy"] > 0.6
    assert (result.metrics()["epistemic"] == 0) == (kind == "deterministic")


def test_best_round_is_chosen_on_validation_only():
    result = fedbayes.run(small(rounds=5), write=False)
    scores = {e["round"]: e["metrics"]["nll"] for e in result.events if e.get("split") == "validation"}
    assert result.best_round == min(scores, key=scores.get)
    assert result.metrics() == next(
        e["metrics"] for e in result.events if e.get("split") == "test" and e["round"] == result.best_round
    )


def test_server_shares_are_disjoint_and_nothing_is_lost():
    s = runner.prepare(small(pretrain__fraction=0.2, distill__enabled="true", distill__fraction=0.2))
    parts = [*s.shards, s.validation, s.server]
    used = torch.cat([torch.from_numpy(p) for p in parts])
    assert len(used) == len(used.unique())
    assert len(used) + len(s.unlabelled) == len(s.dataset.train)


def test_pretraining_stops_early_and_is_the_start():
    s = runner.prepare(small(pretrain__fraction=0.3, pretrain__epochs=4, pretrain__patience=1, data__limit=0))
    seen = []
    start = runner.pretrain(s, [seen.append])
    assert 1 <= len(seen) <= 4
    assert not start.same_bits(s.start)
    judge = runner.make_federation(s, runner.local_cohort([s]), None).judge
    assert judge(start, 1)[0]["metrics"]["accuracy"] > judge(s.start, 1)[0]["metrics"]["accuracy"]


def test_pretraining_is_on_record_and_uses_the_servers_mean(tmp_path):
    e = small(pretrain__fraction=0.3, pretrain__epochs=2, data__mean="client", rounds=1)
    fedbayes.run(e, tmp_path / "a", report=False)
    kinds = [event["kind"] for event in read_events(tmp_path / "a")]
    assert kinds[:4] == ["start", "pretrain", "pretrain", "round"]
    s = runner.prepare(e)
    start = runner.pretrain(s)
    s.transform.shift[:-1] += 100.0  # the clients' means are no business of the server
    assert runner.pretrain(s).same_bits(start)


def test_a_lane_count_chosen_before_a_kill_is_kept(tmp_path):
    fedbayes.run(small(engine__lanes=3), tmp_path / "a", report=False)
    for name in ("checkpoint.safetensors", "metrics.jsonl"):  # killed in the first round
        (tmp_path / "a" / name).unlink()
    resumed = fedbayes.run(small(engine__lanes=0), tmp_path / "a", resume=True, report=False)
    assert config.read(tmp_path / "a").engine.lanes == 3
    assert {e["engine"]["lanes"] for e in resumed.events if e["kind"] == "round"} == {3}


def test_batch_norm_statistics_can_be_measured_on_the_servers_data():
    """The refreshed statistics are the mean and variance of the first layer's outputs on the validation inputs."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8),
                                  torch.nn.ReLU(), torch.nn.Linear(8, 10))  # fmt: skip
    s = runner.prepare(small(evaluation__refresh_batchnorm=True, fusion="fedavg"), model=network)
    judge = runner.make_federation(s, runner.local_cohort([s]), None).judge
    fresh = judge.refreshed(s.start, 1)
    x = s.transform(s.dataset.train.take(s.validation).inputs, client=-1).flatten(1)
    y = x @ s.start.points["1.weight"].T + s.start.points["1.bias"]
    torch.testing.assert_close(fresh.points["2.running_mean"], y.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fresh.points["2.running_var"], y.var(0), rtol=1e-4, atol=1e-5)
    off = dataclasses.replace(
        s.experiment, evaluation=dataclasses.replace(s.experiment.evaluation, refresh_batchnorm=False)
    )
    plain = runner.make_federation(dataclasses.replace(s, experiment=off), runner.local_cohort([s]), None).judge
    assert torch.equal(plain.probabilities(fresh, "test", 1), judge.probabilities(s.start, "test", 1))
    assert not torch.equal(plain.probabilities(s.start, "test", 1), judge.probabilities(s.start, "test", 1))


def test_shared_launch_equals_separate_runs():
    """Deterministic networks, so that lanes and rounding are all that differ."""
    variants = [
        small(model__kind="deterministic", fusion="fedavg", engine__lanes=6, **change)
        for change in ({}, {"seed": 1, "data__limit": 0}, {"local__learning_rate": 0.001})
    ]
    variants = [config.override(v, {"data.limit": 0, "data.test_limit": 0}) for v in variants]
    setups = [runner.prepare(v) for v in variants]
    assert all(share_a_launch(setups[0], s) for s in setups)
    together = runner.run_setups([runner.Launch(s) for s in setups])
    for setup, one in zip(setups, together, strict=True):
        plain = dataclasses.replace(setup.experiment, engine=dataclasses.replace(setup.experiment.engine, lanes=1))
        alone = fedbayes.run(plain, write=False)
        for name, tensor in alone.posterior.points.items():
            torch.testing.assert_close(one.posterior.points[name], tensor, rtol=2e-3, atol=2e-5)


def test_runs_whose_clients_have_means_of_their_own_share_a_launch():
    """Fischer's and Loomis' recipes subtract each site's own mean; partitions differ by seed, and so do the means."""
    change = {"data.mean": "client", "data.limit": 0, "data.test_limit": 0, "evaluation.every": 2}
    base = config.override(small(model__kind="deterministic", fusion="fedavg", engine__lanes=6), change)
    variants = [config.override(base, c) for c in ({}, {"seed": 1}, {"partition.clients": 2}, {"partition.clients": 1})]
    setups = [runner.prepare(v) for v in variants]
    assert all(share_a_launch(setups[0], s) for s in setups)
    assert not torch.equal(setups[0].transform.shift, setups[1].transform.shift)
    together = runner.run_setups([runner.Launch(s) for s in setups])
    for setup, one in zip(setups, together, strict=True):
        alone = fedbayes.run(config.override(setup.experiment, {"engine.lanes": 1}), write=False)
        for name, tensor in alone.posterior.points.items():
            torch.testing.assert_close(one.posterior.points[name], tensor, rtol=2e-3, atol=2e-5)
        assert one.metrics()["nll"] == pytest.approx(alone.metrics()["nll"], rel=1e-3)


def test_a_shared_launch_stopped_in_its_evaluations_resumes_to_the_same_bits(tmp_path):
    """Layer noise is drawn for the launch as a whole, so its runs must come back at one and the same round."""

    def go(root, stop_at=0):
        seen = []

        def listen(event):
            seen.append(event)
            if event["kind"] == "evaluation" and sum(e["kind"] == "evaluation" for e in seen) == stop_at:
                raise KeyboardInterrupt

        cells = compare.grid(small(rounds=3, engine__lanes=3, data__validation=0), {"fusion": ["nwa", "ws"]}, 1, root)
        compare.run_grid(cells, lanes_shared=True, listeners=lambda cell: [listen])
        return [Posterior.load(c.path / "final.safetensors") for c in cells]

    whole = go(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "stopped", stop_at=4)  # round 2: the first run is judged, the second is about to be
    again = go(tmp_path / "stopped")
    assert all(a.same_bits(b) for a, b in zip(again, whole, strict=True))


def test_a_grid_runs_once_and_is_averaged(tmp_path):
    axes = compare.parse_vary(["fusion=nwa,ws", "local.betas=[0.9,0.99],[0.8,0.9]"])
    assert axes["local.betas"] == ["[0.9,0.99]", "[0.8,0.9]"]
    cells = compare.grid(small(rounds=1), {"fusion": axes["fusion"]}, 2, tmp_path)
    assert len(compare.run_grid(cells)) == 4
    assert compare.run_grid(cells) == []
    table = compare.rows(cells)
    assert [r.label for r in table] == ["fusion=nwa", "fusion=ws"]
    values = table[0].values["accuracy"]
    assert table[0].mean("accuracy") == pytest.approx(sum(values) / 2)
    assert "±" in compare.render(table)
    assert all(is_finished(c.path) for c in cells)
    other = compare.grid(small(rounds=1, local__learning_rate=0.5), {"fusion": ["nwa", "ws"]}, 2, tmp_path)
    with pytest.raises(RunError, match="learning_rate"):
        compare.run_grid(other)


def test_every_run_of_a_grid_repeats_from_its_configuration(tmp_path):
    cells = compare.grid(small(rounds=1, engine__lanes=3), {"fusion": ["nwa", "ws"]}, 2, tmp_path)
    compare.run_grid(cells)
    for cell in (cells[1], cells[2]):
        alone = fedbayes.run(config.read(cell.path), write=False)
        assert alone.posterior.same_bits(Posterior.load(cell.path / "final.safetensors"))


def test_seeds_can_be_an_axis(tmp_path):
    cells = compare.grid(small(), {"seed": ["4", "9"]}, 1, tmp_path)
    assert [c.experiment.seed for c in cells] == [4, 9]
    assert [c.seed for c in cells] == [4, 9]


def test_runs_of_many_axes_have_folders_that_can_be_made(tmp_path):
    rows = [f"{'ä' * 60}{i}" for i in range(2)]
    axes = {f"objective.{key}": ["1", "2"] for key in ("prior_std", "kl_weight", "proximal")}
    cells = compare.grid(small(), {"name": rows, "data.name": [f"{'d' * 200}.npz"], **axes}, 2, tmp_path)
    assert len({c.path for c in cells}) == 2 * 2**3 * 2
    for cell in cells:
        cell.path.mkdir()


def test_a_wrong_value_stops_a_grid_before_it_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"--vary.*partition\.alpha"):
        compare.grid(small(), {"partition.alpha": ["1", "x"]}, 1, tmp_path)
    with pytest.raises(ConfigError, match="key=value"):
        compare.parse_vary(["fusion"])


def test_own_network_and_arrays():
    from fedbayes.data import Dataset, Examples

    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=g)
    y = (x[:, 0] + x[:, 1] > 0).long()
    mine = Dataset("mine", Examples(x[:200], y[:200]), Examples(x[200:], y[200:]), ("no", "yes"))
    torch.manual_seed(0)
    network = fedbayes.bayesianize(
        torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)), "flipout"
    )
    e = small(rounds=8, data__limit=0, data__test_limit=0, local__epochs=4, local__learning_rate=0.01)
    result = fedbayes.run(e, dataset=mine, model=network, write=False)
    assert result.metrics()["accuracy"] > 0.85
    prediction = result.predictor("cpu")(x[200:])
    assert prediction.probabilities.shape == (100, 2)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("fusion.rule", "nwaa", "nwa"),
        ("fusion.weighting", "sizes", "size"),
        ("partition.scheme", "dirichlett", "dirichlet"),
        ("model.name", "resnet21", "did you mean .resnet"),
        ("data.name", "digitz", "digits"),
        ("partition.clients", 5000, "5000"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(key, value, words):
    with pytest.raises(fedbayes.errors.FedBayesError, match=words):
        runner.prepare(config.override(config.read("digits"), {key: value}))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 10)), "does not take inputs of shape"),
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)), "must be \\(1, 10\\)"),
    ],
)
def test_a_network_that_does_not_fit_its_data_is_refused_beforehand(network, words):
    with pytest.raises(ConfigError, match=words):
        runner.prepare(small(), model=network)


@pytest.mark.parametrize(("key", "argument"), [("data.name", "dataset"), ("model.name", "model")])
def test_what_was_given_in_python_is_asked_for_again(key, argument):
    """The configuration of such a run names it, but cannot make it."""
    with pytest.raises(ConfigError, match=rf"'python:Mine' was given in Python: .*{argument}=\.\.\."):
        runner.prepare(config.override(small(), {key: "python:Mine"}))


def test_what_a_network_of_ones_own_must_do_is_said():
    with pytest.raises(ConfigError, match=r"tokens reach it as float32: call inputs\.long\(\)"):
        runner.prepare(small(), model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Embedding(256, 10)))
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(ConfigError, match="before \\(logits\\)"):
        runner.prepare(small(), model=torch.nn.Sequential(plain, torch.nn.Softmax(1)))
    ones = from_arrays(torch.rand(60, 1, 8, 8), torch.arange(60) % 10 + 1)
    e = small(data__limit=0, data__test_limit=0)
    with pytest.raises(ConfigError, match="labels count from 0, and the smallest is 1"):
        runner.prepare(e, dataset=ones, model=plain)


@pytest.mark.parametrize("kind", ["deterministic", "dropout", "flipout", "local", "sample"])
def test_a_network_of_ones_own_is_judged_and_described_as_what_it_is(kind):
    """Whatever the experiment says: a point model is asked once, a Bayesian one as often as it is to be."""
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    network = plain if kind == "deterministic" else fedbayes.bayesianize(plain, kind)
    for stated in ("deterministic", "flipout"):
        assert runner.prepare(small(model__kind=stated), model=network).experiment.model.kind == kind


def test_a_network_that_draws_in_its_own_way_keeps_the_kind_it_is_said_to_be():
    class Drawing(torch.nn.Linear):
        def forward(self, x):
            return super().forward(torch.nn.functional.dropout(x.flatten(1), 0.5, training=True))

    assert runner.prepare(small(model__kind="dropout"), model=Drawing(64, 10)).experiment.model.kind == "dropout"


NORMED = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 10)
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": torch.nn.Linear}, "model must be of type Module, not type"),
        ({"model": torch.nn.LazyLinear(10)}, "lazy layers"),
        ({"model": NORMED, "experiment": small(local__batch_size=1)}, "'local.batch_size' = 1"),
        ({"dataset": torch.zeros(5, 3)}, "dataset must be of type Dataset, not Tensor.*from_arrays"),
        ({"experiment": {"rounds": 3}}, "experiment must be of type Experiment, not dict"),
        ({"dataset": from_arrays([[0.0], [1.0]], [0, 1], torch.zeros(0, 1), torch.zeros(0))}, "no test examples"),
    ],
)
def test_what_a_run_cannot_be_made_of_is_refused_beforehand(given, words):
    with pytest.raises(fedbayes.errors.FedBayesError, match=words):
        fedbayes.run(**({"experiment": small(), "write": False} | given))


def test_owners_that_are_not_known_are_one_owner_and_the_report_is_written(tmp_path):
    x, y, site = np.arange(80.0).reshape(40, 2), [0, 0, 1, 1] * 10, [0.0, np.nan] * 20
    np.savez(tmp_path / "a.npz", inputs=x, labels=y, site=site, test_inputs=x, test_labels=y, test_site=site)
    owners = {"partition__scheme": "column", "partition__column": "site", "partition__clients": 0}
    changes = owners | {"rounds": 1, "data__limit": 0, "data__test_limit": 0, "local__batch_size": 4}
    result = fedbayes.run(small(**changes, data__name=str(tmp_path / "a.npz")), tmp_path / "run")
    found = {e["split"]: e["examples"] for e in result.events if e.get("split", "").startswith("test:")}
    assert found == {"test:0.0": 20, "test:nan": 20}
    assert "Group by group" in (tmp_path / "run" / "report.html").read_text()


def test_precision_refuses_a_bayesian_network_and_reports_no_sigma():
    with pytest.raises(ConfigError, match="point models"):
        runner.prepare(small(fusion="precision"))
    result = fedbayes.run(small(fusion="precision", model__kind="deterministic", rounds=1), write=False)
    assert [e["fusion"]["sigma"] for e in result.events if e["kind"] == "round"] == [None]


def test_dwc_with_a_fixed_prior_is_noted():
    notes = [e["text"] for e in fedbayes.run(small(fusion="dwc", rounds=1), write=False).events if e["kind"] == "note"]
    assert any("objective.prior" in text for text in notes)


def test_clients_whose_data_the_server_never_sees_have_numbers_for_names():
    """Over Flower nodes may bring their own data: then the server holds no value of the column that names an owner."""
    s = runner.prepare(config.read("heart"))
    assert s.client_names() == ["cleveland", "hungarian", "switzerland", "va"]
    unseen = dataclasses.replace(s, shards=[shard[:0] for shard in s.shards])
    assert unseen.client_names() == ["client 0", "client 1", "client 2", "client 3"]


def test_every_key_of_the_log_stands_in_the_schema(tmp_path):
    named = set(
        re.findall(r"\w+", (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text(encoding="utf-8"))
    )

    def keys(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from keys(inner) if key != "layers" else ()
        for inner in value if isinstance(value, list) else ():
            yield from keys(inner)

    sent = {"distill.enabled": True, "distill.swa": "none", "distill.epochs": 1, "distill.samples": 2}
    for number, changes in enumerate(
        ({**sent, "pretrain.fraction": 0.2, "pretrain.epochs": 1}, {"data.ood": "mixed.npz"})
    ):
        if "data.ood" in changes:
            digits = fedbayes.data.load(small().data)
            changes["data.ood"] = str(tmp_path / "mixed.npz")
            np.savez(changes["data.ood"], inputs=digits.test.inputs[:20].numpy().transpose(0, 1, 3, 2))
        fedbayes.run(config.override(small(), {**changes, "rounds": 1}), tmp_path / str(number), report=False)
        for event in read_events(tmp_path / str(number)):
            for key in keys(event):
                text = re.sub("(?<!teacher)_(entropy|aleatoric|epistemic|mutual_information)$", "_U", key)
                assert text in named or key.isdigit(), (event["kind"], key)
