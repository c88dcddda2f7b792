"""Live progress: one bar over rounds, with the latest accuracy and sigma beside it."""

from __future__ import annotations

import sys
from typing import Any


class _Lines:
    """What stands in for tqdm's bar on a bare host that has torch, numpy and safetensors alone: a line a round."""

    def __init__(self, total: int, desc: str) -> None:
        self.n, self.total, self.desc, self._shown = 0, total, desc, ""

    def update(self, n: int = 1) -> None:
        self.n += n
        print(f"{self.desc}: round {self.n} of {self.total}{self._shown}", file=sys.stderr)

    def write(self, text: str) -> None:
        print(text)

    def set_postfix(self, shown: dict[str, str]) -> None:
        self._shown = "".join(f", {k} {v}" for k, v in shown.items())

    def close(self) -> None:
        pass


def _bar(total: int, name: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return _Lines(total, name)
    return tqdm(total=total, desc=name, unit="round", dynamic_ncols=True, leave=False, delay=0.5)


class Progress:
    """A listener for ``Federation`` that shows a bar; closes itself at the run's end."""

    def __init__(self, rounds: int, name: str) -> None:
        self._bar = _bar(rounds, name)
        self._shown: dict[str, str] = {}

    def __call__(self, event: dict[str, Any], run: str = "") -> None:
        """Take one event of the run, or of the one called ``run`` among several under one bar."""
        if event["kind"] == "round":
            if self._bar.n == 0 and event["round"] > 1 and self._bar.total >= event["round"]:
                self._bar.update(event["round"] - 1)  # resumed: earlier rounds are done
            self._bar.update()
            sigma = (event["fusion"].get("sigma") or {}).get("q50")
            if sigma is not None:
                self._shown["sigma"] = f"{sigma:.2g}"
        elif event["kind"] == "evaluation" and event["split"] == "test" and event["model"] == "global":
            self._shown["accuracy"] = f"{100 * event['metrics']['accuracy']:.1f}%"
        elif event["kind"] == "note":
            self._bar.write(f"{f'{run}, ' if run else ''}round {event['round']}: {event['text']}")
        elif event["kind"] == "pretrain":
            self._shown["pre-training"] = f"{100 * event['metrics']['accuracy']:.1f}%"
        elif event["kind"] == "end" and self._bar.n >= self._bar.total:
            self.close()
        self._bar.set_postfix(self._shown)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
