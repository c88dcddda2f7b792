"""Fetching against a loopback server: whole, resumed, broken, wrong, and refused transfers."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbayes.data import (
    Dataset,
    Examples,
    Remote,
    check,
    describe_sources,
    fetch,
    register_source,
    render_checks,
    render_sources,
    sources,
)
from fedbayes.data.commands import render_check
from fedbayes.data.fetch import human_size
from fedbayes.errors import DataError

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Publisher(ThreadingHTTPServer):
    """A web server whose misbehaviour a test chooses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = CONTENT
        self.ranges = True  # whether it can resume
        self.break_after = 0  # bytes after which a transfer breaks off, for `breaks` transfers
        self.breaks = 0
        self.asked: list[tuple[str, str]] = []  # (path, Range header)

    def url(self, path: str = "/file.bin") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Publisher  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.server.asked.append((self.path, asked))
        if self.path == "/gone":
            self.send_error(404)
            return
        body, start = self.server.content, 0
        if asked and self.server.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        rest = body[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if self.server.breaks > 0:
            self.server.breaks -= 1
            rest = rest[: self.server.break_after]
        self.wfile.write(rest)


@pytest.fixture
def publisher():
    server = Publisher()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def offer(publisher):
    """Register a source of one file at the publisher's, for the length of a test."""

    def add(**changes) -> Remote:
        fields = {"path": "set/file.bin", "urls": (publisher.url(),), "size": len(CONTENT), "checksum": DIGEST}
        remote = Remote(**{**fields, **changes})

        @register_source("test-set", files=(remote,), licence="CC0", examples="1 + 1", classes=2, summary="a test")
        def read(request) -> Dataset:
            raise NotImplementedError

        return remote

    sources()
    yield add
    sources().pop("test-set", None)  # pyright: ignore[reportAttributeAccessIssue]


def part_of(root: Path) -> Path:
    return root / "set" / "file.bin.part"


def test_a_file_is_fetched_once(publisher, offer, tmp_path):
    offer()
    (path,) = fetch("test-set", tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert not part_of(tmp_path).exists()
    assert fetch("test-set", tmp_path, progress=False) == [path]
    assert len(publisher.asked) == 1


def test_a_broken_transfer_is_resumed(publisher, offer, tmp_path):
    offer()
    publisher.break_after, publisher.breaks = 100_000, 2
    (path,) = fetch("test-set", tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert [r for _, r in publisher.asked] == ["", "bytes=100000-", "bytes=200000-"]


def test_what_arrived_is_kept_for_the_next_call(publisher, offer, tmp_path):
    offer()
    publisher.break_after, publisher.breaks = 1_000, 99
    with pytest.raises(DataError, match="broke off after 4,000 of 300,000 bytes"):
        fetch("test-set", tmp_path, progress=False)
    assert not (tmp_path / "set" / "file.bin").exists()
    assert part_of(tmp_path).read_bytes() == CONTENT[:4_000]
    assert "4,000 bytes fetched so far" in check("test-set", tmp_path)[0].note
    publisher.breaks = 0
    (path,) = fetch("test-set", tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert publisher.asked[-1][1] == "bytes=4000-"


def test_a_server_that_cannot_resume_starts_over(publisher, offer, tmp_path):
    offer()
    publisher.ranges, publisher.break_after, publisher.breaks = False, 100_000, 1
    (path,) = fetch("test-set", tmp_path, progress=False)
    assert path.read_bytes() == CONTENT


def test_a_wrong_checksum_never_becomes_a_file(publisher, offer, tmp_path):
    offer()
    publisher.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(DataError, match="sha256 checksum [0-9a-f]{64} instead of " + DIGEST[7:]):
        fetch("test-set", tmp_path, progress=False)
    assert list((tmp_path / "set").iterdir()) == []


def test_a_wrong_beginning_on_disk_is_thrown_away(publisher, offer, tmp_path):
    offer()
    part_of(tmp_path).parent.mkdir()
    part_of(tmp_path).write_bytes(b"x" * 5_000)
    (path,) = fetch("test-set", tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert [r for _, r in publisher.asked] == ["bytes=5000-", ""]


def test_a_too_long_beginning_and_a_longer_answer(publisher, offer, tmp_path):
    offer()
    part_of(tmp_path).parent.mkdir()
    part_of(tmp_path).write_bytes(b"x" * (len(CONTENT) + 1))
    assert fetch("test-set", tmp_path, progress=False)[0].read_bytes() == CONTENT
    (tmp_path / "set" / "file.bin").unlink()
    publisher.content = CONTENT + b"more"
    with pytest.raises(DataError, match="bytes instead of 300,000"):
        fetch("test-set", tmp_path, progress=False)


def test_unknown_size_still_notices_a_broken_transfer(publisher, offer, tmp_path):
    offer(size=0)
    publisher.break_after, publisher.breaks = 100_000, 1
    assert fetch("test-set", tmp_path, progress=False)[0].read_bytes() == CONTENT


def test_the_next_address_is_tried(publisher, offer, tmp_path):
    offer(urls=(publisher.url("/gone"), publisher.url()))
    assert fetch("test-set", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert [p for p, _ in publisher.asked] == ["/gone", "/file.bin"]


def test_no_address_works(publisher, offer, tmp_path):
    offer(urls=(publisher.url("/gone"),))
    with pytest.raises(DataError, match=r"/gone: HTTP Error 404: Not Found.*Put the file at .*file\.bin by hand"):
        fetch("test-set", tmp_path, progress=False)


def test_nobody_listens(offer, tmp_path):
    offer(urls=("http://127.0.0.1:9/file.bin",))
    with pytest.raises(DataError, match="could not be fetched"):
        fetch("test-set", tmp_path, progress=False)


def test_a_damaged_file_is_seen_and_replaced(offer, tmp_path):
    offer()
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file.bin").write_bytes(CONTENT[:-5])
    (row,) = check("test-set", tmp_path)
    assert (row.present, row.sound, row.note) == (True, False, "299,995 bytes instead of 300,000")
    assert fetch("test-set", tmp_path, progress=False)[0].read_bytes() == CONTENT
    (row,) = check("test-set", tmp_path)
    assert (row.present, row.size, row.sound) == (True, 300_000, True)


def test_progress_goes_to_standard_error(offer, tmp_path, capsys):
    offer()
    fetch("test-set", tmp_path, progress=True)
    captured = capsys.readouterr()
    assert "file.bin" in captured.err
    assert captured.out == ""


def test_the_list_says_what_is_here(offer, tmp_path):
    offer()

    def here() -> str:
        return {row.name: row.present for row in describe_sources(tmp_path)}["test-set"]

    assert here() == "no"
    fetch("test-set", tmp_path, progress=False)
    assert here() == "yes"
    rows = describe_sources(tmp_path)
    assert {"digits", "heart", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn"} <= {r.name for r in rows}
    assert next(r.present for r in rows if r.name == "digits") == "built in"
    text = render_sources(rows)
    assert "300 KB" in next(line for line in text.splitlines() if line.startswith("test-set"))


def test_sets_without_files():
    assert fetch("digits", "/nonexistent", progress=False) == []
    (row,) = check("heart", "/nonexistent")
    assert (row.sound, row.note) == (True, "read: 736 + 184 examples")
    assert "heart" not in render_checks([row]).splitlines()[0]
    with pytest.raises(DataError, match="nothing to fetch"):
        fetch("mine.npz", progress=False)
    with pytest.raises(DataError, match="did you mean 'mnist'"):
        fetch("mnits", progress=False)


def test_a_set_from_its_authors_says_where_to_ask(tmp_path):
    with pytest.raises(DataError, match=r"'deepship' cannot be fetched: .*deepship"):
        fetch("deepship", tmp_path, progress=False)
    (row,) = check("deepship", tmp_path)
    assert (row.present, row.path) == (False, str(tmp_path / "deepship"))
    assert render_check("deepship", tmp_path)[1] is False
    assert render_check("digits", tmp_path)[1] is True


def test_every_canonical_file_is_described():
    for source in sources().values():
        for remote in source.files:
            assert remote.urls
            assert all(url.startswith(("https://", "http://")) for url in remote.urls)
            kind, _, digest = remote.checksum.partition(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[kind]
            assert remote.size > 0


def test_sizes_for_people():
    assert [human_size(n) for n in (0, 999, 45_394, 170_498_071, 2_500_000_000)] == [
        "0 B",
        "999 B",
        "45.4 KB",
        "170 MB",
        "2.5 GB",
    ]


def test_an_empty_test_part_is_no_data_set():
    """A source may give an empty part; the type itself refuses only what does not fit together."""
    with pytest.raises(DataError, match="inputs 2, labels 3"):
        Examples(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64))
