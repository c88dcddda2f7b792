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
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..errors import ConfigError, RunError
from .plain import PlainLoop
from .setting import Job, Outcome, Setting


class ProcessLoop:
    """Trains jobs on ``workers`` processes, forked for each launch; whoever is free takes the longest job left.

    Forking copies nothing: network, examples and starting posteriors are shared until written to; only outcomes travel.
    """

    def __init__(self, setting: Setting, workers: int) -> None:
        if setting.device.type != "cpu" or "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError(
                f"engine.workers is {workers}, but processes side by side are for the CPU of a system that can fork; use 1."
            )
        self.setting, self.workers = setting, workers
        self.loop = PlainLoop(setting)

    def train(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Train every job and yield each when it is done, in any order."""
        context: Any = multiprocessing.get_context("fork")
        order = sorted(range(len(jobs)), key=lambda i: (-jobs[i].steps(self.setting.local), i))
        taken, lines, processes = context.Value("i", 0), [], []
        try:
            for _ in range(min(self.workers, len(jobs))):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=self._work, args=(jobs, order, taken, theirs), daemon=True)
                with warnings.catch_warnings():  # Python 3.12 warns of threads; torch's are idle, and a child uses none
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                lines.append(ours)
                processes.append(process)
            yield from _collect(jobs, lines)
        finally:
            for process in processes:
                process.terminate()
                process.join()
            for line in lines:
                line.close()

    def _work(self, jobs: Sequence[Job], order: Sequence[int], taken: Any, line: Connection) -> None:
        """Train jobs, in a child, until none is left or the parent is gone."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handlers are not a child's business
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
        torch.set_num_threads(1)
        parent = os.getppid()
        while os.getppid() == parent:
            with taken.get_lock():
                place, taken.value = taken.value, taken.value + 1
            if place >= len(order):
                break
            try:
                (found,) = self.loop.train([jobs[order[place]]])
                answer: Any = replace(found, job=None)  # type: ignore[arg-type] - the parent knows the job
            except Exception as error:
                answer = error
            line.send_bytes(pickle.dumps((order[place], answer), protocol=5))
        line.close()


def _collect(jobs: Sequence[Job], lines: Sequence[Connection]) -> Iterator[Outcome]:
    """Yield outcomes as they arrive over the lines; a child's error is raised here."""
    open_lines, missing = list(lines), set(range(len(jobs)))
    while open_lines:
        for line in wait(open_lines):
            assert isinstance(line, Connection)
            try:
                number, answer = pickle.loads(line.recv_bytes())
            except EOFError:
                open_lines.remove(line)
                continue
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
