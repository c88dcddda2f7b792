"""Variational and dropout layers: ordinary ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` whose weights have a spread.

A variational layer *is* the torch layer (a subclass, same arguments, same ``weight`` and ``bias``, which are the
means) with one more parameter ``weight_rho``; sigma = softplus(weight_rho). It draws in training and in evaluation
alike, from torch's default generator, writes no state in ``forward`` and never looks at a value, so it runs under
``functional_call``, ``vmap(randomness="different")``, ``torch.compile``, autocast and CUDA-graph capture.
The KL divergence is no business of a layer: ``fedbayes.objective`` computes it from the parameters.

A rho of -inf (or very negative) switches the noise off exactly, in every estimator.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from .state import inverse_softplus

_CONVOLVE = {1: F.conv1d, 2: F.conv2d}


class Variational(nn.Module):
    """What every variational layer shares: the scales beside the means, and how the layer's linear map is applied.

    ``sigma`` is the initial standard deviation of every Gaussian weight; ``bayesian_bias`` gives the bias a
    distribution too (otherwise it is a point, as in TensorFlow Probability).
    """

    weight: Tensor
    bias: Tensor | None
    weight_rho: Tensor
    bias_rho: Tensor | None
    estimator = ""

    def __init__(self, *args: Any, sigma: float = 0.02, bayesian_bias: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_scales(sigma, bayesian_bias)

    def add_scales(self, sigma: float, bayesian_bias: bool) -> None:
        """Create ``weight_rho`` (and ``bias_rho``) with a constant sigma."""
        check_sigma(sigma)
        self.weight_rho = _scale_like(self.weight, sigma)
        self.bias_rho = _scale_like(self.bias, sigma) if bayesian_bias and self.bias is not None else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, estimator={self.estimator}"

    def apply_map(self, x: Tensor, weight: Tensor, bias: Tensor | None, doubled: bool = False) -> Tensor:
        """Apply the layer's linear map with other weights; ``doubled``: two such maps side by side, as groups."""
        if isinstance(self, nn.Linear):
            return F.linear(x, weight, bias)
        if not doubled:
            return self._conv_forward(x, weight, bias)  # type: ignore[operator]
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)  # type: ignore[arg-type]
            padding = 0
        convolve = _CONVOLVE[len(self.kernel_size)]  # type: ignore[arg-type]
        return convolve(x, weight, bias, self.stride, padding, self.dilation, 2 * self.groups)  # type: ignore[arg-type]

    @property
    def channel_dim(self) -> int:
        """The axis of channels (features), counted from the end."""
        return -1 if isinstance(self, nn.Linear) else -1 - len(self.kernel_size)  # type: ignore[arg-type]


def check_sigma(sigma: float) -> None:
    """Raise unless it can be the standard deviation of a weight."""
    if not isinstance(sigma, Real) or not 0 < sigma < float("inf"):
        raise ConfigError(
            f"sigma is {sigma!r}; the initial standard deviation of a weight must be positive and finite."
        )


def _scale_like(mean: Tensor | None, sigma: float) -> nn.Parameter:
    assert mean is not None
    rho = inverse_softplus(torch.tensor(sigma, dtype=torch.float64)).item()
    if rho > torch.finfo(mean.dtype).max:
        raise ConfigError(f"sigma is {sigma:g}, more than weights of type {mean.dtype} hold.")
    return nn.Parameter(torch.full_like(mean, rho), requires_grad=mean.requires_grad)


def _noise(rho: Tensor) -> Tensor:
    """sigma · eps, eps drawn anew at every call."""
    return F.softplus(rho) * torch.randn_like(rho)


