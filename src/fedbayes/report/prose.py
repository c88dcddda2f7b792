"""Plain words with the run's numbers filled in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from .. import uncertainty
from ..predictor import interval
from .runs import Run

KINDS = {
    "deterministic": "an ordinary (deterministic) {}",
    "dropout": "a Monte-Carlo-dropout {}",
    "flipout": "a Bayesian {} (Flipout)",
    "local": "a Bayesian {} (local reparameterisation)",
    "sample": "a Bayesian {} (sampled weights)",
}
RULES = {
    "fedavg": "plain averaging (FedAvg)",
    "nwa": "naive weighted averaging (NWA)",
    "ws": "the weighted sum of Gaussians (WS)",
    "lp": "linear pooling (LP)",
    "ppa": "population pooling (PPA)",
    "aalv": "averaging means and log-variances (AALV)",
    "conflation": "conflation",
    "wc": "weighted conflation (WC)",
    "llp": "log-linear pooling (LLP)",
    "wasserstein": "the Wasserstein barycentre",
    "dwc": "distributed weight consolidation (DWC)",
    "precision": "precision weighting",
}
WEIGHTS = {
    "equal": "all weighing the same",
    "size": "weighted by how many examples each holds",
    "max-discrepancy": "weighted by maximum discrepancy",
    "max-discrepancy-nearest": "weighted by discrepancy to the nearest",
    "distance": "weighted by closeness to the previous global model",
}
SMALL = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
COLLAPSED = 1e-2
"""A median sigma below this share of its first value, or below 1e-6, is called collapsed."""


def network_name(name: str) -> str:
    """The network's name as one writes it: ``resnet20`` is ResNet-20."""
    written = {"mlp": "MLP", "cnn": "CNN", "lenet": "LeNet", "fedbe-convnet": "ConvNet", "spectrogram-cnn": "spectrogram CNN",
               "waveform-cnn": "waveform CNN", "reyes-mnist": "CNN", "reyes-cifar": "CNN"}  # fmt: skip
    return f"ResNet-{name[6:]}" if name.startswith("resnet") else written.get(name, name)


def number(n: float) -> str:
    """Small counts as words, larger ones with separators."""
    return SMALL[int(n)] if n == int(n) and 0 <= n <= 12 else f"{n:,.0f}"


def plural(n: float, one: str, many: str = "") -> str:
    """``number`` with its noun."""
    return f"{number(n)} {one if n == 1 else many or one + 's'}"


