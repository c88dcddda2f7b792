"""Writes run directories as ``fedbayes run`` does, from real predictions on scikit-learn's digits by small NumPy models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TRAIN = 1200


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return data.data / 16.0, data.target.astype(np.int64)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def train(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, epochs: int, w: np.ndarray | None = None
) -> np.ndarray:
    """Multinomial logistic regression by SGD; returns weights (65, 10)."""
    x = np.c_[x, np.ones(len(x))]
    w = np.zeros((65, 10)) if w is None else w.copy()
    for _ in range(epochs):
        for batch in np.array_split(rng.permutation(len(x)), max(1, len(x) // 16)):
            p = softmax(x[batch] @ w)
            p[np.arange(len(batch)), y[batch]] -= 1
            w -= 0.4 * x[batch].T @ p / len(batch)
    return w


def predict(w: np.ndarray, sigma: float, x: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    x = np.c_[x, np.ones(len(x))]
    draws = w + sigma * rng.standard_normal((samples, *w.shape))
    return softmax(np.einsum("nd,mdc->mnc", x, draws)).astype(np.float32)


def make_run(
    path: Path,
    *,
    seed: int = 0,
    rule: str = "nwa",
    weighting: str = "size",
    alpha: float = 0.5,
    kind: str = "flipout",
    rounds: int = 8,
    sigma: float = 0.35,
    collapse: bool = False,
    ood: bool = True,
    validation: bool = True,
    finished: bool = True,
    predictions: bool = True,
) -> Path:
    """Train ten clients' logistic regressions by averaging and write everything the round loop writes."""
    from fedbayes import uncertainty

    rng = np.random.default_rng(seed)
    x, y = digits()
    order = np.random.default_rng(1).permutation(len(x))
    tr, va, te = order[:TRAIN], order[TRAIN : TRAIN + 150], order[TRAIN + 150 :]
    mix = rng.dirichlet(np.full(10, alpha), size=10)
    clients = [
        rng.choice(tr, size=int(rng.integers(60, 180)), p=mix[k][y[tr]] / mix[k][y[tr]].sum()) for k in range(10)
    ]
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f'name = "digits"\nseed = {seed}\nrounds = {rounds}\n[data]\nname = "digits"\n[partition]\nscheme = "dirichlet"\n'
        f'clients = 10\nalpha = {alpha}\n[model]\nname = "mlp"\nkind = "{kind}"\n[fusion]\nrule = "{rule}"\n'
        f'weighting = "{weighting}"\n[local]\nepochs = 1\nbatch_size = 16\n[evaluation]\nsamples = 25\nbins = 15\n'
    )
    names = [str(i) for i in range(10)]
    record = [
        {"id": k, "name": f"client {k}", "examples": len(c), "counts": np.bincount(y[c], minlength=10).tolist()}
        for k, c in enumerate(clients)
    ]
    (path / "partition.json").write_text(json.dumps({"clients": record, "classes": names}))
    outliers = np.clip(np.random.default_rng(2).permutation(x[te].ravel()).reshape(len(te), 64), 0, 1)
    events = [{"kind": "start", "schema": 1, "name": "digits", "version": "0.1.0", "time": "2026-01-02T03:04:05+0000",
               "data": "digits", "clients": 10, "train": sum(map(len, clients)), "validation": len(va), "test": len(te),
               "classes": names, "device": "cpu", "parameters": 1300}]  # fmt: skip
    w, best, best_round, last = np.zeros((65, 10)), np.inf, 0, {}
    samples = 1 if kind == "deterministic" else 25
    for r in range(1, rounds + 1):
        w = np.mean([train(x[c], y[c], rng, 1, w) for c in clients], axis=0)
        s = 0.0 if kind == "deterministic" else sigma * (10 ** (-r) if collapse else 0.97**r)
        spread = None if kind == "deterministic" else {
            "mean": s, "q01": s * 0.5, "q05": s * 0.6, "q50": s * 0.95, "q95": s * 1.4, "q99": s * 1.7, "ratio": 0.9,
            "floor_share": 1.0 if collapse and r > 7 else 0.0,
            "layers": {"layers.0.weight": s * 0.8, "layers.1.weight": s * 1.1, "head.weight": s * 1.3},
        }  # fmt: skip
        events.append({"kind": "round", "round": r, "seconds": 0.4, "learning_rate": 0.4, "clients": list(range(10)),
                       "examples": sum(map(len, clients)), "train": {"loss": 1 / r, "nll": 1 / r, "kl": 3.0},
                       "fusion": {"rule": rule, "weighting": weighting, "weights": {}, "refused": [], "repaired": 0.0, "sigma": spread},
                       "engine": {"lanes": 10, "steps": 7, "lane_steps": 70, "real_lane_steps": 65, "occupancy": 0.93, "seconds": 0.3},
                       "bytes": {"up": 26000, "down": 26000}})  # fmt: skip
        splits = {"validation": x[va], "test": x[te], "ood:shuffled": outliers}
        if not validation:
            del splits["validation"]
        if not ood:
            del splits["ood:shuffled"]
        last = {n: predict(w, s, v, samples, rng) for n, v in splits.items()}
        for split, p in last.items():
            labels = {"validation": y[va], "test": y[te]}.get(split)
            metrics = (
                uncertainty.summarize_outliers(last["test"], p) if labels is None else uncertainty.summarize(p, labels)
            )
            metrics = {k: None if v != v else v for k, v in metrics.items()}
            events.append({"kind": "evaluation", "round": r, "split": split, "model": "global", "samples": samples,
                           "draws": "per_example", "examples": p.shape[1], "metrics": metrics})  # fmt: skip
            if split == "validation" and metrics["nll"] < best:
                best, best_round = metrics["nll"], r
        if collapse and r == 4:
            events.append(
                {
                    "kind": "note",
                    "round": r,
                    "text": "the posterior has collapsed: the median sigma fell to 1e-4 of its first value; the network is deterministic in all but name.",
                }
            )
    if finished:
        events.append({"kind": "end", "rounds": rounds, "best_round": best_round or rounds, "seconds": 3.2})
    (path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    if predictions:
        zero = np.zeros(len(te), np.int64)
        for split, p in last.items():
            labels = {"validation": y[va], "test": y[te]}.get(split, zero)
            np.savez_compressed(
                path / f"predictions-{split.removeprefix('ood:')}.npz",
                probabilities=p,
                labels=labels,
                indices=np.arange(p.shape[1]),
            )
    return path
