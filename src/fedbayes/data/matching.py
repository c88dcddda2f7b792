"""Making the inputs of one data set fit a network made for another: channels and size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..errors import DataError
from .examples import Examples

_LUMA = (0.299, 0.587, 0.114)
"""ITU-R BT.601 weights of red, green and blue in brightness."""


def match(examples: Examples, like: Examples, what: str) -> Examples:
    """Convert 8-bit images to the channels and size of ``like``; refuse in one sentence what cannot be converted.

    Grey becomes colour by repetition, colour becomes grey by brightness (ITU-R BT.601), and images of another
    size are resized (bilinear, antialiased). Other inputs must have the right shape already. ``what`` names the
    pair in the error.
    """
    mine, wanted = tuple(examples.inputs.shape[1:]), tuple(like.inputs.shape[1:])
    images = examples.inputs.dtype == torch.uint8 and like.inputs.dtype == torch.uint8
    if images and len(mine) == 3 and len(wanted) == 3:
        inputs = _resize(_channels(examples.inputs, wanted[0], what), wanted[1], wanted[2])
        return Examples(inputs, examples.labels, examples.columns)
    if mine != wanted or examples.inputs.dtype != like.inputs.dtype:
        raise DataError(
            f"{what}: its inputs are {_describe(examples.inputs)} and {_describe(like.inputs)} are needed; "
            "only 8-bit images can be converted to one another."
        )
    return examples


def _describe(inputs: Tensor) -> str:
    kind = "8-bit images" if inputs.dtype == torch.uint8 else "floating-point inputs"
    return f"{kind} of shape {tuple(inputs.shape[1:])}"


def _channels(images: Tensor, channels: int, what: str) -> Tensor:
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1).contiguous()
    if images.shape[1] == 3 and channels == 1:
        weights = torch.tensor(_LUMA, device=images.device).view(1, 3, 1, 1)
        return torch.cat([(part * weights).sum(1, keepdim=True).round().to(torch.uint8) for part in images.split(4096)])
    raise DataError(f"{what}: images of {images.shape[1]} channels cannot become images of {channels}.")


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    if tuple(images.shape[2:]) == (height, width) or len(images) == 0:
        return images.new_empty(len(images), images.shape[1], height, width) if len(images) == 0 else images

    def one(part: Tensor) -> Tensor:
        scaled = interpolate(part.float(), size=(height, width), mode="bilinear", antialias=True)
        return scaled.round().clamp(0, 255).to(torch.uint8)

    return torch.cat([one(part) for part in images.split(4096)])
