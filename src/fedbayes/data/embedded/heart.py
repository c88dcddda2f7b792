"""Heart disease in four hospitals (UCI): a natural federation of tables with missing values, carried by the package."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from ...seeds import numpy_rng
from ..examples import Dataset, Examples
from ..sources import Request, register_source
from ..splits import group_codes, stratified_order

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""Cleveland Clinic; Hungarian Institute of Cardiology, Budapest; Zurich and Basel; V.A. Medical Center, Long Beach."""

_RAW = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal"]
_CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
_NUMBERS = tuple(name for name in _RAW if name not in _CATEGORIES)
_GAPPY = tuple(name for name in _RAW if name not in ("age", "sex", "cp"))
_NEVER_ZERO = ("trestbps", "chol")
"""Blood pressure and cholesterol of 0 stand for 'not measured' (all of Switzerland's cholesterol)."""

FEATURES = (
    *_NUMBERS,
    *(f"{name}={value}" for name, values in _CATEGORIES.items() for value in values),
    *(f"{name} missing" for name in _GAPPY),
)
"""Names of the 32 input columns: 9 numbers, 13 category flags, 10 flags of missing values."""

TEST_SHARE = 0.2


def read_heart() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the 13 published features (NaN where missing), the diagnosis 0-4, and the hospital, of 920 patients."""
    tables, hospitals = [], []
    for hospital in HOSPITALS:
        text = files("fedbayes.data.embedded").joinpath(f"heart.{hospital}.data").read_text()
        rows = [[float(v) if v != "?" else np.nan for v in line.split(",")] for line in text.split()]
        tables.append(np.array(rows))
        hospitals += [hospital] * len(rows)
    table = np.concatenate(tables)
    features, diagnosis = table[:, :-1], table[:, -1].astype(np.int64)
    features[features == -9] = np.nan
    for name in _NEVER_ZERO:
        column = features[:, _RAW.index(name)]
        column[column == 0] = np.nan
    return features, diagnosis, np.array(hospitals)


def encode(features: np.ndarray, medians: dict[str, float]) -> np.ndarray:
    """Turn published features into the columns of ``FEATURES``; gaps become the given medians and raise a flag."""
    by_name = dict(zip(_RAW, features.T))
    numbers = [np.where(np.isnan(by_name[n]), medians[n], by_name[n]) for n in _NUMBERS]
    flags = [by_name[n] == v for n, values in _CATEGORIES.items() for v in values]
    gaps = [np.isnan(by_name[n]) for n in _GAPPY]
    return np.stack([*numbers, *flags, *gaps], axis=1).astype(np.float32)


@register_source(
    "heart",
    summary="heart disease in four hospitals, 32 columns, missing values (UCI; carried by the package)",
    examples="736 + 184",
    classes=2,
    licence="CC BY 4.0",
    size=39_570,
)
def heart(request: Request) -> Dataset:
    """Load the table, split once and for all into 736 + 184, stratified by hospital and diagnosis.

    Medians that fill gaps come from the training part alone. The column ``hospital`` names the owner.
    """
    features, diagnosis, hospitals = read_heart()
    labels = (diagnosis > 0).astype(np.int64)
    order = stratified_order(group_codes(hospitals) * 2 + labels, numpy_rng("heart", "test split"))
    cut = round(TEST_SHARE * len(order))
    test, train = np.sort(order[:cut]), np.sort(order[cut:])
    medians = {name: float(np.nanmedian(features[train, _RAW.index(name)])) for name in _NUMBERS}
    inputs = encode(features, medians)
    everything = Examples(torch.from_numpy(inputs), torch.from_numpy(labels), {"hospital": hospitals})
    return Dataset(
        "heart",
        train=everything.take(train),
        test=everything.take(test),
        classes=("healthy", "heart disease"),
        notes="UCI Heart Disease (A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, 1988), CC BY 4.0; diagnosis 0 "
        "against 1-4; gaps filled by training medians and flagged; fixed split into 736 and 184, stratified by "
        "hospital and diagnosis.",
    )
