"""The command ``fedbayes``: one function a subcommand; rooms are imported only when their command is used."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .errors import ConfigError, FedBayesError, nearest
from .overrides import Parser, experiment_from, overrides_last, read_changes, split_help

_EXTRAS = {
    "matplotlib": "report", "jinja2": "report", "flwr": "flower", "cryptography": "flower", "grpc": "flower",
    "soundfile": "sonar", "soxr": "sonar", "tensorboard": "track",
}  # fmt: skip
"""Which extra of the package brings a module that may be missing."""

_GO_ON = {
    "run": "continue the run with --resume", "deploy": "continue the run with --resume",
    "compare": "repeat the command to go on", "reproduce": "repeat the command to go on",
}  # fmt: skip
"""How an interrupted command goes on; what is not named here starts afresh."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status (0 done, 2 a user's mistake in one sentence, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Greek letters gets their numbers, no traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        here = os.getcwd()
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)  # rules, networks and data of one's own ("my_rules:power-mean") lie where one works
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(usage())
            return 0
        if arguments[0] == "--version":
            from . import __version__

            print(f"fedbayes {__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise ConfigError(f"unknown command '{arguments[0]}'; {nearest(arguments[0], COMMANDS)}")
        return COMMANDS[arguments[0]](arguments[1:]) or 0
    except FedBayesError as error:
        print(f"fedbayes: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"fedbayes: {arguments[0]} needs {error.name}: pip install 'fedbayes[{extra}]' brings it.", file=sys.stderr
        )
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:  # a place that cannot be written or read: the machine's matter, not the program's
        print(f"fedbayes: {error.filename or arguments[0]}: {error.strerror or error}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"; what was finished is kept ({_GO_ON[arguments[0]]})" if arguments[0] in _GO_ON else ""
        print(f"\nfedbayes: interrupted{kept}.", file=sys.stderr)
        return 128 + signal.SIGINT


def usage() -> str:
    """Return the overview of commands."""
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name.ljust(width)}  {(function.__doc__ or '').splitlines()[0]}" for name, function in COMMANDS.items()
    ]
    return "usage: fedbayes COMMAND ...   (fedbayes COMMAND --help tells more)\n\n" + "\n".join(lines)


def _parser(name: str, description: str | None, **kwargs: Any) -> Parser:
    return Parser(prog=f"fedbayes {name}", description=description, allow_abbrev=False, **kwargs)


def _remember(data_dir: str | None) -> None:
    """Let everything of this process (the report's pictures, say) find the data where --data-dir says."""
    if data_dir:
        os.environ["FEDBAYES_DATA"] = data_dir


def run(arguments: list[str]) -> int:
    """Run one experiment: a built-in name, a TOML file, or a run directory's configuration."""
    p = _parser("run", run.__doc__, add_help=False)
    p.add_argument("experiment", help="built-in name or TOML file (fedbayes experiments lists the names)")
    p.add_argument("--out", help="run directory (default: runs/NAME-number)")
    p.add_argument("--resume", action="store_true", help="continue the run that --out (or EXPERIMENT) holds")
    p.add_argument("--data-dir", help="where data sets are kept (default: FEDBAYES_DATA or the user's cache)")
    p.add_argument("--central", action="store_true", help="train on all data in one place, as a baseline")
    p.add_argument("--track", choices=["tensorboard"], help="write the same numbers for TensorBoard too")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    parsed = split_help(p, arguments)
    if parsed is None:
        return 0
    options, extra = parsed
    _remember(options.data_dir)
    experiment = experiment_from(options.experiment, extra)
    from . import runner
    from .progress import Progress

    if options.central:
        experiment = central(experiment)
    listeners: list[Callable[..., None]] = [] if options.quiet else [Progress(experiment.rounds, experiment.name)]
    out = Path(options.out) if options.out else None
    if options.resume and out is None and Path(options.experiment).is_dir():
        out = Path(options.experiment)  # a run directory names both the experiment and where it is
    if options.resume and out is not None and not (out / "config.toml").exists():
        print(f"{out} holds no run yet: starting at round 1.")
    result = runner.run(
        experiment, out, resume=options.resume, data_dir=options.data_dir, listeners=listeners, track=options.track
    )
    print_result(result)
    return 0


def central(experiment: Any) -> Any:
    """Return the same training on all data in one place: one client, its optimiser's state kept between rounds."""
    from . import config

    return config.override(
        experiment,
        {
            "name": f"{experiment.name}-central",
            "partition.scheme": "iid",
            "partition.clients": 1,
            "participation.fraction": 1.0,
            "local.keep_state": True,
            "fusion.rule": "nwa" if experiment.model.kind not in ("deterministic", "dropout") else "fedavg",
            "fusion.weighting": "equal",
        },
        "--central",
    )


