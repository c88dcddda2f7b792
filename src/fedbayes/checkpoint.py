"""Nested state to flat tensors and JSON, and back: what a checkpoint file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .posterior import Posterior


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested state into named tensors and a JSON-able rest that says where they belong."""
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            tensors[path] = node
            return {"__tensor__": path}
        if isinstance(node, Posterior):
            gaussians = {n: [g.mean, g.variance] for n, g in node.gaussians.items()}
            return {"__posterior__": walk({"g": gaussians, "p": dict(node.points)}, path)}
        if isinstance(node, Mapping):
            return {"__items__": [[k, walk(v, f"{path}/{k}")] for k, v in node.items()]}
        if isinstance(node, (list, tuple)):
            return [walk(v, f"{path}/{i}") for i, v in enumerate(node)]
        return node

    rest = walk(value, "")
    return tensors, rest


def unpack(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Put back together what ``pack`` split."""
    if isinstance(rest, list):
        return [unpack(tensors, v) for v in rest]
    if not isinstance(rest, Mapping):
        return rest
    if "__tensor__" in rest:
        return tensors[rest["__tensor__"]]
    if "__posterior__" in rest:
        inner = unpack(tensors, rest["__posterior__"])
        return Posterior({n: tuple(g) for n, g in inner["g"].items()}, inner["p"])  # type: ignore[arg-type]
    return {(tuple(k) if isinstance(k, list) else k): unpack(tensors, v) for k, v in rest["__items__"]}
