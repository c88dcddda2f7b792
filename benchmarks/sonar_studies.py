"""The studies of docs/passive-sonar.md: does a federation beat listening alone, does uncertainty find errors and strangers?

    python benchmarks/sonar_studies.py sea|networks|deepship|watkins|rocks [--data-dir DIR] [--seeds 7,8] [--set KEY=VALUE ...]

Every row of a table is judged on the same held-out recordings. *central*: one client with everybody's data; *alone*: each
client trains on its own data only, and what the clients get right is averaged; *federated*: fused every round.

± is the standard error and [a, b] the 95 % interval of a bootstrap that draws *ships* (recordings where ships are unknown) and
not segments, from all seeds or folds together: what is heard of one ship hangs together. "over alone" is the difference to the
last row on the same recordings, so luck that both rows share drops out. "finds errors" and "finds unseen" are areas under
the ROC curve of recordings' entropy / epistemic uncertainty (0.5 is chance).
"""

import argparse
import dataclasses
import os
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

import fedbayes
from fedbayes import config, uncertainty
from fedbayes.data import Dataset, Examples, load, partition
from fedbayes.data.loading import concatenate
from fedbayes.data.sonar import Pooled, pool
from fedbayes.data.splits import held_together, stratified_order
from fedbayes.evaluation import Evaluator
from fedbayes.experiment import Experiment
from fedbayes.seeds import numpy_rng

LIGHT = {"evaluation.every": 1000, "engine.lanes": 1, "data.validation": 0.0}
DRAWS = 2000
MEASURES = ("entropy", "epistemic")
ALONE = "alone, deterministic, mean of the clients"
Case = tuple[Experiment, Dataset]
Row = tuple[str, Mapping[str, object]]


class Tally:
    """What one row of a table got right, recording by recording, over all cases (seeds, folds) of a study."""

    def __init__(self) -> None:
        self.right: dict[tuple[int, str], list[float]] = {}
        self.ship: dict[tuple[int, str], tuple[int, str]] = {}
        self.segments: list[np.ndarray] = []
        self.errors: dict[str, list[np.ndarray]] = {m: [] for m in (*MEASURES, "wrong", "ship")}
        self.strangers: dict[str, list[float]] = {m: [] for m in MEASURES}

    def add(self, result: fedbayes.Result, dataset: Dataset, case: int) -> None:
        """Judge one run; ``case`` tells apart recordings of different seas that have the same name."""
        judge = Evaluator(result.setup.model, result.setup.splits(), result.setup.transform, result.setup.experiment)
        last, test = result.setup.experiment.rounds, dataset.test
        p = judge.probabilities(result.posterior, "test", last)
        pooled = pool(p, names_of(test), test.labels)
        groups = held_together(test)
        owner = np.arange(len(test)) if groups is None else groups
        ships = [f"{owner[np.flatnonzero(pooled.index == r)[0]]}" for r in range(len(pooled))]
        for name, label, ship, right in zip(
            pooled.names, labels_of(pooled), ships, pooled.correct.tolist(), strict=True
        ):
            self.right.setdefault((case, f"{name}/{label}"), []).append(float(right))
            self.ship[case, f"{name}/{label}"] = (case, ship)
        self.segments.append((p.mean(0).argmax(-1).cpu() == test.labels).numpy())
        for measure in MEASURES:
            self.errors[measure].append(pooled.values[measure].numpy())
        self.errors["wrong"].append(~pooled.correct.numpy())
        self.errors["ship"].append(np.array([f"{case}/{s}" for s in ships]))
        for name, outside in dataset.ood.items():
            strange = pool(judge.probabilities(result.posterior, f"ood:{name}", last), names_of(outside))
            for m in MEASURES:
                if pooled.values[m].max() > 1e-9:  # a deterministic network has no epistemic part
                    self.strangers[m].append(uncertainty.detection(pooled.values[m], strange.values[m])["auroc"])

    def over(self, other: "Tally") -> str:
        """Return the difference in recordings right, per cent, and its 95 % interval: paired, ships drawn."""
        keys = sorted(self.right)
        gain = np.array([np.mean(self.right[k]) - np.mean(other.right[k]) for k in keys])
        draws = resampled(np.array(["/".join(map(str, self.ship[k])) for k in keys]), lambda i: 100 * gain[i].mean())
        low, high = np.quantile(draws, [0.025, 0.975])
        return f"{100 * gain.mean():+.1f} [{low:+.0f}, {high:+.0f}]"

    def row(self, name: str, alone: "Tally | None") -> str:
        """Return one line of the table."""
        keys = sorted(self.right)
        right = np.array([np.mean(self.right[k]) for k in keys])
        error = resampled(
            np.array(["/".join(map(str, self.ship[k])) for k in keys]), lambda i: 100 * right[i].mean()
        ).std()
        cells = [
            f"{100 * np.concatenate(self.segments).mean():.1f}",
            f"{100 * right.mean():.1f} ± {error:.1f}",
            self.over(alone) if alone is not None else "",
            " / ".join(self.finds(m) for m in MEASURES),
            " / ".join(f"{np.mean(self.strangers[m]):.2f}" if self.strangers[m] else "-" for m in MEASURES),
        ]
        return f"| {name} | {' | '.join(cells)} |"

    def finds(self, measure: str) -> str:
        """Return the area under the ROC curve with which a measure finds wrong recordings, and its standard error."""
        score, wrong, ships = (np.concatenate(self.errors[k]) for k in (measure, "wrong", "ship"))
        if not 0 < wrong.sum() < len(wrong) or score.max() < 1e-9:
            return "-"
        draws = resampled(ships, lambda i: area(score[i], wrong[i]))
        return f"{area(score, wrong):.2f} ± {np.nanstd(draws):.2f}"


