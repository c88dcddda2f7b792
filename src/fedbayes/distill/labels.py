"""Pseudo-labels: the ensemble's mean prediction on the server's unlabelled inputs, sharpened if asked."""

from __future__ import annotations

from torch import Tensor

from ..errors import ConfigError, DataError

FLOOR = 1e-8
"""Least probability before sharpening, as in the released code: keeps 0 ** (1 / T) and its logarithm finite."""


def pseudo_labels(probabilities: Tensor, temperature: float = 1.0) -> Tensor:
    """Return p̂ⱼ = mean over members (and their Monte-Carlo samples) of p(y | xⱼ; w), sharpened: (R, M, N, C) -> (N, C)."""
    if probabilities.dim() != 4:
        raise DataError(
            f"ensemble predictions have shape {tuple(probabilities.shape)}; expected (members, samples, N, classes)."
        )
    return sharpen(probabilities.double().mean((0, 1)), temperature).float()


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Return p^(1/T) renormalised: T = 1 leaves p as it is, T = 0.5 squares (released code), T -> 0 is the argmax."""
    if not temperature > 0:
        raise ConfigError(f"distill.sharpen = {temperature}: a temperature is above 0 (1: no sharpening).")
    if temperature == 1:
        return p
    logits = p.clamp_min(FLOOR).log() / temperature
    return logits.softmax(-1)
