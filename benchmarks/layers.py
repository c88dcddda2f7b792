#!/usr/bin/env python3
"""What an estimator costs: forward and backward of a convolution, as ratios to the deterministic one in the same run.

    PYTHONPATH=src python benchmarks/layers.py [--device cuda] [--lanes 1 10] [--seconds 0.4] [--budget 60] [--out layers.json]

Every row is a stack of 3×3 convolutions with ReLU between (ResNet-20's widths), forward and backward, under one
or ten lanes (vmap), eager or compiled; on a GPU in bf16 autocast, channels-last, captured in a CUDA graph, so that
kernels are timed and not their launching. The KL is not part of it (a row of its own). Needs torch alone.

Kinds and rows are measured in turns over the whole time of a row's setting, and a ratio is the median of the turns'
ratios, so that a busy machine or a clock that changes hits both sides of it. Rows that `--budget` seconds leave no
time for are named under the table, never guessed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import fedbayes.nn as fnn
from fedbayes.engine.lane_layers import with_lane_layers
from fedbayes.objective import gaussian_kl

KINDS = ("deterministic", "flipout", "flipout, one call", "sample", "local", "dropout")
"""The one all are compared with first, then what one wants to know most."""
ON_LANES = ("deterministic, engine", "flipout, engine")
"""The same under vmap with the lane engine's own operations, where those are meant to run: compiled, on a GPU."""
TURNS = 5
SIDES = {16: 32, 32: 16, 64: 8}
"""Channels and picture side of ResNet-20's stages."""


def stack(channels: int, depth: int, kind: str) -> nn.Module:
    """``depth`` convolutions of one width with ReLU between, of one kind."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.ReLU()]
    module = fnn.bayesianize(nn.Sequential(*layers), kind.split(",")[0])
    for layer in module.modules():
        if isinstance(layer, fnn.FlipoutConv2d):
            layer.one_call = kind.endswith("one call")
    return with_lane_layers(module) if kind in ON_LANES else module


@dataclass(frozen=True)
class Job:
    """All lanes of a stack of layers on one batch: the loss as a function (which may be compiled), and what it trains."""

    loss: Callable[[], Tensor]
    parameters: list[Tensor]

    def step(self, loss: Callable[[], Tensor]) -> Callable[[], object]:
        """One forward and backward."""
        return lambda: torch.autograd.grad(loss(), self.parameters)


def make_job(module: nn.Module, lanes: int, channels: int, batch: int, device: str) -> Job:
    """Stack the parameters and make a batch, laid out as the lanes of the engine are."""
    side = SIDES[channels]
    flat = torch.randn((batch, lanes * channels, side, side), device=device).to(memory_format=torch.channels_last)
    x = flat.view(batch, lanes, channels, side, side).transpose(0, 1)
    parameters = {
        n: torch.stack([p.detach().to(device)] * lanes).requires_grad_() for n, p in module.named_parameters()
    }

    def loss() -> Tensor:
        def one(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(module, p, (x,)).float().square().mean()

        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return torch.vmap(one, randomness="different")(parameters, x).sum()

    loss.__code__ = loss.__code__.replace()  # code of its own: the compiler keeps its variants apart by code
    return Job(loss, list(parameters.values()))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same work as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(run: Callable[[], object], device: str, seconds: float) -> float:
    """Median time of one call over ``seconds`` of calls, at least three of them."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    repeats = 10 if device == "cuda" else 1
    while time.perf_counter() < end or len(times) < 3:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats * 1e3)
    return statistics.median(times)


@dataclass(frozen=True)
class Setting:
    """What a table's line has in common with its neighbours."""

    device: str
    lanes: int
    compiled: bool
    batch: int
    depth: int
    seconds: float
    """Timing of one kind and width, over all turns."""


def prepare(setting: Setting, kind: str, channels: int) -> Callable[[], object]:
    """Build, compile, warm up and (on a GPU) capture one kind's step."""
    job = make_job(stack(channels, setting.depth, kind), setting.lanes, channels, setting.batch, setting.device)
    run = job.step(torch.compile(job.loss) if setting.compiled else job.loss)
    run()
    run()
    return captured(run) if setting.device == "cuda" else run


