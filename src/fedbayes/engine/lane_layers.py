"""Which layers of a network run on operations of our own when lanes are compiled for a GPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.layers import DropoutConv2d, FlipoutConv2d
from ..nn.resnet import Block, ResNet
from .convolution import MOST_CHANNELS, LaneConv2d, LaneDropoutConv2d, LaneFlipoutConv2d
from .normalization import LaneBatchNorm2d


def _norm(layer: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """ReLU of the layer's output and the residual's sum; in one operation where the layer can."""
    if isinstance(layer, LaneBatchNorm2d):
        return layer.then(x, residual, relu=True)
    y = layer(x)
    return F.relu(y if residual is None else y + residual)


class LaneBlock(Block):
    """A residual block whose batch-norms take the ReLU and the residual sum with them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = _norm(self.bn1, self.conv1(x))
        return _norm(self.bn2, self.conv2(y), self.shortcut(x))


class LaneResNet(ResNet):
    """A residual network whose first batch-norm takes the ReLU with it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = _norm(self.bn1, self.conv1(x))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean((-2, -1)))


_ON_LANES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: LaneConv2d,
    DropoutConv2d: LaneDropoutConv2d,
    FlipoutConv2d: LaneFlipoutConv2d,
    nn.BatchNorm2d: LaneBatchNorm2d,
    Block: LaneBlock,
    ResNet: LaneResNet,
}


def with_lane_layers(model: nn.Module) -> nn.Module:
    """Give the layers of a network that have a form for lanes that form, in place; return the network.

    Convolutions that our kernels cannot run (grouped, dilated, padded otherwise than by zeros, wider than
    ``MOST_CHANNELS``) and subclasses of the user's stay as they are. Names, parameters and buffers do not change.
    """
    for layer in model.modules():
        if type(layer) in _ON_LANES and (not isinstance(layer, nn.Conv2d) or _fits(layer)):
            layer.__class__ = _ON_LANES[type(layer)]  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _fits(layer: nn.Conv2d) -> bool:
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    plain = layer.groups == 1 and tuple(layer.dilation) == (1, 1)
    return zeros and plain and max(layer.in_channels, layer.out_channels) <= MOST_CHANNELS
