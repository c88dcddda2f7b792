"""How fast posteriors are fused, against a plain copy and against a Flower-style server, all in one run.

    OMP_NUM_THREADS=1 python benchmarks/fusion.py                        # CPU, under two minutes
    PYTHONPATH=src python benchmarks/fusion.py --device cuda --out fusion.json   # within a minute

It ends in time and with the table, whatever happens: after ``--budget`` seconds nothing new is begun, what fails is a row that says so, and a run that
hangs prints what it has and stops. Needs torch, numpy and safetensors.

Columns: GB/s counts the bytes read, 2 x 4 x K x P for means and variances (nothing written); ``of copy`` divides by the bytes a
``torch.Tensor.copy_`` of the means reads and writes per second, the faster of one timed right before and one right after. On a GPU
``ms`` is the device's own time (calls replayed from a CUDA graph, the copy likewise) and ``call ms`` the time of one call as Python makes it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from fedbayes.fusion import Accumulator, fuse_stacked, pairwise_kl, rules
from fedbayes.posterior import Gaussian, Posterior, kl

CUDA_SIZES = ("100x25000000", "10x272474", "10x25000000", "100x272474")
CPU_SIZES = ("10x272474", "10x4000000", "100x272474")
LAYERS = 60
_MEMORY_SECONDS = 60
"""What ``--memory`` may take beyond the budget."""
_STARTED = time.perf_counter()


def seconds(f: Callable[[], object], device: str, least: float = 0.15, most: int = 50) -> float:
    """Return the best time of one call, after a warm-up call."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    f()
    sync()
    best, spent, calls = float("inf"), 0.0, 0
    while calls < min(3, most) or (spent < least and calls < most):
        start = time.perf_counter()
        f()
        sync()
        took = time.perf_counter() - start
        best, spent, calls = min(best, took), spent + took, calls + 1
        if took > 2:
            break
    return best


def device_seconds(f: Callable[[], object], device: str) -> float:
    """Return the best time of one call without the cost of launching it: on a GPU, calls recorded in a CUDA graph and replayed."""
    if device != "cuda":
        return seconds(f, device)
    calls = max(1, min(20, int(2e-4 / seconds(f, device, least=0))))  # short calls fill a graph of about 0.2 ms
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                f()
    except RuntimeError as error:
        print(f"cannot be recorded in a CUDA graph, timed by single calls: {error}", flush=True)
        return seconds(f, device, least=0.05)
    return seconds(graph.replay, device, least=0.05) / calls


