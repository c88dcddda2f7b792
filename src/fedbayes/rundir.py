"""The directory of one run: what is written there, atomically, by one process at a time.

``config.toml`` (resolved), ``metrics.jsonl`` (line by line), ``final.safetensors``, ``best.safetensors``,
``checkpoint.safetensors`` (one file, replaced atomically), ``partition.json``, predictions and the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from . import config
from .atomic import not_written, write_atomically
from .checkpoint import unpack
from .errors import RunError
from .experiment import Experiment

FILES_OF_A_RUN = ("config.toml", "metrics.jsonl", "checkpoint.safetensors")
_LEFTOVER = re.compile(r"\.(safetensors|toml|json|npz|html)\.\d+\.part$")
"""What a kill in the middle of ``write_atomically`` leaves; nothing else that may lie in the directory is touched."""


class RunDirectory:
    """One run's directory, held by this process alone while it is open.

    ``resume=False`` refuses a directory that already holds a run (nothing is ever overwritten by accident);
    ``resume=True`` continues one, and starts it when there is nothing to continue. ``lanes`` is the lane count its
    ``config.toml`` names (0: left open), ``workers`` the number of processes.
    """

    lanes = workers = 0

    def __init__(self, path: str | Path, experiment: Experiment, *, resume: bool = False) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise not_written(self.path, error) from None
        try:
            self._open(experiment, resume)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> Any:
        handle = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            handle.close()
            raise RunError(
                f"{self.path} is in use by another process (pid {owner}); wait for it to end or choose another "
                "directory with --out."
            ) from None
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        return handle

    def _open(self, experiment: Experiment, resume: bool) -> None:
        existing = [f for f in FILES_OF_A_RUN if (self.path / f).exists()]
        if existing and not resume:
            raise RunError(
                f"{self.path} already holds a run ({', '.join(existing)}); continue it with --resume or choose another "
                "directory with --out."
            )
        if "config.toml" in existing:
            stored = config.read(self.path / "config.toml")
            refuse_another_configuration(self.path, stored, experiment)
            self._refuse_to_shorten(experiment)
            if not experiment.engine.lanes:
                workers = experiment.engine.workers or stored.engine.workers
                experiment = with_lanes(experiment, stored.engine.lanes, workers)
        for leftover in self.path.glob("*.part"):
            if _LEFTOVER.search(leftover.name):
                leftover.unlink()
        self.lanes, self.workers = experiment.engine.lanes, experiment.engine.workers
        self.write_config(experiment)

    def _refuse_to_shorten(self, experiment: Experiment) -> None:
        """Raise where resuming would falsify or erase a run: fewer rounds than it has, or finished without a checkpoint."""
        end = next((e for e in self.events() if e["kind"] == "end"), None)
        loaded = self.load_checkpoint()
        done = end["rounds"] if end else unpack(*loaded)["round"] if loaded else 0
        state = "a finished run" if end else "a run"
        if done > experiment.rounds:
            raise RunError(
                f"{self.path} holds {state} of {done} rounds; 'rounds' = {experiment.rounds} cannot take any back: "
                "resume it with as many or more, or choose another directory with --out."
            )
        if end and not loaded:
            raise RunError(
                f"{self.path} holds {state} of {done} rounds but no checkpoint.safetensors to resume from; choose "
                "another directory with --out, or remove this one to start again."
            )

    def write_config(self, experiment: Experiment) -> None:
        """Write the resolved configuration: it runs again to the same result."""
        write_atomically(self.path / "config.toml", config.dumps(experiment).encode())

    def close(self) -> None:
        """Release the directory."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- metrics ---------------------------------------------------------------------------------------------

    def log(self, event: Mapping[str, Any]) -> None:
        """Append one event to ``metrics.jsonl``; a kill of this process cannot lose it once this returns."""
        self._append(json.dumps(_plain(event), allow_nan=False) + "\n")

    def _append(self, text: str, *, sync: bool = False) -> None:
        file = self.path / "metrics.jsonl"
        try:
            with open(file, "ab") as f:
                f.write(text.encode())
                if sync:
                    f.flush()
                    os.fsync(f.fileno())
        except OSError as error:
            raise not_written(file, error) from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events logged so far."""
        return read_events(self.path)

    def metrics_size(self) -> int:
        """Return the length of ``metrics.jsonl`` in bytes (kept in the checkpoint)."""
        file = self.path / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0

    def truncate_metrics(self, size: int) -> None:
        """Drop what was logged after a checkpoint: those rounds are about to be run again."""
        file = self.path / "metrics.jsonl"
        if self.metrics_size() < size:
            raise RunError(
                f"{file} is shorter than when the checkpoint was written, so earlier rounds would be missing from it; "
                "put it back, or remove checkpoint.safetensors to start the run again from its beginning."
            )
        if file.exists():
            os.truncate(file, size)

    # -- checkpoint ------------------------------------------------------------------------------------------

    def save_checkpoint(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint: tensors by name and a JSON-able state, in one file."""
        ready = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        blob = to_bytes(ready, metadata={"state": json.dumps(_plain(state))})
        self._append("", sync=True)  # the checkpoint counts on the length of metrics.jsonl, power cuts included
        write_atomically(self.path / "checkpoint.safetensors", blob)

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the checkpoint's tensors and state, or None where there is none yet."""
        file = self.path / "checkpoint.safetensors"
        if not file.exists():
            return None
        try:
            with safe_open(str(file), framework="pt") as f:
                tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118 - not a dict
                return tensors, json.loads(f.metadata()["state"])
        except Exception as error:
            raise RunError(
                f"{file} cannot be read ({error}); remove it to start the run again from its beginning."
            ) from None


