"""Reading, checking and writing experiments: TOML files, built-in names, ``key=value`` overrides.

Every mistake is found before any work is done and answered with one sentence that names the key, the file
and the nearest valid one.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_origin

from .errors import ConfigError, nearest
from .experiment import Experiment

# `fusion = "nwa"` and `--vary partition=iid` mean the field that names the section's choice.
PRINCIPAL = {
    "data": "name",
    "partition": "scheme",
    "model": "name",
    "schedule": "name",
    "fusion": "rule",
    "sonar": "picture",
}


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration field: its dotted name, type, default and documentation."""

    name: str
    type: Any
    default: Any
    doc: str


@functools.cache
def keys() -> dict[str, Key]:
    """Return every configuration field by dotted name (``rounds``, ``partition.alpha``, ...)."""
    found: dict[str, Key] = {}
    default = Experiment()
    for field in dataclasses.fields(Experiment):
        value = getattr(default, field.name)
        if not dataclasses.is_dataclass(value):
            found[field.name] = _key(field.name, Experiment, field.name, value)
            continue
        for inner in dataclasses.fields(value):
            name = f"{field.name}.{inner.name}"
            found[name] = _key(name, type(value), inner.name, getattr(value, inner.name))
    return found


def sections() -> list[str]:
    """Return the names of the sections."""
    return list(dict.fromkeys(k.partition(".")[0] for k in keys() if "." in k))


def _key(name: str, cls: type, field: str, default: Any) -> Key:
    return Key(name, typing.get_type_hints(cls)[field], default, _docs(cls).get(field, ""))


@functools.cache
def _docs(cls: type) -> dict[str, str]:
    """Return the string literal that follows each field in the source of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[node.target.id] = str(after.value.value)  # type: ignore[union-attr]
    return docs


def builtin_names() -> list[str]:
    """Return the names of the experiments that come with the package."""
    folder = resources.files("fedbayes") / "experiments"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def read(name_or_file: str | Path) -> Experiment:
    """Read an experiment by built-in name or from a TOML file (or the run directory that holds a ``config.toml``)."""
    path = Path(name_or_file)
    if path.is_dir() and (path / "config.toml").exists():
        path = path / "config.toml"
    if path.suffix.lower() in (".npz", ".npy", ".csv", ".tsv"):
        raise ConfigError(
            f"'{name_or_file}' is data, no experiment: name one, with --data.name {name_or_file} after it."
        )
    if path.is_file():
        return loads(_text(path), source=str(path))
    if str(name_or_file) in builtin_names():
        text = (resources.files("fedbayes") / "experiments" / f"{name_or_file}.toml").read_text(encoding="utf-8")
        return loads(text, source=f"built-in experiment {name_or_file}")
    if path.is_dir():
        raise ConfigError(f"'{name_or_file}' is a folder without config.toml: name a TOML file or a run directory.")
    if path.suffix == ".toml":
        raise ConfigError(f"'{name_or_file}': no such file; `fedbayes experiments` lists the built-in ones.")
    hint = nearest(str(name_or_file), builtin_names())
    raise ConfigError(f"'{name_or_file}' is neither a TOML file nor a built-in experiment; {hint}")


def _text(path: Path) -> str:
    """Read a TOML file; the byte-order mark that some editors write is no part of it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: byte {error.start} is not UTF-8; save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None


def loads(text: str, source: str = "configuration") -> Experiment:
    """Parse TOML text into an experiment; ``source`` is named in errors."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}.") from None
    return from_table(table, source)


def from_table(table: Mapping[str, Any], source: str = "configuration") -> Experiment:
    """Make an experiment of a nested table such as TOML gives; unknown keys and wrong types are refused."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(value, Mapping):
            flat[key] = value
        elif key in sections():
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        elif key not in keys():
            raise ConfigError(f"{source}: unknown section [{key}]; {nearest(key, sections())}")
        else:
            flat[key] = value
    for name, value in flat.items():
        key = _find(name, source)
        if isinstance(value, str) and key.type is not str and get_origin(key.type) is not Literal:
            raise ConfigError(f"{source}: '{key.name}' must be {_describe(key.type)}, not the text {value!r}.")
    return override(Experiment(), flat, source)


