"""Experiments on the command line: ``--key value`` overrides in tyro's spelling, and help that explains every field."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, get_origin

from . import config
from .errors import ConfigError
from .experiment import Experiment


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one sentence like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.removeprefix('fedbayes ')}: {message}; `{self.prog} --help` tells more.")


def experiment_from(name: str, extra: Sequence[str]) -> Any:
    """Read the experiment and apply ``--key value`` overrides (tyro's spelling: dots, dashes or underscores)."""
    base, changes = config.read(name), read_changes(extra)
    experiment = config.override(base, changes, "command line")
    from .setup import check_names

    own = {f"{key}.{config.PRINCIPAL[key]}" if key in config.PRINCIPAL else key for key in changes}
    check_names(experiment, lambda key: "command line" if key in own else f"'{name}'")
    return experiment


def read_changes(arguments: Sequence[str]) -> dict[str, Any]:
    """Read ``--key value`` words as changes of an experiment's fields."""
    found: dict[str, list[str]] = {}
    current = ""
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            current, equals, value = word[2:].partition("=")
            current = current.replace("-", "_")
            found[current] = [value] if equals else []
        elif current:
            found[current].append(word)
        else:
            raise ConfigError(f"command line: '{word}' was not expected; write changes as --key value.")
    changes: dict[str, Any] = {}
    known = config.keys()
    for name, values in found.items():
        off = name.replace(".no_", ".")
        if name not in known and off in known and known[off].type is bool and not values:
            changes[off] = False
        elif name in known and known[name].type is bool and not values:
            changes[name] = True
        elif not values:
            raise ConfigError(f"command line: --{name} needs a value.")
        elif len(values) > 1 and not _is_list(name):
            raise ConfigError(
                f"command line: '{values[1]}' was not expected after --{name} {values[0]}; write changes as --key value."
            )
        else:
            changes[name] = ",".join(values)
    return changes


def _is_list(name: str) -> bool:
    """Whether a field takes several values (an unknown one is refused later, by its name)."""
    key = config.keys().get(f"{name}.{config.PRINCIPAL[name]}" if name in config.PRINCIPAL else name)
    return key is None or get_origin(key.type) is tuple


def _help_with_fields(parser: argparse.ArgumentParser, name: str | None) -> None:
    """Print the command's own options, then every field of the experiment with its default (tyro, where it is there)."""
    parser.print_help()
    print("\nEvery field of the experiment can be overridden:\n")
    base = config.read(name) if name else Experiment()
    try:
        import tyro
    except ImportError:  # a bare host
        for key in config.keys().values():
            print(f"  --{key.name.replace('_', '-')} (default: {config.get(base, key.name)!r})\n      {key.doc}")
        return
    try:
        tyro.cli(Experiment, default=base, args=["--help"], prog=f"{parser.prog} EXPERIMENT", description="")
    except SystemExit:
        return


def split_help(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]] | None:
    """Parse a command's own options; None when help was asked for and has been printed."""
    if "-h" in arguments or "--help" in arguments:
        positional = [a for a in arguments[:1] if not a.startswith("-")]
        _help_with_fields(parser, positional[0] if positional else None)
        return None
    return parser.parse_known_args(overrides_last(parser, arguments))


def overrides_last(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """Move overrides that stand before the experiment's name behind it: there each has one value, a switch may have none."""
    own, known = parser._option_string_actions, config.keys()
    mine: list[str] = []
    moved: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("--"):
        flag, equals, _ = rest[0].partition("=")
        key = known.get(flag[2:].replace("-", "_").replace(".no_", "."))
        if flag in own:
            count = 1 if equals or own[flag].nargs == 0 else 2
        else:
            switch = key is not None and key.type is bool and rest[1:2] and rest[1].lower() not in config.WORDS
            count = 1 if equals or switch else 2
        (mine if flag in own else moved).extend(rest[:count])
        rest = rest[count:]
    return [*mine, *rest, *moved]
