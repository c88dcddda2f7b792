"""The server's inputs for distillation: images of another size or number of channels are made to fit the network."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import Examples
from ..errors import DataError

_CHUNK = 1000


def fit(unlabelled: Examples, shape: tuple[int, ...]) -> Examples:
    """Return the server's inputs in the shape that the clients' have; other things than images must have it already.

    Images are resized by bilinear interpolation with antialiasing (Tiny-ImageNet's 64 x 64 to CIFAR-10's 32 x 32, say);
    grey ones become colours by repetition, colours grey by their mean. 8-bit images stay 8-bit. When: ``distill.data``
    names another data set.
    """
    have = tuple(unlabelled.inputs.shape[1:])
    if have == shape:
        return unlabelled
    if len(have) != 3 or len(shape) != 3 or not len(unlabelled.inputs):
        raise DataError(
            f"distill.data: inputs have shape {have}, but the clients' have {shape}; only images are made to fit, give "
            "others in that shape."
        )
    if have[0] != shape[0] and 1 not in (have[0], shape[0]):
        raise DataError(
            f"distill.data: images have {have[0]} channels, but the clients' have {shape[0]}; only grey and coloured ones are "
            "turned into each other."
        )
    parts = [_fit(part, shape) for part in unlabelled.inputs.split(_CHUNK)]
    return replace(unlabelled, inputs=torch.cat(parts))


def _fit(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    channels, *size = shape
    x = images.float()
    if tuple(x.shape[-2:]) != tuple(size):
        x = F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False)
    if x.shape[1] != channels:
        x = x.mean(1, keepdim=True) if channels == 1 else x.expand(-1, channels, -1, -1)
    if images.dtype == torch.uint8:
        x = x.round_().clamp_(0, 255) if x.is_contiguous() else x.round().clamp(0, 255)
    return x.to(images.dtype)
