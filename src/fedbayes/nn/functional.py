"""What the code of a module's ``forward`` uses without calling a layer: functional layers, and other layers' weights.

Replacing layers does not reach such uses, so ``bayesianize`` must name them. They are read from the bytecode, which is
there when the source is not: starting at ``forward``, through the methods, helper functions, lambdas, partial functions
and ``autograd.Function``s it refers to, with names resolved to the objects they stand for (so an alias of ``F.conv2d``
is found, and a layer that is called ``linear`` is not mistaken for the functional). Nothing is run.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NAMES = (
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "multi_head_attention_forward",
)  # fmt: skip
"""The functional layers that are looked for."""
DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
)
"""Functional dropout, which a layer's ``training`` flag switches off."""

_FUNCTIONAL = {id(getattr(space, n)): n for n in (*NAMES, *DROPOUTS) for space in (F, torch) if hasattr(space, n)}
_FUNCTIONAL[id(torch.func.functional_call)] = "functional_call"
_TORCHS_OWN = {
    id(vars(cls)[n])
    for cls in (nn.Linear, nn.Conv1d, nn.Conv2d)
    for n in ("forward", "_conv_forward")
    if n in vars(cls)
}
"""Forwards of torch's layers: asked for by class, or bound before the layer was replaced, they draw nothing."""
_ALL_WEIGHTS = frozenset(["parameters", "named_parameters", "state_dict"])
_CALLS = frozenset(["PUSH_NULL", "PRECALL", "CALL"])
_ABOUT = frozenset([
    "dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "size", "dim", "numel", "layout",
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
])  # fmt: skip
"""What is asked of a weight without using its values."""
_NOT_USERS = frozenset([*sys.stdlib_module_names, "torch", "numpy"]) - {
    "builtins"
}  # where nameless code says it is from
_UNKNOWN: Any = object()
_NOTHING_NEW = frozenset(
    ["POP_TOP", "NOP", "RESUME", "EXTENDED_ARG", "PRECALL", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS"]
)
"""Instructions that leave no new value on the stack."""


def uses(layer: nn.Module) -> tuple[list[str], list[str]]:
    """Return what ``layer.forward`` uses: names of functional layers, and names (from ``layer``) of other layers' weights.

    The second are parameters with two or more axes of modules inside ``layer`` whose values the code reads itself,
    by name, by asking a module for all of its own, or through torch's ``nn.Linear.forward`` instead of the layer's;
    ``*.weight`` where it cannot be told of which of them (``self.layers[i].weight``).
    """
    reader = _Reader(layer)
    reader.method(layer, "forward")
    for hook in (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()):
        reader.use(hook)
    listed = set() if "functional_call" in reader.calls else reader.listed  # it runs the layer, with those
    return sorted(reader.calls), sorted(reader.weights | listed)


class _Reader:
    """Walks code and collects ``calls``, ``weights``, and those ``listed`` by asking a module for all of its own."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        inner = ((n, p) for n, p in layer.named_parameters() if "." in n and p.dim() > 1)
        self.names = {id(p): n for n, p in inner}
        self.tails = {n.rpartition(".")[2] for n in self.names.values()}
        self.calls: set[str] = set()
        self.weights: set[str] = set()
        self.listed: set[str] = set()
        self.seen: set[tuple[int, int]] = set()

    def method(self, owner: object, name: str) -> None:
        """Read a method as its owner has it, and as long as ``super`` is used in it, those it inherits."""
        if isinstance(owner, nn.Module) and name in vars(owner):
            return self.use(vars(owner)[name])
        for cls in type(owner).__mro__:
            found = None if _foreign(cls) else vars(cls).get(name)
            if found is not None:
                self.use(found, owner)
                if "super" not in getattr(getattr(found, "__code__", None), "co_names", ()):
                    return None
        return None

    def use(self, value: Any, owner: object = None) -> None:
        """Take note of a value that the code refers to; ``owner`` is what its first argument will be."""
        if id(value) in _FUNCTIONAL:
            self.calls.add(_FUNCTIONAL[id(value)])
        elif id(value) in _TORCHS_OWN:
            self.weights |= self.held(_UNKNOWN if owner is None else owner)
        elif type(value).__module__ == "torch._ops":
            name = getattr(value, "__name__", "").partition(".")[0]
            self.calls.update({name} & {*NAMES, *DROPOUTS})
        elif isinstance(value, functools.partial | functools.partialmethod):
            self.use(value.func, owner)
        elif isinstance(value, types.MethodType):
            self.use(value.__func__, value.__self__)
        elif isinstance(value, staticmethod | classmethod):
            self.use(value.__func__)
        elif isinstance(value, property):
            self.use(value.fget, owner)
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            self.use(vars(value).get("forward"))
        elif isinstance(value, types.FunctionType) and not _foreign(value):
            self.function(value, owner)

    def function(self, function: types.FunctionType, owner: object) -> None:
        """Read a function and the functions inside it."""
        code = function.__code__
        if (id(code), id(owner)) in self.seen:
            return
        self.seen.add((id(code), id(owner)))
        known: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                known[name] = cell.cell_contents
            except ValueError:  # a cell not filled yet
                continue
        if owner is not None and code.co_argcount:
            known[code.co_varnames[0]] = owner
        self.code(code, function.__globals__, known)

    def code(self, code: types.CodeType, global_names: Mapping[str, Any], known: dict[str, Any]) -> None:
        """Follow chains of names: ``F.conv2d``, ``self.head.weight``, also through local names given to them.

        Instructions are taken in the order they stand in, on a stack of the objects that are known.
        """
        stack: list[Any] = []
        imported = _UNKNOWN
        instructions = list(dis.get_instructions(code))
        for at, instruction in enumerate(instructions):
            following = instructions[at + 1] if at + 1 < len(instructions) else None
            op, name = instruction.opname, instruction.argval
            size = len(stack) + dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
            if op in _NOTHING_NEW:
                stack = _resized(stack, size)
                continue
            if op in ("STORE_FAST", "STORE_NAME", "STORE_DEREF"):
                known[name] = stack.pop() if stack else _UNKNOWN
                continue
            if op == "SWAP" and instruction.argval <= len(stack):
                stack[-1], stack[-instruction.argval] = stack[-instruction.argval], stack[-1]
                continue
            current = _UNKNOWN
            if op == "COPY" and instruction.argval <= len(stack):
                current = stack[-instruction.argval]
            elif op in ("LOAD_GLOBAL", "LOAD_NAME"):
                current = known.get(name, global_names.get(name, _UNKNOWN))
            elif op.startswith("LOAD_FAST") or op in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
                current = known.get(name, _UNKNOWN) if isinstance(name, str) else _UNKNOWN
            elif op in ("LOAD_ATTR", "LOAD_METHOD"):
                owner = stack.pop() if stack else _UNKNOWN
                current = self.attribute(owner, name)
                if owner is _UNKNOWN and name in self.tails and not _asks_about(following):
                    self.weights.add(f"*.{name}")
                if name in _ALL_WEIGHTS and owner is not self.layer and following and following.opname in _CALLS:
                    after = next((i for i in instructions[at + 1 :] if i.opname not in _CALLS), None)
                    if not _asks_about(after):  # next(self.head.parameters()).device
                        self.listed |= self.held(owner)
            elif op == "IMPORT_NAME":
                current = imported = sys.modules.get(name, _UNKNOWN)
            elif op == "IMPORT_FROM":
                current = getattr(imported, name, imported)  # `import a.b as c` asks a.b for b
            stack = [*_resized(stack, size - 1), current]
            self.use(current)
            if id(current) in self.names and not _asks_about(following):
                self.weights.add(self.names[id(current)])
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, global_names, dict(known))
            elif isinstance(constant, str) and constant in self.tails:  # getattr(self.head, "weight")
                self.weights.add(f"*.{constant}")

    def held(self, owner: Any) -> set[str]:
        """Return the names of an object's weights, with ``*`` for an object that is not known."""
        if owner is _UNKNOWN:
            return {f"*.{tail}" for tail in self.tails}
        weights = owner.parameters() if isinstance(owner, nn.Module) else ()
        return {self.names[id(p)] for p in weights if id(p) in self.names}

    def attribute(self, owner: Any, name: str) -> Any:
        """Return what ``owner.name`` stands for, as far as it can be known without running anything."""
        if isinstance(owner, types.ModuleType) or type(owner).__module__ == "torch._ops":
            return getattr(owner, name, _UNKNOWN)
        if isinstance(owner, nn.Module):
            for table in (owner._modules, owner._parameters, owner._buffers, vars(owner)):
                if name in table:
                    return table[name]
            self.method(owner, name)
        elif isinstance(owner, type):  # Base.forward(self, x)
            return inspect.getattr_static(owner, name, _UNKNOWN)
        return _UNKNOWN


def _resized(stack: list[Any], size: int) -> list[Any]:
    """The stack cut or filled up to a size (jumps are not followed, so it may be off)."""
    return [*stack[: max(size, 0)], *[_UNKNOWN] * (size - len(stack))]


def _asks_about(following: dis.Instruction | None) -> bool:
    """Whether the next instruction asks a weight for its shape or type, not its values."""
    return following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD") and following.argval in _ABOUT


def _foreign(thing: Any) -> bool:
    """Whether a class or function belongs to torch, NumPy or Python: not a user's code."""
    return (getattr(thing, "__module__", "") or "").partition(".")[0] in _NOT_USERS
