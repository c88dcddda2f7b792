"""The node's side of secure aggregation: four messages a round, between which its secrets stay in Flower's node state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from .. import __version__
from ..errors import FedBayesError, RunError
from .home import sentence
from .masking import FixedPoint, Party
from .records import take_assignments

if TYPE_CHECKING:
    from ..cohort import Update
    from ..experiment import Experiment

STATE = "masking"


def metrics_sent(experiment: Experiment) -> tuple[str, ...]:
    """What a node adds to its statistics: training losses; nothing under differential privacy, which covers no losses."""
    return () if experiment.privacy.clip > 0 else ("loss", "nll", "kl")


def answer_keys(asked: RecordDict, node: int, state: RecordDict) -> RecordDict:
    """First exchange: fresh keys."""
    about = asked.config_records["masking"]
    party, (masking, sealing) = Party.begin(node, int(about["threshold"]))  # type: ignore[arg-type]
    keep(state, party)
    return RecordDict({"keys": ConfigRecord({"masking": masking, "sealing": sealing})})


def answer_shares(asked: RecordDict, state: RecordDict) -> RecordDict:
    """Second exchange: the sealed shares for every other party."""
    party = recover(state)
    masking, sealing = asked.config_records["masking-keys"], asked.config_records["sealing-keys"]
    sealed = party.share({int(n): (masking[n], sealing[n]) for n in masking})  # type: ignore[misc]
    keep(state, party)
    return RecordDict({"sealed": ConfigRecord({str(n): box for n, box in sealed.items()})})


def answer_masked(asked: RecordDict, node_config: Mapping[str, Any], state: RecordDict) -> RecordDict:
    """Third exchange: train the clients that live here and send the sum of their statistics under masks."""
    party = recover(state)
    about, wire = asked.config_records["masking"], asked.config_records["wire"]
    failures: dict[int, str] = {}
    numbers = FixedPoint(int(about["bits"]), int(about["parties"]))  # type: ignore[arg-type]
    weights = {int(n): float(w) for n, w in asked.config_records["weights"].items()}  # type: ignore[arg-type]
    vector, included = _statistics(asked, node_config, state, wire, weights, party.threshold, failures)
    reply = RecordDict({"failures": ConfigRecord({str(c): r for c, r in failures.items()})})
    if included and vector is not None:
        try:
            encoded = numbers.encode(vector)
            masked = party.mask(encoded, {int(n): b for n, b in asked.config_records["sealed"].items()})  # type: ignore[misc]
        except RunError as error:
            reply["failures"] = ConfigRecord({str(c): str(error) for c in weights})
            return reply
        keep(state, party)
        reply["masked"] = ArrayRecord({"vector": Array(masked)})
        reply["included"] = ConfigRecord({"clients": included})
    return reply


def answer_reveal(asked: RecordDict, state: RecordDict) -> RecordDict:
    """Fourth exchange: the shares that take the masks off the sum; then every secret is forgotten."""
    party = recover(state)
    about = asked.config_records["sum"]
    shares = party.reveal(list(about["present"]), list(about["dropped"]))  # type: ignore[arg-type]
    del state[STATE]
    return RecordDict({"shares": ConfigRecord({str(n): s for n, s in shares.items()})})


def _statistics(
    asked: RecordDict,
    node_config: Mapping[str, Any],
    state: RecordDict,
    wire: ConfigRecord,
    weights: Mapping[int, float],
    threshold: int,
    failures: dict[int, str],
) -> tuple[np.ndarray | None, list[int]]:
    """Train every client of this node; return the sum of their vectors (metrics at the end) and who is in it."""
    from .client import last_trained, node_setup, train_one

    try:
        if wire["version"] != __version__:
            raise FedBayesError(
                f"the server runs fedbayes {wire['version']} and this node {__version__}; install the same on both."
            )
        assignments = take_assignments(asked)
        setup = node_setup(asked, node_config, assignments[0].client)
    except FedBayesError as error:
        failures.update(dict.fromkeys(weights, sentence(error, node_config)))
        return None, []
    total, included = None, []
    for a in assignments:
        try:
            update = train_one(setup, a, state, last_trained(wire, a.client))
            vector = client_vector(setup.experiment, update, a.start, weights[a.client])
        except Exception as error:
            failures[a.client] = sentence(error, node_config)
            continue
        total = vector if total is None else total + vector
        included.append(a.client)
    if total is not None and setup.experiment.privacy.clip > 0:
        total += _noise(setup.experiment, weights, threshold, len(total))
    return total, included


def client_vector(experiment: Experiment, update: Update, start: Any, weight: float) -> np.ndarray:
    """Return one client's statistics in relative coordinates, clipped if asked, then its losses (the KL a weight)."""
    from ..federation import options, rule_of_round
    from ..posterior import check
    from ..privacy.relative import Relative, clipped, refuse_unless_sum

    rule = rule_of_round(refuse_unless_sum(experiment, options(experiment)), experiment, update.round)
    check(update.posterior, start, client=update.client, allow_zero_variance=rule.allows_zero_variance)
    relative = Relative(rule, start)
    vector, _ = clipped(relative, update.posterior, weight, update.client, experiment.privacy.clip)
    count = max(1, sum(g.mean.numel() for g in start.gaussians.values()))
    metrics = [
        float(update.metrics.get(name, 0.0)) / (count if name == "kl" else 1) for name in metrics_sent(experiment)
    ]
    metrics = [min(max(weight * m, -100.0), 100.0) if math.isfinite(m) else 0.0 for m in metrics]
    return np.concatenate([vector.numpy(), metrics])