def print_result(result: Any) -> None:
    """Print a finished run's numbers and where its files are."""
    from .compare import Row, render
    from .runner import mean_sigma

    values = {k: [v] for k, v in result.metrics("test").items()}
    values["sigma"] = [mean_sigma(result.events)]
    rows = [Row(result.setup.experiment.name, values)]
    for split in sorted({e["split"] for e in result.events if e.get("split", "").startswith("test:")}):
        rows.append(Row("  " + split.removeprefix("test:"), {k: [v] for k, v in result.metrics(split).items()}))
    print(render(rows))
    for event in result.events:
        if event["kind"] == "note":
            print(f"note (round {event['round']}): {event['text']}")
    chosen = f"test data, round {result.best_round}"
    print(f"({chosen}{', chosen on validation data' if len(result.setup.validation) else ''})")
    if result.path:
        page = result.path / "report.html"
        print(f"report: {page}    files: {result.path}" if page.exists() else f"files: {result.path}")


def compare(arguments: list[str]) -> int:
    """Run a grid (--vary key=a,b ... --seeds n), skipping finished runs, and print mean ± deviation."""
    p = _parser("compare", compare.__doc__, add_help=False)
    p.add_argument("experiment", help="built-in name or TOML file")
    p.add_argument("--vary", action="append", default=[], metavar="KEY=A,B", help="values of a field (repeatable)")
    p.add_argument("--seeds", type=int, default=1, help="number of seeds, counted up from the experiment's")
    p.add_argument("--out", help="folder of the grid (default: runs/compare-NAME)")
    p.add_argument("--data-dir", help="where data sets are kept")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--together", action="store_true", help="train like runs side by side (the default on a GPU)")
    how.add_argument("--separately", action="store_true", help="one run after the other (the default on a CPU)")
    p.add_argument("--quiet", action="store_true", help="no progress bars")
    parsed = split_help(p, arguments)
    if parsed is None:
        return 0
    options, extra = parsed
    _remember(options.data_dir)
    base = experiment_from(options.experiment, extra)
    from . import compare as grids
    from . import runner
    from .progress import Progress

    root = Path(options.out) if options.out else runner.DEFAULT_ROOT / f"compare-{base.name}"
    cells = grids.grid(base, grids.parse_vary(options.vary), options.seeds, root)
    bar = None if options.quiet else Progress(sum(c.experiment.rounds for c in cells), base.name)
    ran = grids.run_grid(
        cells,
        data_dir=options.data_dir,
        lanes_shared=True if options.together else False if options.separately else None,
        listeners=(lambda cell: [partial(bar, run=cell.path.name)]) if bar else None,
    )
    if bar:
        bar.close()
    table = grids.rows(cells)
    print(f"{len(ran)} runs done now, {len(cells) - len(ran)} were finished before.")
    print(grids.render(table))
    grids.write_csv(table, root / "table.csv")
    if page := runner.write_report(*(c.path for c in cells), out=root / "report.html"):
        print(f"report: {page}")
    return 0


def demo(arguments: list[str]) -> int:
    """Ten clients, handwritten digits, five fusion rules beside FedAvg and MC-dropout: table and report."""
    p = _parser("demo", demo.__doc__)
    p.add_argument("--out", default="runs/demo", help="folder of the demo's runs")
    p.add_argument("--rounds", type=int, default=None, help="rounds of every federation")
    options = p.parse_args(arguments)
    from .demo import run_demo

    return run_demo(Path(options.out), options.rounds)


def experiments(arguments: list[str]) -> int:
    """List the built-in experiments."""
    _parser("experiments", experiments.__doc__).parse_args(arguments)
    from . import config

    for name in config.builtin_names():
        e = config.read(name)
        print(f"{name:24} {e.data.name}, {e.partition.scheme}, {e.model.name} {e.model.kind}, {e.rounds} rounds")
    return 0


def rules(arguments: list[str]) -> int:
    """List the fusion rules: aliases, formula, papers, what each does to the variance, when to use it."""
    _parser("rules", rules.__doc__).parse_args(arguments)
    from .fusion import listing

    print(listing())
    return 0


def partition(arguments: list[str]) -> int:
    """Show who gets what in an experiment: a table, and a picture with the report extra (--picture FILE)."""
    p = _parser("partition", partition.__doc__, add_help=False)
    p.add_argument("experiment")
    p.add_argument("--data-dir")
    p.add_argument("--picture", help="write the picture to this PNG or SVG file")
    parsed = split_help(p, arguments)
    if parsed is None:
        return 0
    options, extra = parsed
    _remember(options.data_dir)
    experiment = experiment_from(options.experiment, extra)
    from .data import render
    from .setup import holdings, prepare

    setup = prepare(experiment, data_dir=options.data_dir)
    print(render(holdings(setup), setup.dataset.classes))
    if options.picture:
        from .report import partition_figure

        held = holdings(setup)
        counts = [list(row.counts) for row in held]
        print(partition_figure(counts, setup.dataset.classes, [row.name for row in held], Path(options.picture)))
    return 0


