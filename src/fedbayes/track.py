"""The numbers of ``metrics.jsonl`` for TensorBoard too: a listener of the round loop, or a finished run afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, RunError, nearest

Event = Mapping[str, Any]


def scalars(event: Event) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of everything numeric in a round or evaluation event.

    Tags are ``test/accuracy``, ``ood:svhn/auroc_entropy``, ``test (ensemble)/accuracy``, ``train/loss``,
    ``sigma/q50``, ``sigma by layer/NAME``, ``round/seconds``, ``engine/occupancy``, ``bytes/up``. Undefined values
    (null in the file) are left out.
    """
    if event["kind"] == "evaluation":
        model = event.get("model", "global")
        place = event["split"] if model == "global" else f"{event['split']} ({model})"
        yield from _numbers(place, event.get("metrics"))
    elif event["kind"] == "round":
        yield from _numbers("round", {k: event.get(k) for k in ("seconds", "learning_rate", "examples")})
        yield from _numbers("train", event.get("train"))
        fusion = event.get("fusion") or {}
        sigma = fusion.get("sigma") or {}
        yield from _numbers("sigma", sigma)
        yield from _numbers("sigma by layer", sigma.get("layers"))
        yield "fusion/refused", float(len(fusion.get("refused") or ()))
        yield from _numbers("fusion", {k: v for k, v in fusion.items() if k != "sigma"})
        yield from _numbers("engine", event.get("engine"))
        yield from _numbers("bytes", event.get("bytes"))


def _numbers(place: str, values: Mapping[str, Any] | None) -> Iterator[tuple[str, float]]:
    for name, value in (values or {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            yield f"{place}/{name}", float(value)


class TensorBoard:
    """A listener that writes every round and evaluation event to ``RUN/tensorboard``.

    Evaluations that belong to no round yet are written at the round they name; the run's notes appear as text.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError(
                '--track tensorboard needs tensorboard, which is not installed: pip install "fedbayes[track]" brings it.'
            ) from None
        self._writer = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        """Write one event; on the last one everything is on disk."""
        kind = event.get("kind")
        if kind in ("round", "evaluation"):
            for tag, value in scalars(event):
                self._writer.add_scalar(tag, value, int(event["round"]))
            if kind == "evaluation":
                self._writer.flush()
        elif kind == "note":
            self._writer.add_text("notes", str(event.get("text", "")), int(event.get("round", 0)))
        elif kind == "end":
            self.close()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()


TRACKERS: dict[str, Callable[[Path], Callable[[Event], None]]] = {
    "tensorboard": lambda run: TensorBoard(run / "tensorboard")
}
"""Makers of listeners by name; each is given the run directory."""


def tracker(name: str, run: str | Path | None) -> Callable[[Event], None]:
    """Return the listener called ``name`` for a run directory (``fedbayes run --track NAME``)."""
    if name not in TRACKERS:
        raise ConfigError(f"--track '{name}' does not exist; {nearest(name, TRACKERS)}")
    if run is None:
        raise ConfigError("--track needs a run directory to write into: name it with --out.")
    return TRACKERS[name](Path(run))


def replay(run: str | Path, name: str = "tensorboard") -> Path:
    """Write the events of an existing run directory for a tracker, as ``--track`` would have, and return its folder."""
    from .rundir import read_events

    run = Path(run)
    if not (run / "metrics.jsonl").exists():
        raise RunError(f"{run} holds no run (no metrics.jsonl).")
    listener = tracker(name, run)
    for event in read_events(run):
        listener(event)
    close = getattr(listener, "close", None)
    if close is not None:
        close()
    return run / name