class Flipout(Variational):
    """Flipout (Wen et al. 2018): one weight draw a pass, made almost independent between examples by random signs.

    y = f(x; mu) + s_out · f(x · s_in; sigma·eps), with signs s_in, s_out drawn per example *and channel* and constant
    over space (and over all axes between the first, the examples, and the features of a linear layer), as in the
    paper. Each example sees a weight perturbation of exactly the right distribution, shared by all its pixels, so the
    spread survives pooling. The recommended estimator: gradient variance falls with the batch size, epistemic
    uncertainty is right everywhere. A variational bias is perturbed inside the second map.

    ``one_call`` makes both convolutions one call with twice the groups: fewer kernels, one more copy of the input.
    It pays where calls are small and many; ``benchmarks/layers.py`` measures both.
    """

    estimator = "flipout"
    one_call = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output under a fresh draw."""
        sign_in, sign_out = self._signs(x)
        delta = _noise(self.weight_rho)
        delta_bias = None if self.bias_rho is None else _noise(self.bias_rho)
        flipped = x * sign_in
        if self.one_call and not isinstance(self, nn.Linear):
            return self._forward_one_call(x, flipped, delta, delta_bias, sign_out)
        y = self.apply_map(x, self.weight, self.bias)
        noise = self.apply_map(flipped, delta, delta_bias)
        return torch.addcmul(y, noise, sign_out.to(noise.dtype))

    def _forward_one_call(
        self, x: Tensor, flipped: Tensor, delta: Tensor, delta_bias: Tensor | None, sign_out: Tensor
    ) -> Tensor:
        bias = self.bias
        if bias is not None:
            bias = torch.cat([bias, torch.zeros_like(bias) if delta_bias is None else delta_bias])
        both = self.apply_map(
            torch.cat([x, flipped], self.channel_dim), torch.cat([self.weight, delta]), bias, doubled=True
        )
        y, noise = both.chunk(2, self.channel_dim)
        return torch.addcmul(y, noise, sign_out.to(noise.dtype))

    def _signs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Signs for inputs and outputs, from one draw: per example and channel, broadcast over everything between."""
        if isinstance(self, nn.Linear):
            fan_in, fan_out = self.in_features, self.out_features
            shape = (*x.shape[: min(1, x.dim() - 1)], *(1,) * (x.dim() - 2), fan_in + fan_out)
        else:
            fan_in, fan_out = int(self.in_channels), int(self.out_channels)  # type: ignore[arg-type]
            dim = self.channel_dim
            shape = (*x.shape[:dim], fan_in + fan_out, *(1,) * (-1 - dim))
        # rand, not randint: the compiler stores a small tensor of uniforms once, but would redraw integers at every pixel.
        bits = torch.rand(shape, device=x.device, dtype=torch.float32).round()
        signs = torch.rsub(bits, 1, alpha=2).to(x.dtype)
        sign_in, sign_out = signs.split([fan_in, fan_out], self.channel_dim)
        return sign_in, sign_out


class LocalReparameterization(Variational):
    """Local reparameterisation (Kingma et al. 2015): the output is drawn, not the weights.

    y = f(x; mu) + sqrt(f(x²; sigma²)) · eps with eps of the output's shape. For linear layers on vectors this is the
    exact distribution of every example's output, at the lowest gradient variance. For convolutions each location is
    drawn on its own: marginals are right, but neighbouring pixels should share their weights' noise and do not, so
    the noise averages out under pooling (the variance of a globally pooled 3×3 convolution of 16×16 pixels comes out
    about 50 times too small). Use it where the Bayesian layers are linear (Ozer's nets); avoid it in convolutions where
    epistemic uncertainty is read after pooling.

    Where the variance is 0 (sigma 0, or a patch of zeros) the noise and its gradient are exactly 0, not NaN.
    """

    estimator = "local"

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output under a fresh draw."""
        mean = self.apply_map(x, self.weight, self.bias)
        if mean.dtype == torch.float16:  # whose squares are 0 below 2.4e-4 and infinite above 256
            with torch.autocast(x.device.type, enabled=False):
                std = self._deviation(
                    x.float(), self.weight_rho.float(), None if self.bias_rho is None else self.bias_rho.float()
                )
            std = std.to(mean.dtype)
        else:
            std = self._deviation(x, self.weight_rho, self.bias_rho)
        return torch.addcmul(mean, std, torch.randn_like(std))

    def _deviation(self, x: Tensor, rho: Tensor, bias_rho: Tensor | None) -> Tensor:
        bias = None if bias_rho is None else F.softplus(bias_rho).square()
        variance = self.apply_map(x.square(), F.softplus(rho).square(), bias)
        alive = variance > 0  # also false for the tiny negatives that Winograd and FFT convolutions make
        return torch.where(alive, variance, 1).sqrt() * alive


class WeightSampling(Variational):
    """Direct sampling (Blundell et al. 2015): w = mu + sigma·eps, one draw for all examples of the pass.

    The plainest estimator and the reference for the others; the gradient's variance does not fall with the batch.
    """

    estimator = "sample"

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output under a fresh draw."""
        bias = self.bias if self.bias is None or self.bias_rho is None else self.bias + _noise(self.bias_rho)
        return self.apply_map(x, self.weight + _noise(self.weight_rho), bias)


class FlipoutLinear(Flipout, nn.Linear):
    """``nn.Linear`` with Flipout."""


class FlipoutConv1d(Flipout, nn.Conv1d):
    """``nn.Conv1d`` with Flipout."""


class FlipoutConv2d(Flipout, nn.Conv2d):
    """``nn.Conv2d`` with Flipout."""


class LocalLinear(LocalReparameterization, nn.Linear):
    """``nn.Linear`` with local reparameterisation: exact."""


