"""Real processes: a SuperLink and SuperNodes with TLS and node keys, on loopback. Slow, so few tests that each show much."""

import os
import signal
import subprocess
import sys
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store
from flower_cases import small

from fedbayes import config, runner
from fedbayes.errors import ConfigError, RunError
from fedbayes.flower.deploy import Tail, follow, partitioned, read_events, rehearse, with_whole_paths, write_app
from fedbayes.flower.network import Network
from fedbayes.flower.pki import make_certificates, make_node_key
from fedbayes.flower.processes import TAG, marked_processes
from fedbayes.posterior import Posterior

pytestmark = pytest.mark.slow


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def test_deployment_survives_a_killed_server_app_refuses_strangers_and_ends_in_the_local_runs_bits(tmp_path):
    experiment = small(rounds=2, transport__wait=300.0)
    local = runner.run(experiment, tmp_path / "local", report=False)
    path, folder = tmp_path / "run", tmp_path / "net"
    with Network(folder, partitioned(3)) as network:
        tag = network.tag
        unknown, anonymous = network.add_node({"partition-id": 0}), network.add_node({"partition-id": 1})
        network.start_node(unknown.number, key=make_node_key(folder / "keys", "stranger")[0])
        network.start_node(anonymous.number)
        app = write_app(folder / "app", experiment, {"out": str(path), "resume": False, "report": False})
        first = network.submit(app)
        wait_for(lambda: any(e["kind"] == "round" for e in read_events(path)) or first.poll() is not None)
        assert network.kill_server_app()
        first.kill()
        first.wait()
        assert not (path / "final.safetensors").exists()
        wait_for(lambda: unknown.process.poll() is not None and anonymous.process.poll() is not None)
        again = write_app(folder / "app", experiment, {"out": str(path), "resume": True, "report": False})
        follow(network, network.submit(again), path, resume=True)
        log = network.log("superlink")
        assert "No SuperNode found with the given public key" in log
        assert "/v1/fleet/register-node][ApiError:2001]" in log
        assert len(marked_processes(tag)) > 4
    assert marked_processes(tag) == []
    assert not (folder / "keys").exists()
    assert Posterior.load(path / "final.safetensors").same_bits(local.posterior)
    events = read_events(path)
    assert [e["round"] for e in events if e["kind"] == "round"] == [1, 2]
    assert {"config.toml", "metrics.jsonl", "partition.json", "final.safetensors", "predictions-test.npz"} <= {
        f.name for f in path.iterdir()
    }
    ours = [e["metrics"] for e in events if e["kind"] == "evaluation"]
    assert ours == [e["metrics"] for e in local.events if e["kind"] == "evaluation"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_rehearsal_leaves_no_process_behind(tmp_path, number):
    (tmp_path / "e.toml").write_text(config.dumps(small(rounds=50)))
    script = (
        "import sys, pathlib\nfrom fedbayes import config\nfrom fedbayes.flower.deploy import rehearse\n"
        f"rehearse(config.read({str(tmp_path / 'e.toml')!r}), 1, {str(tmp_path / 'run')!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    )
    logs = tmp_path / "run" / "flower" / "logs"
    wait_for(lambda: (logs / "run.log").exists() or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()
    children = _children_of(tmp_path)
    assert len(children) >= 2
    process.send_signal(number)
    assert process.wait(180) != 0
    if number == signal.SIGKILL:  # the kernel ends what we started, and what that started notices within a second
        wait_for(lambda: not _children_of(tmp_path), 60)
        return
    assert "KeyboardInterrupt" in process.stderr.read()
    assert not _children_of(tmp_path)
    assert not (tmp_path / "run" / "flower" / "home").exists()
    assert (logs / "superlink.log").exists()


def test_an_interrupt_while_a_process_is_being_started_is_not_lost(tmp_path):
    """Python drops what is raised inside a fork's callbacks, and ``logging`` has such callbacks in every process."""
    script = (
        "import os, pathlib, signal\nfrom fedbayes.flower.network import Network\n"
        f"network = Network({str(tmp_path)!r}, [])\npathlib.Path({str(tmp_path / 'logs')!r}).mkdir()\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "try:\n    network._spawn(['sleep', '600'], 'x')\n"
        "except KeyboardInterrupt:\n    [process] = network._spawned\n    network.stop()\n    print('heard', process.poll())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, preexec_fn=_heed_interrupts, timeout=60
    )
    assert done.stdout.split() == ["heard", str(-signal.SIGTERM)], done.stderr


def _heed_interrupts():
    """Undo what a shell without job control does to its background jobs: it makes them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _children_of(folder):
    """Processes of the network under this folder, and of no other that runs meanwhile."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/environ", "rb") as f:
                    environment = f.read()
            except OSError:
                continue
            if f"{TAG}=".encode() in environment and f"FLWR_HOME={folder}".encode() in environment:
                found.add(int(entry))
    return found


# -- without processes -------------------------------------------------------------------------------------------


def test_certificates_verify_for_their_hosts_and_for_no_other(tmp_path):
    files = make_certificates(tmp_path, ("127.0.0.1", "link.example"))
    authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
    server = x509.load_pem_x509_certificate(files.certificate.read_bytes())

    def verify(subject):
        return PolicyBuilder().store(Store([authority])).build_server_verifier(subject).verify(server, [])

    assert len(verify(x509.DNSName("link.example"))) == 2
    import ipaddress

    assert len(verify(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))) == 2
    with pytest.raises(x509.verification.VerificationError):
        verify(x509.DNSName("other.example"))
    assert files.key.stat().st_mode & 0o077 == 0


def test_node_keys_are_p384_and_belong_together(tmp_path):
    private, public = make_node_key(tmp_path, "n0")
    key = load_ssh_private_key(private.read_bytes(), None)
    assert key.curve.name == "secp384r1"
    assert key.public_key() == load_ssh_public_key(public.read_bytes())
    assert private.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="exists already"):
        make_node_key(tmp_path, "n0")
    with pytest.raises(ConfigError, match="at least one host"):
        make_certificates(tmp_path, [])