def refuse_another_configuration(path: Path, stored: Experiment, wanted: Experiment) -> None:
    """Raise unless a directory's run is the wanted one; rounds may be added, and a lane count left open was chosen."""
    free = {"rounds", "checkpoint_every", "name"}
    if not wanted.engine.lanes:
        free |= {"engine.lanes"} | ({"engine.workers"} if not wanted.engine.workers else set())
    before, now = config.flatten(stored), config.flatten(wanted)
    changed = [key for key in now if before[key] != now[key] and key not in free]
    if changed:
        raise RunError(
            f"{path} holds a run with another configuration ({', '.join(changed)} differ); resume it unchanged, "
            "choose another directory with --out, or remove it."
        )


def with_lanes(experiment: Experiment, lanes: int, workers: int) -> Experiment:
    """Return the experiment with its numbers of lanes and of processes set."""
    return dataclasses.replace(experiment, engine=dataclasses.replace(experiment.engine, lanes=lanes, workers=workers))


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run directory's ``metrics.jsonl``; a torn last line (a crash) is left out."""
    file = path / "metrics.jsonl"
    if not file.exists():
        return
    with open(file, encoding="utf-8", errors="replace") as f:  # a line may be torn within a letter
        for line in f:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Name the file of a run directory that cannot be read; a damaged one fails wherever its reader stumbles."""
    try:
        yield
    except Exception as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise RunError(
            f"{file} is missing or damaged ({why}); copy the run directory again, or repeat the run."
        ) from None


def is_finished(path: Path) -> bool:
    """Whether the run in ``path`` came to its end."""
    return any(event["kind"] == "end" for event in read_events(path))


def fresh_directory(root: Path, name: str) -> Path:
    """Return ``root/NAME-001`` or the next number that is free."""
    root.mkdir(parents=True, exist_ok=True)
    for number in range(1, 100_000):
        path = root / f"{name}-{number:03d}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise RunError(f"{root} holds too many runs named {name}; choose another directory with --out.")


def _plain(value: Any) -> Any:
    """Return JSON-able plain values; numbers that JSON cannot hold (NaN, infinities) become null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        return _plain(value.item())
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value