def override(base: Experiment, changes: Mapping[str, Any], source: str = "command line") -> Experiment:
    """Return ``base`` with dotted keys replaced; values are typed (TOML, Python) or strings (command line)."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        key = _find(name, source)
        section, _, field = key.name.rpartition(".")
        sections.setdefault(section, {})[field] = coerce(key, value, source)
    top = sections.pop("", {})
    for section, fields in sections.items():
        top[section] = dataclasses.replace(getattr(base, section), **fields)
    result = dataclasses.replace(base, **top)
    check(result, source)
    return result


def _find(name: str, source: str) -> Key:
    known = keys()
    full = f"{name}.{PRINCIPAL[name]}" if name in PRINCIPAL else name
    if full in known:
        return known[full]
    raise ConfigError(f"{source}: unknown key '{name}'; {_nearest_key(name)}")


def _nearest_key(name: str) -> str:
    """Return the hint for an unknown key: the same key of another section, the closest one, or where to look."""
    known, (section, _, leaf) = keys(), name.rpartition(".")
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        *some, last = [f"'{k}'" for k in same]
        return f"did you mean {', '.join(some)} or {last}?" if some else f"did you mean {last}?"
    inside = [k for k in known if section and k.startswith(f"{section}.")]
    for candidates, cutoff in ((inside, 0.6), (list(known), 0.7)):  # closest in its own section before any other
        by_leaf = {k.rpartition(".")[2]: k for k in reversed(candidates)}
        if close := difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=cutoff):
            return f"did you mean '{by_leaf[close[0]]}'?"
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"did you mean '{close[0]}'?"
    if inside:
        return f"the keys of [{section}] are: {', '.join(inside)}."
    top = [k for k in known if "." not in k]
    return f"valid are {', '.join(top)} and the sections {', '.join(sections())}; `fedbayes run --help` explains each."


def coerce(key: Key, value: Any, source: str) -> Any:
    """Return ``value`` as the type of ``key``, or raise a sentence saying what would be right."""
    if isinstance(value, Mapping):
        inner = ", ".join(value) or "nothing"
        raise ConfigError(f"{source}: '{key.name}' is a single value, not a table (found {inner}).")
    try:
        return _convert(key.type, value)
    except (ValueError, TypeError, OverflowError):
        words = f"{source}: '{key.name}' must be {_describe(key.type)}, not {value!r}"
        close: list[str] = []
        if get_origin(key.type) is Literal and isinstance(value, str):
            close = difflib.get_close_matches(value.lower(), typing.get_args(key.type), n=1, cutoff=0.5)
        raise ConfigError(f"{words}; did you mean '{close[0]}'?" if close else f"{words}.") from None


def _convert(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        if value in typing.get_args(kind):
            return value
        raise ValueError(value)
    if origin is tuple:
        inner = typing.get_args(kind)
        items = _items(value)
        if Ellipsis not in inner and len(items) != len(inner):
            raise ValueError(value)
        return tuple(_convert(inner[0], v) for v in items)
    return _CONVERT[kind](value)


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        text = value.strip().strip("[]()")
        return [v.strip().strip("'\"") for v in text.split(",") if v.strip()]
    return list(value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return WORDS[value.lower()] if isinstance(value, str) and value.lower() in WORDS else _refuse(value)


WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""How a command line says true and false."""


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        _refuse(value)
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        _refuse(value)
    number = float(value)
    return number if math.isfinite(number) else _refuse(value)


def _to_str(value: Any) -> str:
    return value if isinstance(value, str) else _refuse(value)


def _refuse(value: Any) -> typing.NoReturn:
    raise ValueError(value)


_CONVERT = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def _describe(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in typing.get_args(kind))
    if origin is tuple:
        inner = typing.get_args(kind)
        count = "a list of" if Ellipsis in inner else f"a list of {len(inner)}"
        return f"{count} {_describe(inner[0]).removeprefix('a ')}s"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]


