"""The studies of docs/passive-sonar.md: does a federation beat listening alone, does uncertainty find the errors?

    python benchmarks/sonar_studies.py sea|deepship|watkins|rocks [--data-dir DIR] [--seed 0] [--set KEY=VALUE ...]

Every line is judged on the same held-out recordings. *central*: one client with everybody's data; *alone*: each
client trains on its own data only, and the accuracies are averaged; *federated*: a posterior each, fused every round.
Prints one row per setting: accuracy per segment and per recording, and the area under the ROC curve of entropy for
finding wrong recordings and unseen classes (0.5 is chance). Uncertainty after ± is the standard error over the test
recordings, which are few.
"""

import argparse
import dataclasses
import os
import time
import tomllib

import numpy as np
import torch

import fedbayes
from fedbayes import config, uncertainty
from fedbayes.data import Dataset, load, partition
from fedbayes.data.sonar import pool
from fedbayes.experiment import Experiment

LIGHT = {"evaluation.every": 1000, "engine.lanes": 1, "data.validation": 0.0}
SKIPPED: list[str] = []
"""Rows that --skip leaves out."""


class Tally:
    """Predictions of several runs, judged together; ``folds`` says how many of them have recordings of their own."""

    def __init__(self, folds: int) -> None:
        self.folds = folds
        self.right: list[np.ndarray] = []
        self.entropy: list[np.ndarray] = []
        self.segments: list[np.ndarray] = []
        self.unseen: list[float] = []

    def add(self, result: fedbayes.Result, dataset: Dataset) -> None:
        """Judge one run on its test recordings, and on the unseen where there are any."""
        p = predictions(result, "test")
        names = dataset.test.columns.get("recording", np.arange(len(dataset.test)).astype(str))
        pooled = pool(p, names, dataset.test.labels)
        self.right.append(pooled.correct.numpy())
        self.entropy.append(pooled.values["entropy"].numpy())
        self.segments.append((p.mean(0).argmax(-1) == dataset.test.labels).numpy())
        if "unseen" in dataset.ood:
            strange = pool(predictions(result, "ood:unseen"), dataset.ood["unseen"].columns["recording"])
            self.unseen.append(uncertainty.detection(pooled.values["entropy"], strange.values["entropy"])["auroc"])

    def row(self, name: str) -> str:
        """Return one line of the table."""
        right, segments = np.concatenate(self.right), np.concatenate(self.segments)
        error = 100 * np.sqrt(right.mean() * (1 - right.mean()) / len(right) * max(1, len(self.right) / self.folds))
        wrong = torch.from_numpy(~right)
        finds = uncertainty.auroc(torch.from_numpy(np.concatenate(self.entropy)), wrong) if 0 < wrong.sum() < len(wrong) else np.nan  # fmt: skip
        strange = f"{np.mean(self.unseen):.2f}" if self.unseen else "-"
        return f"| {name} | {100 * segments.mean():.1f} | {100 * right.mean():.1f} ± {error:.1f} | {finds:.2f} | {strange} |"  # fmt: skip


def predictions(result: fedbayes.Result, split: str) -> torch.Tensor:
    """Return the final posterior's predictions of a split."""
    from fedbayes.evaluation import Evaluator

    judge = Evaluator(result.setup.model, result.setup.splits(), result.setup.transform, result.setup.experiment)
    return judge.probabilities(result.posterior, split, result.setup.experiment.rounds)


def train(base: Experiment, dataset: Dataset, **changes: object) -> fedbayes.Result:
    """Run one experiment on data that are already there; nothing is written."""
    experiment = config.override(base, {k.replace("__", "."): v for k, v in changes.items()} | LIGHT)
    return fedbayes.run(experiment, dataset=dataset, write=False, report=False)


def settings(base: Experiment, rules: list[str]) -> dict[str, dict[str, object]]:
    """Return the federated settings compared: a deterministic one, and Flipout under several rules."""
    table: dict[str, dict[str, object]] = {
        "federated, deterministic, FedAvg": {"model__kind": "deterministic", "fusion__rule": "fedavg"}
    }
    for rule in rules:
        table[f"federated, Flipout, {rule}"] = {"fusion__rule": rule}
    return table


