"""The UCI optical handwritten digits: 1,797 images of 8x8, carried by the package."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from ...seeds import numpy_rng
from ..examples import Dataset, Examples
from ..sources import Request, register_source
from ..splits import stratified_order

TEST_EXAMPLES = 360


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images (1797, 8, 8) with values 0 to 16 and the labels, as published."""
    with files("fedbayes.data.embedded").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"], arrays["labels"]


@register_source(
    "digits",
    summary="handwritten digits, 8x8 grey (UCI optical digits; carried by the package)",
    examples="1,437 + 360",
    classes=10,
    licence="CC BY 4.0",
    size=45_394,
)
def digits(request: Request) -> Dataset:
    """Load the digits, split once and for all (not by the experiment's seed) into 1,437 + 360, stratified."""
    images, labels = read_digits()
    # Published values run from 0 to 16; stretched to the 8 bits every other image set has.
    inputs = torch.from_numpy(np.round(images.astype(np.float64) * (255 / 16)).astype(np.uint8))[:, None]
    everything = Examples(inputs, torch.from_numpy(labels.astype(np.int64)))
    order = stratified_order(labels, numpy_rng("digits", "test split"))
    return Dataset(
        "digits",
        train=everything.take(np.sort(order[TEST_EXAMPLES:])),
        test=everything.take(np.sort(order[:TEST_EXAMPLES])),
        classes=tuple("0123456789"),
        notes="UCI Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak, 1998), CC BY 4.0; "
        "values 0-16 stretched to 0-255; fixed stratified split into 1,437 training and 360 test images.",
    )
