"""Adam's second moment by layer: what precision weighting (Reyes 2021) weighs by, as numbers for the log and a figure."""

from __future__ import annotations

from typing import Any

from .posterior import Posterior

FLOOR = 1e-16
"""Least second moment, Adam's eps squared: the default of the rule ``precision``, so that dead units do not give infinity."""


def moment_summary(posterior: Posterior, floor: float = FLOOR) -> dict[str, dict[str, float]]:
    """Return ``moment`` (mean v) and ``inverse`` (mean 1/v) of each tensor a client sent with an estimated variance.

    ``floor`` is the rule's least v. These are the quantities of Reyes' variance analysis (section 5.4, Figures 7 and 8); the mean inverse is what
    equation (6) weighs a client's layer by.
    """
    summary = {}
    for name, g in posterior.gaussians.items():
        v = g.variance.detach().double().clamp_min(floor)
        summary[name] = {"moment": float(v.mean()), "inverse": float((1 / v).mean())}
    return summary


def section(run: Any) -> str | None:
    """Return the report's section on precision weighting: mean inverse second moment by client and by layer, or None."""
    from .recipes.figures import moment_charts

    rounds = [
        (e["round"], e["fusion"]["moments"])
        for e in run.events
        if e["kind"] == "round" and e.get("fusion", {}).get("moments")
    ]
    if not rounds:
        return None
    figures = "".join(f"<figure>{svg}</figure>" for svg in moment_charts(rounds) if svg)
    return (
        '<p class="note">Each client sends the mean of Adam\'s second moment v beside its weights; equation (6) of Reyes 2021 '
        "weighs a client by 1/v, so a client high up here counts more. Values are scaled to 0..1, as in the paper.</p>"
        f'<div class="figures">{figures}</div>'
    )
