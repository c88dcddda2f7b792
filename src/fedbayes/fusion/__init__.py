"""Fusing posteriors: rules, client weights, and the accumulator they stream through."""

from . import averages, mixtures, products  # noqa: F401 - registers the rules
from .accumulator import Accumulator, Fused
from .batch import fuse
from .catalogue import listing, markdown_table
from .collapse import collapse_note
from .rule import Rule, Statistics, WeightSums, get_rule, register, rules
from .stacked import fuse_stacked
from .weighting import Weighting, client_weights, get_weighting, pairwise_kl, register_weighting, weightings

__all__ = [
    "Accumulator",
    "Fused",
    "Rule",
    "Statistics",
    "WeightSums",
    "Weighting",
    "client_weights",
    "collapse_note",
    "fuse",
    "fuse_stacked",
    "get_rule",
    "get_weighting",
    "listing",
    "markdown_table",
    "pairwise_kl",
    "register",
    "register_weighting",
    "rules",
    "weightings",
]
