"""Turn a user's own network Bayesian: replace its linear and convolutional layers, leave everything else alone."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import ConfigError, nearest
from .layers import LAYERS, Dropout, Variational
from .state import RHO

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Which layers: a glob pattern of names, several (a sequence, or separated by commas), or a function of name and layer."""

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_TORCH_DROPOUT: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
"""Torch's dropout layers and how many trailing axes each drops together."""
_READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # these use their layers' weights directly
_FUNCTIONAL = frozenset(
    [
        "linear",
        "bilinear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "multi_head_attention_forward",
        "scaled_dot_product_attention",
    ]
)


class NotConverted(UserWarning):
    """Weights of a network that ``bayesianize`` could not give a distribution; they stay points."""


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
    matches = _matcher(where)
    candidates = {name: layer for name, layer in module.named_modules() if _kind_of(layer) is not None}
    closed = _closed_layers(module)
    open_names = [n for n in candidates if n not in closed]
    converted = tuple(n for n in open_names if matches(n, candidates[n]))
    left_out = tuple(n for n in open_names if n not in set(converted))
    return Survey(converted, left_out, tuple(_unseen(module, closed)))


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

    ``kind``: ``flipout``, ``local``, ``sample`` (weights become means, with constant ``sigma``) or ``dropout``
    (masks after each convolution and before each linear layer, on in evaluation too; where the network has dropout
    layers of its own and ``where`` is empty, those are kept on instead and none are added). ``deterministic`` gives
    a plain copy. ``where`` chooses layers by name (empty: all). Layers used in several places stay one layer.
    Normalisation, pooling, activations and the code of ``forward`` are not touched. Weights that are used where no
    layer can be replaced (``F.conv2d`` with a parameter, attention, subclasses with their own ``forward``) raise the
    warning ``NotConverted``, one sentence each; ``survey`` lists them without converting.
    """
    if kind != "deterministic" and kind not in LAYERS:
        raise ConfigError(f"'{kind}' is no kind of network; {nearest(kind, ['deterministic', *LAYERS])}")
    module = copy.deepcopy(module)
    if kind == "deterministic":
        return module
    if kind == "dropout" and not where and _keep_dropout_on(module):
        return module
    plan = survey(module, where)
    if not plan.converted:
        names = list(plan.left_out)
        raise ConfigError(
            f"no layer matches '{where}'; the network's layers are: {', '.join(names)}"
            if names
            else "the network has no linear or convolutional layer that could be made Bayesian"
        )
    options = {"p": dropout} if kind == "dropout" else {"sigma": sigma, "bayesian_bias": bayesian_bias}
    chosen = set(plan.converted)
    layers = [layer for name, layer in module.named_modules() if name in chosen]
    for layer in layers:
        _convert(layer, kind, options)
    _share_scales(layers)
    _check_names(module)
    if warn:
        for sentence in plan.unseen:
            warnings.warn(sentence, NotConverted, stacklevel=2)
    return module


def _kind_of(layer: nn.Module) -> type[nn.Module] | None:
    """The torch layer whose forward this layer runs unchanged, or None: a subclass with its own forward is not one."""
    if isinstance(layer, Variational) or layer._parameters.get("weight") is None:  # parametrised, spectral norm ...
        return None
    for base in LAYERS["flipout"]:
        same_forward = type(layer).forward is base.forward
        same_convolution = getattr(type(layer), "_conv_forward", None) is getattr(base, "_conv_forward", None)
        if isinstance(layer, base) and same_forward and same_convolution:
            return base
    return None


def _convert(layer: nn.Module, kind: str, options: dict[str, Any]) -> None:
    """Make a layer its Bayesian sibling, in place: whoever holds the layer, in whatever list, holds the new one."""
    base = _kind_of(layer)
    assert base is not None
    layer.__class__ = LAYERS[kind][base]
    if isinstance(layer, Variational):
        layer.add_scales(options["sigma"], options["bayesian_bias"])
    else:
        layer.mask = Dropout(options["p"])


def _share_scales(layers: Sequence[nn.Module]) -> None:
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
    """Make the network's own dropout layers MC-dropout, in place; say whether there were any."""
    own = [layer for layer in module.modules() if type(layer) in _TORCH_DROPOUT]
    for layer in own:
        together = _TORCH_DROPOUT[type(layer)]
        layer.__class__ = Dropout
        layer.per_pass, layer.together = False, together  # type: ignore[assignment]
    return bool(own) or any(isinstance(layer, Dropout) for layer in module.modules())


def _matcher(where: Where) -> Callable[[str, nn.Module], bool]:
    if callable(where):
        return where
    patterns = [p.strip() for p in (where.split(",") if isinstance(where, str) else where) if p.strip()]
    return lambda name, _: not patterns or any(fnmatchcase(name, p) for p in patterns)


def _closed_layers(module: nn.Module) -> set[str]:
    """Layers inside modules that use their children's weights without calling them."""
    return {
        f"{name}.{inner}".lstrip(".")
        for name, parent in module.named_modules()
        if isinstance(parent, _READS_ITS_CHILDREN)
        for inner, child in parent.named_modules()
        if inner and _kind_of(child) is not None
    }


def _unseen(module: nn.Module, closed: set[str]) -> Iterator[str]:
    """Sentences on weights no layer replacement can reach."""
    told: set[str] = set()
    for name, layer in module.named_modules():
        if (_kind_of(layer) is not None and name not in closed) or isinstance(layer, (Variational, *_NORMS)):
            continue
        where = f"'{name}' ({type(layer).__name__})" if name else f"the network ({type(layer).__name__})"
        if "." in name and name.rpartition(".")[0] in told:  # a part of something already told
            told.add(name)
            continue
        weights = [n for n, p in layer.named_parameters(recurse=False) if p.dim() > 1]
        calls = _functional_calls(layer)
        if isinstance(layer, _READS_ITS_CHILDREN):
            told.add(name)
            yield f"{where} uses its weights directly; they stay points."
        elif weights and not calls:
            yield f"{where} has weights that are in no replaceable layer ({', '.join(weights)}); they stay points."
        elif calls:
            yield (
                f"{where} calls {', '.join(calls)} in its forward; weights used there stay points"
                + (f" ({', '.join(weights)})." if weights else ".")
                + " Use nn.Linear or nn.Conv layers to make them Bayesian."
            )


def _functional_calls(layer: nn.Module) -> list[str]:
    """Names of functional layers called in the ``forward`` (and other methods) of a user's module."""
    if type(layer).__module__.startswith("torch.nn"):
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(layer))))
    except (OSError, TypeError, SyntaxError):  # no source: built interactively
        return []
    calls = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and not _is_self_call(node.func)
    }
    return sorted(calls & _FUNCTIONAL)


def _is_self_call(function: ast.expr) -> bool:
    """``self.linear(x)`` calls a layer that happens to be called so, not the functional."""
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