def central(base: Experiment) -> dict[str, object]:
    """One client with all data: the same passes over it."""
    return {"partition__scheme": "iid", "partition__clients": 1, "fusion__rule": "nwa", "data__mean": "global"}


def alone(base: Experiment, dataset: Dataset, tally: Tally, most: int = 0, **changes: object) -> None:
    """Train every client on its own shard only."""
    shards = partition(base.partition, dataset.train, base.seed)
    for shard in shards[: most or len(shards)]:
        own = dataclasses.replace(dataset, train=dataset.train.take(shard))
        tally.add(train(base, own, **(central(base) | changes)), dataset)


def study(name: str, bases: list[Experiment], rules: list[str], data_dir: str | None) -> None:
    """Print a study's table; several bases are the folds (or seeds) of one study."""
    print(
        f"\n### {name}\n\n| setting | segments, % | recordings, % | finds errors | finds unseen |\n|---|---|---|---|---|"
    )
    different = len({b.sonar.fold for b in bases})
    sets = [(b, load(b.data, sonar=b.sonar, data_dir=data_dir, seed=b.seed)) for b in bases]
    jobs: dict[str, dict[str, object]] = {
        "central, deterministic": central(bases[0]) | {"model__kind": "deterministic"},
        "central, Flipout": central(bases[0]),
    }
    wanted = {n: c for n, c in (jobs | settings(bases[0], rules)).items() if n not in SKIPPED}
    for label, changes in wanted.items():
        start, tally = time.process_time(), Tally(different)
        for base, dataset in sets:
            tally.add(train(base, dataset, **changes), dataset)
        print(tally.row(label), f"<!-- {time.process_time() - start:.0f} s of processor -->", flush=True)
    start, tally = time.process_time(), Tally(different)
    for base, dataset in sets:
        alone(base, dataset, tally, model__kind="deterministic")
    print(tally.row("alone, deterministic, mean of the clients"), f"<!-- {time.process_time() - start:.0f} s of processor -->", flush=True)  # fmt: skip


def main() -> None:
    """Run one of the four studies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("study", choices=("sea", "deepship", "watkins", "rocks"))
    parser.add_argument("--data-dir", default=os.environ.get("FEDBAYES_DATA"))
    parser.add_argument("--rules", default="nwa,ws,conflation,aalv")
    parser.add_argument("--folds", type=int, default=0, help="how many of the folds (0: all)")
    parser.add_argument("--seed", type=int, default=0, help="sea and recordings: the experiment's seed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change any field, as in TOML")
    parser.add_argument("--skip", action="append", default=[], help="a row's name to leave out")
    parser.add_argument("--high", default="0,2000", help="watkins: upper band edges in Hz, 0 for the whole band")
    given = parser.parse_args()
    rules = given.rules.split(",")
    torch.set_num_threads(1)
    SKIPPED.extend(given.skip)
    changes = {"seed": given.seed} | {
        k: tomllib.loads(f"v = {v}")["v"] for k, v in (x.split("=", 1) for x in given.set)
    }
    if given.study == "sea":
        study("Synthetic sea, ten sites", [config.override(config.read("sonar-synthetic"), changes)], rules, None)
    elif given.study == "rocks":
        study("Mines and rocks", [config.override(rocks(), {"seed": s}) for s in range(5)], rules, given.data_dir)
    else:
        base = config.override(config.read(f"sonar-{given.study}"), changes)
        folds = range(given.folds or base.sonar.folds)
        for high in [0.0] if given.study == "deepship" else map(float, given.high.split(",")):
            bases = [config.override(base, {"sonar.fold": f, "sonar.high": high}) for f in folds]
            study(f"{given.study}, {high:g} Hz" if high else given.study, bases, rules, given.data_dir)


def rocks() -> Experiment:
    """The smallest example: 208 returns of an active sonar, five owners, a small network."""
    return config.override(
        Experiment(name="sonar-rocks", rounds=20),
        {
            "data.name": "sonar-rocks", "data.scale": "standard", "data.mean": "none", "partition.scheme": "dirichlet",
            "partition.clients": 5, "partition.alpha": 0.5, "model.name": "mlp", "model.width": 32,
            "local.batch_size": 16, "local.learning_rate": 3e-3, "local.epochs": 2, "objective.kl_weight": 0.1,
            "evaluation.draws": "per_pass",
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
