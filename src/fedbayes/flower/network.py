"""A Flower network on loopback: one SuperLink and some SuperNodes as real processes, and none of them left behind.

Used by ``fedbayes deploy --local``, by the tests and by the scripted failures. Everything Flower writes goes under
one folder (its home, its logs, its database), telemetry and update checks are off, and no dependency is installed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RunError
from .pki import Certificates, make_certificates, make_node_key
from .processes import (
    TAG,
    command_of,
    dying_with_parent,
    kill,
    marked_processes,
    signal_group,
    signals_deferred,
    signals_held,
    wait_all,
)


@dataclass
class Node:
    """One SuperNode: its number, what it was told about itself, its process, and how often it was started."""

    number: int
    config: Mapping[str, str | int | float]
    key: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


class Network:
    """Start a SuperLink and SuperNodes on loopback, with TLS and authenticated nodes unless ``insecure``.

    Use it as a context manager: leaving it, an exception, Ctrl-C or the interpreter's end stop every process it
    started, including those that Flower started in turn; on Linux so does a signal that kills this process at once. ``folder`` keeps logs (``logs/``), keys,
    certificates and Flower's own files. ``nodes`` gives one node config each.
    """

    def __init__(
        self, folder: str | Path, nodes: Sequence[Mapping[str, str | int | float]], *, insecure: bool = False
    ) -> None:
        self.folder = Path(folder).resolve()
        self.insecure = insecure
        self.nodes = [Node(i, dict(config)) for i, config in enumerate(nodes)]
        self.tag = uuid.uuid4().hex
        self.port = free_port()
        self.superlink: subprocess.Popen[bytes] | None = None
        self._certificates: Certificates | None = None
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._stopped = False
        self._submitted = 0  # where the log of the last app begins

    def __enter__(self) -> Network:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until every node has connected."""
        atexit.register(self.stop)
        try:
            self._prepare()
            self.start_superlink()
            for node in self.nodes:
                if not self.insecure:
                    node.key = self.register(f"node-{node.number}")
                self.start_node(node.number)
            self.wait_for_nodes([n.number for n in self.nodes])
        except BaseException:
            self.stop()
            raise

    def _prepare(self) -> None:
        shutil.rmtree(self.folder / "keys", ignore_errors=True)  # what a killed rehearsal left
        for name in ("home", "logs", "keys"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        connection = ["[superlink]", 'default = "rehearsal"', "", "[superlink.rehearsal]"]
        connection.append(f'address = "127.0.0.1:{self.port}"')
        if self.insecure:
            connection.append("insecure = true")
        else:
            self._certificates = make_certificates(self.folder / "keys")
            connection.append(f'root-certificates = "{self._certificates.authority}"')
        (self.folder / "home" / "config.toml").write_text("\n".join(connection) + "\n", encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process: Flower's home, nothing sent outwards, and the mark we find them by.

        All processes share this machine's cores, so threads that wait for each other must not spin: with more threads than
        cores that makes arithmetic ten times slower. It changes no bit, unlike fewer threads.
        """
        scripts = str(Path(sys.executable).parent)
        return {
            "OMP_WAIT_POLICY": "passive",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])
            ),  # modules of one's own
            "PATH": scripts + os.pathsep + os.environ.get("PATH", ""),
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PYTHONUNBUFFERED": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            TAG: self.tag,
        }

    def start_superlink(self) -> None:
        """Start the SuperLink (again): same port, same database, so registered nodes and runs are remembered."""
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation", "--database", str(self.folder / "home" / "state.db")]
        if self._certificates is None:
            command += ["--insecure"]
        else:
            command += ["--enable-supernode-auth", "--ssl-ca-certfile", str(self._certificates.authority)]
            command += ["--ssl-certfile", str(self._certificates.certificate)]
            command += ["--ssl-keyfile", str(self._certificates.key)]
        self.superlink = self._spawn(command, "superlink")
        self._wait_for_port(self.superlink, self.port, "superlink")

    def register(self, name: str) -> Path:
        """Make a key pair, register its public half with the SuperLink, return the private half's file."""
        private, public = make_node_key(self.folder / "keys", name)
        done = self.command(["flwr", "supernode", "register", str(public), "rehearsal", "--name", name])
        if done.returncode:
            raise RunError(f"The SuperLink did not register the key of {name}: {last_lines(done.stdout)}")
        return private

    def start_node(self, number: int, *, key: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Start (again) the SuperNode of this number; ``key`` replaces the one it was registered with."""
        node = self.nodes[number]
        port = free_port()
        config = " ".join(f"{k}={_quoted(v)}" for k, v in node.config.items())
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        if config:
            command += ["--node-config", config]
        if self._certificates is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self._certificates.authority)]
            private = key or node.key
            if private is not None:
                command += ["--auth-supernode-private-key", str(private)]
        node.starts += 1
        node.process = self._spawn(command, f"node-{number}", environment)

    def return_node(self, number: int, seconds: float = 180, *, environment: Mapping[str, str] | None = None) -> None:
        """Start a killed node again, as a supervisor would: until the SuperLink takes it back.

        The SuperLink refuses a node while it believes the old process alive (two missed heartbeats: up to 60 s), and
        the SuperNode then ends; so a real one wants a supervisor that restarts it.
        """
        end = time.monotonic() + seconds
        before = self.log(f"node-{number}").count("SuperNode ID:")
        while time.monotonic() < end:
            self.start_node(number, environment=environment)
            process = self.nodes[number].process
            while process is not None and process.poll() is None:
                if self.log(f"node-{number}").count("SuperNode ID:") > before:
                    return
                time.sleep(0.2)
            time.sleep(5)
        raise RunError(f"Node {number} was not taken back within {seconds:.0f} s.")

    def add_node(self, config: Mapping[str, str | int | float]) -> Node:
        """Append a node that is neither registered nor started yet."""
        node = Node(len(self.nodes), dict(config))
        self.nodes.append(node)
        return node

    def wait_for_nodes(self, numbers: Sequence[int], seconds: float = 60) -> None:
        """Wait until these nodes say they are connected, or fail with what their logs say."""
        end = time.monotonic() + seconds
        for number in numbers:
            node = self.nodes[number]
            while self.log(f"node-{number}").count("SuperNode ID:") < node.starts:
                dead = node.process is None or node.process.poll() is not None
                if dead or time.monotonic() > end:
                    raise RunError(
                        f"Node {number} did not connect within {seconds:.0f} s: {last_lines(self.log(f'node-{number}'))}"
                    )
                time.sleep(0.1)

    def kill_node(self, number: int) -> None:
        """Kill a node and what it runs, at once (SIGKILL), as a power cut would."""
        process = self.nodes[number].process
        if process is not None:
            signal_group(process, signal.SIGKILL)
            process.wait()

    def pause_node(self, number: int) -> None:
        """Stop a node and what it runs without ending them (SIGSTOP): a machine that hangs."""
        process = self.nodes[number].process
        if process is not None:
            signal_group(process, signal.SIGSTOP)

    def server_apps(self) -> list[int]:
        """Processes in which a ServerApp runs."""
        return [pid for pid in marked_processes(self.tag) if "flwr-serverapp" in command_of(pid)]

    def kill_server_app(self) -> bool:
        """Kill the process of the ServerApp at once; whether there was one."""
        found = self.server_apps()
        for pid in found:
            kill(pid)
        return bool(found)

    def kill_superlink(self) -> None:
        """Kill the SuperLink at once; its ServerApp processes follow it by themselves."""
        if self.superlink is not None:
            signal_group(self.superlink, signal.SIGKILL)
            self.superlink.wait()

    def submit(
        self, app: str | Path, overrides: Mapping[str, str | int | float] | None = None
    ) -> subprocess.Popen[bytes]:
        """Submit a Flower app and follow its log until it ends: the process of ``flwr run --stream``."""
        command = ["flwr", "run", str(app), "rehearsal", "--stream"]
        if overrides:
            command += ["--run-config", " ".join(f"{k}={_quoted(v)}" for k, v in overrides.items())]
        self._submitted = len(self.log("run"))
        return self._spawn(command, "run")

    def command(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run one of Flower's short commands against this network and return its output."""
        return subprocess.run(
            command, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )

    def run_log(self) -> str:
        """What the app that was submitted last has said so far."""
        return self.log("run")[self._submitted :]

    def log(self, name: str) -> str:
        """What ``superlink``, ``node-0``, ... or ``run`` have written so far."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """Stop every process; safe to call twice, and not to be interrupted half-way."""
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        with signals_held():
            for process in self._spawned:
                signal_group(process, signal.SIGTERM)
            wait_all(self._spawned, 3.0)
            for process in self._spawned:
                signal_group(process, signal.SIGKILL)
            wait_all(self._spawned, 5.0)
            end = time.monotonic() + 10
            while (left := marked_processes(self.tag)) and time.monotonic() < end:
                for pid in left:
                    kill(pid)
                time.sleep(0.1)
            shutil.rmtree(self.folder / "keys", ignore_errors=True)

    def _spawn(
        self, command: Sequence[str], name: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with open(self.folder / "logs" / f"{name}.log", "ab") as log, signals_deferred():
            process = subprocess.Popen(
                command,
                env={**self.environment, **(environment or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=dying_with_parent(),
            )
            self._spawned.append(process)
        return process

    def _wait_for_port(self, process: subprocess.Popen[bytes], port: int, name: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        raise RunError(f"The {name} did not start: {last_lines(self.log(name))}")


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _quoted(value: str | int | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if "'" in value and '"' in value:
            raise RunError(f"A value given to Flower may not hold both kinds of quotation marks: {value!r}.")
        return f'"{value}"' if "'" in value else f"'{value}'"
    return repr(value)


def last_lines(text: str, count: int = 3) -> str:
    """Return the last lines of a log that say something, as one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "it wrote nothing"
