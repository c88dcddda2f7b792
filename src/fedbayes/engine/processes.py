"""The plain loop on several cores: clients train in processes of their own, one thread each.

For networks whose single operations are too small for two threads and too large to gain from lanes (LeNet, a ResNet on
small pictures), the clients themselves are what can be spread over the cores of a CPU. A client's numbers are those of
the plain loop with one thread, whichever process trains it: every draw has its address.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..errors import ConfigError, RunError
from .plain import PlainLoop
from .setting import Job, Outcome, Setting


@dataclass(frozen=True)
class _Worker:
    """A child and the line to it."""

    process: Any
    line: Connection


class ProcessLoop:
    """Trains jobs on ``workers`` processes; whoever is free takes the longest job left.

    They are forked at the first launch and stay until the loop is dropped, so that a later launch costs no fork and finds
    torch's caches warm. Forking copies nothing: network and examples are shared until written to; per launch only the
    starts go out and the outcomes come back. Processes of a launch that fails or is given up are ended.
    """

    def __init__(self, setting: Setting, workers: int) -> None:
        if not can_fork(setting):
            raise ConfigError(
                f"engine.workers is {workers}, but processes side by side are for the CPU of a system that can fork; use 1."
            )
        self.setting, self.workers = setting, workers
        self.loop = PlainLoop(setting)
        self._taken: Any = _fork().Value("i", 0)
        self._living: list[_Worker] = []
        weakref.finalize(self, _end, self._living)

    def train(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Train every job and yield each when it is done, in any order."""
        self._taken.value = 0
        order = sorted(range(len(jobs)), key=lambda i: (-jobs[i].steps(self.setting.local), i))
        message = pickle.dumps((list(jobs), order), protocol=5)
        finished = False
        try:
            while len(self._living) < min(self.workers, len(jobs)):
                self._living.append(self._start())
            busy = self._living[: len(jobs)]
            for worker in busy:
                with suppress(BrokenPipeError):  # a dead child is found out below
                    worker.line.send_bytes(message)
            yield from _collect(jobs, [worker.line for worker in busy])
            finished = True
        finally:
            if not finished:
                self.close()

    def close(self) -> None:
        """End the processes; a later launch forks them again."""
        _end(self._living)

    def _start(self) -> _Worker:
        ours, theirs = _fork().Pipe()
        process = _fork().Process(target=_work, args=(self.loop, self._taken, theirs, os.getpid()), daemon=True)
        with warnings.catch_warnings():  # Python 3.12 warns of threads; torch's are idle, and a child uses none
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return _Worker(process, ours)


def can_fork(setting: Setting) -> bool:
    """Whether processes side by side can train here: on a CPU, in a process that may fork."""
    forks = "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon
    return setting.device.type == "cpu" and forks


def _fork() -> Any:
    return multiprocessing.get_context("fork")


def _end(workers: list[_Worker]) -> None:
    """End processes and forget them."""
    while workers:
        worker = workers.pop()
        worker.process.terminate()
        worker.process.join()
        worker.line.close()


def _work(loop: PlainLoop, taken: Any, line: Connection, parent: int) -> None:
    """Serve launches, in a child, until the parent is gone or hangs up."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handlers are not a child's business
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):
        while True:
            jobs, order = pickle.loads(line.recv_bytes())
            _launch(loop, jobs, order, taken, line)


def _follow(parent: int) -> None:
    """End this process when the parent is gone (killed, say), in the middle of a job too.

    It shares the parent's open files: until it ends, the lock of the parent's run directory is held.
    """
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _launch(loop: PlainLoop, jobs: Sequence[Job], order: Sequence[int], taken: Any, line: Connection) -> None:
    """Train jobs until none is left, and say so."""
    while True:
        with taken.get_lock():
            place, taken.value = taken.value, taken.value + 1
        if place >= len(order):
            break
        try:
            (found,) = loop.train([jobs[order[place]]])
            answer: Any = replace(found, job=None)  # type: ignore[arg-type] - the parent knows the job
        except Exception as error:
            answer = error
        line.send_bytes(pickle.dumps((order[place], answer), protocol=5))
    line.send_bytes(pickle.dumps(None))


def _collect(jobs: Sequence[Job], lines: Sequence[Connection]) -> Iterator[Outcome]:
    """Yield outcomes as they arrive over the lines; a child's error is raised here."""
    open_lines, missing = list(lines), set(range(len(jobs)))
    while open_lines:
        for line in wait(open_lines):
            assert isinstance(line, Connection)
            try:
                message = pickle.loads(line.recv_bytes())
            except (EOFError, ConnectionResetError):
                message = None
            if message is None:  # this child has no more to say
                open_lines.remove(line)
                continue
            number, answer = message
            if isinstance(answer, Exception):
                raise answer
            missing.discard(number)
            yield replace(answer, job=jobs[number])
    if missing:
        clients = sorted(jobs[i].assignment.client for i in missing)
        raise RunError(
            f"a training process ended without answering for clients {clients[:20]} (killed, or out of memory?); "
            "use fewer 'engine.workers'."
        )
