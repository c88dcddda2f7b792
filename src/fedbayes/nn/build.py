"""``build``: a network by name, of the kind asked for, initialised by seed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from .. import seeds
from ..errors import ConfigError, nearest
from . import networks
from .bayesianize import Where, bayesianize
from .initialize import INITIALIZERS, initialize
from .layers import LAYERS
from .resnet import RESNETS


@dataclass(frozen=True)
class Architecture:
    """A network in the table: how it is made, on what inputs by default, and which of its layers are Bayesian.

    ``make(classes=, input_shape=, **options)`` returns a plain deterministic ``nn.Module``; of the options ``width``,
    ``dropout`` and ``shortcut`` it takes those it knows (asking for another width or shortcut is refused).
    ``variational`` and ``dropout`` are the network's own choice of layers (glob patterns, empty for all) for variational
    kinds and for MC-dropout.
    """

    make: Callable[..., nn.Module]
    sides: Callable[[int], tuple[int, ...]]
    variational: str = ""
    dropout: str = ""


def _pictures(channels: int) -> tuple[int, ...]:
    """28×28 for one channel (MNIST), 32×32 otherwise (CIFAR)."""
    return (28, 28) if channels == 1 else (32, 32)


def _seconds(channels: int) -> tuple[int, ...]:
    """Three seconds of sound at 16 kHz; the network takes any length."""
    return (48000,)


def _vector(channels: int) -> tuple[int, ...]:
    """Inputs that are vectors of ``in_channels`` features."""
    return ()


NETWORKS: dict[str, Architecture] = {
    "mlp": Architecture(networks.mlp, _vector, dropout="fc2,fc3"),
    "cnn": Architecture(networks.cnn, _pictures),
    "lenet": Architecture(networks.lenet, _pictures, variational="fc*"),
    "reyes-mnist": Architecture(networks.reyes_mnist, _pictures),
    "reyes-cifar": Architecture(networks.reyes_cifar, _pictures),
    "fedbe-convnet": Architecture(networks.fedbe_convnet, _pictures),
    "spectrogram-cnn": Architecture(networks.spectrogram_cnn, _pictures),
    "waveform-cnn": Architecture(networks.waveform_cnn, _seconds),
    **{name: Architecture(make, _pictures) for name, make in RESNETS.items()},
}
"""The networks by name. A new one is one function and one line here (or ``register``)."""

KINDS = ("deterministic", *LAYERS)


def register(name: str, architecture: Architecture) -> None:
    """Add a network to the table under a new name."""
    if name in NETWORKS:
        raise ConfigError(f"a network called '{name}' exists already; choose another name.")
    NETWORKS[name] = architecture


def build(
    name: str,
    kind: str = "flipout",
    *,
    classes: int = 10,
    in_channels: int = 3,
    input_shape: tuple[int, ...] | None = None,
    dropout: float = 0.2,
    bayesian_bias: bool = False,
    where: Where = "",
    width: int = 0,
    shortcut: str = "A",
    init: str = "he",
    sigma: float = 0.02,
    seed: int = 0,
) -> nn.Module:
    """Return a network by name, of a kind, with initial weights that depend on the seed alone.

    ``name``: one of ``NETWORKS``, or ``package.module:function`` for your own, called with those of the arguments
    ``classes``, ``in_channels``, ``input_shape`` that it takes and returning an ``nn.Module``.
    ``kind``: deterministic, dropout, flipout, local or sample. ``input_shape`` is the shape of one input, channels
    first; it wins over ``in_channels``; without it pictures are 28×28 (one channel) or 32×32, and the input of
    ``mlp`` is a vector of ``in_channels`` features. The other arguments are the fields of ``experiment.Model``.
    Equal seeds give equal means to every kind of a network. ``init="keep"`` leaves the means as the network's maker
    left them: for your own, that may be trained weights. An own network always keeps what is no linear or convolutional
    layer (drawn by its constructor, they depend on the seed alone, too).
    """
    _check(name, kind, init, classes, dropout)
    sides = input_shape or (in_channels,)
    if not (isinstance(sides, Sequence) and all(isinstance(side, Integral) and side > 0 for side in sides)):
        raise ConfigError(f"there are no inputs of shape {sides}; every side is a whole number of at least 1.")
    own = ":" in name
    if not own and name not in NETWORKS:
        raise ConfigError(f"'{name}' is no network; {nearest(name, NETWORKS)} (or package.module:function)")
    options: dict[str, Any] = {"width": width, "dropout": dropout, "shortcut": shortcut}
    if own:
        make, default = _own(name), Architecture(nn.Identity, _vector)
        options = {"in_channels": input_shape[0] if input_shape else in_channels}
        shape = input_shape
    else:
        default = NETWORKS[name]
        make, shape = default.make, input_shape or (in_channels, *default.sides(in_channels))
        _takes(name, make, width=width, shortcut=shortcut)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(seed, "init", "constructor"))
        plain = make(**_accepted(name, make, {"classes": classes, "input_shape": shape, **options}))
    if not isinstance(plain, nn.Module):
        raise ConfigError(f"'{name}' returned {type(plain).__name__}; it must return a torch.nn.Module.")
    choice = where or (default.dropout if kind == "dropout" else default.variational)
    module = bayesianize(plain, kind, where=choice, sigma=sigma, dropout=dropout, bayesian_bias=bayesian_bias)
    return initialize(module, init, sigma, seeds.torch_rng(seed, "init"))


def _check(name: str, kind: str, init: str, classes: int, dropout: float) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"a network is asked for by its name, not by {name!r}.")
    if kind not in KINDS:
        raise ConfigError(f"'{kind}' is no kind of network; {nearest(kind, KINDS)}")
    if init not in INITIALIZERS:
        raise ConfigError(f"'{init}' is no initialisation; {nearest(init, INITIALIZERS)}")
    if not isinstance(classes, Integral) or classes < 2:
        raise ConfigError(f"classes is {classes!r}; a classifier needs a whole number of them, at least 2.")
    if not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise ConfigError(f"dropout is {dropout}; a dropout probability is at least 0 and below 1.")


def _takes(name: str, make: Callable[..., nn.Module], width: int, shortcut: str) -> None:
    """Refuse a width or shortcut that would have no effect."""
    known = inspect.signature(make).parameters
    for option, value, default in (("width", width, 0), ("shortcut", shortcut, "A")):
        if value != default and option not in known:
            raise ConfigError(f"{name} has no {option}; leave it at {default!r}, or choose another network.")
    if not isinstance(width, Integral) or width < 0:
        raise ConfigError(f"width is {width}; it must be 0 (the network's own) or more.")


def _own(name: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"'{name}' is no network of your own; write package.module:function.")
    try:
        made = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(f"network '{name}': module '{module_name}' cannot be imported ({error}).") from None
    except AttributeError:
        raise ConfigError(f"network '{name}': '{module_name}' has no '{attribute}'.") from None
    if not callable(made):
        raise ConfigError(f"network '{name}' is not a function or class that returns a torch.nn.Module.")
    return made  # type: ignore[return-value]


def _accepted(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes; refuse one that needs others."""
    try:
        signature = inspect.signature(function)
        if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            arguments = {k: v for k, v in arguments.items() if k in signature.parameters}
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"network '{name}' cannot be made ({error}); its function is called with classes, in_channels and input_shape."
        ) from None
    return arguments
