"""Fusing clients that already lie side by side in memory: one pass over a (clients, weights) pair of tensors."""

from __future__ import annotations

import functools
import math
import platform
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, PosteriorError
from ..posterior import Gaussian, least_positive
from .rule import Rule, Statistics, WeightSums, get_rule
from .weighting import scaled

_EAGER_TILE = (8, 2**12)
"""Clients and columns of a tile whose float64 temporaries (256 KiB each) stay in a CPU's cache."""
_COMPILED_TILE = (10, 2**17)
"""Clients a compiled CPU kernel reads side by side (two streams of memory each, more than prefetchers follow beyond that: measured,
8 to 12 are best and 16 up to half as fast), and columns whose totals stay in cache."""
_GPU_TILE = (16, 2**23)
"""Uncompiled on a GPU: as much as keeps it busy, with temporaries of 1 GiB whatever the number of clients."""


@torch.no_grad()
def fuse_stacked(
    means: Tensor,
    variances: Tensor,
    weights: Sequence[float] | None = None,
    rule: str | Rule = "nwa",
    previous: Gaussian | None = None,
    *,
    compile: bool = False,
    **options: Any,
) -> Gaussian:
    """Fuse K clients stacked along the first axis: (K, ...) means and variances to one Gaussian of shape (...), same dtype.

    The fast path for clients trained as lanes. Sums are float64 in a fixed order along the first axis, so the result repeats to the bit
    but agrees with ``Accumulator`` only to rounding. ``compile=True`` compiles the rule into one kernel that reads every number once
    (a GPU needs it to reach its memory bandwidth). Nothing is checked; use ``fuse`` for posteriors that may be bad.
    """
    chosen = get_rule(rule, **options)
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in (means, variances)):
        raise PosteriorError("means and variances must be floating-point torch tensors of shape (clients, ...).")
    if means.shape != variances.shape or means.dim() < 1 or not len(means):
        shapes = f"{tuple(means.shape)} and {tuple(variances.shape)}"
        raise PosteriorError(f"means and variances have shapes {shapes}; they must be equal and (clients, ...).")
    if chosen.needs_previous and previous is None:
        raise PosteriorError(f"the rule '{chosen.name}' needs the previous global posterior; pass previous=.")
    if chosen.draws:
        raise ConfigError(
            f"the rule '{chosen.name}' draws random numbers and has no stacked form; use fuse() or its limit lp."
        )
    given = [1.0] * len(means) if weights is None else list(map(_number, weights))
    if len(given) != len(means) or not all(0 <= w < math.inf for w in given) or not sum(given) > 0:
        raise PosteriorError(f"give {len(means)} finite weights, not negative and not all zero; got {weights}.")
    given = scaled(given)
    shape = means.shape[1:]
    if previous is not None:
        if not isinstance(previous, tuple) or any(t.shape != shape for t in previous):
            raise PosteriorError(f"previous must be a Gaussian (mean, variance) of the clients' shape {tuple(shape)}.")
        previous = Gaussian(*previous)
    m, v = means.reshape(len(means), -1), variances.reshape(len(means), -1)
    if min(given) == 0:  # a client of weight 0 adds nothing, also under rules that do not weigh
        there = [k for k, w in enumerate(given) if w > 0]
        m, v, given = m[there], v[there], [given[k] for k in there]
    # The first client of largest weight is a good pivot: the variance of a mixture is at least w² times its squared distance.
    near = max(range(len(given)), key=given.__getitem__)
    p = previous if previous is not None and chosen.needs_previous else Gaussian(m[near], v[near])
    w, sums = _on_device(chosen, tuple(given), m.device)
    one_kernel = compile and (m.is_cuda or len(m) <= _COMPILED_TILE[0])
    out = (_whole if one_kernel else _in_tiles)(
        chosen, sums, m, v, w, Gaussian(p.mean.reshape(-1), p.variance.reshape(-1)), compile
    )
    return Gaussian(out.mean.reshape(shape), out.variance.reshape(shape))


