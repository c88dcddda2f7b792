"""Convolutions on lanes as one operation of our own, and how a network comes to use it.

``convolve_lanes`` is an operation of PyTorch's (it works under autograd, ``vmap``, ``torch.compile`` and CUDA graphs) that
convolves every lane's images with that lane's weights, with Flipout's noise where asked. On a CUDA device it runs the
Triton kernels of ``kernels.py``, elsewhere PyTorch's own convolutions, which are what the tests compare it with.
The layers here are the ordinary ones that call it; ``lane_layers.py`` says who gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn.grad import conv2d_input, conv2d_weight

from ..nn.layers import DropoutConv2d, FlipoutConv2d, _noise
from .normalization import on_kernels, our_kernels

MOST_CHANNELS = 128
"""Channels up to which our kernels hold a whole tile; wider layers are left to cuDNN, which is good at them."""

_PROGRAMS = 528
"""Most programs for the weights' gradient: four for each multiprocessor of a large GPU."""

_GEOMETRY = "int[] kernel, int[] stride, int[] padding"
_SIGNS = "Tensor? delta, Tensor? sign_in, Tensor? sign_out"


# -- the operations ----------------------------------------------------------------------------------------------


@custom_op(
    "fedbayes::convolve_lanes", mutates_args=(), schema=f"(Tensor x, Tensor weight, {_SIGNS}, {_GEOMETRY}) -> Tensor"
)
def convolve_lanes(
    x: Tensor,
    weight: Tensor,
    delta: Tensor | None,
    sign_in: Tensor | None,
    sign_out: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Convolve images (lanes, batch, C, H, W) with packed weights (lanes, taps, C, D) of the same lane.

    With ``delta`` (noise packed like the weights) and signs (lanes, batch, C) and (lanes, batch, D) this is a Flipout layer:
    f(x; weight) + sign_out · f(x · sign_in; delta). Weights are packed by ``packed``. The result lies in memory as
    (batch, H, W, lanes, D), which elementwise work between two convolutions keeps.
    """
    size = _out_size(x.shape[-2:], kernel, stride, padding)
    if not on_kernels(x):
        return _like_channels_last(_reference(x, weight, delta, sign_in, sign_out, kernel, stride, padding))
    y = _empty(x, weight.shape[-1], size)
    _launch_convolve(x, weight, delta, sign_in, sign_out, y, kernel, stride, padding, transposed=False)
    return y


@custom_op(
    "fedbayes::convolve_lanes_input",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor weight, {_SIGNS}, int[] size, {_GEOMETRY}) -> Tensor",
)
def convolve_lanes_input(
    dy: Tensor,
    weight: Tensor,
    delta: Tensor | None,
    sign_in: Tensor | None,
    sign_out: Tensor | None,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return the gradient of ``convolve_lanes`` by its input, whose images have the given ``size``."""
    if not on_kernels(dy):
        return _like_channels_last(_reference_dx(dy, weight, delta, sign_in, sign_out, size, kernel, stride, padding))
    dx = _empty(dy, weight.shape[-2], size)
    _launch_convolve(dy, weight, delta, sign_out, sign_in, dx, kernel, stride, padding, transposed=True)
    return dx


@custom_op(
    "fedbayes::convolve_lanes_weight",
    mutates_args=(),
    schema=f"(Tensor x, Tensor dy, Tensor? sign_in, Tensor? sign_out, {_GEOMETRY}) -> (Tensor, Tensor)",
)
def convolve_lanes_weight(
    x: Tensor,
    dy: Tensor,
    sign_in: Tensor | None,
    sign_out: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the gradients by weights and by their noise as partial sums (groups, lanes, taps, C, D), float32.

    Without signs the second is empty. Adding the groups is left to the caller, whose compiler joins it to other work.
    """
    weight, delta = _empty_gradients(x, dy, sign_in is not None, kernel)
    if on_kernels(x):
        _launch_weigh(x, dy, sign_in, sign_out, weight, delta, kernel, stride, padding)
    else:
        _reference_dw(x, dy, sign_in, sign_out, weight, delta, kernel, stride, padding)
    return weight, delta


@convolve_lanes.register_fake
def _(x, weight, delta, sign_in, sign_out, kernel, stride, padding):
    return _empty(x, weight.shape[-1], _out_size(x.shape[-2:], kernel, stride, padding))


@convolve_lanes_input.register_fake
def _(dy, weight, delta, sign_in, sign_out, size, kernel, stride, padding):
    return _empty(dy, weight.shape[-2], size)


@convolve_lanes_weight.register_fake
def _(x, dy, sign_in, sign_out, kernel, stride, padding):
    return _empty_gradients(x, dy, sign_in is not None, kernel)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, delta, sign_in, sign_out, ctx.kernel, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight, delta, sign_in, sign_out)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, delta, sign_in, sign_out = ctx.saved_tensors
    geometry = ctx.kernel, ctx.stride, ctx.padding
    dx = dweight = ddelta = None
    dy = dy.to(x.dtype)
    if ctx.needs_input_grad[0]:
        dx = convolve_lanes_input(dy, weight, delta, sign_in, sign_out, list(x.shape[-2:]), *geometry)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        dweight, noise = (t.sum(0) for t in convolve_lanes_weight(x, dy, sign_in, sign_out, *geometry))
        ddelta = None if delta is None else noise
    return dx, dweight, ddelta, None, None, None, None, None


convolve_lanes.register_autograd(_backward, setup_context=_setup)


@convolve_lanes.register_vmap
def _(info, in_dims, x, weight, delta, sign_in, sign_out, kernel, stride, padding):
    """Fold the mapped axis into the lanes."""
    tensors = [
        t if t is None else (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        for t, d in zip((x, weight, delta, sign_in, sign_out), in_dims)
    ]
    y = convolve_lanes(*tensors, kernel, stride, padding)
    return y.unflatten(0, (info.batch_size, -1)), 0


# -- shapes and layouts ------------------------------------------------------------------------------------------


def packed(weight: Tensor) -> Tensor:
    """Return convolution weights (D, C, height, width) as (taps, C, D), in that order in memory."""
    return weight.permute(2, 3, 1, 0).flatten(0, 1).contiguous()


def _unpacked(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    return weight.unflatten(-3, tuple(kernel)).movedim((-1, -2), (-4, -3))


def _out_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    height, width = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True))
    return height, width


def _empty(x: Tensor, channels: int, size: Sequence[int]) -> Tensor:
    """Return an empty result (lanes, batch, channels, *size), channels innermost in memory, then lanes."""
    lanes, batch = x.shape[:2]
    return x.new_empty((batch, *size, lanes, channels)).permute(3, 0, 4, 1, 2)


def _like_channels_last(y: Tensor) -> Tensor:
    return _empty(y, y.shape[2], y.shape[-2:]).copy_(y)


def _empty_gradients(x: Tensor, dy: Tensor, noise: bool, kernel: Sequence[int]) -> tuple[Tensor, Tensor]:
    lanes, batch, channels = x.shape[:3]
    out, taps = dy.shape[2], kernel[0] * kernel[1]
    programs = lanes * -(-taps * channels // _rows(taps * channels, out))
    shape = (_groups(programs, batch), lanes, taps, channels, out)
    weight = x.new_empty(shape, dtype=torch.float32)
    return weight, x.new_empty(shape if noise else (1, 1), dtype=torch.float32)


def _rows(contraction: int, out: int) -> int:
    """Contraction indices that one program of the weights' gradient sums."""
    return min(64 if out <= 64 else 32, _power(contraction))


def _groups(programs: int, batch: int) -> int:
    """Groups of examples that are summed apart: enough programs to fill a GPU, few enough sums to write and add."""
    return min(batch, 1 << (max(1, _PROGRAMS // programs).bit_length() - 1))


# -- on a CUDA device --------------------------------------------------------------------------------------------


def _power(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


class Tile(NamedTuple):
    """How one launch is cut: pixels, contraction indices and output channels of a program, pipeline stages, warps."""

    pixels: int
    depth: int
    out: int
    stages: int
    warps: int


def _tile(pixels: int, contraction: int, out: int) -> Tile:
    """Return the tile of a convolution."""
    depth = 32 if out <= 32 else 64
    return Tile(min(128, _power(pixels)), min(depth, _power(contraction)), _power(out), 3, 4)


def _weight_tile(pixels: int, contraction: int, out: int) -> Tile:
    """Return the tile of a gradient by weights."""
    wide = out > 32
    return Tile(min(64 if wide else 128, _power(pixels)), _rows(contraction, out), _power(out), 3 if wide else 2, 4)


def _lanes_contiguous(weight: Tensor) -> Tensor:
    """Return packed weights whose lanes are contiguous, wherever each begins (all may share one memory)."""
    return weight if weight[0].is_contiguous() else weight.contiguous()


def _strides(signs: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if signs is None else signs.stride()


def _launch_convolve(
    x: Tensor,
    weight: Tensor,
    delta: Tensor | None,
    sign_in: Tensor | None,
    sign_out: Tensor | None,
    y: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    transposed: bool,
) -> None:
    lanes, batch, channels, height, width = x.shape
    out, (rows, columns) = y.shape[2], y.shape[-2:]
    weight = _lanes_contiguous(weight)
    delta = weight if delta is None else _lanes_contiguous(delta)
    w_tap, w_in, w_out = weight.stride()[1:]
    if transposed:
        w_in, w_out = w_out, w_in
    parities = stride[0] * stride[1] if transposed else 1
    pixels = -(-rows // stride[0]) * -(-columns // stride[1]) if transposed else rows * columns
    tile = _tile(pixels, -(-kernel[0] * kernel[1] // parities) * channels, out)
    grid = (lanes, batch, parities * -(-pixels // tile.pixels) * -(-out // tile.out))
    our_kernels().convolve[grid](
        x, weight, delta, weight if sign_in is None else sign_in, weight if sign_out is None else sign_out, y,
        height, width, rows, columns, *x.stride(), y.stride(0), y.stride(1), y.stride(3), y.stride(4),
        weight.stride(0), delta.stride(0), w_tap, w_in, w_out, *_strides(sign_in), *_strides(sign_out),
        CIN=channels, COUT=out, COUT_BLOCK=tile.out, KERNEL_H=kernel[0], KERNEL_W=kernel[1],
        STRIDE_H=stride[0], STRIDE_W=stride[1], PAD_H=padding[0], PAD_W=padding[1], NOISE=sign_in is not None,
        TRANSPOSED=transposed, PIXELS=tile.pixels, DEPTH=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def _launch_weigh(
    x: Tensor,
    dy: Tensor,
    sign_in: Tensor | None,
    sign_out: Tensor | None,
    dweight: Tensor,
    ddelta: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> None:
    lanes, batch, channels, height, width = x.shape
    out, (rows, columns) = dy.shape[2], dy.shape[-2:]
    taps, groups = kernel[0] * kernel[1], dweight.shape[0]
    tile = _weight_tile(rows * columns, taps * channels, out)
    our_kernels().weigh[(lanes, -(-taps * channels // tile.depth), groups)](
        x, dy, dweight if sign_in is None else sign_in, dweight if sign_out is None else sign_out, dweight, ddelta,
        lanes, batch, height, width, rows, columns, -(-batch // groups), -(-rows * columns // tile.pixels),
        *x.stride(), *dy.stride(), *_strides(sign_in), *_strides(sign_out),
        CIN=channels, COUT=out, COUT_PADDED=tile.out, TAPS=taps, KERNEL_WIDTH=kernel[1],
        STRIDE_H=stride[0], STRIDE_W=stride[1], PAD_H=padding[0], PAD_W=padding[1],
        NOISE=sign_in is not None, PIXELS=tile.pixels, ROWS=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


# -- by PyTorch's own convolutions -------------------------------------------------------------------------------


def _reference(x, weight, delta, sign_in, sign_out, kernel, stride, padding) -> Tensor:
    lanes = []
    for lane, images in enumerate(x):
        y = F.conv2d(images, _unpacked(weight[lane], kernel).to(x.dtype), None, stride, padding)
        if delta is not None:
            noise = _unpacked(delta[lane], kernel).to(x.dtype)
            flipped = images * sign_in[lane][..., None, None].to(x.dtype)
            y = y + F.conv2d(flipped, noise, None, stride, padding) * sign_out[lane][..., None, None].to(x.dtype)
        lanes.append(y)
    return torch.stack(lanes)


def _reference_dx(dy, weight, delta, sign_in, sign_out, size, kernel, stride, padding) -> Tensor:
    lanes = []
    for lane, slope in enumerate(dy):
        shape = (len(slope), weight.shape[2], *size)
        w = _unpacked(weight[lane], kernel).to(dy.dtype)
        dx = conv2d_input(shape, w, slope, stride, padding)
        if delta is not None:
            d = _unpacked(delta[lane], kernel).to(dy.dtype)
            flipped = slope * sign_out[lane][..., None, None].to(dy.dtype)
            noise = conv2d_input(shape, d, flipped, stride, padding)
            dx = dx + noise * sign_in[lane][..., None, None].to(dy.dtype)
        lanes.append(dx)
    return torch.stack(lanes)


def _reference_dw(x, dy, sign_in, sign_out, dweight, ddelta, kernel, stride, padding) -> None:
    shape = (dy.shape[2], x.shape[2], *kernel)
    groups = len(dweight)
    for lane, (images, slopes) in enumerate(zip(x, dy)):
        for group, (part, slope) in enumerate(zip(_parts(images, groups), _parts(slopes, groups))):
            dweight[group, lane] = packed(conv2d_weight(part, shape, slope, stride, padding))
        if sign_in is None:
            continue
        images = images * sign_in[lane][..., None, None].to(x.dtype)
        slopes = slopes * sign_out[lane][..., None, None].to(x.dtype)
        for group, (part, slope) in enumerate(zip(_parts(images, groups), _parts(slopes, groups))):
            ddelta[group, lane] = packed(conv2d_weight(part, shape, slope, stride, padding))


def _parts(batch: Tensor, groups: int) -> list[Tensor]:
    size = -(-len(batch) // groups)
    return [batch[i * size : (i + 1) * size] for i in range(groups)]


# -- layers ------------------------------------------------------------------------------------------------------


def _cast(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's type, as a convolution of PyTorch's own would take it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _OnLanes:
    """Makes a convolution layer use ``convolve_lanes``."""

    def _convolve(
        self, x: Tensor, weight: Tensor, delta: Tensor | None, sign_in: Tensor | None, sign_out: Tensor | None
    ) -> Tensor:
        """Convolve as the only lane; under ``vmap`` its axis becomes the lanes."""
        x = _cast(x)
        tensors = [
            None if t is None else t.unsqueeze(0)
            for t in (
                x, packed(weight).to(x.dtype), None if delta is None else packed(delta).to(x.dtype),
                None if sign_in is None else sign_in.flatten(1), None if sign_out is None else sign_out.flatten(1),
            )
        ]  # fmt: skip
        geometry = list(self.kernel_size), list(self.stride), list(self.padding)  # type: ignore[attr-defined]
        return convolve_lanes(*tensors, *geometry).squeeze(0)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self._convolve(x, weight, None, None, None)
        return y if bias is None else y + bias[:, None, None].to(y.dtype)


class LaneConv2d(_OnLanes, nn.Conv2d):
    """``nn.Conv2d`` on lanes."""


class LaneDropoutConv2d(_OnLanes, DropoutConv2d):
    """``DropoutConv2d`` on lanes."""


class LaneFlipoutConv2d(_OnLanes, FlipoutConv2d):
    """``FlipoutConv2d`` on lanes: both of its convolutions in one pass over the input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output under a fresh draw."""
        sign_in, sign_out = self._signs(x)
        y = self._convolve(x, self.weight, _noise(self.weight_rho), sign_in, sign_out)
        if self.bias is not None:
            y = y + self.bias[:, None, None].to(y.dtype)
        if self.bias_rho is not None:
            y = torch.addcmul(y, _noise(self.bias_rho)[:, None, None].to(y.dtype), sign_out.to(y.dtype))
        return y