class LocalConv1d(LocalReparameterization, nn.Conv1d):
    """``nn.Conv1d`` with local reparameterisation: loses spread under pooling."""


class LocalConv2d(LocalReparameterization, nn.Conv2d):
    """``nn.Conv2d`` with local reparameterisation: loses spread under pooling."""


class SampleLinear(WeightSampling, nn.Linear):
    """``nn.Linear`` with weights drawn once a pass."""


class SampleConv1d(WeightSampling, nn.Conv1d):
    """``nn.Conv1d`` with weights drawn once a pass."""


class SampleConv2d(WeightSampling, nn.Conv2d):
    """``nn.Conv2d`` with weights drawn once a pass."""


class Dropout(nn.Module):
    """MC-dropout (Gal & Ghahramani 2016): dropout that stays on in evaluation.

    With ``per_pass`` one mask is drawn for all examples of a pass (one thinned network), otherwise each example has
    its own. Set it on a whole network with ``share_masks``. ``together`` trailing axes are dropped as one: 0 drops
    elements, 2 whole channels of pictures (as ``nn.Dropout2d`` does).
    """

    def __init__(self, p: float = 0.2, per_pass: bool = False, together: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"dropout is {p}; a dropout probability is at least 0 and below 1.")
        self.p = p
        self.per_pass = per_pass
        self.together = together

    def extra_repr(self) -> str:
        return f"p={self.p}, per_pass={self.per_pass}, together={self.together}"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with elements dropped, in training and evaluation alike."""
        if self.p == 0:
            return x
        if not self.per_pass and not self.together:
            return F.dropout(x, self.p, training=True)
        like = x[:1] if self.per_pass else x
        shape = (*like.shape[: like.dim() - self.together], *(1,) * self.together)
        return x * F.dropout(x.new_ones(shape), self.p, training=True)


class DropoutLinear(nn.Linear):
    """``nn.Linear`` with MC-dropout on its inputs."""

    mask: Dropout

    def __init__(self, *args: Any, p: float = 0.2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mask = Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for thinned inputs."""
        return super().forward(self.mask(x))


class DropoutConv1d(nn.Conv1d):
    """``nn.Conv1d`` with MC-dropout on its outputs."""

    mask: Dropout

    def __init__(self, *args: Any, p: float = 0.2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mask = Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """Return the thinned output."""
        return self.mask(super().forward(x))


class DropoutConv2d(nn.Conv2d):
    """``nn.Conv2d`` with MC-dropout on its outputs."""

    mask: Dropout

    def __init__(self, *args: Any, p: float = 0.2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mask = Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """Return the thinned output."""
        return self.mask(super().forward(x))


def share_masks(module: nn.Module, per_pass: bool = True) -> nn.Module:
    """Make every MC-dropout layer draw one mask a pass (or one per example again), in place; return the module."""
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.per_pass = per_pass
    return module


LAYERS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "flipout": {nn.Linear: FlipoutLinear, nn.Conv1d: FlipoutConv1d, nn.Conv2d: FlipoutConv2d},
    "local": {nn.Linear: LocalLinear, nn.Conv1d: LocalConv1d, nn.Conv2d: LocalConv2d},
    "sample": {nn.Linear: SampleLinear, nn.Conv1d: SampleConv1d, nn.Conv2d: SampleConv2d},
    "dropout": {nn.Linear: DropoutLinear, nn.Conv1d: DropoutConv1d, nn.Conv2d: DropoutConv2d},
}
"""What each kind makes of a torch layer."""


def sibling(kind: str, base: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """Return the Bayesian class for layers of ``cls``, which runs the forward of torch's ``base`` unchanged.

    For torch's own classes that is the entry of ``LAYERS``. A user's subclass keeps its methods and attributes: its
    sibling derives from it and from that entry, in this order.
    """
    bayesian = LAYERS[kind][base]
    if cls is base:
        return bayesian
    return _siblings.setdefault(
        (kind, cls),
        type(f"{bayesian.__name__.removesuffix(base.__name__)}{cls.__name__}", (cls, bayesian), {
            "__module__": __name__, "__doc__": f"``{cls.__name__}`` as ``{bayesian.__name__}``.",
            "__reduce_ex__": lambda self, _: (_empty_sibling, (kind, base, cls), self.__getstate__()),
        }),
    )  # fmt: skip


_siblings: dict[tuple[str, type[nn.Module]], type[nn.Module]] = {}


def _empty_sibling(kind: str, base: type[nn.Module], cls: type[nn.Module]) -> nn.Module:
    """What pickling and copying start from: these classes cannot be imported by name."""
    made = sibling(kind, base, cls)
    return made.__new__(made)
