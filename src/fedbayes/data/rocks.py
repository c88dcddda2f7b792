"""Sonar, mines and rocks: 208 active-sonar returns of 60 energy bands, the smallest table."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import DataError
from ..seeds import numpy_rng
from .examples import Dataset, Examples
from .files import need
from .sources import Remote, Request, register_source
from .splits import stratified_order

_TEST = 42


@register_source(
    "sonar-rocks",
    summary="sonar returns from a metal cylinder or rocks, 60 bands (UCI)",
    examples="166 + 42",
    classes=2,
    licence="CC BY 4.0",
    files=(
        Remote(
            "sonar-rocks/sonar.all-data",
            (
                "https://archive.ics.uci.edu/ml/machine-learning-databases/undocumented/connectionist-bench/sonar/sonar.all-data",
            ),
            87776,
            "sha256:e90434cdbf00fcf93ffa911fe447ae25606979658e60f1d32e155c3b5240234d",
            also=("sonar.all-data",),
        ),
    ),
)
def sonar_rocks(request: Request) -> Dataset:
    """Load the table, split once and for all (not by the experiment's seed) into 166 + 42, stratified."""
    path = need(request.data_dir, request.name, ("sonar-rocks/sonar.all-data", "sonar.all-data"))
    rows = [line.split(",") for line in path.read_text().split()]
    try:
        inputs = np.array([row[:60] for row in rows], dtype=np.float32)
        labels = np.array([("R", "M").index(row[60]) for row in rows], dtype=np.int64)
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} should have 60 numbers and R or M in every line ({error}).") from None
    everything = Examples(torch.from_numpy(inputs), torch.from_numpy(labels))
    order = stratified_order(labels, numpy_rng("sonar-rocks", "test split"))
    return Dataset(
        "sonar-rocks",
        train=everything.take(np.sort(order[_TEST:])),
        test=everything.take(np.sort(order[:_TEST])),
        classes=("rock", "mine"),
        notes="Connectionist Bench, sonar, mines vs. rocks (T. Sejnowski, R. P. Gorman, UCI), CC BY 4.0; "
        "fixed stratified split into 166 and 42.",
    )