def _noise(experiment: Experiment, weights: Mapping[int, float], threshold: int, size: int) -> np.ndarray:
    """This node's share of the noise: any ``threshold`` nodes together carry all of it."""
    from ..federation import options
    from ..privacy.noise import secret_normal
    from ..privacy.relative import noise_of, refuse_unless_sum

    deviation = noise_of(experiment, refuse_unless_sum(experiment, options(experiment)), weights) / math.sqrt(threshold)
    return deviation * secret_normal(size).numpy() if deviation else np.zeros(size)


# -- secrets between messages ------------------------------------------------------------------------------------


def keep(state: RecordDict, party: Party) -> None:
    """Put a party into Flower's state of this node (it never leaves the node)."""
    order = sorted(party.publics)
    held = sorted(party.seed_shares)
    state[STATE] = ConfigRecord(
        {
            "number": party.number,
            "threshold": party.threshold,
            "stage": party.stage,
            "secrets": [party.masking_key, party.sealing_key, party.own_seed],
            "publics": order,
            "public-masking": [party.publics[n][0] for n in order],
            "public-sealing": [party.publics[n][1] for n in order],
            "held": held,
            "seed-shares": [party.seed_shares[n] for n in held],
            "key-shares": [party.key_shares[n] for n in held],
        }
    )


def recover(state: RecordDict) -> Party:
    """Take the party back; a node that was restarted since has lost it and drops out of this sum."""
    kept: Any = state.get(STATE)
    if not isinstance(kept, ConfigRecord):
        raise RunError(
            "secure aggregation: this node lost its secrets of this round (it was restarted); it sits the round out."
        )
    masking, sealing, seed = kept["secrets"]  # type: ignore[misc]
    party = Party(int(kept["number"]), int(kept["threshold"]), masking, sealing, seed, stage=str(kept["stage"]))  # type: ignore[arg-type]
    party.publics = dict(zip(kept["publics"], zip(kept["public-masking"], kept["public-sealing"])))  # type: ignore[arg-type]
    party.seed_shares = dict(zip(kept["held"], kept["seed-shares"]))  # type: ignore[arg-type]
    party.key_shares = dict(zip(kept["held"], kept["key-shares"]))  # type: ignore[arg-type]
    return party
