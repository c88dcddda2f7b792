"""Turn a user's own network Bayesian: replace its linear and convolutional layers, leave everything else alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ..errors import ConfigError, nearest
from . import functional
from .layers import LAYERS, Dropout, Variational, sibling
from .state import RHO

Where = str | Sequence[str] | type[nn.Module] | Callable[[str, nn.Module], bool]
"""Which layers: a glob pattern of names, several (a sequence, or separated by commas), a class, or a function of name and layer."""

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_TORCH_DROPOUT: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
"""Torch's dropout layers and how many trailing axes each drops together."""
_READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # these use their layers' weights directly


class NotConverted(UserWarning):
    """What ``bayesianize`` could not reach: weights that stay points, dropout that stays off in evaluation."""


@dataclass(frozen=True)
class Survey:
    """What ``bayesianize`` would do to a network, and what it cannot see."""

    converted: tuple[str, ...]
    """Names of the layers that get a distribution."""
    left_out: tuple[str, ...]
    """Names of layers that could have one but do not match ``where``."""
    unseen: tuple[str, ...]
    """Sentences: weights that are used where no layer can be replaced."""


def survey(module: nn.Module, where: Where = "") -> Survey:
    """Say which layers ``bayesianize`` would convert, which it leaves out by ``where``, and what it cannot convert."""
    _check_ready(module)
    candidates = {name: layer for name, layer in module.named_modules() if _kind_of(layer) is not None}
    closed = _closed_layers(module)
    open_names = [n for n in candidates if n not in closed]
    chosen = _choose(where, {n: candidates[n] for n in open_names})
    converted = tuple(n for n in open_names if n in chosen)
    left_out = tuple(n for n in open_names if n not in set(converted))
    return Survey(converted, left_out, tuple(_unseen(module, closed, chosen)))


def bayesianize(
    module: nn.Module,
    kind: str = "flipout",
    *,
    where: Where = "",
    sigma: float = 0.02,
    dropout: float = 0.2,
    bayesian_bias: bool = False,
    warn: bool = True,
) -> nn.Module:
    """Return a copy of a network with its linear and convolutional layers made Bayesian; the original is untouched.

    ``kind``: ``flipout``, ``local``, ``sample`` (weights become means, with constant ``sigma``) or ``dropout`` (masks
    after each convolution and before each linear layer, on in evaluation too; where the network has dropout layers of
    its own and ``where`` is empty, those are kept on instead and none are added; dropout that is no layer, as inside
    attention and recurrent layers, is reported). ``deterministic`` gives a plain copy. ``where`` chooses layers by
    name or class (empty: all). Layers used in several places stay one layer. A subclass that leaves ``forward`` to torch keeps
    its own methods. Normalisation, pooling, activations and the code of ``forward`` are not touched. Weights that are
    used where no layer can be replaced (``F.conv2d`` with a parameter, also in a helper function or with another
    layer's weight; attention; subclasses with their own ``forward``) raise the warning ``NotConverted``, one sentence
    each; ``survey`` lists them without converting.
    """
    if kind != "deterministic" and kind not in LAYERS:
        raise ConfigError(f"'{kind}' is no kind of network; {nearest(kind, ['deterministic', *LAYERS])}")
    for name, value in (("sigma", sigma), ("dropout", dropout)):
        if not isinstance(value, Real):
            raise ConfigError(f"{name} is {value!r}; it must be a number.")
    _check_ready(module)
    original, module = module, _copy(module)
    if kind == "deterministic":
        return module
    own_dropout = kind == "dropout" and not where and _keep_dropout_on(module)
    if kind == "dropout" and warn:
        _warn(_off_in_evaluation(original))
    if own_dropout:
        return module
    plan = survey(original, where)  # not of the copy: functions held by the network see the original
    if not plan.converted:
        raise ConfigError(_nothing_to_convert(module, plan))
    options = {"p": dropout} if kind == "dropout" else {"sigma": sigma, "bayesian_bias": bayesian_bias}
    layers = {name: module.get_submodule(name) for name in plan.converted}
    for name, layer in layers.items():
        _convert(name, layer, kind, options)
    _share_scales(layers.values())
    _check_names(module)
    if warn:
        _warn(plan.unseen)
    return module


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warnings.warn(sentence, NotConverted, stacklevel=3)


def _named(name: str, layer: nn.Module) -> str:
    return f"'{name}' ({type(layer).__name__})" if name else f"the network ({type(layer).__name__})"


