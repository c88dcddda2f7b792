"""Between a network's tensors and a ``Posterior``: the only place that knows both rho and variance.

Convention: a parameter ``X`` is Gaussian exactly when a parameter ``X_rho`` stands beside it; its standard deviation
is ``softplus(X_rho)``. Everything else in a network's parameters and buffers is a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import PosteriorError, nearest
from ..posterior import Gaussian, Posterior

RHO = "_rho"
"""What is appended to a parameter's name to name its untransformed scale."""


def inverse_softplus(sigma: Tensor) -> Tensor:
    """Return rho with ``softplus(rho) = sigma``, computed in float64 and returned in sigma's type.

    The textbook ``log(exp(sigma) - 1)`` is minus infinity below 6e-8 and overflows above 88 in float32; written as
    ``sigma + log(-expm1(-sigma))`` it holds for every positive sigma. A sigma of exactly 0 gives -inf, which every
    layer turns back into a noise of exactly 0.
    """
    s = sigma.double()
    return (s + torch.log(-torch.expm1(-s))).to(sigma.dtype)


def gaussian_names(tensors: Iterable[str]) -> list[str]:
    """Return the names of the Gaussian tensors among ``tensors`` (those with a ``_rho`` beside them), in order."""
    names = list(tensors)
    present = set(names)
    orphans = [n for n in names if n.endswith(RHO) and n.removesuffix(RHO) not in present]
    if orphans:
        raise PosteriorError(
            f"'{orphans[0]}' is the scale of '{orphans[0].removesuffix(RHO)}', which is missing; "
            "a Gaussian tensor needs both."
        )
    return [n for n in names if n + RHO in present]


def to_posterior(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Posterior:
    """Return the posterior that a network's full state (parameters and buffers by name) stands for.

    Variances are computed in float64 and stored in the mean's type, in float32 where that has 16 bits (the square of a
    small sigma is no number there). The result shares no memory with ``tensors``. Elementwise, so it also works on
    tensors stacked along leading lane axes.
    """
    gaussians: dict[str, Gaussian] = {}
    with torch.no_grad():
        for name in gaussian_names(tensors):
            mean, rho = tensors[name], tensors[name + RHO]
            kept = torch.float32 if mean.dtype.itemsize < 4 else mean.dtype
            variance = F.softplus(rho.detach().double()).square().to(kept)
            gaussians[name] = Gaussian(mean.detach().clone(), variance)
        scales = {n + RHO for n in gaussians}
        points = {n: t.detach().clone() for n, t in tensors.items() if n not in gaussians and n not in scales}
    return Posterior(gaussians, points, metadata or {})


def from_posterior(posterior: Posterior) -> dict[str, Tensor]:
    """Return the full state of a network: means, ``_rho`` for each of them, and points; the inverse of ``to_posterior``.

    Nothing is shared with the posterior, so that training in place leaves it as it was.
    """
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, (mean, variance) in posterior.gaussians.items():
            state[name] = mean.detach().clone()
            state[name + RHO] = inverse_softplus(variance.detach().double().sqrt()).to(mean.dtype)
        state |= {n: t.detach().clone() for n, t in posterior.points.items()}
    return state


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's full state by name, parameters and buffers, sharing memory with it (shared layers once)."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def caller(module: nn.Module) -> Callable[..., Tensor]:
    """Return ``call(state, *inputs)``: the module evaluated under another full state, right for shared layers too.

    ``torch.func.functional_call`` leaves a module that is registered under two names with the state it was called
    with, instead of its own. Here each slot is written once: shared modules by their first name, and parameters tied
    between different modules in each of them. Values that ``forward`` reassigns end up in ``state``, as there.
    """
    first = {id(t): n for n, t in state_of(module).items()}
    slots = {
        f"{prefix}.{name}".lstrip("."): id(tensor)
        for prefix, part in module.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
    }
    tied = {slot: first[key] for slot, key in slots.items() if first[key] != slot}

    def call(state: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        if not tied:
            return functional_call(module, state, inputs, tie_weights=False)
        whole = {**state, **{slot: state[name] for slot, name in tied.items() if name in state}}
        output = functional_call(module, whole, inputs, tie_weights=False)
        state.update({name: whole[name] for name in state})
        return output

    return call


def posterior_of(module: nn.Module, metadata: Mapping[str, str] | None = None) -> Posterior:
    """Return the posterior a module holds now."""
    return to_posterior(state_of(module), metadata)


def load_posterior(module: nn.Module, posterior: Posterior) -> nn.Module:
    """Write a posterior into a module of the same names and shapes, in place, and return the module."""
    if not isinstance(posterior, Posterior):
        raise PosteriorError(f"load_posterior takes a Posterior, not an object of type {type(posterior).__name__}.")
    for name, (_, variance) in posterior.gaussians.items():
        if bool((variance < 0).any()):
            raise PosteriorError(f"'{name}' has a negative variance in the posterior; no network can hold it.")
    new, old = from_posterior(posterior), state_of(module)
    for name in sorted(new.keys() ^ old.keys()):
        side, other = ("posterior", old) if name in new else ("network", new)
        raise PosteriorError(
            f"'{name}' is in the {side} alone ({nearest(name, other)}); network and posterior must match."
        )
    with torch.no_grad():
        for name, tensor in old.items():
            if tensor.shape != new[name].shape:
                raise PosteriorError(
                    f"'{name}' has shape {tuple(new[name].shape)} in the posterior and {tuple(tensor.shape)} in the network."
                )
            tensor.copy_(new[name])
    return module


def draw(tensors: Mapping[str, Tensor], generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Return a state with every Gaussian weight drawn once and its noise switched off (rho = -inf).

    Run with it, a network of any estimator uses one and the same weight sample for all examples of the pass:
    ``draws="per_pass"`` of the evaluation.
    """
    state = dict(tensors)
    with torch.no_grad():
        for name in gaussian_names(tensors):
            mean, rho = tensors[name], tensors[name + RHO]
            noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            state[name] = mean + F.softplus(rho) * noise
            state[name + RHO] = torch.full_like(rho, float("-inf"))
    return state
