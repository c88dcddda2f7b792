"""How fast posteriors are fused, against a plain copy and against a Flower-style server, all in one run.

    python benchmarks/fusion.py --device cpu --sizes 10x272474 --out fusion.json
    PYTHONPATH=src python benchmarks/fusion.py --device cuda --out fusion.json

Columns: GB/s counts the bytes read, 2 x 4 x K x P for means and variances (nothing written); ``of copy`` divides by the bytes a
``torch.Tensor.copy_`` of the means reads and writes per second, the faster of one timed right before and one right after. On a GPU
``ms`` is the device's own time (calls replayed from a CUDA graph, the copy likewise) and ``call ms`` the time of one call as Python makes it.
Needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from fedbayes.fusion import Accumulator, fuse_stacked, pairwise_kl, rules
from fedbayes.posterior import Gaussian, Posterior, kl

CUDA_SIZES = ("100x25000000", "10x272474", "10x25000000", "100x272474")
CPU_SIZES = ("10x272474", "10x4000000", "100x272474")
LAYERS = 60
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
        with torch.cuda.graph(graph):
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


def stacked_rows(k: int, p: int, device: str, compiled: bool, deadline: float, chosen: list[str]) -> Iterator[dict]:
    """Time every rule on stacked clients."""
    means, variances = clients(k, p, device)
    target = torch.empty_like(means)
    plain = functools.partial(target.copy_, means)
    copy = 2 * means.nbytes / device_seconds(plain, device) / 1e9
    yield {"what": "plain copy", "K": k, "P": p, "gb_per_s": copy, "of_copy": 1.0}
    previous = Gaussian(means[0].clone(), variances[0] * 1.02)
    traffic = 2 * means.nbytes
    for rule in chosen:
        late = time.perf_counter() - _STARTED - deadline
        if late > (0 if rule not in _READY else 20):
            yield {"what": f"{rule}: not run, out of time", "K": k, "P": p}
            continue
        needs = previous if rule == "dwc" else None
        weights = list(range(1, k + 1))
        call = functools.partial(fuse_stacked, means, variances, weights, rule, needs, compile=compiled)
        start = time.perf_counter()
        call()  # compiles
        _READY[rule] = first = time.perf_counter() - start
        before = device_seconds(plain, device)
        took = device_seconds(call, device)
        copy = 2 * means.nbytes / min(before, device_seconds(plain, device)) / 1e9
        gb = traffic / took / 1e9
        row = {"what": rule, "K": k, "P": p, "seconds": took, "gb_per_s": gb, "of_copy": gb / copy, "first": first}
        yield {**row, "call": seconds(call, device, least=0.02)} if device == "cuda" else row
    if k * p <= 5e8:
        yield flower_row(means.cpu(), variances.cpu(), copy)


_READY: dict[str, float] = {}
"""Rules already compiled; after the budget no further one is."""


def flower_row(means: torch.Tensor, variances: torch.Tensor, copy: float) -> dict:
    """Time the NumPy loop on the same clients (averaging means and variances: rule nwa)."""
    k, p = means.shape
    lists = []
    for m, v in zip(means, variances):
        q = as_posterior(m, v)
        lists.append([t.numpy() for g in q.gaussians.values() for t in g])
    took = seconds(lambda: flower_style(lists, list(range(1, k + 1))), "cpu", 0, 3 if k * p < 1e8 else 1)
    gb = 2 * means.nbytes / took / 1e9
    return {
        "what": "nwa, Flower-style NumPy loop",
        "K": k,
        "P": p,
        "seconds": took,
        "gb_per_s": gb,
        "of_copy": gb / copy,
    }


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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"mib": peak, "seconds": time.perf_counter() - start}))


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


def main() -> None:
    """Run the measurements asked for and print the table last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", nargs="*", help="KxP, e.g. 10x272474")
    parser.add_argument("--rules", nargs="*", help="default: every rule with a stacked form")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--memory", action="store_true", help="also measure peak memory for K = 10 and 1,000 (CPU)")
    parser.add_argument("--budget", type=float, default=55.0, help="seconds after which no further rule is compiled")
    parser.add_argument("--out", help="write the rows as JSON here")
    parser.add_argument("--stream", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stream:
        return stream(*map(int, args.stream.split("x")))
    chosen = args.rules or [r.name for r in rules() if not r.draws and r.name != "fedavg"]
    rows: list[dict] = []
    for size in args.sizes or (CUDA_SIZES if args.device == "cuda" else CPU_SIZES):
        k, p = map(int, size.split("x"))
        for row in stacked_rows(k, p, args.device, not args.eager, args.budget, chosen):
            rows.append(row)
            print(row, flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    rows += streaming_rows(272_474, args.device)
    if args.device == "cuda":
        rows += streaming_rows(25_000_000, args.device)
    rows.append(kl_row(args.device))
    if args.memory:
        rows += memory_rows()
    took = time.perf_counter() - _STARTED
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if args.out:
        with open(args.out, "w") as f:
            json.dump({"device": name, "torch": torch.__version__, "rows": rows}, f, indent=1)
    print(f"\n{name}, torch {torch.__version__}, {took:.0f} s in all\n\n{table(rows)}")


if __name__ == "__main__":
    main()