def _kind_of(layer: nn.Module) -> type[nn.Module] | None:
    """The torch layer whose forward this layer runs unchanged, or None: a subclass with its own forward is not one."""
    weight = layer._parameters.get("weight")  # None: parametrised, spectral norm ...
    if isinstance(layer, Variational) or weight is None or not weight.is_floating_point():
        return None
    if vars(layer).keys() & {"forward", "_conv_forward"}:  # replaced on this very layer
        return None
    for base in LAYERS["flipout"]:
        same_forward = type(layer).forward is base.forward
        same_convolution = getattr(type(layer), "_conv_forward", None) is getattr(base, "_conv_forward", None)
        if isinstance(layer, base) and same_forward and same_convolution:
            return base
    return None


def _convert(name: str, layer: nn.Module, kind: str, options: dict[str, Any]) -> None:
    """Make a layer its Bayesian sibling, in place: whoever holds the layer, in whatever list, holds the new one."""
    base = _kind_of(layer)
    assert base is not None
    bayesian = LAYERS[kind][base]
    own = ("weight" + RHO, "bias" + RHO) if issubclass(bayesian, Variational) else ("mask",)
    taken = [n for n in (*own, *sorted({*dir(bayesian)} - {*dir(base)})) if hasattr(layer, n)]
    if taken:
        raise ConfigError(
            f"{_named(name, layer)} has a '{taken[0]}' of its own, a name that {kind} layers need: rename it, or leave "
            "the layer out with `where`."
        )
    layer.__class__ = sibling(kind, base, type(layer))
    if isinstance(layer, Variational):
        layer.add_scales(options["sigma"], options["bayesian_bias"])
    else:
        layer.mask = Dropout(options["p"])


def _share_scales(layers: Iterable[nn.Module]) -> None:
    """Layers that share a mean (tied weights) share its scale."""
    scales: dict[int, nn.Parameter] = {}
    for layer in layers:
        for name in ("weight", "bias"):
            rho = layer._parameters.get(name + RHO)
            if rho is not None:
                setattr(layer, name + RHO, scales.setdefault(id(getattr(layer, name)), rho))


def _check_names(module: nn.Module) -> None:
    """A weight tied to a layer that is not Bayesian is named after that layer, away from its scale: refuse."""
    names = {n for n, _ in module.named_parameters()}
    for name in names:
        if name.endswith(RHO) and name.removesuffix(RHO) not in names:
            raise ConfigError(
                f"'{name.removesuffix(RHO)}' is tied to a weight elsewhere in the network that stays a point; "
                "exclude the layer with `where`, or untie the weights."
            )


def _keep_dropout_on(module: nn.Module) -> bool:
    """Make the network's own dropout layers MC-dropout, in place; say whether there is any that drops."""
    for layer in module.modules():
        if type(layer) in _TORCH_DROPOUT:
            together = _TORCH_DROPOUT[type(layer)]
            layer.__class__ = Dropout
            layer.per_pass, layer.together = False, together  # type: ignore[assignment]
        elif isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # or torch's fast path would pass the dropout by in evaluation
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # part of that path
    return any(isinstance(layer, Dropout) and layer.p > 0 for layer in module.modules())


def _off_in_evaluation(module: nn.Module) -> Iterator[str]:
    """Sentences on dropout that no layer replacement keeps on in evaluation."""
    for name, layer in module.named_modules():
        where = _named(name, layer)
        calls = [c for c in functional.uses(layer)[0] if c in functional.DROPOUTS]
        inside = isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) and layer.dropout > 0
        if isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)) or inside:
            yield f"{where} has dropout that is off in evaluation; MC-dropout does not reach it."
        elif calls:
            yield (
                f"{where} calls {', '.join(calls)} in its forward, as a rule off in evaluation, which MC-dropout does not "
                "reach. Use nn.Dropout, or fedbayes.nn.Dropout."
            )


def _choose(where: Where, layers: dict[str, nn.Module]) -> set[str]:
    """Names of the layers that ``where`` picks; a pattern that matches none of them is a mistake."""
    if isinstance(where, type):
        return {name for name, layer in layers.items() if isinstance(layer, where)}
    if callable(where):
        return {name for name, layer in layers.items() if where(name, layer)}
    given = where.split(",") if isinstance(where, str) else [*where] if isinstance(where, Iterable) else [where]
    if not all(isinstance(p, str) for p in given):
        raise ConfigError(
            f"where is {where!r}; it must be a glob pattern, several, a class, or a function of name and layer."
        )
    patterns = [p.strip() for p in given if p.strip()]
    if not patterns:
        return set(layers)
    for pattern in patterns:
        if layers and not any(fnmatchcase(name, pattern) for name in layers):
            raise ConfigError(f"no layer matches '{pattern}'; {_layers_are(layers)}")
    return {name for name in layers if any(fnmatchcase(name, p) for p in patterns)}


