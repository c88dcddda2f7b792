"""The same surroundings for every test, whoever runs it and whatever ran before."""

import pytest


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what ``--data-dir`` leaves in the environment; ask this machine's own addresses, not a proxy."""
    monkeypatch.setenv("FEDBAYES_DATA", "")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
