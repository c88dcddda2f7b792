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


def _image(shape: Shape, name: str, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ConfigError(
            f"{name} takes pictures of shape (channels, height, width) with sides of at least {least}, not {tuple(shape)}."
        )
    return shape[0], shape[1], shape[2]
