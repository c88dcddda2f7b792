"""How fast a posterior is judged: M sampled networks over N images, against a plain loop, all in one run.

    PYTHONPATH=src python benchmarks/evaluate.py --device cuda --out evaluate.json
    python benchmarks/evaluate.py --device cpu --images 256 --samples 3

The job: class probabilities of 25 samples of 10,000 images of 32x32x3 by a Flipout ResNet-20, then every number of
``uncertainty.summarize``. The plain loop is what one writes by hand: eager PyTorch, float32, a batch of 1,000 at a
time. Columns: seconds (median of the repetitions after a warm-up), the same as a ratio to the plain loop; the warm-up
(compilation, capture) is reported apart. Then the metrics' seconds on the device of the predictions and their share.
Needs torch, numpy and safetensors only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes import uncertainty
from fedbayes.data import Transform
from fedbayes.engine import predict
from fedbayes.experiment import Engine
from fedbayes.nn import build, posterior_of


def synchronise(device: str) -> None:
    """Wait until the device has done everything it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], device: str, repetitions: int) -> tuple[float, float, Any]:
    """Return (median seconds, seconds of the first call, last result)."""
    times, result = [], None
    for _ in range(repetitions + 1):
        synchronise(device)
        start = time.perf_counter()
        result = work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), times[0], result


def plain_loop(
    network: nn.Module, images: Tensor, transform: Transform, samples: int, batch: int, bf16: bool
) -> Tensor:
    """Sample by sample, batch by batch, as one would write it by hand."""
    out = []
    with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        for _ in range(samples):
            parts = [network(transform(part)).float().softmax(-1) for part in images.split(batch)]
            out.append(torch.cat(parts))
    return torch.stack(out).cpu()


def ways(
    network: nn.Module, images: Tensor, transform: Transform, o: argparse.Namespace
) -> dict[str, Callable[[], Tensor]]:
    """The ways to predict that are compared, by name; the first is the reference."""
    posterior = posterior_of(network)
    eager = network.to(o.device).eval()

    def engine(precision: Any, compiled: bool) -> Callable[[], Tensor]:
        settings = Engine(device=o.device, precision=precision, compile=compiled)
        return lambda: predict(
            network, posterior, images, transform, samples=o.samples, batch_size=o.batch, engine=settings
        )

    found: dict[str, Callable[[], Tensor]] = {
        "plain loop, float32": lambda: plain_loop(eager, images, transform, o.samples, o.batch, False)
    }
    if o.device.startswith("cuda"):
        found["plain loop, bf16"] = lambda: plain_loop(eager, images, transform, o.samples, o.batch, True)
    found["engine.predict, float32"] = engine("float32", False)
    if o.device.startswith("cuda"):
        found["engine.predict, bf16"] = engine("bf16", False)
        found["engine.predict, bf16, compiled"] = engine("bf16", True)
    return found


def metrics_seconds(p: Tensor, labels: Tensor, device: str, repetitions: int) -> tuple[float, float]:
    """Seconds of ``summarize`` with the predictions on the CPU and on the device."""
    host, _, _ = timed(lambda: uncertainty.summarize(p, labels), "cpu", repetitions)
    there, gold = p.to(device), labels.to(device)
    return host, timed(lambda: uncertainty.summarize(there, gold), device, repetitions)[0]


def main() -> None:
    """Run every way, print the table last."""
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a.add_argument("--images", type=int, default=10_000)
    a.add_argument("--samples", type=int, default=25)
    a.add_argument("--batch", type=int, default=1000)
    a.add_argument("--network", default="resnet20")
    a.add_argument("--kind", default="flipout")
    a.add_argument("--repetitions", type=int, default=3)
    a.add_argument("--budget", type=float, default=80.0, help="start no further way after this many seconds")
    a.add_argument("--out", help="write the figures to this JSON file")
    o = a.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    images = torch.randint(0, 256, (o.images, 3, 32, 32), dtype=torch.uint8).to(o.device)
    labels = torch.randint(0, 10, (o.images,))
    network = build(o.network, o.kind, classes=10, input_shape=(3, 32, 32))
    transform = Transform(torch.full((3, 1, 1), 1 / 255), torch.zeros(1, 3, 32, 32)).to(o.device)
    figures: dict[str, dict[str, float]] = {}
    predictions = None
    for name, way in ways(network, images, transform, o).items():
        if time.perf_counter() - began > o.budget:
            print(f"{name}: left out, the time is up")
            continue
        try:
            seconds, first, p = timed(way, o.device, o.repetitions)
        except Exception as error:  # a way that fails must not hide the others' figures
            print(f"{name}: failed ({type(error).__name__}: {str(error)[:200]})")
            continue
        figures[name] = {
            "seconds": seconds,
            "first_call": first,
            "accuracy": float((p.mean(0).argmax(-1) == labels).double().mean()),
        }
        predictions = p
        print(f"{name}: {seconds:.3f} s (first call {first:.1f} s)", flush=True)
    if predictions is None:
        raise SystemExit("nothing could be measured.")
    host, there = metrics_seconds(predictions, labels, o.device, o.repetitions)
    reference = next(iter(figures.values()))["seconds"]
    best = min(f["seconds"] for f in figures.values())
    print(f"\n{o.network} {o.kind}, {o.samples} samples of {o.images:,} images, batches of {o.batch}, {torch.__version__}, "
          f"{torch.cuda.get_device_name() if o.device.startswith('cuda') else 'cpu'}")  # fmt: skip
    print(f"{'way':36}{'seconds':>10}{'x plain':>10}{'first call':>12}")
    for name, f in figures.items():
        print(f"{name:36}{f['seconds']:10.3f}{reference / f['seconds']:10.2f}{f['first_call']:12.1f}")
    print(f"{'metrics on the device':36}{there:10.4f}{'':10}{there / best:11.1%} of the fastest way")
    print(f"{'metrics on the CPU':36}{host:10.4f}{'':10}{host / best:11.1%} of the fastest way")
    if o.out:
        record = {
            "settings": vars(o),
            "torch": torch.__version__,
            "ways": figures,
            "metrics_device": there,
            "metrics_cpu": host,
        }
        Path(o.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
