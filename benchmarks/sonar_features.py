"""How fast recordings become pictures, and in how much memory: seconds of sound per second of one processor core.

    OMP_NUM_THREADS=1 python benchmarks/sonar_features.py [--minutes 20]

Decoding, resampling (32 to 16 kHz), cutting into 3 s segments with half overlap (so every sample is pictured twice),
the picture itself and its 8-bit storage all count. The goal is 200 times real time.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile
import torch

from fedbayes.data.sonar import Recording, extract, make_picture, stream
from fedbayes.data.sonar.sea import hear, plan
from fedbayes.experiment import Sonar

RATE = 32000


def write(path: Path, minutes: float) -> None:
    """Write noise with a beat: as hard to decode as a ship."""
    rng = np.random.default_rng(0)
    with soundfile.SoundFile(str(path), "w", RATE, 1) as file:
        for _ in range(max(1, round(minutes * 6))):
            beat = 1 + 0.5 * np.sin(2 * np.pi * 8 * np.arange(10 * RATE) / RATE)
            file.write((0.1 * beat * rng.standard_normal(10 * RATE)).astype(np.float32))


def peak_memory() -> float:
    """Return the most memory this process has had, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args().minutes
    torch.set_num_threads(1)
    print("| what | times real time, one core |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("wav", "flac"):
            recording = Recording(Path(folder) / f"a.{suffix}", "x", "r")
            write(recording.path, minutes)
            start = time.process_time()
            for _ in stream(recording, 16000):
                pass
            print(f"| decode and resample {suffix} | {60 * minutes / (time.process_time() - start):.0f} |", flush=True)
            for kind in ("logmel", "lofar", "demon", "waveform"):
                picture = make_picture(Sonar(picture=kind))
                extract([recording], picture, progress=False) if suffix == "wav" and kind == "logmel" else None
                start, before = time.process_time(), peak_memory()
                features = extract([recording], picture, progress=False)
                speed = 60 * minutes / (time.process_time() - start)
                held = features.inputs.numel() * features.inputs.element_size() / 2**20
                print(f"| {kind} from {suffix} | {speed:.0f} | <!-- {len(features.inputs)} pictures, {held:.1f} MiB; peak memory grew by {peak_memory() - before:.0f} MiB -->", flush=True)  # fmt: skip
    passages = plan(Sonar(sample_rate=8000), 0)[:40]
    start = time.process_time()
    for passage in passages:
        hear(passage, 6.0, 8000)
    print(f"| making the synthetic sea, 8 kHz | {240 / (time.process_time() - start):.0f} |")


if __name__ == "__main__":
    main()
