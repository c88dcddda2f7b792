"""Fusing clients that already lie side by side in memory: one pass over a (clients, weights) pair of tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, PosteriorError
from ..posterior import Gaussian
from .rule import Rule, WeightSums, get_rule

_CPU_BLOCK = 2**15


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
    if means.shape != variances.shape or means.dim() < 1 or not len(means):
        raise PosteriorError(
            f"means {tuple(means.shape)} and variances {tuple(variances.shape)} must be equal and (clients, ...)."
        )
    if chosen.needs_previous and previous is None:
        raise PosteriorError(f"the rule '{chosen.name}' needs the previous global posterior; pass previous=.")
    if chosen.draws:
        raise ConfigError(
            f"the rule '{chosen.name}' draws random numbers and has no stacked form; use fuse() or its limit lp."
        )
    given = [1.0] * len(means) if weights is None else [float(w) for w in weights]
    if len(given) != len(means) or min(given) < 0 or not sum(given) > 0:
        raise PosteriorError(f"give {len(means)} weights, not negative and not all zero; got {given}.")
    shape = means.shape[1:]
    m, v = means.reshape(len(means), -1), variances.reshape(len(means), -1)
    # The first client of largest weight is a good pivot: the variance of a mixture is at least w² times its squared distance.
    near = max(range(len(given)), key=given.__getitem__)
    p = previous if previous is not None and chosen.needs_previous else Gaussian(m[near], v[near])
    w = torch.tensor([chosen.mass(x) for x in given], dtype=torch.float64, device=m.device)[:, None]
    # Sums of weights go in as numbers on the device: new weights every round must not mean a new compilation.
    sums = torch.tensor(WeightSums.of(map(chosen.mass, given)), dtype=torch.float64, device=m.device)
    kernel = functools.partial(_compiled(chosen) if compile else functools.partial(_kernel, chosen), sums)
    out = _in_blocks(kernel, m, v, w, p, m.shape[1] if compile or m.is_cuda else _CPU_BLOCK)
    return Gaussian(out.mean.reshape(shape), out.variance.reshape(shape))


def _kernel(rule: Rule, sums: Tensor, m: Tensor, v: Tensor, w: Tensor, pm: Tensor, pv: Tensor) -> tuple[Tensor, Tensor]:
    """Summarise, add, conclude for a (K, n) block."""
    pivot = Gaussian(pm.double(), pv.double())
    terms = rule.terms_near(Gaussian(m.double(), v.double()), w, pivot)
    total = {key: t.sum(0) for key, t in terms.items()}
    fused, _ = rule.mend(rule.solve(total, WeightSums(*sums.unbind()), pivot), pivot)  # pyright: ignore[reportArgumentType]
    return fused.mean.to(m.dtype), fused.variance.to(v.dtype).clamp(min=torch.finfo(v.dtype).tiny)


@functools.lru_cache(maxsize=64)
def _compiled(rule: Rule) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile the kernel for one rule. Each rule gets its own code object: torch limits recompilations per code object."""
    code = _kernel.__code__.replace(co_name=f"fuse_{rule.name.replace('-', '_')}")
    own = types.FunctionType(code, _kernel.__globals__)
    return torch.compile(functools.partial(own, rule))


def _in_blocks(
    kernel: Callable[..., tuple[Tensor, Tensor]], m: Tensor, v: Tensor, w: Tensor, p: Gaussian, block: int
) -> Gaussian:
    """Run the kernel over columns, block by block, so that temporaries stay in cache."""
    n = m.shape[1]
    pm, pv = p.mean.reshape(-1), p.variance.reshape(-1)
    if block >= n:
        return Gaussian(*kernel(m, v, w, pm, pv))
    mean, variance = torch.empty_like(m[0]), torch.empty_like(v[0])
    for a in range(0, n, block):
        b = min(a + block, n)
        mean[a:b], variance[a:b] = kernel(m[:, a:b], v[:, a:b], w, pm[a:b], pv[a:b])
    return Gaussian(mean, variance)
