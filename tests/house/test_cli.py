"""The command line: overrides, sentences for mistakes, exit codes; help that explains every field."""

import os
import subprocess
import sys

import pytest

from fedbayes import cli, config
from fedbayes.overrides import experiment_from
from fedbayes.rundir import is_finished

QUICK = [
    "--rounds", "1", "--partition.clients", "3", "--data.limit", "200", "--data.test-limit", "60",
    "--evaluation.samples", "2", "--engine.lanes", "1",
]  # fmt: skip


def test_run_compare_report_predict_end_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "run"
    assert cli.main(["run", "digits", "--out", str(out), "--quiet", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "accuracy" in printed
    assert str(out / "report.html") in printed
    assert (out / "report.html").stat().st_size > 10_000
    assert config.read(out).partition.clients == 3
    assert cli.main(["run", str(out / "config.toml"), "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err
    grid = [
        "compare",
        "digits",
        "--vary",
        "fusion=nwa,conflation",
        "--seeds",
        "2",
        "--out",
        str(tmp_path / "grid"),
        "--quiet",
    ]
    assert cli.main([*grid, *QUICK]) == 0
    assert "4 runs done now" in capsys.readouterr().out
    assert cli.main([*grid, *QUICK]) == 0
    again = capsys.readouterr().out
    assert "0 runs done now, 4 were finished before" in again
    assert "fusion=nwa" in again
    assert sum(is_finished(p) for p in (tmp_path / "grid").iterdir() if p.is_dir()) == 4


def test_a_grid_says_which_run_a_note_is_about(tmp_path, capsys):
    grid = ["compare", "digits", "--vary", "fusion=ws,nwa", "--out", str(tmp_path), *QUICK, "--rounds", "5"]
    assert cli.main(grid) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "is collapsing" in line]
    assert len(notes) == 1
    assert notes[0].startswith("fusion=ws-seed0, round ")


def test_central_training_is_one_client(tmp_path):
    assert cli.main(["run", "digits", "--central", "--out", str(tmp_path / "c"), "--quiet", *QUICK]) == 0
    e = config.read(tmp_path / "c")
    assert (e.partition.clients, e.local.keep_state) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "'run'"),
        (["run", "digts"], "'digits'"),
        (["run", "digits", "--partition.alhpa", "1"], "'partition.alpha'"),
        (["run", "digits", "--alpha", "1"], "'partition.alpha'"),
        (["run", "digits", "--rounds", "many"], "whole number"),
        (["run", "digits", "--rounds"], "needs a value"),
        (["run", "digits", "--fusion.rule", "nwaa"], "command line: 'fusion.rule': there is no fusion rule 'nwaa'"),
        (
            ["run", "digits", "--model", "resnet21"],
            "command line: 'model.name': there is no network 'resnet21'; did you",
        ),
        (["run", "digits", "--fusion.options", "a=b"], "'fusion.options': the rule 'nwa' has no option 'a'"),
        (["run", "digits", "--data.ood", "mnits"], "'data.ood': no data set is called 'mnits': did you mean 'mnist'?"),
        (["run", "--rounds", "digits"], "--rounds needs a value"),
        (["run", "digits", "--data.name", "mnist", "--data-dir", "/nowhere"], "mnist"),
        (["run", "digits", "stray"], "'stray'"),
        (["run", "digits", "--resume"], "--out"),
        (["compare", "digits", "--vary", "fusion"], "key=value"),
        (["compare", "digits", "--vary", "fusio=nwa"], "fusio"),
        (["data", "fetch"], "name the data set"),
        (["data", "check", "mnits"], "mnist"),
        (["deploy", "digits"], "--local"),
        (["run", "digits", "--rounds", "1", "nwa"], "'nwa' was not expected after --rounds 1"),
        (["run", "digits", "--name", "a", "b"], "'b' was not expected after --name a"),
        (["run", "digits", "--schedule", "step", "--schedule.factors", "1"], "'schedule.factors' must be one more"),
        (["run", "digits", "--data.name", ""], "'data.name' must be a data set's name or a path"),
        (["report", "/nowhere"], "/nowhere"),
        (["run"], "experiment"),
        (["run", "wards.npz"], "--data.name wards.npz"),
        (["data", "lst"], "fetch"),
        (["demo", "--rounds", "0"], "at least 1"),
        (["compare", "digits", "--seeds", "two"], "--seeds"),
        (["reproduce", "ozer-figure-1", "--seeds", "0"], "--seeds must be at least 1"),
        (["reproduce", "ozer-figure-1", "--only", "x"], "drawn without runs"),
        (["reproduce", "reyes-table-2", "--sclae", "full"], "unknown key 'sclae'"),
        (["reproduce", "reyes-table-2", "--engine.lanes", "x"], "'engine.lanes' must be a whole number"),
        (["reproduce", "reyes-table-2", "--seed", "3"], "--seeds"),
        (["reproduce", "reyes-table-2", "stray"], "'stray'"),
        (["compare", "digits", "--vary", "fusion=nwa,nwa"], "give each value once"),
        (["compare", "digits", "--vary", "partition.alpha=1,1.0"], "are the same experiment; give each value once"),
        (["compare", "digits", "--vary", "fusion=nwa", "--vary", "fusion.rule=ws"], "'fusion.rule' is given twice"),
        (["predict", "run", "--input", "in.npz", "--reject", "x"], "predict: argument --reject"),
        (["compare", "digits", "--vary", "seed=1,2", "--seeds", "2"], "use one of them"),
        (["run", "digits", "--out", "/dev/null/run", "--rounds", "1"], "/dev/null/run cannot be written"),
        (["run", "digits", "--pretrain.fraction", "0.1", "--data.validation", "0"], "data.validation"),
        (["run", "digits", "--privacy.noise", "1"], "privacy.clip"),
        (["run", "digits", "--fusion.private", "--fusion.weighting", "max-discrepancy"], "fusion.weighting"),
        (["run", "digits", "--distill.enabled", "--distill.swa-cycle", "100000"], "distill.swa_start"),
        (["run", "digits", "--track", "tensorboard", "--partition.clients", "5000"], "5000"),
        (["data", "fetch", "mnist", "--data-dir", "/dev/null"], "/dev/null"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_a_file_gets_wrong_is_said_with_the_file(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('[partition]\nscheme = "dirichlett"\n')
    assert cli.main(["run", str(tmp_path / "mine.toml"), "--fusion", "ws"]) == 2
    error = capsys.readouterr().err
    assert f"'{tmp_path / 'mine.toml'}': 'partition.scheme': there is no partition scheme 'dirichlett'" in error
    assert "did you mean 'dirichlet'?" in error


@pytest.mark.parametrize(
    ("command", "words"),
    [("run", "--resume"), ("reproduce", "repeat the command"), ("compare", "repeat the command"), ("demo", "rupted.")],
)
def test_an_interrupted_command_says_how_it_goes_on(command, words, monkeypatch, capsys):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, command, stop)
    assert cli.main([command]) == 130
    error = capsys.readouterr().err
    assert words in error
    assert ("--resume" in error) == (command == "run")


def test_overrides_may_stand_before_the_experiment():
    from fedbayes.overrides import Parser, split_help

    p = Parser(prog="fedbayes run", allow_abbrev=False)
    p.add_argument("experiment")
    p.add_argument("--out")
    p.add_argument("--quiet", action="store_true")
    words = [
        "--quiet",
        "--rounds",
        "3",
        "--out",
        "x",
        "--local.keep-state",
        "--distill.no-refresh-batchnorm",
        "digits",
        "--seed=4",
    ]
    parsed = split_help(p, words)
    assert parsed is not None
    options, extra = parsed
    assert (options.experiment, options.out, options.quiet) == ("digits", "x", True)
    e = experiment_from("digits", extra)
    assert (e.rounds, e.seed, e.local.keep_state, e.distill.refresh_batchnorm) == (3, 4, True, False)


def test_a_command_that_computes_nothing_does_not_wait_for_torch():
    code = (
        "import sys; from fedbayes.cli import main; main(['--help']); main(['--version']);"
        "main(['run', 'digits', '--rounds', '0']); main(['experiments']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert "'rounds' must be at least 1" in done.stderr


def test_a_terminal_without_greek_letters_gets_their_numbers():
    done = subprocess.run(
        [sys.executable, "-m", "fedbayes", "rules"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert rb"formula: \u03bc = \u03a3 w" in done.stdout


def test_overrides_in_every_spelling():
    words = [
        "--local.learning-rate", "0.5", "--local.batch_size=7", "--local.keep-state", "--local.betas", "0.8", "0.9",
        "--fusion", "ws", "--distill.no-refresh-batchnorm",
    ]  # fmt: skip
    e = experiment_from("digits", words)
    assert (e.local.learning_rate, e.local.batch_size, e.local.keep_state) == (0.5, 7, True)
    assert (e.local.betas, e.fusion.rule, e.distill.refresh_batchnorm) == ((0.8, 0.9), "ws", False)


def test_help_explains_every_field(capsys):
    assert cli.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    missing = [k for k in sorted(config.keys()) if k.replace("_", "-") not in text]
    assert missing == []
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in cli.COMMANDS)


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command, capsys):
    try:
        status = cli.main([command, "--help"])
    except SystemExit as stop:  # argparse leaves this way
        status = stop.code
    assert status == 0
    assert command in capsys.readouterr().out


def test_tables_of_the_command_line(capsys):
    assert cli.main(["rules"]) == 0
    rules = capsys.readouterr().out
    assert all(
        word in rules for word in ("nwa", "eaa", "conflation", "fediv", "needs previous global: yes", "max-discrepancy")
    )
    assert cli.main(["experiments"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in config.builtin_names())
    assert cli.main(["partition", "digits"]) == 0
    assert "client 9" in capsys.readouterr().out
    assert cli.main(["data", "list"]) == 0
    assert "cifar10" in capsys.readouterr().out
