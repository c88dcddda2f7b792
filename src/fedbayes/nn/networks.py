"""The papers' networks other than ResNets, as plain ``nn.Module``s: LeNet, Reyes', FedBE's, MLP, CNNs for sound."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..errors import ConfigError

Shape = tuple[int, ...]


class Plain(nn.Module):
    """A stack of named layers applied one after another, with flattening where a linear layer meets pictures."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        for layer in self.children():
            x = layer(x)
        return x


def mlp(classes: int, input_shape: Shape, width: int = 0) -> nn.Module:
    """Two hidden layers of ``width`` (100) units on flattened inputs of any shape."""
    width = width or 100
    return Plain(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(input_shape), width),
        relu1=nn.ReLU(),
        fc2=nn.Linear(width, width),
        relu2=nn.ReLU(),
        fc3=nn.Linear(width, classes),
    )


def cnn(classes: int, input_shape: Shape, width: int = 0) -> nn.Module:
    """A small convolutional network: two 3×3 convolutions (``width`` = 16 and twice that) with pooling, 64 units."""
    channels, height, side = _image(input_shape, "cnn", 4)
    width = width or 16
    return Plain(
        conv1=nn.Conv2d(channels, width, 3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(width, 2 * width, 3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(2 * width * (height // 4) * (side // 4), 64),
        relu3=nn.ReLU(),
        fc2=nn.Linear(64, classes),
    )


def lenet(classes: int, input_shape: Shape) -> nn.Module:
    """LeNet-5 as Ozer et al. 2022 have it: 62,006 parameters on 3×32×32, 44,426 on 1×28×28."""
    channels, height, side = _image(input_shape, "lenet", 16)
    flat = 16 * (((height - 4) // 2 - 4) // 2) * (((side - 4) // 2 - 4) // 2)
    return Plain(
        conv1=nn.Conv2d(channels, 6, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(flat, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, classes),
    )


def reyes_mnist(classes: int, input_shape: Shape, dropout: float = 0.2) -> nn.Module:
    """Reyes et al. 2021's network for MNIST and Fashion-MNIST: 600,810 parameters on 1×28×28."""
    channels, height, side = _image(input_shape, "reyes-mnist", 6)
    return Plain(
        conv1=nn.Conv2d(channels, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 32, 3),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        dropout=nn.Dropout(dropout),
        fc1=nn.Linear(32 * ((height - 4) // 2) * ((side - 4) // 2), 128),
        relu3=nn.ReLU(),
        fc2=nn.Linear(128, classes),
    )


def reyes_cifar(classes: int, input_shape: Shape, dropout: float = 0.2) -> nn.Module:
    """Reyes et al. 2021's network for CIFAR-10: 4,225,354 parameters on 3×32×32, running statistics counted."""
    channels, height, side = _image(input_shape, "reyes-cifar", 4)
    return Plain(
        conv1=nn.Conv2d(channels, 32, 3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        bn1=nn.BatchNorm2d(32),
        conv2=nn.Conv2d(32, 64, 3, padding=1),
        relu2=nn.ReLU(),
        bn2=nn.BatchNorm2d(64),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        dropout1=nn.Dropout(dropout),
        fc1=nn.Linear(64 * (height // 4) * (side // 4), 1024),
        relu3=nn.ReLU(),
        dropout2=nn.Dropout(dropout),
        fc2=nn.Linear(1024, classes),
    )


def fedbe_convnet(classes: int, input_shape: Shape) -> nn.Module:
    """FedBE's ConvNet (Chen & Chao 2021): 122,570 parameters on 3×32×32, no normalisation."""
    channels, height, side = _image(input_shape, "fedbe-convnet", 18)
    flat = 64 * (((height - 2) // 2 - 2) // 2 - 2) * (((side - 2) // 2 - 2) // 2 - 2)
    return Plain(
        conv1=nn.Conv2d(channels, 32, 3),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(64, 64, 3),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(flat, 64),
        relu4=nn.ReLU(),
        fc2=nn.Linear(64, classes),
    )


def spectrogram_cnn(classes: int, input_shape: Shape, width: int = 0) -> nn.Module:
    """A 2-D network for time-frequency pictures of any size: four 3×3 convolutions with batch-norm, average pooling.

    ``width`` (16) channels after the first convolution, up to four times as many; about 61,000 parameters.
    """
    channels, _, _ = _image(input_shape, "spectrogram-cnn", 1)
    width = width or 16
    widths = [channels, width, 2 * width, 4 * width, 4 * width]
    layers: dict[str, nn.Module] = {}
    for i in range(4):
        layers |= {
            f"conv{i + 1}": nn.Conv2d(widths[i], widths[i + 1], 3, padding=1, bias=False),
            f"bn{i + 1}": nn.BatchNorm2d(widths[i + 1]),
            f"relu{i + 1}": nn.ReLU(),
            f"pool{i + 1}": nn.MaxPool2d(2, ceil_mode=True) if i < 3 else nn.AdaptiveAvgPool2d(1),
        }
    return Plain(**layers, flatten=nn.Flatten(), fc=nn.Linear(widths[-1], classes))


def waveform_cnn(classes: int, input_shape: Shape, width: int = 0) -> nn.Module:
    """A 1-D network for waveforms of any length, shape (channels, samples), after M5 (Dai et al. 2017).

    The first convolution is a bank of 80-sample filters taken every fourth sample; three short ones follow, each
    after pooling by four; then the average over time. ``width`` (32) filters; about 26,000 parameters.
    """
    if len(input_shape) != 2:
        raise ConfigError(f"waveform-cnn takes waveforms of shape (channels, samples), not {tuple(input_shape)}.")
    width = width or 32
    widths = [input_shape[0], width, width, 2 * width, 2 * width]
    layers: dict[str, nn.Module] = {}
    for i in range(4):
        kernel, stride, padding = (80, 4, 40) if i == 0 else (3, 1, 1)
        layers |= {
            f"conv{i + 1}": nn.Conv1d(widths[i], widths[i + 1], kernel, stride, padding, bias=False),
            f"bn{i + 1}": nn.BatchNorm1d(widths[i + 1]),
            f"relu{i + 1}": nn.ReLU(),
            f"pool{i + 1}": nn.MaxPool1d(4, ceil_mode=True) if i < 3 else nn.AdaptiveAvgPool1d(1),
        }
    return Plain(**layers, flatten=nn.Flatten(), fc=nn.Linear(widths[-1], classes))


def _image(shape: Shape, name: str, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ConfigError(
            f"{name} takes pictures of shape (channels, height, width) with sides of at least {least}, not {tuple(shape)}."
        )
    return shape[0], shape[1], shape[2]