def names_of(examples: Examples) -> np.ndarray:
    """Return each example's recording, or its own number where it is not cut from one."""
    return examples.columns.get("recording", np.arange(len(examples)).astype(str))


def labels_of(pooled: Pooled) -> list[int]:
    """Return the labels of pooled recordings."""
    return [] if pooled.labels is None else pooled.labels.tolist()


def area(score: np.ndarray, wrong: np.ndarray) -> float:
    """Return the area under the ROC curve, NaN where only one kind is there."""
    return (
        uncertainty.auroc(torch.from_numpy(score), torch.from_numpy(wrong)) if 0 < wrong.sum() < len(wrong) else np.nan
    )


def resampled(clusters: np.ndarray, statistic: Callable[[np.ndarray], float], draws: int = DRAWS) -> np.ndarray:
    """Return a statistic of ``draws`` bootstrap samples; whole clusters are drawn, as many as there are."""
    members = [np.flatnonzero(clusters == c) for c in np.unique(clusters)]
    rng = numpy_rng("sonar studies", "bootstrap")
    return np.array([statistic(np.concatenate([members[c] for c in rng.integers(0, len(members), len(members))])) for _ in range(draws)])  # fmt: skip


def train(base: Experiment, dataset: Dataset, changes: Mapping[str, object]) -> fedbayes.Result:
    """Run one experiment on data that are already there; nothing is written."""
    return fedbayes.run(config.override(base, {**changes, **LIGHT}), dataset=dataset, write=False, report=False)


def central(base: Experiment) -> dict[str, object]:
    """One client with all data: the same passes over it."""
    mean = {"data.mean": "global"} if base.data.mean == "client" else {}
    return {"partition.scheme": "iid", "partition.clients": 1, "fusion.rule": "nwa", **mean}


def rows(base: Experiment, rules: list[str]) -> list[Row]:
    """Return the settings compared, by name: central, FedAvg, MC-dropout, and Flipout under several rules."""
    plain = {"model.kind": "deterministic"}
    return [
        ("central, deterministic", central(base) | plain),
        ("central, Flipout", central(base)),
        ("federated, deterministic, FedAvg", plain | {"fusion.rule": "fedavg"}),
        ("federated, MC-dropout, FedAvg", {"model.kind": "dropout", "model.dropout": 0.1, "fusion.rule": "fedavg"}),
        *((f"federated, Flipout, {rule}", {"fusion.rule": rule}) for rule in rules),
    ]


def listen_alone(cases: list[Case]) -> Tally:
    """Train every client of every case on its own shard only, and judge it on the whole test."""
    tally = Tally()
    for number, (base, dataset) in enumerate(cases):
        for shard in partition(base.partition, dataset.train, base.seed):
            own = dataclasses.replace(dataset, train=dataset.train.take(shard))
            tally.add(train(base, own, central(base) | {"model.kind": "deterministic"}), dataset, number)
    return tally


def study(title: str, cases: list[Case], wanted: list[Row], lonely: bool = True) -> None:
    """Print a study's table."""
    shown = [len(np.unique(names_of(d.test))) for _, d in cases]
    print(f"\n### {title}\n\n{len(cases)} cases, {sum(shown)} test recordings\n")
    print(
        "| setting | segments, % | recordings, % | over alone | finds errors | finds unseen |\n|---|---|---|---|---|---|"
    )
    start, alone = time.process_time(), listen_alone(cases) if lonely else None
    spent = time.process_time() - start
    for label, changes in wanted:
        start, tally = time.process_time(), Tally()
        for number, (base, dataset) in enumerate(cases):
            tally.add(train(base, dataset, changes), dataset, number)
        print(tally.row(label, alone), f"<!-- {time.process_time() - start:.0f} s of processor -->", flush=True)
    if alone is not None:
        print(alone.row(ALONE, None), f"<!-- {spent:.0f} s of processor -->", flush=True)