def test_impossible_requests_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        rehearse(small(), 0, tmp_path / "run")
    with pytest.raises(RunError, match="nothing to resume"):
        rehearse(small(), 1, None, resume=True)
    with pytest.raises(ConfigError, match="rule"):
        rehearse(small(fusion__rule="nwaa"), 1, tmp_path / "run")
    with pytest.raises(ConfigError, match="at least 2 nodes"):
        rehearse(small(fusion__private=True), 1, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data\.mean = none or client"):
        rehearse(small(privacy__clip=1.0, fusion__weighting="equal"), 3, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    runner.run(small(rounds=1), tmp_path / "run", report=False)
    with pytest.raises(RunError, match="already holds a run"):
        rehearse(small(rounds=1), 1, tmp_path / "run")
    assert not (tmp_path / "run" / "flower").exists()


def test_processes_find_the_data_and_modules_of_the_folder_one_works_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = with_whole_paths(small(data__name="mine.npz", data__ood="digits"))
    assert (whole.data.name, whole.data.ood) == (str(tmp_path / "mine.npz"), "digits")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert Network(tmp_path / "net", []).environment["PYTHONPATH"] == os.pathsep.join(("/elsewhere", str(tmp_path)))


def test_the_app_carries_the_experiment_through_flowers_configuration(tmp_path):
    import tomllib

    from fedbayes.flower.server import Settings

    experiment = small(fusion__options=("population=10",), fusion__rule="ppa", name="a 'quoted' name 🐟\x7f")
    write_app(tmp_path, experiment, {"out": "/x y/🐟", "resume": True, "report": False})
    flower = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    settings = Settings.read(flower["config"])
    assert settings.experiment == experiment
    assert (settings.out, settings.resume, settings.report) == ("/x y/🐟", True, False)


def test_tail_reads_whole_lines_once_and_follows_a_truncated_file(tmp_path):
    file = tmp_path / "m.jsonl"
    tail = Tail(file)
    assert list(tail.read()) == []
    file.write_text('{"a": 1}\n{"a": 2')
    assert list(tail.read()) == [{"a": 1}]
    with open(file, "a") as f:
        f.write("2}\n")
    assert list(tail.read()) == [{"a": 22}]
    file.write_text('{"a": 1}\n')
    assert list(tail.read()) == []
    with open(file, "a") as f:
        f.write('{"a": 3}\n')
    assert list(tail.read()) == [{"a": 3}]


@pytest.mark.parametrize("name", ["flower_app", "flower_fusion_strategy"])
def test_flower_finds_the_apps_of_the_examples(name, monkeypatch):
    """Flower reads the components without importing them, so they must be assigned where it looks."""
    from pathlib import Path

    from flwr.cli.config_utils import load_and_validate

    folder = Path(__file__).parents[2] / "examples" / name
    monkeypatch.chdir(folder)
    loaded, warnings = load_and_validate(folder / "pyproject.toml")
    assert loaded["tool"]["flwr"]["app"]["publisher"] == "fedbayes"
    assert warnings == []
