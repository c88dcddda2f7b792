"""Initial means and sigmas by name, drawn from a generator, the same means for every kind of network."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import ConfigError, nearest
from .layers import check_sigma
from .state import RHO, inverse_softplus


def initialize(
    module: nn.Module, init: str = "he", sigma: float = 0.02, generator: torch.Generator | None = None
) -> nn.Module:
    """Draw new means, biases and scales for every linear and convolutional layer, in place; return the module.

    - ``he``: means N(0, 2/fan_in), biases 0, constant sigma (He et al. 2015; the choice for ReLU networks)
    - ``xavier``: means uniform (Glorot & Bengio 2010; Keras' default, FedBE), biases 0, constant sigma
    - ``torch``: the layers' own uniform in ±1/sqrt(fan_in), biases too, constant sigma
    - ``tfp``: means and biases N(0, 0.1²), rho ~ N(-3, 0.1²), so sigma about 0.049 (TensorFlow Probability's
      defaults: Fischer, Loomis); ``sigma`` is not used
    - ``bflp``: linear means N(0, 1/fan_in), their biases 0, log-variance ~ N(-9, 0.001²), so sigma about 0.011;
      convolutions as torch does (Ozer et al. 2022); ``sigma`` is not used
    - ``keep``: means and biases as they are (trained weights, or what the constructor drew), constant sigma

    All means are drawn before all scales: networks of different kinds get equal means from equal seeds.
    """
    if init not in INITIALIZERS:
        raise ConfigError(f"'{init}' is no initialisation; {nearest(init, INITIALIZERS)}")
    mean, scale = INITIALIZERS[init]
    layers = [m for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    with torch.no_grad():
        for layer in layers:
            mean(layer, generator)
        for layer in layers:
            for name in ("weight", "bias"):
                rho = getattr(layer, name + RHO, None)
                if rho is not None:
                    rho.copy_(scale(rho, sigma, generator))
    return module


def _normal(t: Tensor, std: float, generator: torch.Generator | None) -> None:
    t.copy_(torch.randn(t.shape, generator=generator) * std)


def _uniform(t: Tensor, bound: float, generator: torch.Generator | None) -> None:
    t.copy_((torch.rand(t.shape, generator=generator) * 2 - 1) * bound)


def _fans(layer: nn.Module) -> tuple[int, int]:
    return nn.init._calculate_fan_in_and_fan_out(layer.weight)  # type: ignore[arg-type]


def _zero_bias(layer: nn.Module) -> None:
    if layer.bias is not None:
        layer.bias.zero_()  # type: ignore[operator]


def _he(layer: nn.Module, generator: torch.Generator | None) -> None:
    _normal(layer.weight, math.sqrt(2 / _fans(layer)[0]), generator)  # type: ignore[arg-type]
    _zero_bias(layer)


def _xavier(layer: nn.Module, generator: torch.Generator | None) -> None:
    _uniform(layer.weight, math.sqrt(6 / sum(_fans(layer))), generator)  # type: ignore[arg-type]
    _zero_bias(layer)


def _torch(layer: nn.Module, generator: torch.Generator | None) -> None:
    bound = 1 / math.sqrt(_fans(layer)[0])
    _uniform(layer.weight, bound, generator)  # type: ignore[arg-type]
    if layer.bias is not None:
        _uniform(layer.bias, bound, generator)  # type: ignore[arg-type]


def _tfp(layer: nn.Module, generator: torch.Generator | None) -> None:
    _normal(layer.weight, 0.1, generator)  # type: ignore[arg-type]
    if layer.bias is not None:
        _normal(layer.bias, 0.1, generator)  # type: ignore[arg-type]


def _bflp(layer: nn.Module, generator: torch.Generator | None) -> None:
    if not isinstance(layer, nn.Linear):
        return _torch(layer, generator)
    _normal(layer.weight, 1 / math.sqrt(layer.in_features), generator)
    _zero_bias(layer)


def _keep(layer: nn.Module, generator: torch.Generator | None) -> None:
    """Nothing is drawn."""


def _constant_sigma(rho: Tensor, sigma: float, generator: torch.Generator | None) -> Tensor:
    check_sigma(sigma)
    return torch.full_like(rho, inverse_softplus(torch.tensor(sigma, dtype=torch.float64)).item())


def _tfp_rho(rho: Tensor, sigma: float, generator: torch.Generator | None) -> Tensor:
    return torch.randn(rho.shape, generator=generator) * 0.1 - 3


def _bflp_rho(rho: Tensor, sigma: float, generator: torch.Generator | None) -> Tensor:
    log_variance = torch.randn(rho.shape, generator=generator, dtype=torch.float64) * 0.001 - 9
    return inverse_softplus((log_variance / 2).exp())


Mean = Callable[[nn.Module, torch.Generator | None], None]
Scale = Callable[[Tensor, float, torch.Generator | None], Tensor]

INITIALIZERS: dict[str, tuple[Mean, Scale]] = {
    "he": (_he, _constant_sigma),
    "xavier": (_xavier, _constant_sigma),
    "torch": (_torch, _constant_sigma),
    "tfp": (_tfp, _tfp_rho),
    "bflp": (_bflp, _bflp_rho),
    "keep": (_keep, _constant_sigma),
}
"""Initialisations by name: how means, and how scales are drawn."""
