"""Experiments in and out of TOML; every mistake answered by one sentence with key, file and nearest valid one."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import config
from fedbayes.errors import ConfigError
from fedbayes.experiment import Experiment


def test_every_field_has_a_docstring():
    assert [k.name for k in config.keys().values() if not k.doc] == []


def test_default_survives_toml():
    assert config.loads(config.dumps(Experiment())) == Experiment()


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**62),
    lr=st.floats(1e-300, 1e300),
    name=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1).filter(
        lambda s: s.strip() and not s.startswith(".")
    ),
    classes=st.lists(st.integers(0, 99), max_size=4),
    keep=st.booleans(),
)
def test_any_values_survive_toml(seed, lr, name, classes, keep):
    changes = {"seed": seed, "local.learning_rate": lr, "name": name, "data.exclude_classes": classes}
    e = config.override(Experiment(), {**changes, "local.keep_state": keep})
    assert config.loads(config.dumps(e)) == e


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rouns = 3", ["rouns", "'rounds'", "my.toml"]),
        ("[partition]\nalhpa = 1", ["partition.alhpa", "'partition.alpha'", "my.toml"]),
        ("alpha = 1", ["alpha", "'partition.alpha'"]),
        ("rounds = 'many'", ["rounds", "whole number", "'many'"]),
        ("rounds = 2.5", ["rounds", "whole number"]),
        ("rounds = true", ["rounds", "whole number"]),
        ("rounds = 0", ["rounds", "at least 1"]),
        ("[local]\nlearning_rate = -1", ["local.learning_rate", "greater than 0"]),
        ("[local]\nlearning_rate = nan", ["local.learning_rate", "a number"]),
        ("[local]\nbetas = [0.9]", ["local.betas", "a list of 2 numbers"]),
        ("[model]\nkind = 'Flippout'", ["model.kind", "did you mean 'flipout'?"]),
        ("[objective]\nprior_std = 1e-30", ["objective.prior_std", "1e-15"]),
        ("[evaluation]\nbins = 99999999999999999999", ["evaluation.bins", "between 1 and 10000"]),
        ("[fusion.rule]\na = 1", ["fusion.rule", "single value"]),
        ("[data]\nvalidation = 1.0", ["data.validation", "below 1"]),
        ("[data]\nvalidation = 0.6\n[pretrain]\nfraction = 0.5", ["pretrain.fraction", "1.1"]),
        ("[partition]\nscheme = 'column'", ["partition.column"]),
        ("[partition]\nclients = 0", ["partition.clients", "at least 1"]),
        ("[partition]\nclients = 0.5", ["partition.clients", "whole number"]),
        ("rounds = ", ["my.toml", "TOML"]),
        ("rounds = '20'", ["rounds", "whole number", "text '20'"]),
        ("[local]\nbetas = '0.9,0.99'", ["local.betas", "list of 2"]),
        ("[partitoin]\nalpha = 1", ["section [partitoin]", "'partition'"]),
        ("[partition]\nfoo = 1", ["partition.foo", "the keys of [partition] are", "partition.alpha"]),
        ("epochs = 3", ["'local.epochs', 'pretrain.epochs' or 'distill.epochs'"]),
        ("zzzz = 3", ["valid are name, seed, rounds", "sections data, partition"]),
        ("[data]\nvalidation = 0\n[pretrain]\nfraction = 0.1", ["pretrain.fraction", "data.validation"]),
        ("[data]\nvalidation = 0\n[evaluation]\nrefresh_batchnorm = true", ["evaluation.refresh_batchnorm"]),
        ("[local]\noptimizer = 'sgd'\nnesterov = true\nmomentum = 0", ["local.nesterov", "local.momentum"]),
        ("[schedule]\nname = 'exponential'\nreading = 'keep'\ndecay = 1.5", ["schedule.decay", "below 1"]),
        ("[transport]\nmask_bits = 16", ["transport.mask_bits", "32 or 64"]),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(ConfigError) as caught:
        config.loads(text, "my.toml")
    message = str(caught.value)
    assert all(w in message for w in words), message
    assert "\n" not in message


def test_section_shorthand_means_its_choice():
    assert config.loads('fusion = "ws"\npartition = "iid"').fusion.rule == "ws"
    assert config.override(Experiment(), {"fusion": "lp"}).fusion.rule == "lp"


def test_strings_from_the_command_line_are_converted():
    e = config.override(
        Experiment(), {"rounds": "7", "local.betas": "0.8,0.9", "local.keep_state": "true", "data.exclude_classes": ""}
    )
    assert (e.rounds, e.local.betas, e.local.keep_state, e.data.exclude_classes) == (7, (0.8, 0.9), True, ())


def test_experiments_put_together_in_python_are_checked_like_files():
    from fedbayes.experiment import Fusion, Local

    e = config.checked(Experiment(rounds="7", local=Local(betas=[0.8, 0.9])))  # type: ignore[arg-type]
    assert (e.rounds, e.local.betas) == (7, (0.8, 0.9))
    for wrong, words in (
        ({"rounds": -5}, "'rounds' must be at least 1"),
        ({"local": Local(epochs="many")}, "'local.epochs' must be a whole number"),
        ({"fusion": "nwa"}, r"'fusion' must be a fedbayes.experiment.Fusion\(...\), not 'nwa'"),
        ({"local": Fusion()}, "'local' must be a fedbayes.experiment.Local"),
    ):
        with pytest.raises(ConfigError, match=words):
            config.checked(Experiment(**wrong))  # type: ignore[arg-type]


def test_builtin_experiments_are_valid_and_named_alike():
    for name in config.builtin_names():
        assert config.read(name).name == name


def test_unknown_experiment_names_the_nearest():
    with pytest.raises(ConfigError, match="digits"):
        config.read("digts")


def test_files_that_are_no_experiments(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.toml").write_bytes('name = "é"'.encode("latin-1"))
    for name, words in (("folder", "without config.toml"), ("none.toml", "no such file"), ("latin.toml", "not UTF-8")):
        with pytest.raises(ConfigError, match=words):
            config.read(tmp_path / name)
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbfrounds = 7\r\n")  # as some editors save it
    assert config.read(tmp_path / "marked.toml").rounds == 7


def test_every_field_is_used_somewhere():
    """A field that nothing reads is a promise that nothing keeps."""
    package = Path(config.__file__).parent
    outside = [p for p in package.rglob("*.py") if p.name not in ("experiment.py", "config.py", "readings.py")]
    source = "\n".join(p.read_text(encoding="utf-8") for p in outside)
    unread = [k for k in sorted(config.keys()) if not re.search(rf"\.{k.rpartition('.')[2]}\b", source)]
    assert unread == []


def test_experiment_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Experiment().rounds = 3  # type: ignore[misc]
