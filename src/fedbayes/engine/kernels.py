"""Triton kernels for many lanes at once: convolutions and batch-norms, forward and backward.

Lanes are small convolutions of 3 to 128 channels that share nothing. cuDNN runs them as grouped convolutions, with a
slicing kernel and a launch for every group; here all lanes are one launch of an implicit matrix product. A Flipout
layer's two maps, f(x; mu) + s_out · f(x · s_in; delta), read the input once: the signs of an example multiply rows and
columns of its weights' noise, so neither the input nor the gradient is ever copied with changed signs.

A contraction index j stands for (tap, channel): tap = j // CIN, channel = j % CIN. Sums are float32, in a fixed order: the
weights' gradient is written as partial sums over groups of examples, without atomics. Imported on CUDA devices alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(
    x, weight, delta, sign_in, sign_out, y,
    height, width, out_height, out_width,
    x_lane, x_example, x_channel, x_row, x_column,
    y_lane, y_example, y_row, y_column,
    w_lane, d_lane, w_tap, w_in, w_out,
    in_lane, in_example, in_channel, out_lane, out_example, out_channel,
    CIN: tl.constexpr, COUT: tl.constexpr, COUT_BLOCK: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    NOISE: tl.constexpr, TRANSPOSED: tl.constexpr, PIXELS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Convolve one block of pixels of one example on one lane; ``TRANSPOSED``: the gradient by the input.

    For the gradient, ``x`` is the output's gradient, channels and signs change places, and an input pixel gathers from
    the output pixels that its taps reach. With a stride only the taps of the pixel's parity reach any, so pixels of one
    parity are a block of their own: (KERNEL / STRIDE)² taps instead of KERNEL².
    """
    lane = tl.program_id(0).to(tl.int64)
    example = tl.program_id(1).to(tl.int64)
    if TRANSPOSED:
        rows, columns = tl.cdiv(out_height, STRIDE_H), tl.cdiv(out_width, STRIDE_W)
        blocks = tl.cdiv(rows * columns, PIXELS)
        parity, block = (tl.program_id(2) // blocks) % (STRIDE_H * STRIDE_W), tl.program_id(2) % blocks
        part_of_out = tl.program_id(2) // (blocks * STRIDE_H * STRIDE_W)
        pixel = block * PIXELS + tl.arange(0, PIXELS)
        row = pixel // columns * STRIDE_H + parity // STRIDE_W
        column = pixel % columns * STRIDE_W + parity % STRIDE_W
        live = (row < out_height) & (column < out_width)
        first_h, first_w = (parity // STRIDE_W + PAD_H) % STRIDE_H, (parity % STRIDE_W + PAD_W) % STRIDE_W
        TAPS_W: tl.constexpr = (KERNEL_W + STRIDE_W - 1) // STRIDE_W
        TAPS: tl.constexpr = (KERNEL_H + STRIDE_H - 1) // STRIDE_H * TAPS_W
    else:
        blocks = tl.cdiv(out_height * out_width, PIXELS)
        part_of_out = tl.program_id(2) // blocks
        pixel = tl.program_id(2) % blocks * PIXELS + tl.arange(0, PIXELS)
        row, column = pixel // out_width, pixel % out_width
        live = pixel < out_height * out_width
        TAPS_W: tl.constexpr = KERNEL_W
        TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    out = part_of_out * COUT_BLOCK + tl.arange(0, COUT_BLOCK)
    total = tl.zeros((PIXELS, COUT_BLOCK), dtype=tl.float32)
    noise = tl.zeros((PIXELS, COUT_BLOCK), dtype=tl.float32)
    x += lane * x_lane + example * x_example
    weight += lane * w_lane
    delta += lane * d_lane
    sign_in += lane * in_lane + example * in_example
    for begin in tl.range(0, TAPS * CIN, DEPTH, num_stages=STAGES):
        j = begin + tl.arange(0, DEPTH)
        tap, channel = j // CIN, j % CIN
        if TRANSPOSED:
            kernel_h, kernel_w = first_h + tap // TAPS_W * STRIDE_H, first_w + tap % TAPS_W * STRIDE_W
            exists = (j < TAPS * CIN) & (kernel_h < KERNEL_H) & (kernel_w < KERNEL_W)
            down = (row[:, None] + PAD_H - kernel_h[None, :]) // STRIDE_H  # exact, by the choice of taps
            right = (column[:, None] + PAD_W - kernel_w[None, :]) // STRIDE_W
            reached = (row[:, None] + PAD_H >= kernel_h[None, :]) & (column[:, None] + PAD_W >= kernel_w[None, :])
            inside = reached & (down < height) & (right < width)
        else:
            kernel_h, kernel_w = tap // TAPS_W, tap % TAPS_W
            exists = j < TAPS * CIN
            down = row[:, None] * STRIDE_H - PAD_H + kernel_h[None, :]
            right = column[:, None] * STRIDE_W - PAD_W + kernel_w[None, :]
            inside = (down >= 0) & (right >= 0) & (down < height) & (right < width)
        used = exists[None, :] & live[:, None] & inside
        part = tl.load(x + down * x_row + right * x_column + channel[None, :] * x_channel, mask=used, other=0.0)
        place = ((kernel_h * KERNEL_W + kernel_w) * w_tap + channel * w_in)[:, None] + out[None, :] * w_out
        there = exists[:, None] & (out < COUT)[None, :]
        total = tl.dot(part, tl.load(weight + place, mask=there, other=0.0), total)
        if NOISE:
            signs = tl.load(sign_in + channel * in_channel)
            d = tl.load(delta + place, mask=there, other=0.0)
            noise = tl.dot(part, (d * signs[:, None]).to(part.dtype), noise)
    if NOISE:
        place = lane * out_lane + example * out_example + out * out_channel
        total += noise * tl.load(sign_out + place, mask=out < COUT, other=0.0).to(tl.float32)[None, :]
    place = lane * y_lane + example * y_example + (row * y_row + column * y_column)[:, None] + out[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=live[:, None] & (out < COUT)[None, :])


@triton.jit
def weigh(
    x, dy, sign_in, sign_out, dweight, ddelta,
    lanes, examples, height, width, out_height, out_width, group, blocks,
    x_lane, x_example, x_channel, x_row, x_column,
    y_lane, y_example, y_channel, y_row, y_column,
    in_lane, in_example, in_channel, out_lane, out_example, out_channel,
    CIN: tl.constexpr, COUT: tl.constexpr, COUT_PADDED: tl.constexpr, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    NOISE: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum x · dy over the pixels of a group of examples, for ``ROWS`` contraction indices on one lane.

    The gradients by weights and by their noise differ by each example's signs alone, so one product serves both.
    """
    lane = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(2) * group
    tap, channel = j // CIN, j % CIN
    kernel_row, kernel_column = tap // KERNEL_WIDTH, tap % KERNEL_WIDTH
    out = tl.arange(0, COUT_PADDED)
    by_weight = tl.zeros((ROWS, COUT_PADDED), dtype=tl.float32)
    by_delta = tl.zeros((ROWS, COUT_PADDED), dtype=tl.float32)
    count = tl.minimum(group, examples - first) * blocks
    for step in tl.range(0, count, num_stages=STAGES):
        example = (first + step // blocks).to(tl.int64)
        pixel = (step % blocks) * PIXELS + tl.arange(0, PIXELS)
        row, column = pixel // out_width, pixel % out_width
        live = pixel < out_height * out_width
        down = row[:, None] * STRIDE_H - PAD_H + kernel_row[None, :]
        right = column[:, None] * STRIDE_W - PAD_W + kernel_column[None, :]
        inside = (down >= 0) & (right >= 0) & (down < height) & (right < width)
        used = inside & live[:, None] & (j < TAPS * CIN)[None, :]
        place = lane * x_lane + example * x_example + channel[None, :] * x_channel
        part = tl.load(x + place + down * x_row + right * x_column, mask=used, other=0.0)
        place = lane * y_lane + example * y_example + (row * y_row + column * y_column)[:, None]
        exists = live[:, None] & (out < COUT)[None, :]
        slope = tl.load(dy + place + out[None, :] * y_channel, mask=exists, other=0.0)
        product = tl.dot(tl.trans(part), slope)
        by_weight += product
        if NOISE:
            rows = tl.load(sign_in + lane * in_lane + example * in_example + channel * in_channel).to(tl.float32)
            place = lane * out_lane + example * out_example + out * out_channel
            columns = tl.load(sign_out + place, mask=out < COUT, other=0.0).to(tl.float32)
            by_delta += product * rows[:, None] * columns[None, :]
    place = (tl.program_id(2) * lanes + lane) * TAPS * CIN * COUT + j[:, None] * COUT + out[None, :]
    exists = (j < TAPS * CIN)[:, None] & (out < COUT)[None, :]
    tl.store(dweight + place, by_weight, mask=exists)
    if NOISE:
        tl.store(ddelta + place, by_delta, mask=exists)


# -- batch-norm: columns (lane, channel) of a matrix whose rows are pixels ----------------------------------------


@triton.jit
def moments(x, partial, rows, columns, per_split, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum deviations and their squares over a stretch of rows, for a block of columns.

    Deviations are from the first row, which keeps the difference of squares from cancelling where the mean is far from 0.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, rows)
    known = column < columns
    pivot = tl.load(x + column, mask=known, other=0.0).to(tl.float32)[None, :]
    first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        used = (row < end)[:, None] & known[None, :]
        v = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=used, other=0.0).to(tl.float32)
        v = tl.where(used, v - pivot, 0.0)
        first += v
        second += v * v
    place = partial + tl.program_id(1) * 2 * columns + column
    tl.store(place, tl.sum(first, 0), mask=known)
    tl.store(place + columns, tl.sum(second, 0), mask=known)


@triton.jit
def total(partial, columns, column, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr):
    """Add the two sums of all splits, in a fixed order."""
    split = tl.arange(0, SPLITS_PADDED)
    used = (split < SPLITS)[:, None] & (column < columns)[None, :]
    place = partial + split[:, None] * 2 * columns + column[None, :]
    first = tl.sum(tl.load(place, mask=used, other=0.0), 0)
    return first, tl.sum(tl.load(place + columns, mask=used, other=0.0), 0)


@triton.jit
def normalize(
    x, residual, weight, bias, partial, y, mean_out, variance_out, rows, columns, per_split, eps,
    weight_lane, bias_lane, CHANNELS: tl.constexpr, AFFINE: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise a stretch of rows by the moments, scale, shift, add the residual and clip at 0, as asked."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, rows)
    known = column < columns
    first, second = total(partial, columns, column, SPLITS, SPLITS_PADDED)
    shift = first / rows
    variance = tl.maximum(second / rows - shift * shift, 0.0)
    mean = tl.load(x + column, mask=known, other=0.0).to(tl.float32) + shift
    if tl.program_id(1) == 0:
        tl.store(mean_out + column, mean, mask=known)
        tl.store(variance_out + column, variance, mask=known)
    scale = tl.math.rsqrt(variance + eps)
    base = tl.zeros((COLUMNS,), dtype=tl.float32)
    if AFFINE:
        lane, channel = column // CHANNELS, column % CHANNELS
        scale = scale * tl.load(weight + lane * weight_lane + channel, mask=known, other=0.0)
        base = tl.load(bias + lane * bias_lane + channel, mask=known, other=0.0)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        used = (row < end)[:, None] & known[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        v = (tl.load(x + place, mask=used, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :] + base[None, :]
        if RESIDUAL:
            v += tl.load(residual + place, mask=used, other=0.0).to(tl.float32)
        if RELU:
            v = tl.where(v < 0, 0.0, v)  # and no maximum, which would turn a NaN into 0
        tl.store(y + place, v.to(y.dtype.element_ty), mask=used)


@triton.jit
def slopes(
    dy, x, y, mean, variance, partial, rows, columns, per_split, eps,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and the gradient times the normalised input, over a stretch of rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, rows)
    known = column < columns
    m = tl.load(mean + column, mask=known, other=0.0)[None, :]
    scale = tl.math.rsqrt(tl.load(variance + column, mask=known, other=1.0) + eps)[None, :]
    first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        used = (row < end)[:, None] & known[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        g = tl.load(dy + place, mask=used, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(tl.load(y + place, mask=used, other=0.0) > 0, g, 0.0)
        v = (tl.load(x + place, mask=used, other=0.0).to(tl.float32) - m) * scale
        first += g
        second += g * v
    place = partial + tl.program_id(1) * 2 * columns + column
    tl.store(place, tl.sum(first, 0), mask=known)
    tl.store(place + columns, tl.sum(second, 0), mask=known)


@triton.jit
def denormalize(
    dy, x, y, weight, mean, variance, partial, dx, dresidual, dweight, dbias, rows, columns, per_split, eps,
    weight_lane, CHANNELS: tl.constexpr, AFFINE: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients by the input and by the residual for a stretch of rows, and those by scale and shift."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, rows)
    known = column < columns
    first, second = total(partial, columns, column, SPLITS, SPLITS_PADDED)
    if tl.program_id(1) == 0:
        tl.store(dbias + column, first, mask=known)
        tl.store(dweight + column, second, mask=known)
    m = tl.load(mean + column, mask=known, other=0.0)[None, :]
    scale = tl.math.rsqrt(tl.load(variance + column, mask=known, other=1.0) + eps)
    outer = scale
    if AFFINE:
        lane, channel = column // CHANNELS, column % CHANNELS
        outer = scale * tl.load(weight + lane * weight_lane + channel, mask=known, other=0.0)
    first, second = (first / rows)[None, :], (second / rows)[None, :]
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        used = (row < end)[:, None] & known[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        g = tl.load(dy + place, mask=used, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(tl.load(y + place, mask=used, other=0.0) > 0, g, 0.0)
            if RESIDUAL:
                tl.store(dresidual + place, g.to(dresidual.dtype.element_ty), mask=used)
        v = (tl.load(x + place, mask=used, other=0.0).to(tl.float32) - m) * scale[None, :]
        slope = (g - first - v * second) * outer[None, :]
        tl.store(dx + place, slope.to(dx.dtype.element_ty), mask=used)
