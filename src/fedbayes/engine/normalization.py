"""Batch-norm on lanes as one operation of our own, with the residual sum and the ReLU that follow it in a residual network.

In memory a pixel holds the channels of all lanes side by side, so the statistics of all lanes are those of the columns
of one matrix: two passes forward, two backward, however many lanes there are. On a CUDA device they are the Triton kernels
of ``kernels.py``, elsewhere plain PyTorch, which the tests compare with ``nn.BatchNorm2d``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

_ROWS, _COLUMNS, _PROGRAMS = 64, 32, 528


@custom_op(
    "fedbayes::normalize_lanes",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, bool relu, float eps) -> (Tensor, Tensor, Tensor)",
)
def normalize_lanes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, relu: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images (lanes, batch, C, H, W) normalised by their own statistics, and those: mean and variance (lanes, C).

    ``weight`` and ``bias`` are (lanes, C); ``residual`` is added before ``relu`` clips at 0. Arithmetic is float32, the
    result has the input's type.
    """
    if not on_kernels(x):
        wide = x.to(_type(x))
        variance, mean = torch.var_mean(wide, (1, 3, 4), correction=0)
        y = (wide - _wide(mean)) * _wide(torch.rsqrt(variance + eps) * (1 if weight is None else weight))
        y = y if bias is None else y + _wide(bias)
        y = y if residual is None else y + residual
        return as_pixels(y.relu() if relu else y).to(x.dtype, copy=True), mean, variance
    kernels = our_kernels()
    weight, bias = _dense(weight), _dense(bias)
    rows, columns, splits, per_split = _cut(x)
    matrix, y = _matrix(x), torch.empty_like(_matrix(x))
    mean = x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)
    variance = torch.empty_like(mean)
    partial = x.new_empty((splits, 2, columns), dtype=torch.float32)
    grid = (-(-columns // _COLUMNS), splits)
    kernels.moments[grid](matrix, partial, rows, columns, per_split, ROWS=_ROWS, COLUMNS=_COLUMNS)
    kernels.normalize[grid](
        matrix, matrix if residual is None else _matrix(residual),
        partial if weight is None else weight, partial if bias is None else bias,
        partial, y, mean, variance, rows, columns, per_split, eps, _lane_stride(weight), _lane_stride(bias),
        CHANNELS=x.shape[2], AFFINE=weight is not None, RESIDUAL=residual is not None, RELU=relu,
        SPLITS=splits, SPLITS_PADDED=_power(splits), ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return _images(y, x.shape), mean, variance


@custom_op(
    "fedbayes::normalize_lanes_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor? y, Tensor? weight, Tensor mean, Tensor variance, bool residual, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def normalize_lanes_backward(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    residual: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``normalize_lanes`` by input, residual (empty unless asked for), weight and bias.

    ``y`` is the result where it was clipped at 0, None where it was not.
    """
    if not on_kernels(x):
        wide, scale = x.to(_type(x)), torch.rsqrt(variance + eps)
        g = (dy if y is None else torch.where(y > 0, dy, 0.0)).to(_type(x))
        v = (wide - _wide(mean)) * _wide(scale)
        by_bias, by_weight = g.sum((1, 3, 4)), (g * v).sum((1, 3, 4))
        count = x.shape[1] * x.shape[3] * x.shape[4]
        outer = scale if weight is None else scale * weight
        dx = (g - _wide(by_bias / count) - v * _wide(by_weight / count)) * _wide(outer)
        made = as_pixels(g).to(x.dtype, copy=True) if residual else x.new_empty(0)
        return as_pixels(dx).to(x.dtype, copy=True), made, by_weight, by_bias
    kernels = our_kernels()
    weight = _dense(weight)
    rows, columns, splits, per_split = _cut(x)
    matrix, slope, clipped = _matrix(x), _matrix(dy.to(x.dtype)), None if y is None else _matrix(y)
    dx = torch.empty_like(matrix)
    made = torch.empty_like(matrix) if residual else x.new_empty(0)
    by_weight, by_bias = torch.empty_like(mean), torch.empty_like(mean)
    partial = x.new_empty((splits, 2, columns), dtype=torch.float32)
    grid = (-(-columns // _COLUMNS), splits)
    relu, clipped = clipped is not None, matrix if clipped is None else clipped
    kernels.slopes[grid](
        slope, matrix, clipped, mean, variance, partial, rows, columns, per_split, eps,
        RELU=relu, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    kernels.denormalize[grid](
        slope, matrix, clipped, partial if weight is None else weight, mean, variance, partial, dx,
        made if residual else dx, by_weight, by_bias, rows, columns, per_split, eps, _lane_stride(weight),
        CHANNELS=x.shape[2], AFFINE=weight is not None, RESIDUAL=residual, RELU=relu,
        SPLITS=splits, SPLITS_PADDED=_power(splits), ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return _images(dx, x.shape), _images(made, x.shape) if residual else made, by_weight, by_bias


@normalize_lanes.register_fake
def _(x, weight, bias, residual, relu, eps):
    statistics = x.new_empty((x.shape[0], x.shape[2]), dtype=_type(x))
    return _empty_images(x), statistics, torch.empty_like(statistics)


@normalize_lanes_backward.register_fake
def _(dy, x, y, weight, mean, variance, residual, eps):
    made = _empty_images(x) if residual else x.new_empty(0)
    return _empty_images(x), made, torch.empty_like(mean), torch.empty_like(mean)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, residual, relu, ctx.eps = inputs
    y, mean, variance = output
    ctx.residual, ctx.relu = residual is not None, relu
    ctx.save_for_backward(x, weight, y if relu else None, mean, variance)


def _backward(ctx: Any, dy: Tensor, _mean: Tensor, _variance: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, y, mean, variance = ctx.saved_tensors
    dy = as_pixels(dy.to(x.dtype))
    both = ctx.residual and ctx.relu
    dx, made, by_weight, by_bias = normalize_lanes_backward(dy, x, y, weight, mean, variance, both, ctx.eps)
    dresidual = made if both else dy if ctx.residual else None
    affine = (by_weight, by_bias) if weight is not None else (None, None)
    return dx, *affine, dresidual, None, None


normalize_lanes.register_autograd(_backward, setup_context=_setup)


@normalize_lanes.register_vmap
def _(info, in_dims, x, weight, bias, residual, relu, eps):
    """Fold the mapped axis into the lanes."""
    x, weight, bias, residual = (
        t if t is None else (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        for t, d in zip((x, weight, bias, residual), in_dims)
    )
    residual = None if residual is None else as_pixels(residual)
    assert x is not None
    results = normalize_lanes(as_pixels(x), weight, bias, residual, relu, eps)
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in results), (0, 0, 0)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's own switch: kernels run on the CPU, operation by operation, so that they can be tested without a GPU."""


def on_kernels(x: Tensor) -> bool:
    """Whether our kernels work on this tensor: on a CUDA device, and interpreted for float32 on a CPU."""
    return x.is_cuda or (INTERPRETED and x.dtype == torch.float32)


def our_kernels() -> Any:
    """Return the Triton kernels; imported only here, where something can run them."""
    from . import kernels

    return kernels


# -- layouts -----------------------------------------------------------------------------------------------------


def as_pixels(images: Tensor) -> Tensor:
    """Lay images (lanes, batch, C, H, W) out as (batch, H, W, lanes, C) in memory (no copy where they are)."""
    return images.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)


def _matrix(images: Tensor) -> Tensor:
    """Return images as a matrix of pixels by lanes and channels."""
    return images.permute(1, 3, 4, 0, 2).contiguous().flatten(0, 2).flatten(1)


def _images(matrix: Tensor, shape: torch.Size) -> Tensor:
    lanes, batch, channels, height, width = shape
    return matrix.view(batch, height, width, lanes, channels).permute(3, 0, 4, 1, 2)


def _empty_images(x: Tensor) -> Tensor:
    lanes, batch, channels, height, width = x.shape
    return x.new_empty((batch, height, width, lanes, channels)).permute(3, 0, 4, 1, 2)


def _wide(statistics: Tensor) -> Tensor:
    return statistics[:, None, :, None, None]


def _dense(affine: Tensor | None) -> Tensor | None:
    """Return (lanes, C) numbers whose channels are neighbours in memory, wherever each lane's begin."""
    return affine if affine is None or affine.stride(1) == 1 else affine.contiguous()


def _lane_stride(affine: Tensor | None) -> int:
    return 0 if affine is None else affine.stride(0)


def _type(x: Tensor) -> torch.dtype:
    """Return the type of statistics: float32, for float64 inputs (off a GPU) float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _cut(x: Tensor) -> tuple[int, int, int, int]:
    """Return rows, columns, splits of the rows and rows of a split, for programs enough to fill a GPU."""
    lanes, batch, channels, height, width = x.shape
    rows, columns = batch * height * width, lanes * channels
    wanted = max(1, _PROGRAMS // -(-columns // _COLUMNS))
    per_split = max(_ROWS, -(-rows // min(wanted, 128) // _ROWS) * _ROWS)
    return rows, columns, -(-rows // per_split), per_split


# -- the layer ---------------------------------------------------------------------------------------------------


class LaneBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` on lanes.

    PyTorch's own rule for ``vmap`` returns float32 where the input is bfloat16 (its affine part is a product of its own);
    a residual sum then exists in two types and is computed twice. Here the result has the input's type, as without ``vmap``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input; in training its statistics are the batch's, and the running ones move."""
        return self.then(x)

    def then(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalise, add a residual, clip at 0: in one operation in training."""
        if self.training or self.running_mean is None or self.running_var is None:
            own = (None if t is None else t.unsqueeze(0) for t in (self.weight, self.bias))
            rest = None if residual is None else residual.to(x.dtype).unsqueeze(0)
            y, mean, variance = normalize_lanes(x.unsqueeze(0), *own, rest, relu, self.eps)
            if self.training and self.running_mean is not None:
                self._move(mean.squeeze(0).detach(), variance.squeeze(0).detach(), x.numel() // x.shape[1])
            return y.squeeze(0)
        scale = torch.rsqrt(self.running_var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        y = (x.to(_type(x)) - self.running_mean[:, None, None]) * scale[:, None, None]
        y = y if self.bias is None else y + self.bias[:, None, None]
        y = y if residual is None else y + residual
        return (y.relu() if relu else y).to(x.dtype)

    def _move(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics towards the batch's; the running variance is the unbiased one."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        step = self.num_batches_tracked.float().reciprocal() if self.momentum is None else self.momentum
        unbiased = variance * (count / max(1, count - 1))
        self.running_mean.add_((mean - self.running_mean) * step)
        self.running_var.add_((unbiased - self.running_var) * step)