def networks(base: Experiment) -> list[Row]:
    """Return the three networks, each deterministic and Flipout; waveforms have a data set of their own (``study_networks``)."""
    return [
        (f"{name}, {said}", {"model.name": name, "model.kind": kind, "fusion.rule": rule})
        for name in (["waveform-cnn"] if base.sonar.picture == "waveform" else ["spectrogram-cnn", "resnet20"])
        for said, kind, rule in (("deterministic, FedAvg", "deterministic", "fedavg"), ("MC-dropout, FedAvg", "dropout", "fedavg"), ("Flipout, nwa", "flipout", "nwa"))
    ]  # fmt: skip


def sea_cases(changes: Mapping[str, object], seeds: list[int]) -> list[Case]:
    """Return the synthetic sea of each seed."""
    bases = [config.override(config.read("sonar-synthetic"), {"seed": s, **changes}) for s in seeds]
    return [(b, load(b.data, sonar=b.sonar, seed=b.seed)) for b in bases]


def fold_cases(
    name: str, changes: Mapping[str, object], data_dir: str | None, seeds: list[int], folds: int
) -> list[Case]:
    """Return every fold of a set of real recordings, dealt anew for each seed."""
    base = config.override(config.read(f"sonar-{name}"), changes)
    bases = [
        config.override(base, {"sonar.fold": f, "seed": s}) for s in seeds for f in range(folds or base.sonar.folds)
    ]
    return [(b, load(b.data, sonar=b.sonar, data_dir=data_dir, seed=b.seed)) for b in bases]


def rocks_cases(changes: Mapping[str, object], data_dir: str | None, seeds: list[int], folds: int = 5) -> list[Case]:
    """Return mines and rocks, all 208 dealt into stratified folds anew for each seed: five owners, a small network."""
    base = config.override(
        Experiment(name="sonar-rocks", rounds=20),
        {
            "data.name": "sonar-rocks", "data.scale": "standard", "data.mean": "none", "partition.scheme": "dirichlet",
            "partition.clients": 5, "partition.alpha": 0.5, "model.name": "mlp", "model.width": 32,
            "local.batch_size": 16, "local.learning_rate": 3e-3, "local.epochs": 2, "objective.kl_weight": 0.1,
            "evaluation.draws": "per_pass",
        }
        | dict(changes),
    )  # fmt: skip
    whole = load(base.data, data_dir=data_dir)
    everything = concatenate([whole.train, whole.test])
    everything = Examples(everything.inputs, everything.labels, {"recording": np.arange(len(everything)).astype(str)})
    cases = []
    for seed in seeds:
        order = stratified_order(everything.labels.numpy(), numpy_rng(seed, "sonar studies", "rocks"))
        for fold in np.array_split(order, folds):
            train, test = np.setdiff1d(order, fold), np.sort(fold)
            split = dataclasses.replace(whole, train=everything.take(train), test=everything.take(test))
            cases.append((config.override(base, {"seed": seed}), split))
    return cases


def main() -> None:
    """Run one of the studies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("study", choices=("sea", "networks", "deepship", "watkins", "rocks"))
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDBAYES_DATA"))
    parser.add_argument("--rules", default="nwa,ws")
    parser.add_argument("--seeds", default="0", help="of seas, or of how recordings are dealt into folds: 7,8,9")
    parser.add_argument("--folds", type=int, default=0, help="how many of the folds (0: all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change any field, as in TOML")
    parser.add_argument("--skip", action="append", default=[], help="a row's name to leave out")
    parser.add_argument("--high", default="0,2000", help="watkins: upper band edges in Hz, 0 for the whole band")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds, rules = [int(s) for s in given.seeds.split(",")], given.rules.split(",")
    changes = {k: tomllib.loads(f"v = {v}")["v"] for k, v in (x.split("=", 1) for x in given.set)}

    def run(title: str, cases: list[Case], wanted: list[Row] | None = None) -> None:
        found = wanted or rows(cases[0][0], rules)
        study(title, cases, [r for r in found if r[0] not in given.skip], ALONE not in given.skip)

    if given.study == "sea":
        run("Synthetic sea, ten sites", sea_cases(changes, seeds))
    elif given.study == "networks":
        for picture in ({}, {"sonar.picture": "waveform", "sonar.sample_rate": 2000}):
            cases = sea_cases(picture | changes, seeds)
            run(f"Networks, {cases[0][0].sonar.picture}", cases, networks(cases[0][0]))
    elif given.study == "deepship":
        run("DeepShip, public part", fold_cases("deepship", changes, given.data_dir, seeds, given.folds))
    elif given.study == "rocks":
        run("Mines and rocks", rocks_cases(changes, given.data_dir, seeds))
    else:
        for high in map(float, given.high.split(",")):
            cases = fold_cases("watkins", {"sonar.high": high} | changes, given.data_dir, seeds, given.folds)
            run(f"Watkins, to {high or 8000:g} Hz", cases)


if __name__ == "__main__":
    main()