def measure(setting: Setting, channels: int, deadline: float) -> list[dict[str, Any]]:
    """Rows of all kinds for one setting and width; the kinds left out when ``deadline`` is near have no ``ms``."""
    runs: dict[str, Callable[[], object]] = {}
    rows: list[dict[str, Any]] = []
    last = 0.0
    kinds = (*KINDS[:3], *ON_LANES, *KINDS[3:]) if setting.compiled and setting.device == "cuda" else KINDS
    for kind in kinds:
        began = time.perf_counter()
        row = {"kind": kind, "channels": channels, "lanes": setting.lanes, "compiled": setting.compiled}
        if began + last + (len(runs) + 1) * setting.seconds < deadline:
            try:
                runs[kind] = prepare(setting, kind, channels)
            except Exception as error:  # one kind that fails must not cost the table of the others
                row["error"] = f"{type(error).__name__}: {error}"
            row["prepare_s"] = time.perf_counter() - began
            last = row["prepare_s"]
        rows.append(row)
    turns = [
        {k: milliseconds(run, setting.device, setting.seconds / TURNS) for k, run in runs.items()} for _ in range(TURNS)
    ]
    for row in rows:
        if row["kind"] in runs:
            row["ms"] = statistics.median(t[row["kind"]] for t in turns)
            row["ratio"] = statistics.median(t[row["kind"]] / t.get(KINDS[0], float("nan")) for t in turns)
            print(
                "  {lanes} lanes, compiled {compiled}, {channels} channels, {kind}: {ms:.3f} ms".format(**row),
                flush=True,
            )
    return rows


def measure_kl(device: str, seconds: float) -> dict[str, Any]:
    """Forward and backward of the KL of a whole Flipout ResNet-20, eager."""
    module = fnn.build("resnet20", "flipout").to(device)
    parameters = dict(module.named_parameters())
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    names = fnn.gaussian_names(parameters)
    wanted = [t for n, t in parameters.items() if n in names or n.endswith(fnn.RHO)]

    def run() -> object:
        kl = gaussian_kl(parameters, dict.fromkeys(names, zero), dict.fromkeys(names, one))
        return torch.autograd.grad(kl, wanted)

    return {"kind": "KL of ResNet-20", "ms": milliseconds(run, device, seconds)}


def table(rows: list[dict[str, Any]], widths: list[int]) -> str:
    """Ratios to the deterministic convolution: a line a kind and setting, a column a width."""
    lines = [f"{'kind':24s}{'lanes':>6s}{'compiled':>10s}" + "".join(f"{f'{c} channels':>18s}" for c in widths)]
    settings = sorted({(r["lanes"], r["compiled"]) for r in rows})
    for lanes, compiled in settings:
        for kind in sorted((*KINDS, *ON_LANES), key=lambda k: (k != KINDS[0], k)):
            cells = [r for r in rows if (r["kind"], r["lanes"], r["compiled"]) == (kind, lanes, compiled)]
            if not cells:
                continue
            values = "".join(f"{r['ratio']:>6.2f}x {r['ms']:>7.3f} ms" if "ms" in r else f"{'-':>18s}" for r in cells)
            lines.append(f"{kind:24s}{lanes:>6d}{'yes' if compiled else 'no':>10s}{values}")
    failed = [r for r in rows if "error" in r]
    lines += [f"{r['kind']}, {r['channels']} channels, compiled {r['compiled']}: {r['error'][:300]}" for r in failed]
    missing = [r for r in rows if "ms" not in r and r not in failed]
    if missing:
        lines.append(f"{len(missing)} of {len(rows)} rows not measured (-): the time was up (--budget).")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    arguments.add_argument("--seconds", type=float, default=0.4, help="timing of one row")
    arguments.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds in all; rows that do not fit are left out"
    )
    arguments.add_argument("--out", type=Path, help="write the rows as JSON")
    arguments.add_argument("--no-compile", action="store_true", help="eager rows only")
    arguments.add_argument("--lanes", type=int, nargs="+", help="lane counts (default 10, on a CPU 1)")
    arguments.add_argument(
        "--widths", type=int, nargs="+", choices=list(SIDES), help="channels (default 16 64, on a CPU all)"
    )
    a = arguments.parse_args()
    deadline = time.perf_counter() + a.budget
    gpu = a.device == "cuda"
    if gpu:
        torch.backends.cudnn.benchmark = True
    batch, depth = (32, 3) if gpu else (16, 2)
    widths = a.widths or ([16, 64] if gpu else list(SIDES))
    kl = measure_kl(a.device, a.seconds)
    rows: list[dict[str, Any]] = []
    for compiled in (False,) if a.no_compile else (True, False):
        for lanes in a.lanes or ([10] if gpu else [1]):
            for channels in widths:
                rows += measure(Setting(a.device, lanes, compiled, batch, depth, a.seconds), channels, deadline)
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    if a.out:
        a.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows, "kl": kl}, indent=1))
    print(f"\n{name}, torch {torch.__version__}, batch {batch}, {depth} convolutions, forward + backward")
    print(f"KL of a Flipout ResNet-20, forward + backward, eager: {kl['ms']:.3f} ms")
    print("Ratio to the deterministic convolutions of the same line's setting, and milliseconds:")
    print(table(rows, widths))


if __name__ == "__main__":
    sys.exit(main())
