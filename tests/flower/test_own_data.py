"""Nodes whose data never leave them: arrays in a file on the node, named by its node config alone."""

import itertools
import json

import numpy as np
import pytest
from flower_cases import grid_of, over_grid, rounds_of, small

from fedbayes import runner
from fedbayes.data import load_source
from fedbayes.errors import RunError
from fedbayes.flower.server import Settings, serve

SIZES = (50, 80, 30)


@pytest.fixture
def files(tmp_path):
    """Three owners' files of real digits, of different size, none with a test part."""
    train = load_source("digits").train
    paths, at = [], 0
    for i, n in enumerate(SIZES):
        part = train.take(np.arange(at, at + n))
        paths.append(tmp_path / f"owner-{i}.npz")
        np.savez(paths[-1], inputs=part.inputs.numpy(), labels=part.labels.numpy())
        at += n
    return paths


def own(**changes):
    return small(data__mean="none", transport__nodes=3, **changes)


def test_every_example_of_every_owner_is_used_and_its_number_reported(files):
    grid = grid_of(configs=[{"partition-id": i, "data": str(f)} for i, f in enumerate(files)])
    federation, _ = over_grid(own(data__limit=0), grid)
    federation.run()
    assert federation.cohort.sizes() == dict(enumerate(SIZES))
    assert rounds_of(federation)[0]["examples"] == sum(SIZES)


def test_result_is_that_of_a_local_run_on_the_same_shards(files):
    experiment = own(data__limit=0, data__scale="unit")
    setup = runner.prepare(experiment)
    grid = grid_of(configs=[{"partition-id": i, "data": str(f)} for i, f in enumerate(files)])
    federation, _ = over_grid(experiment, grid, setup)
    import dataclasses

    edges = np.cumsum((0, *SIZES))
    train = load_source("digits").train
    shards = [np.arange(a, b) for a, b in itertools.pairwise(edges)]
    together = dataclasses.replace(setup, dataset=dataclasses.replace(setup.dataset, train=train), shards=shards)
    local = runner.make_federation(together, runner.local_cohort([together]), None)
    assert federation.run().same_bits(local.run())


def test_owners_without_a_number_are_given_one(files):
    federation, _ = over_grid(own(), grid_of(configs=[{"data": str(f)} for f in files]))
    federation.run()
    assert sorted(federation.cohort.sizes().values()) == sorted(SIZES)
    numbered, _ = over_grid(own(), grid_of(configs=[{"partition-id": i, "data": str(f)} for i, f in enumerate(files)]))
    assert federation.posterior.same_bits(numbered.run())


def test_the_run_directory_tells_sizes_and_claims_no_class_counts(files, tmp_path, monkeypatch):
    grid = grid_of(configs=[{"partition-id": i, "data": str(f)} for i, f in enumerate(files)])
    serve(grid, Settings(own(rounds=1), str(tmp_path / "run"), report=False))
    held = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert [c["examples"] for c in held["clients"]] == list(SIZES)
    assert all(c["counts"] == [] for c in held["clients"])
    with pytest.raises(RunError, match="data of the nodes' own"):  # nor does it go on where those data are not
        runner.run(own(rounds=2), tmp_path / "run", resume=True)
    runner.run(own(rounds=1), tmp_path / "simulated", report=False)
    with pytest.raises(RunError, match="begun as a simulation, but the nodes bring their own data"):
        serve(grid, Settings(own(rounds=2), str(tmp_path / "simulated"), resume=True))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"data__mean": "global"}, r"data\.mean = global"), ({"data__scale": "standard"}, r"data\.scale = standard")],
)
def test_settings_that_need_everybodys_data_in_one_place_are_refused(files, changes, sentence):
    experiment = small(**({"data__mean": "none", "transport__nodes": 3} | changes))
    federation, said = over_grid(
        experiment, grid_of(configs=[{"partition-id": i, "data": str(f)} for i, f in enumerate(files)])
    )
    with pytest.raises(RunError, match=sentence):
        federation.run()
    assert "never meet" in " ".join(said)


def test_arrays_that_do_not_fit_are_refused_with_a_sentence(tmp_path):
    inputs = np.zeros((20, 8, 8), np.uint8)
    cases = {
        "shape": {"inputs": np.zeros((20, 9, 9), np.uint8), "labels": np.arange(20) % 10},
        "label 12": {"inputs": inputs, "labels": np.full(20, 12)},
        "labels are names": {"inputs": inputs, "labels": np.array(["a", "b"] * 10)},
        "classes are 1, 0, 2, 3, 4, 5, 6, 7, 8, 9 and the server's 0, 1,": {
            "inputs": inputs, "labels": np.arange(20) % 10, "classes": list("1023456789"),
        },
        "classes are 0, 1 and the server's 0, 1, 2,": {"inputs": inputs, "labels": np.arange(20) % 2, "classes": list("01")},
        "not fractions": {"inputs": inputs, "labels": np.full(20, 0.5)},
        "label at position 3 is missing": {"inputs": inputs, "labels": np.where(np.arange(20) == 3, np.nan, 1.0)},
        "holds no examples": {"inputs": inputs[:0], "labels": np.zeros(0, int)},
        "of numbers": {"inputs": inputs.astype(str), "labels": np.arange(20) % 10},
        "one array without a name": inputs,
    }  # fmt: skip
    for i, (word, arrays) in enumerate(cases.items()):
        path = tmp_path / f"{i}.npz"
        with open(path, "wb") as file:
            np.savez(file, **arrays) if isinstance(arrays, dict) else np.save(file, arrays)
        federation, said = over_grid(own(), grid_of(configs=[{"partition-id": 0, "data": str(path)}]))
        with pytest.raises(RunError, match=word):
            federation.run()
        (refusal,) = [s for s in said if "is refused" in s and word in s]
        assert str(tmp_path) not in refusal  # folders are the node's own business


def test_excluded_classes_are_left_out_of_plain_labels_too(files):
    grid = grid_of(configs=[{"partition-id": i, "data": str(f)} for i, f in enumerate(files)])
    federation, _ = over_grid(own(rounds=1, data__exclude_classes=(9,)), grid)
    federation.run()
    labels = load_source("digits").train.labels[: sum(SIZES)]
    assert rounds_of(federation)[0]["examples"] == int((labels != 9).sum())


def test_an_owner_may_hold_a_single_class(tmp_path):
    train = load_source("digits").train
    configs = []
    for i, digits in enumerate([(3,), (0, 9), tuple(range(10))]):
        part = train.take(np.flatnonzero(np.isin(train.labels.numpy(), digits))[:40])
        np.savez(tmp_path / f"{i}.npz", inputs=part.inputs.numpy(), labels=part.labels.numpy())
        configs.append({"partition-id": i, "data": str(tmp_path / f"{i}.npz")})
    federation, _ = over_grid(own(rounds=1), grid_of(configs=configs))
    federation.run()
    assert federation.cohort.sizes() == {0: 40, 1: 40, 2: 40}
