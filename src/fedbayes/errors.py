"""The errors FedBayes raises on purpose: each is one sentence saying what was wrong, where, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedBayesError(Exception):
    """Base of every error a user can cause; the command line prints its sentence and exits with status 2."""


class ConfigError(FedBayesError):
    """An experiment that cannot be run as written: unknown key, wrong type, impossible value."""


class DataError(FedBayesError):
    """A data set, file or partition that cannot be had as asked."""


class PosteriorError(FedBayesError):
    """A posterior that cannot be fused or loaded: non-finite, non-positive variance, wrong names or shapes."""


class RunError(FedBayesError):
    """A run that cannot start, continue or finish: directory in use, quorum missed, checkpoint unreadable."""


def nearest(word: object, valid: Iterable[str]) -> str:
    """Return ``'; did you mean X?'`` for the closest valid word, or the list of valid ones when none is close."""
    options = list(valid)
    close = difflib.get_close_matches(str(word), options, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "valid are: " + ", ".join(sorted(options))