def _number(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        return math.nan


@functools.lru_cache(maxsize=8)
def _on_device(rule: Rule, weights: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the weights as a column and their sums, on the device.

    Sums go in as numbers on the device: new weights every round must not mean a new compilation. The last few are kept, because a copy
    to a GPU takes longer than a small fusion and cannot be part of a CUDA graph.
    """
    masses = [rule.mass(x) for x in weights]
    w = torch.tensor(masses, dtype=torch.float64, device=device)[:, None]
    return w, torch.tensor(WeightSums.of(masses), dtype=torch.float64, device=device)


def _whole(rule: Rule, sums: Tensor, m: Tensor, v: Tensor, w: Tensor, p: Gaussian, compile: bool) -> Gaussian:
    """Fuse all clients and columns by one kernel."""
    return Gaussian(*_kernel(_fuse, rule, compile, m.is_cuda, len(m))(sums, m, v, w, *p))


def _in_tiles(rule: Rule, sums: Tensor, m: Tensor, v: Tensor, w: Tensor, p: Gaussian, compile: bool) -> Gaussian:
    """Fuse a few clients and a block of columns at a time, so that temporaries and totals stay small (on a CPU: in cache)."""
    k, n = m.shape
    group, block = _GPU_TILE if m.is_cuda else _COMPILED_TILE if compile else _EAGER_TILE
    solve = _kernel(_solve, rule, compile)
    mean, variance = torch.empty_like(m[0]), torch.empty_like(v[0])
    for a in range(0, n, block):
        at = slice(a, min(a + block, n))
        pm, pv = p.mean[at], p.variance[at]
        total: Statistics = {}
        for i in range(0, k, group):
            some = slice(i, min(i + group, k))
            add = _kernel(_add, rule, compile, clients=some.stop - i)
            total = add(total, m[some, at], v[some, at], w[some], pm, pv)
        fused_mean, fused_variance = solve(sums, total, pm, pv)
        mean[at], variance[at] = _rounded(fused_mean, fused_variance, m.dtype, v.dtype)
    return Gaussian(mean, variance)


def _add(
    rule: Rule, unrolled: bool, total: Statistics, m: Tensor, v: Tensor, w: Tensor, pm: Tensor, pv: Tensor
) -> Statistics:
    """Add the terms of a (K, n) block to a total (an empty one at first)."""
    pivot = Gaussian(pm.double(), pv.double())
    if unrolled:
        for a, b, x in zip(m.unbind(), v.unbind(), w.unbind()):
            terms = rule.terms_near(Gaussian(a.double(), b.double()), x, pivot)
            total = Rule.add(total, terms) if total else terms
        return total
    terms = rule.terms_near(Gaussian(m.double(), v.double()), w, pivot)
    block = {key: t.sum(0) for key, t in terms.items()}
    return Rule.add(total, block) if total else block


def _solve(
    rule: Rule, unrolled: bool, sums: Tensor, total: Statistics, pm: Tensor, pv: Tensor
) -> tuple[Tensor, Tensor]:
    """Make the fused float64 mean and variance of a total."""
    pivot = Gaussian(pm.double(), pv.double())
    fused, _ = rule.mend(rule.solve(total, WeightSums(*sums.unbind()), pivot), pivot)  # pyright: ignore[reportArgumentType]
    return fused.mean, fused.variance


def _fuse(
    rule: Rule, unrolled: bool, sums: Tensor, m: Tensor, v: Tensor, w: Tensor, pm: Tensor, pv: Tensor
) -> tuple[Tensor, Tensor]:
    """Summarise, add, conclude for a (K, n) block."""
    total = _add(rule, unrolled, {}, m, v, w, pm, pv)
    return _rounded(*_solve(rule, unrolled, sums, total, pm, pv), m.dtype, v.dtype)


def _rounded(
    mean: Tensor, variance: Tensor, mean_type: torch.dtype, variance_type: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the results in the clients' types, the variance never 0, and neither infinite for being too large for its type."""
    of_mean, of_variance = torch.finfo(mean_type).max, torch.finfo(variance_type).max
    variance = variance.clamp(max=of_variance).to(variance_type).clamp(min=least_positive(variance_type))
    return mean.clamp(-of_mean, of_mean).to(mean_type), variance


def _kernel(
    part: Callable[..., Any], rule: Rule, compile: bool, gpu: bool = False, clients: int = 0
) -> Callable[..., Any]:
    """Return one of the functions above for a rule (and, where they are unrolled, a number of clients), compiled if asked."""
    return _compiled(part, rule, gpu, 0 if gpu else clients) if compile else functools.partial(part, rule, False)


@functools.lru_cache(maxsize=256)
def _compiled(part: Callable[..., Any], rule: Rule, gpu: bool, clients: int) -> Callable[..., Any]:
    """Compile a part for one rule. Each rule and number of clients gets its own code object: torch limits recompilations of one.

    On a GPU one compilation serves every number of clients and weights (``dynamic``): each costs seconds.
    On a CPU the clients are unrolled into one plain loop over columns, which the C++ compiler vectorises: inductor's own vectors convert
    float32 to float64 through memory; measured, four times slower (benchmarks/RESULTS.md).
    """
    code = part.__code__.replace(co_name=f"{part.__name__}_{rule.name.replace('-', '_')}_{clients}")
    own = types.FunctionType(code, part.__globals__)
    if gpu:
        return functools.partial(torch.compile(own, dynamic=True), rule, False)
    return functools.partial(torch.compile(own, dynamic=True, options=_plain_loops()), rule, True)


_GCC_FLAGS = (
    "-ftree-loop-vectorize",  # inductor turns it off, trusting its own vectors
    "-mprefer-vector-width=512",
    "-fno-math-errno",  # a root that may set errno is a call, and a loop with a call is no vector
    "-D__FAST_MATH__",  # for the headers only: they then declare log and exp of libmvec, which work on vectors
    "-fno-thread-jumps",  # these two make branches of the selects in a repair
    "-fno-tree-pre",
)


def _plain_loops() -> dict[str, Any]:
    """Return inductor's options for loops that the C++ compiler makes vectors of.

    Inductor has no option for the compiler's flags; only the one for the architecture comes after its own, so that is where they go.
    Arithmetic stays as strict as inductor's (no contraction, no reordering); libmvec's logarithm and exponential err by up to 4 units in
    the last place of a float64.
    """
    from torch._inductor import config, list_options  # here, because it takes a second

    options: dict[str, Any] = {"cpp.simdlen": 1}
    linux = sys.platform == "linux" and platform.machine() == "x86_64"
    if linux and config.cpp.cxx == (None, "g++") and "cpp.march" in list_options():
        options["cpp.march"] = " ".join(("native", *_GCC_FLAGS))
    return options
