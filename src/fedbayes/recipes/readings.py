"""What the papers leave open, as named choices: each option is a set of configuration changes with its reason.

A recipe names the readings that touch it and the option it takes; ``fedbayes reproduce NAME --reading key=option``
takes another. Options apply to every cell, or only to those where ``when`` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, nearest


@dataclass(frozen=True)
class Option:
    """One way to read an ambiguity: what it changes in the experiment, where it applies, and how a result is read.

    ``when`` holds where every configuration field has the given value; a key ``@coordinate`` holds where the cell's
    coordinate contains the given word. ``needs`` is set beside ``set`` in fields that are 0 so far.
    """

    set: Mapping[str, Any] = field(default_factory=dict)
    when: Mapping[str, Any] = field(default_factory=dict)
    report: str = ""
    needs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """One ambiguity: what is open, and its options by name."""

    question: str
    options: Mapping[str, Option]


def _set(**changes: Any) -> Option:
    return Option({k.replace("__", "."): v for k, v in changes.items()})


READINGS: dict[str, Reading] = {
    "optimizer": Reading(
        "Fischer and Loomis do not state the optimiser; batch, rate and L2 match a Keras example that uses Adam.",
        {"adam": _set(local__optimizer="adam"), "sgd": _set(local__optimizer="sgd", local__learning_rate=0.1)},
    ),
    "schedule": Reading(
        "Loomis states no schedule, and that some callbacks did not work in federation: Fischer's (same network, same "
        "laboratory), or a constant rate.",
        {"fischer": Option(), "constant": _set(schedule__name="constant")},
    ),
    "lr_decay": Reading(
        "Fischer: the rate falls 'by a factor of .04 every round' after 50 rounds; taken literally nothing trains.",
        {
            "exp": _set(schedule__reading="exp"),
            "keep": _set(schedule__reading="keep"),
            "literal": _set(schedule__reading="literal"),
        },
    ),
    "kl_scale": Reading(
        "Loomis divides the KL by the client's own samples, which counts the prior once per client; Fischer is silent.",
        {
            "client": _set(objective__kl_scale="client"),
            "federation": _set(objective__kl_scale="federation"),
            "shared": _set(objective__kl_scale="shared"),
        },
    ),
    "initialisation": Reading(
        "The initial posterior is not stated; the library both used has defaults (mu ~ N(0, .1), rho ~ N(-3, .1)).",
        {"tfp": _set(model__init="tfp"), "he": _set(model__init="he", model__sigma=0.02)},
    ),
    "bayesian_bias": Reading(
        "Fischer writes 'each weight and bias', but the library's biases are points by default.",
        {"no": _set(model__bayesian_bias=False), "yes": _set(model__bayesian_bias=True)},
    ),
    "shortcut": Reading(
        "The thesis counts 19 convolutions, as with parameter-free shortcuts (A); the Keras example projects (B).",
        {"A": _set(model__shortcut="A"), "B": _set(model__shortcut="B")},
    ),
    "pixel_mean": Reading(
        "Loomis subtracts each site's own mean and the test set's on the server; Fischer is silent.",
        {"client": _set(data__mean="client"), "global": _set(data__mean="global")},
    ),
    "optimizer_state": Reading(
        "Clients are torn down each round in the thesis, so their optimiser starts afresh; the others do not say.",
        {"fresh": _set(local__keep_state=False), "kept": _set(local__keep_state=True)},
    ),
    "samples": Reading(
        "Monte-Carlo samples at evaluation: 25 in the thesis, not stated by Fischer, 10 in BFL-P's code.",
        {"25": _set(evaluation__samples=25), "10": _set(evaluation__samples=10), "100": _set(evaluation__samples=100)},
    ),
    "dirichlet": Reading(
        "Fischer says every client has equally much data, so its Dirichlet cannot be the unequal one it cites.",
        {
            "equal": Option(),
            "unequal": Option({"partition.scheme": "dirichlet-unequal"}, {"partition.scheme": "dirichlet"}),
        },
    ),
    "max_discrepancy": Reading(
        "Fischer's eq. (20) as printed is 1 / KL to the *nearest* client; its name says the farthest.",
        {
            "nearest": Option(
                {"fusion.weighting": "max-discrepancy-nearest"}, {"fusion.weighting": "max-discrepancy"}
            ),
            "farthest": Option(),
        },
    ),
    "fedavg_flipout": Reading(
        "Loomis' FedAvg of Gaussians: the text averages means and variances (nwa), the equation averages variables (ws).",
        {
            "nwa": Option({"fusion.rule": "nwa"}, {"fusion.rule": "fedavg", "model.kind": "flipout"}),
            "ws": Option({"fusion.rule": "ws"}, {"fusion.rule": "fedavg", "model.kind": "flipout"}),
        },
    ),
    "batchnorm": Reading(
        "No paper says how batch-norm is aggregated under the Gaussian rules; it has no variance, so: weighted mean, or its "
        "statistics measured anew on the server's validation images (5 % of the training set where a recipe keeps none).",
        {
            "mean": Option(),
            "refresh": Option({"evaluation.refresh_batchnorm": True}, needs={"data.validation": 0.05}),
        },
    ),
    "reported_round": Reading(
        "Which round's numbers are printed: the last, the one of lowest test NLL (Loomis; selects on the test set), or "
        "the one of lowest validation NLL (on 5 % of the training set where a recipe keeps none).",
        {
            "last": Option(report="last"),
            "best-test-nll": Option(report="best-test-nll"),
            "best-validation-nll": Option(report="best-validation-nll", needs={"data.validation": 0.05}),
        },
    ),
    "evaluated_rounds": Reading(
        "Loomis evaluates after every round and prints the best; here every tenth, because 25 samples a round cost more than "
        "one epoch's training. The best of 20 rounds is a little worse than the best of 200.",
        {"10": _set(evaluation__every=10), "1": _set(evaluation__every=1)},
    ),
    "accuracy_over": Reading(
        "Reyes prints accuracy ± deviation without saying over what; only over the rounds is the ± as large as printed.",
        {"rounds": Option(report="rounds"), "last": Option(report="last")},
    ),
    "dwc_prior": Reading(
        "Distributed weight consolidation is exact when clients train against the global model as prior; Fischer "
        "writes that it is the prior, not that the KL used it.",
        {
            "previous": Option({"objective.prior": "previous"}, {"fusion.rule": "dwc"}),
            "fixed": Option(),
        },
    ),
    "dwc_guard": Reading(
        "Fischer gives no guard where DWC's precision is not positive: the previous posterior is kept there, or the "
        "precision floored, or the run stopped.",
        {
            "previous": Option({"fusion.options": ["repair=previous"]}, {"fusion.rule": "dwc"}),
            "floor": Option({"fusion.options": ["repair=floor"]}, {"fusion.rule": "dwc"}),
            "stop": Option({"fusion.options": ["repair=stop"]}, {"fusion.rule": "dwc"}),
        },
    ),
    "nwa_space": Reading(
        "NWA averages variances by its equation; code may as well average standard deviations.",
        {
            "variance": Option(),
            "sigma": Option({"fusion.rule": "wasserstein"}, {"fusion.rule": "nwa", "model.kind": "flipout"}),
        },
    ),
    "prior_update": Reading(
        "Table 5's prior is the previous global posterior, mean and variance.",
        {"previous": _set(objective__prior="previous")},
    ),
    "sign": Reading(
        "Reyes: section 3 takes the second moment as Fisher information (weight v), the rest weighs by its inverse.",
        {
            "inverse": Option({"fusion.options": ["sign=inverse"]}, {"fusion.rule": "precision"}),
            "fisher": Option({"fusion.options": ["sign=fisher"]}, {"fusion.rule": "precision"}),
        },
    ),
    "epsilon": Reading(
        "Reyes states no epsilon, but v = 0 (a dead unit) makes 1/v infinite: the least v that counts, 1e-16 (the square of "
        "torch's eps for Adam; as good as none) or Keras' usual 1e-7.",
        {
            "none": Option({"fusion.options": ["floor=1e-16"]}, {"fusion.rule": "precision"}),
            "keras": Option({"fusion.options": ["floor=1e-7"]}, {"fusion.rule": "precision"}),
        },
    ),
    "bias_correction": Reading(
        "Reyes does not say whether v is divided by 1 - beta2^t; it cancels where all clients took equally many steps.",
        {
            "yes": Option({"fusion.options": ["bias_correction=true"]}, {"fusion.rule": "precision"}),
            "no": Option({"fusion.options": ["bias_correction=false"]}, {"fusion.rule": "precision"}),
        },
    ),
    "adam_constants": Reading(
        "Reyes states no constants of Adam; Keras' defaults (rate 1e-3, eps 1e-7), or torch's (eps 1e-8).",
        {
            "keras": _set(local__learning_rate=1e-3, local__eps=1e-7),
            "torch": _set(local__learning_rate=1e-3, local__eps=1e-8),
        },
    ),
    "dropout": Reading(
        "Reyes gives no dropout rates; the Keras examples these networks come from have 0.25 and 0.5.",
        {"0.25": _set(model__dropout=0.25), "0.5": _set(model__dropout=0.5)},
    ),
    "participation_split": Reading(
        "Reyes does not say how the 100 participants of the client-fraction study are split.",
        {"iid": _set(partition__scheme="iid"), "2-class": _set(partition__scheme="shards")},
    ),
    "clamp": Reading(
        "BFL-P's code starts log-variances at -9 and clamps them at -8, so that they never receive a gradient; the "
        "exact arithmetic is used here, with the same initial values or with sigmas that can move.",
        {"released-init": _set(model__init="bflp"), "trainable": _set(model__init="torch", model__sigma=0.02)},
    ),
    "client_schedule": Reading(
        "FedBE: paper: x0.1 after 30 % and 60 % of the rounds; released code: x0.5 in the first of 40 rounds, x0.2, x0.1 and "
        "x0.01 of the first rate after 30, 60 and 90 %.",
        {
            "paper": _set(schedule__name="step", schedule__milestones=[0.3, 0.6], schedule__factor=0.1),
            "released": _set(
                schedule__name="step", schedule__milestones=[0.025, 0.3, 0.6, 0.9],
                schedule__factors=[0.5, 1.0, 0.2, 0.1, 0.01],
            ),
            "constant": _set(schedule__name="constant"),
        },
    ),
    "model_distribution": Reading(
        "FedBE's Gaussian: the poster's weighted mean and variance, or the released code's directions.",
        {
            "poster": Option(),
            "released": Option({"distill.distribution": "gaussian-released"}, {"distill.distribution": "gaussian"}),
            "dirichlet": Option({"distill.distribution": "dirichlet"}, {"distill.distribution": "gaussian"}),
        },
    ),
    "swa": Reading(
        "FedBE's averaging: cyclical rate (poster), or constant from step 500 on (released code).",
        {
            "cyclical": Option({}, {"distill.swa": "cyclical"}),
            "constant": Option({"distill.swa": "constant"}, {"distill.swa": "cyclical"}),
        },
    ),
    "kd_reduction": Reading(
        "The distillation loss per example (the usual), or divided by the classes too (released code).",
        {"batch": _set(distill__reduction="batch"), "batch-classes": _set(distill__reduction="batch-classes")},
    ),
    "sharpen": Reading(
        "Pseudo-labels: the plain mean (poster), or sharpened at temperature 0.5 (released code).",
        {"none": _set(distill__sharpen=1.0), "0.5": _set(distill__sharpen=0.5)},
    ),
    "fedbe_initialisation": Reading(
        "Not on the poster; the released code draws Glorot-uniform weights and zero biases.",
        {"xavier": _set(model__init="xavier"), "torch": _set(model__init="torch")},
    ),
    "weight_decay": Reading(
        "FedBE searches weight decay in [1e-3, 1e-4]; its script has 1e-3 for the ConvNet and 2e-4 for ResNets.",
        {
            "script": Option({"local.weight_decay": 1e-3}, {"model.name": "fedbe-convnet"}),
            "1e-4": _set(local__weight_decay=1e-4),
        },
    ),
    "step_duplicates": Reading(
        "Step partition: the ten images of every class leave the shards (poster's counts), or stay in them too (released "
        "code), so that some images are held twice.",
        {"no": _set(partition__duplicates=False), "yes": _set(partition__duplicates=True)},
    ),
    "proximal": Reading(
        "FedProx's mu is not on the poster.",
        {
            "0.01": Option({"objective.proximal": 0.01}, {"@method": "fedprox"}),
            "0.001": Option({"objective.proximal": 0.001}, {"@method": "fedprox"}),
            "0.1": Option({"objective.proximal": 0.1}, {"@method": "fedprox"}),
        },
    ),
    "server_momentum": Reading(
        "FedAvgM's momentum is not on the poster.",
        {
            "0.9": Option({"fusion.server_momentum": 0.9}, {"@method": "fedavgm"}),
            "0.5": Option({"fusion.server_momentum": 0.5}, {"@method": "fedavgm"}),
        },
    ),
    "one_shot_epochs": Reading(
        "1-Ensemble trains each client once and for longer; the poster does not say how long (200 epochs here).",
        {"200": Option({"local.epochs": 200}, {"@method": "1-ensemble"}),
            "20": Option({"local.epochs": 20}, {"@method": "1-ensemble"}),
        },
    ),
}  # fmt: skip


def take(readings: Mapping[str, str], source: str) -> list[Option]:
    """Return the chosen options in the order of ``READINGS``; an unknown name or option gets one sentence."""
    for name, option in readings.items():
        if name not in READINGS:
            raise ConfigError(f"{source}: no reading is named '{name}'; {nearest(name, READINGS)}")
        if str(option) not in READINGS[name].options:
            raise ConfigError(
                f"{source}: reading '{name}' has no option '{option}'; {nearest(str(option), READINGS[name].options)}"
            )
    return [r.options[str(readings[name])] for name, r in READINGS.items() if name in readings]