def clients(k: int, p: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (K, P) float32 means and variances."""
    torch.manual_seed(0)
    means = torch.empty(k, p, device=device).normal_(std=0.05)
    variances = torch.empty(k, p, device=device).uniform_(1e-4, 4e-4)
    return means, variances


def as_posterior(mean: torch.Tensor, variance: torch.Tensor) -> Posterior:
    """Return one client as a posterior of LAYERS tensors (views)."""
    cuts = list(range(0, mean.numel(), -(-mean.numel() // LAYERS)))
    parts = zip(cuts, [*cuts[1:], mean.numel()])
    return Posterior({f"layer{i:02d}.weight": (mean[a:b], variance[a:b]) for i, (a, b) in enumerate(parts)})


def flower_style(lists: list[list[np.ndarray]], examples: list[int]) -> list[np.ndarray]:
    """Weighted average as a typical server does it: for each layer, a Python sum over clients of NumPy arrays."""
    total = sum(examples)
    weighted = [[layer * n for layer in weights] for weights, n in zip(lists, examples)]
    return [functools.reduce(np.add, layers) / total for layers in zip(*weighted)]


class Clock:
    """What is left of the time given; the last part is for measuring rules that are compiled already."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def left(self) -> float:
        """Return the seconds until nothing new is begun."""
        return self.limit - (time.perf_counter() - _STARTED)

    def compiles(self) -> bool:
        """Whether there is time to compile one more rule."""
        return self.left() > min(12, self.limit / 4)


def stacked_rows(k: int, p: int, device: str, compiled: bool, clock: Clock, chosen: list[str]) -> Iterator[dict]:
    """Time every rule on stacked clients; a rule that fails is a row that says so."""
    means, variances = clients(k, p, device)
    target = torch.empty_like(means)
    plain = functools.partial(target.copy_, means)
    copy = 2 * means.nbytes / device_seconds(plain, device) / 1e9
    yield {"what": "plain copy", "K": k, "P": p, "gb_per_s": copy, "of_copy": 1.0}
    previous = Gaussian(means[0].clone(), variances[0] * 1.02)
    late: list[str] = []
    for rule in chosen:
        kernel = (rule, device == "cpu" and k > 16)  # a CPU has kernels of their own for many clients
        if not (clock.left() > 0 if kernel in _READY else clock.compiles()):
            late.append(rule)
            continue
        needs = previous if rule == "dwc" else None
        call = functools.partial(fuse_stacked, means, variances, range(1, k + 1), rule, needs, compile=compiled)
        try:
            yield {"what": rule, "K": k, "P": p, **rule_times(call, plain, device, means.nbytes)}
            _READY.add(kernel)
        except Exception as error:  # the other rules' figures must not be lost
            yield failure(rule, error, k, p)
    if late:
        yield {"what": f"not run, out of time: {', '.join(late)}", "K": k, "P": p}


_READY: set[tuple[str, bool]] = set()
"""Kernels already compiled."""


def rule_times(call: Callable[[], object], plain: Callable[[], object], device: str, nbytes: int) -> dict:
    """Return what is measured of one rule, a copy timed right before and right after."""
    start = time.perf_counter()
    call()  # compiles
    if device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    before = device_seconds(plain, device)
    took = device_seconds(call, device)
    copy = 2 * nbytes / min(before, device_seconds(plain, device)) / 1e9
    gb = 2 * nbytes / took / 1e9
    row = {"seconds": took, "gb_per_s": gb, "of_copy": gb / copy, "first": first}
    return {**row, "call": seconds(call, device, least=0.02)} if device == "cuda" else row


def failure(what: str, error: Exception, k: int = 0, p: int = 0) -> dict:
    """Return the row of something that failed."""
    words = (str(error).strip().splitlines() or [""])[0][:120].replace("|", "/")
    return {"what": f"{what}: failed, {type(error).__name__}: {words}", "K": k, "P": p}


def flower_rows(sizes: Iterable[tuple[int, int]], clock: Clock, copies: dict[tuple[int, int], float]) -> Iterator[dict]:
    """Time the NumPy loop at every size that fits into memory and time, beside a CPU's copies if that is what was measured."""
    for k, p in sizes:
        if k * p > 5e8 or clock.left() < k * p / 2e7:
            yield {"what": "Flower-style NumPy loop: not run, too large or out of time", "K": k, "P": p}
        else:
            yield flower_row(*clients(k, p, "cpu"), copies.get((k, p)))


def flower_row(means: torch.Tensor, variances: torch.Tensor, copy: float | None) -> dict:
    """Time the NumPy loop on the same clients (averaging means and variances: rule nwa)."""
    k, p = means.shape
    lists = []
    for m, v in zip(means, variances):
        q = as_posterior(m, v)
        lists.append([t.numpy() for g in q.gaussians.values() for t in g])
    took = seconds(lambda: flower_style(lists, list(range(1, k + 1))), "cpu", 0, 3 if k * p < 1e8 else 1)
    gb = 2 * means.nbytes / took / 1e9
    row = {"what": "nwa, Flower-style NumPy loop", "K": k, "P": p, "seconds": took, "gb_per_s": gb}
    return {**row, "of_copy": gb / copy} if copy else row


def streaming_rows(p: int, device: str) -> Iterator[dict]:
    """Time one client's absorb."""
    means, variances = clients(2, p, device)
    a, b = (as_posterior(m, v) for m, v in zip(means, variances))
    for rule in ("nwa", "conflation", "lp"):
        for reproducible in (True, False):
            total = Accumulator(rule, a, a, reproducible=reproducible)
            names = iter(range(10**9))
            took = seconds(lambda: total.absorb(b, 1.0, next(names)), device)  # noqa: B023 - called at once
            kind = "order-free" if reproducible else "plain pairs"
            gb = 2 * means[0].nbytes / took / 1e9
            yield {"what": f"absorb one client, {rule}, {kind}", "K": 1, "P": p, "seconds": took, "gb_per_s": gb}


def kl_row(device: str, k: int = 100, p: int = 272_474) -> dict:
    """Time the pairwise KL matrix and compare a few entries with the direct sum."""
    means, variances = clients(k, p, device)
    posteriors: dict[int | str, Posterior] = {i: as_posterior(means[i], variances[i]) for i in range(k)}
    matrix = pairwise_kl(posteriors)
    pairs = [(0, 1), (k - 1, 0), (k // 2, k // 3)]
    direct = {(i, j): float(kl(posteriors[i], posteriors[j])) for i, j in pairs}
    error = max(abs(float(matrix[i, j]) / d - 1) for (i, j), d in direct.items())
    took = seconds(lambda: pairwise_kl(posteriors), device, least=0)
    return {"what": f"pairwise KL, largest relative error {error:.1e}", "K": k, "P": p, "seconds": took, "error": error}


def memory_rows(p: int = 27_247) -> Iterator[dict]:
    """Peak resident memory of a process that streams K clients, each made when it is its turn."""
    for k in (10, 1000):
        command = [sys.executable, __file__, "--stream", f"{k}x{p}"]
        peak = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        yield {
            "what": f"peak memory {peak['mib']:.0f} MiB, streaming conflation",
            "K": k,
            "P": p,
            "seconds": peak["seconds"],
        }


def stream(k: int, p: int) -> None:
    """Child process of ``memory_rows``."""
    torch.set_num_threads(1)
    start, total = time.perf_counter(), None
    for i in range(k):
        means, variances = clients(1, p, "cpu")
        posterior = as_posterior(means[0], variances[0])
        total = total or Accumulator("conflation", posterior)
        total.absorb(posterior, 1.0, i)
    assert total is not None
    total.conclude()
    print(json.dumps({"mib": own_peak(), "seconds": time.perf_counter() - start}))


def own_peak() -> float:
    """Return this process's peak resident memory in MiB (``ru_maxrss`` would give a small child its parent's peak)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def table(rows: list[dict]) -> str:
    """Return the rows as Markdown."""
    lines = ["| what | K | P | ms | GB/s | of copy | call ms | first call s |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        ms = f"{1000 * r['seconds']:.3g}" if "seconds" in r else ""
        gb = f"{r['gb_per_s']:.3g}" if "gb_per_s" in r else ""
        share = f"{100 * r['of_copy']:.0f} %" if "of_copy" in r else ""
        call = f"{1000 * r['call']:.3g}" if "call" in r else ""
        first = f"{r['first']:.1f}" if "first" in r else ""
        lines.append(f"| {r['what']} | {r['K']} | {r['P']:,} | {ms} | {gb} | {share} | {call} | {first} |")
    return "\n".join(lines)


def collect(rows: list[dict], what: str, source: Callable[[], Iterable[dict]], needed: float, clock: Clock) -> None:
    """Add the rows of a source to ``rows`` as they come; a failure is one row more and not the end."""
    if clock.left() < needed:
        rows.append({"what": f"{what}: not run, out of time", "K": 0, "P": 0})
        return
    try:
        for row in source():
            rows.append(row)
            print(row, flush=True)
    except Exception as error:  # what was measured before must not be lost
        rows.append(failure(what, error))


def finish(rows: list[dict], device: str, out: str | None) -> None:
    """Write the rows as JSON if asked, and print the table."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if out:
        with open(out, "w") as f:
            json.dump({"device": name, "torch": torch.__version__, "rows": rows}, f, indent=1)
    took = time.perf_counter() - _STARTED
    print(f"\n{name}, torch {torch.__version__}, {took:.0f} s in all\n\n{table(rows)}", flush=True)


def watch(rows: list[dict], device: str, out: str | None, after: float) -> threading.Timer:
    """Start a watch that ends a hanging run with what it has."""

    def end() -> None:
        rows.append({"what": f"stopped: still busy after {after:.0f} s", "K": 0, "P": 0})
        finish(rows, device, out)
        os._exit(1)

    timer = threading.Timer(after, end)
    timer.daemon = True
    timer.start()
    return timer


def main() -> None:
    """Run the measurements asked for and print the table last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", nargs="*", help="KxP, e.g. 10x272474")
    parser.add_argument("--rules", nargs="*", help="default: every rule with a stacked form")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument(
        "--memory", action="store_true", help="also measure peak memory for K = 10 and 1,000 (CPU, Linux)"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds after which nothing new is begun (default: CUDA 45, CPU 105)"
    )
    parser.add_argument("--out", help="write the rows as JSON here")
    parser.add_argument("--stream", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stream:
        return stream(*map(int, args.stream.split("x")))
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here.")
    clock, rows = Clock((45.0 if cuda else 105.0) if args.budget is None else args.budget), []
    watchdog = watch(rows, args.device, args.out, clock.limit + 12 + _MEMORY_SECONDS * args.memory)
    chosen = args.rules or [r.name for r in rules() if not r.draws and r.name != "fedavg"]
    given = args.sizes or (CUDA_SIZES if cuda else CPU_SIZES)
    sizes = [(int(k), int(p)) for k, p in (size.split("x") for size in given)]
    for k, p in sizes:
        stacked = functools.partial(stacked_rows, k, p, args.device, not args.eager, clock, chosen)
        collect(rows, f"{k} x {p:,}", stacked, 0, clock)
        if cuda:
            torch.cuda.empty_cache()
    copies = {(r["K"], r["P"]): r["gb_per_s"] for r in rows if r["what"] == "plain copy" and not cuda}
    collect(rows, "Flower-style NumPy loop", lambda: flower_rows(sizes, clock, copies), 0, clock)
    for p in (272_474, 25_000_000) if cuda else (272_474,):
        collect(rows, f"streaming {p:,}", functools.partial(streaming_rows, p, args.device), 0, clock)
    collect(rows, "pairwise KL", lambda: [kl_row(args.device)], 0, clock)
    if args.memory:
        collect(rows, "peak memory", memory_rows, -_MEMORY_SECONDS, clock)
    watchdog.cancel()
    finish(rows, args.device, args.out)


if __name__ == "__main__":
    main()
