"""Data sets, partitions and augmentations of one's own work by name, as ``docs/data.md`` writes them."""

import re
import sys
from pathlib import Path

import pytest

import fedbayes
from fedbayes import config
from fedbayes.data import Request, partition
from fedbayes.data.loading import short_name
from fedbayes.data.partition import SCHEMES
from fedbayes.data.sources import _SOURCES, get_source
from fedbayes.data.transform import AUGMENTATIONS
from fedbayes.errors import ConfigError, DataError
from fedbayes.setup import check_names, prepare

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
NAMES = {"data.name": "my_data:my-set", "partition.scheme": "my_data:by-class", "data.augment": "my_data:gain"}


@pytest.fixture
def my_data(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(re.findall(r"```python\n(# my_data.*?)```", PAGE, re.S)[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_data")
    _SOURCES.pop("my-set")
    SCHEMES.pop("by-class")
    AUGMENTATIONS.pop("gain")


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_documented_module_runs(my_data, tmp_path, lanes):
    small = {"rounds": 1, "partition.clients": 3, "engine.lanes": lanes, "evaluation.samples": 2}
    experiment = config.override(fedbayes.Experiment(), {**NAMES, **small, "data.ood": "my_data:my-set"})
    result = fedbayes.run(experiment, tmp_path / "run")
    assert [len(s) for s in result.setup.shards] == [270, 270, 270]
    assert set(result.setup.dataset.ood) == {"my-set"}  # a name that a file can have
    again = prepare(config.read(tmp_path / "run" / "config.toml"))
    assert [list(s) for s in again.shards] == [list(s) for s in result.setup.shards]
    plain = config.override(experiment, {"data.augment": "none"})
    assert fedbayes.run(plain, tmp_path / "plain").metrics("test") != result.metrics("test")


def test_the_documented_partition_deals_everything(my_data, tmp_path):
    experiment = config.override(fedbayes.Experiment(), NAMES)
    train = get_source("my_data:my-set").read(Request("my-set", tmp_path, 0)).train
    shards = partition(experiment.partition, train, seed=0)
    assert sorted(i for s in shards for i in s) == list(range(900))
    assert short_name("my_data:my-set") == "my-set"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("partition.scheme", "no_such:x", "the module 'no_such' of the partition scheme 'x' cannot be imported"),
        ("data.augment", "no_such:x", "the module 'no_such' of the augmentation 'x' cannot be imported"),
        ("data.name", "no_such:x", "the module 'no_such' of the data set 'x' cannot be imported"),
        ("data.augment", "crop-flop", "there is no augmentation 'crop-flop'; did you mean 'crop-flip'"),
        ("partition.scheme", "json:x", "there is no partition scheme 'x'"),
        ("data.name", "json:x", "no data set is called 'x'"),
    ],
)
def test_a_name_that_is_not_there(key, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_names(config.override(fedbayes.Experiment(), {key: value}))


@pytest.mark.parametrize("name", ["python:my digits", "C:/sounds", "a/b:c"])
def test_what_is_no_module_is_not_imported(name):
    with pytest.raises(DataError, match=f"no data set is called '{name}'"):
        get_source(name)
