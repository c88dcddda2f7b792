"""ResNets for small pictures (He et al. 2016, section 4.2): 20, 32, 44 or 56 layers, 16-32-64 channels."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, nearest

_SHORTCUTS = ("A", "B")


class Subsample(nn.Module):
    """Shortcut A: every second pixel, new channels filled with zeros on both sides; no parameters."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.before = new_channels // 2
        self.after = new_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` at half the size with more channels."""
        return F.pad(x[..., ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """Two 3×3 convolutions with batch-norm around a shortcut."""

    def __init__(self, channels_in: int, channels: int, shortcut: str) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        bias = shortcut == "B"
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=bias)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=bias)
        self.bn2 = nn.BatchNorm2d(channels)
        if stride == 1:
            self.shortcut: nn.Module = nn.Identity()
        elif shortcut == "A":
            self.shortcut = Subsample(channels - channels_in)
        else:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of 6n + 2 layers for pictures of about 32×32, with global average pooling.

    Shortcut ``A`` (the paper's): parameter-free shortcuts, no biases but the last; 269,722 trainable parameters for
    ResNet-20. Shortcut ``B`` (the Keras CIFAR-10 example, likely behind Fischer and Loomis): 1×1 projections without
    batch-norm and biases everywhere; 273,066 trainable, 274,442 with the running statistics.
    """

    def __init__(self, depth: int, classes: int, channels: int, shortcut: str) -> None:
        super().__init__()
        if shortcut not in _SHORTCUTS:
            raise ConfigError(f"shortcut '{shortcut}' is unknown; {nearest(shortcut, _SHORTCUTS)}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=shortcut == "B")
        self.bn1 = nn.BatchNorm2d(16)
        self.stage1 = nn.Sequential(*(Block(16, 16, shortcut) for _ in range(blocks)))
        self.stage2 = nn.Sequential(*(Block(32 if i else 16, 32, shortcut) for i in range(blocks)))
        self.stage3 = nn.Sequential(*(Block(64 if i else 32, 64, shortcut) for i in range(blocks)))
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean((-2, -1)))


def _make(depth: int, classes: int, input_shape: tuple[int, ...], shortcut: str = "A") -> nn.Module:
    if len(input_shape) != 3:
        raise ConfigError(f"resnet{depth} takes pictures of shape (channels, height, width), not {tuple(input_shape)}.")
    return ResNet(depth, classes, input_shape[0], shortcut)


RESNETS = {f"resnet{depth}": partial(_make, depth) for depth in (20, 32, 44, 56)}
"""Makers of the four depths by name."""
