"""Processes that a network starts: found by a mark in their environment, ended together, and ended when we are.

Signals that arrive while one is being started or all are being stopped wait for a moment (``signals_deferred``,
``signals_held``), so that none is lost and nothing is left half done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TAG = "FEDBAYES_NETWORK"
"""The environment variable that marks a network's processes."""


def marked_processes(tag: str) -> list[int]:
    """Processes that carry a network's mark in their environment (where ``/proc`` exists), ourselves excluded."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0")
            alive = marked and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            continue
        if alive and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def _load_prctl() -> Any:
    """Linux's ``prctl``, looked up before any fork; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)


_PRCTL = _load_prctl()
_PR_SET_PDEATHSIG = 1


def dying_with_parent() -> Callable[[], None] | None:
    """Return what to run between fork and exec so that the process dies with ours; None where that cannot be."""
    return _die_with_parent if _PRCTL is not None and _in_main_thread() else None


def _die_with_parent() -> None:
    """Between fork and exec: have the kernel end this process with ours, should ours be killed without a word."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def command_of(pid: int) -> str:
    """Return a process's command line; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class signals_held:
    """Ignore Ctrl-C and SIGTERM for a moment (in the main thread), so that stopping is not itself stopped."""

    def __enter__(self) -> None:
        self._old: dict[int, object] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, signal.SIG_IGN)
            except ValueError:  # not the main thread: signals do not arrive here anyway
                return

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait until the end of the block (in the main thread).

    Python drops an exception raised inside the callbacks around a fork (``logging`` has some), so a Ctrl-C that
    arrives just then would be lost; and one that arrives just after would lose the process that was started.
    """
    if not _in_main_thread():
        yield
        return
    arrived: list[int] = []
    old = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heeded = {n: h for n, h in old.items() if h not in (signal.SIG_IGN, None)}  # None: set by other than Python
    for number in heeded:
        signal.signal(number, lambda n, _frame: arrived.append(n))
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and what it started, if they are there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)  # each process leads its own session, so its group is its pid


def kill(pid: int) -> None:
    """Kill a process at once, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for processes to end, so many seconds for all of them together."""
    end = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
