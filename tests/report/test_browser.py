"""The page in a real headless Chromium: no console error, no network request, both colour schemes, narrow and wide."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("sklearn")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

from make_run import make_run  # noqa: E402

from fedbayes import report  # noqa: E402

PROBE = """
addEventListener('load', () => {
  const svgs = [...document.querySelectorAll('figure svg')];
  const text = svgs[0].querySelector('text');
  document.title = JSON.stringify({
    figures: svgs.length,
    drawn: svgs.filter(s => s.getBoundingClientRect().width > 150 && s.getBoundingClientRect().height > 80).length,
    overflow: document.documentElement.scrollWidth - innerWidth,
    width: innerWidth,
    paper: getComputedStyle(document.querySelector('section')).backgroundColor,
    ink: getComputedStyle(text).fill,
    letters: Math.min(...svgs.map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)),
    loaded: performance.getEntriesByType('resource').map(e => e.name),
  });
});
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    make_run(root / "runs" / "one", rounds=3)
    make_run(root / "runs" / "two", rounds=3, rule="ws", collapse=True, ood=False, predictions=False)
    return {"one": report.write([root / "runs" / "one"]), "several": report.write([root / "runs"])}


def chromium(
    url: str, profile: Path, *flags: str, scheme: str = "light", width: int = 1200
) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    dark = (
        ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else ["--blink-settings=preferredColorScheme=1"]
    )
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--enable-logging=stderr",
        "--v=0", "--hide-scrollbars", f"--window-size={width},2000", *dark, *flags, url,
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "HOME": str(profile)}
    )


def console(output: str) -> list[str]:
    """Lines that the page itself wrote to the browser's console (errors, refused resources)."""
    return [line for line in output.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("which", ["one", "several"])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 500)])
def test_page_in_a_browser(pages, tmp_path, which, scheme, width):
    """A copy with a probing script (the page's own policy allows none, so the copy loosens it) reports what is seen."""
    html = pages[which].read_text(encoding="utf-8")
    probed = html.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';", 1)
    probed = probed.replace("</body>", f"<script>{PROBE}</script></body>", 1)
    file = tmp_path / "probed.html"
    file.write_text(probed, encoding="utf-8")
    done = chromium(file.as_uri(), tmp_path / "profile", "--dump-dom", scheme=scheme, width=width)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stderr[-2000:]
    seen = json.loads(title.group(1).replace("&quot;", '"').replace("&amp;", "&"))
    assert not console(done.stderr)
    assert seen["figures"] == html.count('role="img"') >= 5
    assert seen["drawn"] == seen["figures"]
    assert seen["loaded"] == []
    assert seen["overflow"] <= 0, "the page must not scroll sideways"
    assert seen["letters"] > 0.9, "letters of a figure must not shrink much"
    paper = [int(v) for v in re.findall(r"\d+", seen["paper"])[:3]]
    ink = [int(v) for v in re.findall(r"\d+", seen["ink"])[:3]]
    assert (sum(paper) < 150) == (scheme == "dark")
    assert abs(sum(paper) - sum(ink)) > 200, "letters in figures must be readable on the page"


def test_nothing_is_asked_for_over_the_network(pages, tmp_path):
    """Served over HTTP the browser asks for the page and nothing else, and its console stays empty."""
    asked: list[str] = []
    body = pages["one"].read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/page.html" else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body if self.path == "/page.html" else b"")

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        done = chromium(f"http://127.0.0.1:{server.server_port}/page.html", tmp_path / "profile", "--dump-dom")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == ["/page.html"]
    assert not console(done.stderr)
    assert "What was run" in done.stdout or "Learning" in done.stdout