def figure(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    """A number as text; a dash when it is missing or undefined."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value * scale:.{digits}f}"


def small(value: float | None) -> str:
    """A number that may be tiny, with three significant digits."""
    if value is None or not math.isfinite(value):
        return "–"
    return "0" if value == 0 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def split_of(run: Run) -> str:
    """How the data were shared out, in words."""
    alpha = run.setting("partition.alpha", "?")
    scheme = run.setting("partition.scheme", "")
    return {
        "iid": "alike (IID)",
        "shards": f"so that each held {run.setting('partition.classes_per_client', 2)} classes",
        "dirichlet": f"with unequal class mixes (Dirichlet, α = {alpha})",
        "dirichlet-unequal": f"with unequal class mixes and sizes (Dirichlet, α = {alpha})",
        "step": "with two kinds of clients, each strong in its own classes (step)",
        "quantity": f"in unequal amounts (α = {alpha})",
        "column": f"as they came: by {run.setting('partition.column', 'owner')}",
        "odd-one": "alike but for one client, which held few examples of few classes (odd-one)",
    }.get(str(scheme), "as configured")


def opening(run: Run) -> str:
    """What was run and what came of it, in one paragraph."""
    start, last = run.start, (run.rounds or [{}])[-1]
    clients = int(start.get("clients") or len((run.partition or {}).get("clients", ())))
    kind = str(run.setting("model.kind", ""))
    name = network_name(str(run.setting("model.name", "network")))
    network = KINDS.get(kind, "a {}").format(name)
    fusion = last.get("fusion") or {}
    rule = str(fusion.get("rule") or run.setting("fusion.rule", ""))
    effort = int(run.setting("local.steps", 0) or 0)
    effort_words = plural(effort, "step") if effort else plural(int(run.setting("local.epochs", 1) or 1), "epoch")
    fraction = float(run.setting("participation.fraction", 1.0))
    who = "each client" if fraction >= 1 else f"each client of a {fraction * 100:.3g} % draw"
    held = f"{start.get('train', 0):,} training examples of {run.setting('data.name', start.get('data', 'the data'))}"
    if clients == 1:
        parts = [
            f"All {held} lay in one place, where in {plural(len(run.rounds), 'round')} {network} was trained for {effort_words} "
            "each: no federation, but what one is measured against."
        ]
        return " ".join([*parts, _verdict(run)])
    parts = [
        f"{plural(clients, 'client')} held {held}, shared out {split_of(run)}.",
        f"In {plural(len(run.rounds), 'round')} {who} trained {network} for {effort_words} on its own data, and the "
        f"server fused what they sent by {RULES.get(rule, rule or 'the configured rule')}, "
        f"{WEIGHTS.get(str(fusion.get('weighting') or run.setting('fusion.weighting', '')), 'weighted as configured')}.",
    ]
    parts.append(_verdict(run))
    text = " ".join(p for p in parts if p)
    return text[:1].upper() + text[1:]


def _verdict(run: Run) -> str:
    m = run.headline
    if not m:
        return "No evaluation has been logged yet."
    test = run.predictions("test")
    n = test.probabilities.shape[1] if test else int((run.evaluations() or [{}])[-1].get("examples", 0))
    samples = test.probabilities.shape[0] if test else int((run.evaluations() or [{}])[-1].get("samples", 1))
    how = f"with {samples} sampled networks each" if samples > 1 else "with one network"
    text = f"On {n:,} test inputs, judged {how}, it is right in {figure(m.get('accuracy'), 100)} % of the cases"
    if (gap := m.get("confidence", math.nan) - m.get("accuracy", math.nan)) == gap:
        if abs(gap) < 0.01:
            text += ", and about as sure as it should be"
        else:
            text += f"; on average it is {abs(gap) * 100:.1f} points {'too sure of itself' if gap > 0 else 'more modest than it need be'}"
    return text + "."


def answering(run: Run, share: float = 0.8) -> str:
    """What setting aside the least sure inputs brings."""
    test = run.predictions("test")
    if test is None:
        return ""
    v = test.per_example
    whole = float(v["correct"].mean())
    best = uncertainty.accuracy_at(v["entropy"], v["correct"], share)
    verb = "rises" if best > whole else ("falls" if best < whole else "stays")
    move = f"{verb} from {whole * 100:.1f} to {best * 100:.1f} %" if best != whole else f"stays at {whole * 100:.1f} %"
    text = f"Set the least sure fifth aside for a human (by entropy) and the accuracy on the rest {move}."
    area = run.headline.get("auroc_error_epistemic", math.nan)
    entropy = run.headline.get("auroc_error_entropy", math.nan)
    if math.isfinite(entropy):
        text += f" Shown one wrong and one right answer, entropy picks the wrong one {entropy * 100:.0f} times in 100"
        text += f", epistemic uncertainty alone {area * 100:.0f} times (50 is chance)." if math.isfinite(area) else "."
    return text


def outlier_rows(run: Run) -> list[dict[str, Any]]:
    """For each out-of-distribution set: how well each uncertainty tells it from the known data."""
    test = run.predictions("test")
    if test is None:
        return []
    rows = []
    for name, out in run.outliers.items():
        m = uncertainty.summarize_outliers(torch.as_tensor(test.probabilities), torch.as_tensor(out.probabilities))
        rows += [
            {
                "set": name,
                "by": u.replace("_", " "),
                "auroc": m[f"auroc_{u}"],
                "fpr95": m[f"fpr95_{u}"],
                "aupr": m[f"aupr_{u}"],
            }
            for u in uncertainty.UNCERTAINTIES
        ]
    return rows


def spread_of(run: Run) -> str:
    """How the posterior's sigma went, and whether it collapsed."""
    spreads = run.spreads
    if not spreads:
        if not run.rounds:
            return ""
        if run.setting("model.kind") == "dropout":
            return "The weights are points; what spread its predictions have comes from Monte-Carlo dropout."
        return "The network has point weights only: there is no posterior spread, and its epistemic uncertainty is 0."
    (first, a), (last, b) = spreads[0], spreads[-1]
    x, y = a.get("q50") or a.get("mean"), b.get("q50") or b.get("mean")
    text = f"The median sigma of the weights went from {small(x)} in round {first} to {small(y)} in round {last}."
    if first == last:
        text = f"The median sigma of the weights was {small(y)} after round {last}."
    if collapsed(run):
        text += (
            f" The posterior has collapsed (by round {collapse_round(run)}): the network is a point model in all but name, and its epistemic uncertainty says "
            "nothing. Product rules (WS, conflation, WC) divide the variance by about the number of clients each round."
        )
    return text


def repairs_of(run: Run) -> str:
    """What share of the weights the rule had to repair, where it had to."""
    shares = {int(e["round"]): float((e.get("fusion") or {}).get("repaired") or 0) for e in run.rounds}
    worst = max(shares, key=shares.__getitem__, default=0)
    if not shares.get(worst):
        return ""
    rounds = sum(share > 0 for share in shares.values())
    return (
        f"In {plural(rounds, 'round')} some weights came out of the fusion without a positive precision and were repaired: "
        f"{100 * shares[worst]:.2g} % of all at most, in round {worst}."
    )


def collapse_round(run: Run) -> int | None:
    """The round from which on the spread is gone: median sigma a hundredth of the first, or below a millionth."""
    medians = [(number, s.get("q50") or s.get("mean") or 0.0) for number, s in run.spreads]
    found = None
    for number, value in reversed(medians):
        if not (value < COLLAPSED * medians[0][1] or value < 1e-6):
            break
        found = number
    return found


def collapsed(run: Run) -> bool:
    """Whether the posterior's spread has gone by the last round."""
    return collapse_round(run) is not None


def _recordings(run: Run) -> int:
    """How many recordings the test inputs were cut from; 0 where they are no parts of recordings."""
    from .examples import test_inputs

    test = run.predictions("test")
    names = test_inputs(run).columns.get("recording") if test else None
    return 0 if test is None or names is None else len(np.unique(np.asarray(names)[test.indices]))


def cards(run: Run) -> list[tuple[str, str, str]]:
    """The few numbers that matter: (name, value, what it means)."""
    m = run.headline
    if not m:
        return []
    test = run.predictions("test")
    n = test.probabilities.shape[1] if test else int(run.evaluations()[-1].get("examples", 0))
    accuracy = m.get("accuracy", math.nan)
    recordings = _recordings(run)
    independent = recordings or n  # segments of one recording repeat each other
    low, high = interval(accuracy, independent) if independent and math.isfinite(accuracy) else (math.nan, math.nan)
    units = plural(independent, "recording" if recordings else "input")
    sure = f"{low * 100:.1f} to {high * 100:.1f} %: 95 % interval from {units}" if math.isfinite(low) else ""
    rows = [
        ("Accuracy", f"{figure(accuracy, 100)} %", sure),
        ("NLL", figure(m.get("nll"), 1, 3), "nats per input; lower is better"),
        ("ECE", f"{figure(m.get('ece'), 100)} %", "mean gap between confidence and truth"),
        ("Epistemic", small(m.get("epistemic")), "mean variance between sampled networks"),
    ]
    if run.sigma:
        rows.append(
            (
                "Median sigma",
                small(run.sigma.get("q50") or run.sigma.get("mean")),
                "collapsed" if collapsed(run) else "spread of the weights",
            )
        )
    by_entropy = [r for r in outlier_rows(run) if r["by"] == "entropy"]
    if by_entropy:
        rows.append(
            (
                "Unknown inputs",
                f"{by_entropy[0]['auroc']:.2f}",
                f"AUROC of telling {by_entropy[0]['set']} apart, by entropy",
            )
        )
    return rows