def _layers_are(names: Iterable[str], most: int = 24) -> str:
    names = list(names)
    if names == [""]:
        return "the network is itself the one layer, without a name: leave `where` empty."
    more = f" ... and {len(names) - most} more" if len(names) > most else ""
    return f"the network's layers are: {', '.join(n or '(the network itself)' for n in names[:most])}{more}"


def _nothing_to_convert(module: nn.Module, plan: Survey) -> str:
    if plan.left_out:
        return f"`where` picks no layer; {_layers_are(plan.left_out)}"
    if any(isinstance(m, (Variational, Dropout)) for m in module.modules()):
        return (
            "the network's linear and convolutional layers are Bayesian already; start from the deterministic network."
        )
    return "the network has no linear or convolutional layer that could be made Bayesian" + "".join(
        f"; {sentence.rstrip('.')}" for sentence in plan.unseen[:3]
    )


def _check_ready(module: nn.Module) -> None:
    """Refuse what cannot be converted at all, each in a sentence."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"bayesianize takes a torch.nn.Module, not {type(module).__name__}.")
    for name, part in module.named_modules():
        where = _named(name, part)
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                f"{where} is a TorchScript module, whose layers cannot be replaced; start from the original."
            )
        lazy = [
            n for table in (part._parameters, part._buffers) for n, t in table.items() if t is not None and is_lazy(t)
        ]
        if lazy:
            raise ConfigError(f"{where} has no {lazy[0]} yet; pass one batch through the network first.")
    names = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    orphans = [n for n in sorted(names) if n.endswith(RHO) and n.removesuffix(RHO) not in names]
    if orphans:
        raise ConfigError(
            f"the network has a parameter '{orphans[0]}'; names that end in '{RHO}' belong to scales: rename it."
        )


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"the network cannot be copied ({str(error).partition('. ')[0].rstrip('.')}); take out what copy.deepcopy "
            "refuses, such as locks and generators; if it has old-style reparametrisations, undo them first "
            "(torch.nn.utils.remove_weight_norm, torch.nn.utils.prune.remove)."
        ) from None


def _closed_layers(module: nn.Module) -> set[str]:
    """Layers inside modules that use their children's weights without calling them."""
    return {
        f"{name}.{inner}".lstrip(".")
        for name, parent in module.named_modules()
        if isinstance(parent, _READS_ITS_CHILDREN)
        for inner, child in parent.named_modules()
        if inner and _kind_of(child) is not None
    }


def _unseen(module: nn.Module, closed: set[str], converted: set[str]) -> Iterator[str]:
    """Sentences on weights no layer replacement can reach."""
    gaussian = {f"{n}.weight".lstrip("."): id(m.weight) for n, m in module.named_modules() if n in converted}
    told: set[str] = set()
    for name, layer in module.named_modules():
        if (_kind_of(layer) is not None and name not in closed) or isinstance(layer, (Variational, *_NORMS)):
            continue
        where = _named(name, layer)
        if name and name.rpartition(".")[0] in told:  # a part of something already told
            told.add(name)
        elif isinstance(layer, _READS_ITS_CHILDREN):
            told.add(name)
            yield f"{where} uses its weights directly; they stay points."
        else:
            weights = {n: id(p) for n, p in layer.named_parameters(recurse=False) if p.dim() > 1}
            own = [n for n, p in weights.items() if p not in gaussian.values()]
            used, read = functional.uses(layer)
            calls = [c for c in used if c in functional.NAMES]
            read = [n for n in read if any(fnmatchcase(g, f"{name}.{n}".lstrip(".")) for g in gaussian)]
            read += [g for g, mean in gaussian.items() if mean in weights.values()]  # tied
            if own or calls or read:
                yield f"{where} {_unreached(own, calls, read)}"


def _unreached(own: Sequence[str], calls: Sequence[str], read: Sequence[str]) -> str:
    """What to say of a module with weights of its own, with functional layers, or that reads converted layers' weights."""
    held = ", ".join(own)
    if read:
        through = f" (through {', '.join(calls)})" if calls else ""
        return (
            f"reads {', '.join(map(repr, read))} itself in its forward{through} instead of calling the layer; "
            f"that use sees means, never a draw.{f' Its own weights ({held}) stay points.' if own else ''}"
        )
    if calls:
        return (
            f"calls {', '.join(calls)} in its forward; weights used there stay points{f' ({held})' if own else ''}. "
            "Use nn.Linear or nn.Conv layers to make them Bayesian."
        )
    return f"has weights that are in no replaceable layer ({held}); they stay points."