# Each row: keys, what holds for a possible value, and the words for it.
_RANGES: list[tuple[str, typing.Callable[[Any], bool], str]] = [
    ("rounds local.batch_size evaluation.every evaluation.samples evaluation.batch_size checkpoint_every "
     "objective.samples distill.batch_size partition.classes_per_client distill.swa_cycle "
     "sonar.sample_rate sonar.sites sonar.recordings pretrain.patience", lambda v: v >= 1, "at least 1"),
    ("seed partition.clients data.limit data.test_limit partition.minimum partition.minor_examples local.epochs_max "
     "local.steps schedule.silent engine.lanes engine.workers distill.samples distill.epochs distill.swa_start pretrain.epochs "
     "model.width objective.kl_anneal local.momentum local.weight_decay local.clip_norm objective.l2 "
     "objective.proximal objective.kl_weight privacy.clip privacy.noise fusion.max_update participation.deadline "
     "fusion.server_momentum local.sigma_learning_rate sonar.low sonar.high transport.nodes transport.wait", lambda v: v >= 0, "0 or more"),
    ("evaluation.bins", lambda v: 1 <= v <= 10_000, "between 1 and 10000"),
    ("objective.prior_std", lambda v: 1e-15 <= v <= 1e15, "between 1e-15 and 1e15 (float32 holds its square)"),
    ("model.sigma", lambda v: 1e-18 <= v <= 1e18, "between 1e-18 and 1e18 (float32 holds its square)"),
    ("local.learning_rate partition.alpha local.eps distill.learning_rate "
     "distill.dirichlet_alpha distill.sharpen fusion.server_learning_rate sonar.seconds schedule.decay schedule.factor",
     lambda v: v > 0, "greater than 0"),
    ("participation.fraction participation.quorum", lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
    ("data.validation model.dropout pretrain.fraction distill.fraction sonar.overlap local.momentum "
     "fusion.server_momentum", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("privacy.delta", lambda v: 0 < v < 1, "between 0 and 1"),
    ("local.betas", lambda v: all(0 <= b < 1 for b in v), "two numbers, each at least 0 and below 1"),
    ("schedule.milestones", lambda v: all(0 < m < 1 for m in v), "shares of the rounds between 0 and 1"),
    ("data.name", lambda v: v.strip() != "", "a data set's name or a path (`fedbayes data list` shows the names)"),
    ("transport.mask_bits", lambda v: v in (32, 64), "32 or 64"),
    ("name", lambda v: v.strip() != "" and "/" not in v and not v.startswith(".") and min(v) >= " ", "a name without '/'"),
]  # fmt: skip


def check(experiment: Experiment, source: str = "configuration") -> None:
    """Raise a sentence for the first value that cannot be; combinations included."""
    for names, possible, words in _RANGES:
        for name in names.split():
            value = get(experiment, name)
            if not possible(value):
                raise ConfigError(f"{source}: '{name}' must be {words}, not {value!r}.")
    for words in _contradictions(experiment):
        raise ConfigError(f"{source}: {words}")


def _contradictions(e: Experiment) -> Iterator[str]:
    """Yield a sentence for every combination of values that cannot be."""
    if e.local.epochs < 1 and not e.local.steps and not e.local.epochs_max:
        yield f"'local.epochs' must be at least 1 (or give 'local.steps'), not {e.local.epochs}."
    if e.local.optimizer == "sgd" and e.local.nesterov and not e.local.momentum:
        yield "'local.nesterov' needs 'local.momentum' above 0."
    if e.schedule.name == "exponential" and e.schedule.reading == "keep" and e.schedule.decay >= 1:
        yield f"'schedule.decay' must be below 1 where 'schedule.reading' is keep, not {e.schedule.decay:g}."
    if e.schedule.factors and len(e.schedule.factors) != len(e.schedule.milestones) + 1:
        yield (
            f"'schedule.factors' must be one more than the milestones (the first for the rounds before them), not "
            f"{len(e.schedule.factors)} for {len(e.schedule.milestones)}."
        )
    if e.objective.prior == "previous" and e.objective.prior_layers:
        yield "'objective.prior_layers' has no meaning where 'objective.prior' is previous."
    if e.partition.scheme == "column" and not e.partition.column:
        yield "'partition.column' must name a column when 'partition.scheme' is column."
    if e.partition.scheme != "column" and e.partition.clients < 1:
        yield f"'partition.clients' must be at least 1, not {e.partition.clients}."
    for name, asked, why in (
        ("pretrain.fraction", e.pretrain.fraction > 0, "to stop early"),
        ("evaluation.refresh_batchnorm", e.evaluation.refresh_batchnorm, "as the server's data"),
    ):
        if asked and not e.data.validation:
            yield f"'{name}' needs a validation set {why}: set 'data.validation' above 0."
    distilled = e.distill.fraction if e.distill.enabled and not e.distill.data else 0
    if (taken := e.data.validation + e.pretrain.fraction + distilled) >= 1:
        yield (
            f"'data.validation', 'pretrain.fraction' and 'distill.fraction' together take {taken:g} of the training "
            "data; they must leave some to the clients (below 1)."
        )


def checked(experiment: Experiment, source: str = "experiment") -> Experiment:
    """Return an experiment that was put together in Python with every value checked and typed as from a file."""
    for name in sections():
        given, kind = getattr(experiment, name), type(getattr(Experiment(), name))
        if not isinstance(given, kind):
            raise ConfigError(f"{source}: '{name}' must be a fedbayes.experiment.{kind.__name__}(...), not {given!r}.")
    return override(Experiment(), flatten(experiment), source)


def get(experiment: Experiment, name: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = experiment
    for part in name.split("."):
        value = getattr(value, part)
    return value


def flatten(experiment: Experiment) -> dict[str, Any]:
    """Return every value by dotted key."""
    return {name: get(experiment, name) for name in keys()}


def dumps(experiment: Experiment) -> str:
    """Write an experiment as TOML, completely; ``loads`` gives the same experiment back."""
    lines, section = [], ""
    for name, value in flatten(experiment).items():
        head, _, field = name.rpartition(".")
        if head != section:
            lines += ["", f"[{head}]"]
            section = head
        lines.append(f"{field} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)
