"""Where a graph attends: fused operators, and attention that is spelled out as products around a softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Iterable

_FUSED_INPUTS: dict[tuple[str, str], tuple[int, int, int]] = {
    ("", "Attention"): (0, 1, 2),
    (DOMAIN, "KVAttention"): (0, 1, 2),
    ("com.microsoft", "GroupQueryAttention"): (0, 1, 2),
    ("com.microsoft", "MultiHeadAttention"): (0, 1, 2),
    ("com.microsoft", "PagedAttention"): (0, 1, 2),
    ("com.microsoft", "Attention"): (0, 0, 0),
}

_PASSING = frozenset({"Cast", "Where", "Reshape", "Transpose", "Mul", "Div", "Add", "Dropout", "Identity", "Tanh"})
"""What may stand between scores, their softmax, and the product with the values."""


@dataclass(frozen=True)
class Mixer:
    """A place where tokens read others.

    Attributes:
        node: what makes the result.
        query: what is asked.
        key: what it is compared with.
        value: what is read.
    """

    node: ir.Node
    query: ir.Value | None
    key: ir.Value | None
    value: ir.Value | None


def mixers(nodes: Iterable[ir.Node]) -> list[Mixer]:
    """Return the places where tokens read others, in order."""
    places_of_attention = []
    for node in nodes:
        indices = _FUSED_INPUTS.get((node.domain, node.op_type))
        if indices is not None:
            places_of_attention.append(
                Mixer(node, *(node.inputs[p] if p < len(node.inputs) else None for p in indices))
            )
        elif _multiplies(node) and (softmax := _nearest(node.inputs[0], "Softmax")) is not None:
            scores = _nearest(softmax.inputs[0], "MatMul")
            if scores is not None and _multiplies(scores):
                places_of_attention.append(Mixer(node, scores.inputs[0], scores.inputs[1], node.inputs[1]))
    return places_of_attention


def _multiplies(node: ir.Node) -> bool:
    """Return whether a node multiplies two matrices that are computed."""
    return node.op_type == "MatMul" and not any(value is None or value.is_initializer() for value in node.inputs)


def _nearest(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the nearest node of a type that ``value`` is made by, with nothing but elementwise nodes between."""
    waiting, visits = [value], set[ir.Node]()
    while waiting:
        node = None if (operand := waiting.pop(0)) is None else operand.producer()
        if node is None or node in visits:
            continue
        visits.add(node)
        if node.op_type == op_type:
            return node
        if node.op_type in _PASSING:
            waiting += node.inputs
    return None