def data(arguments: list[str]) -> int:
    """Data sets: `data list`, `data fetch NAME`, `data check NAME`."""
    p = _parser("data", data.__doc__)
    p.add_argument("action", choices=["list", "fetch", "check"])
    p.add_argument("name", nargs="?", help="data set (fetch, check)")
    p.add_argument("--data-dir", help="where data sets are kept (default: FEDBAYES_DATA or the user's cache)")
    options = p.parse_args(arguments)
    from .data import commands

    if options.action == "list":
        print(commands.render_sources(options.data_dir))
        return 0
    if not options.name:
        raise ConfigError(f"data {options.action}: name the data set (fedbayes data list shows them).")
    if options.action == "fetch":
        print(commands.fetch(options.name, options.data_dir))
        return 0
    text, good = commands.render_check(options.name, options.data_dir)
    print(text)
    return 0 if good else 1


def report(arguments: list[str]) -> int:
    """Write the HTML report of one run, or of several overlaid."""
    p = _parser("report", report.__doc__)
    p.add_argument("runs", nargs="+", help="run directories, or folders that hold them")
    p.add_argument("--out", help="file to write (default: report.html beside the run)")
    p.add_argument("--data-dir", help="where data sets are kept, for the pictures of single inputs")
    options = p.parse_args(arguments)
    _remember(options.data_dir)
    from .report import write

    print(write([Path(r) for r in options.runs], Path(options.out) if options.out else None))
    return 0


def predict(arguments: list[str]) -> int:
    """Predict with a run's posterior and say how sure: class, probabilities, uncertainties per input."""
    from .predictor import predict_command

    return predict_command(arguments)


def deploy(arguments: list[str]) -> int:
    """Run the experiment over Flower: `deploy EXPERIMENT --nodes 3 --local` rehearses it on this machine."""
    p = _parser("deploy", deploy.__doc__, add_help=False)
    p.add_argument("experiment")
    p.add_argument("--nodes", type=int, default=3, help="SuperNodes to start")
    p.add_argument("--local", action="store_true", help="rehearse on loopback with TLS and authenticated nodes")
    p.add_argument("--insecure", action="store_true", help="without TLS and node authentication")
    p.add_argument("--out", help="run directory (default: runs/NAME-number)")
    p.add_argument("--resume", action="store_true", help="continue the run that --out holds")
    p.add_argument("--data-dir")
    parsed = split_help(p, arguments)
    if parsed is None:
        return 0
    options, extra = parsed
    _remember(options.data_dir)
    if not options.local:
        raise ConfigError(
            "deploy starts nodes on this machine only with --local; docs/deploying.md has the real thing."
        )
    experiment = experiment_from(options.experiment, extra)
    from .flower.deploy import rehearse
    from .progress import Progress

    result = rehearse(
        experiment, nodes=options.nodes, run_dir=options.out, insecure=options.insecure, resume=options.resume,
        data_dir=options.data_dir, listeners=[Progress(experiment.rounds, f"{experiment.name} over Flower")],
    )  # fmt: skip
    print_result(result)
    return 0


def recipes(arguments: list[str]) -> int:
    """List the papers' tables and figures that can be reproduced, with what each needs."""
    p = _parser("recipes", recipes.__doc__)
    p.add_argument("--data-dir")
    options = p.parse_args(arguments)
    from .recipes import list_recipes

    print(list_recipes(data_dir=options.data_dir))
    return 0


def reproduce(arguments: list[str]) -> int:
    """Reproduce a paper's table: `reproduce fischer-table-2 --scale smoke|quick|full [--only ...]`."""
    fields = "--KEY VALUE changes a field of every cell, e.g. --engine.compile on a GPU; the page says so where results depend on it."
    p = _parser("reproduce", reproduce.__doc__, epilog=fields)
    p.add_argument("recipe")
    p.add_argument("--scale", choices=["smoke", "quick", "full"], default="quick")
    p.add_argument(
        "--only",
        action="append",
        default=[],
        help="run only cells whose label matches (repeatable); the page shows all that has finished",
    )
    p.add_argument(
        "--reading",
        action="append",
        default=[],
        metavar="NAME=OPTION",
        help="take another reading of what the paper leaves open (repeatable)",
    )
    p.add_argument("--seeds", type=int, help="runs per cell (default: the paper's at full scale, else 1)")
    p.add_argument(
        "--out",
        default="runs/reproduce",
        help="folder of runs and pages; recipes that share cells share their runs there",
    )
    p.add_argument("--data-dir")
    options, extra = p.parse_known_args(overrides_last(p, arguments))
    from .progress import Progress
    from .recipes import reproduce as carry_out

    readings = dict(_pair(item, "--reading") for item in options.reading)
    made = carry_out(
        options.recipe, options.scale, options.only, options.out, options.data_dir, readings=readings,
        changes=read_changes(extra), seeds=options.seeds, listeners=lambda cell: [Progress(cell.experiment.rounds, cell.label)],
    )  # fmt: skip
    print(made)
    return 0


def _pair(item: str, option: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name or not value:
        raise ConfigError(f"{option} '{item}': write it as NAME=VALUE.")
    return name, value


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    f.__name__: f
    for f in (
        run, compare, demo, report, predict, deploy, partition, data, rules, experiments, recipes, reproduce,
    )
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
