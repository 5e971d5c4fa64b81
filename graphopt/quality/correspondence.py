"""Which product of a compressed model stands for which products of its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.folding import fold
from graphopt.analysis.structure.folding.labels import matrix_of, rounds
from graphopt.analysis.structure.folding.trunk import constant_nodes
from graphopt.analysis.structure.roles import roles_of
from graphopt.analysis.structure.token_cost import constants_of
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphopt.ort.session import Array

_FRONT = 2
"""Nodes in front of a product that a kernel may have taken in."""


@dataclass(frozen=True)
class Product:
    """A product of AFTER with what it was in floats.

    Attributes:
        name: of the node.
        role: what it is for.
        layer: where; ``None`` outside of layers.
        data: the name of what it multiplies, before any rounding.
        made: the name of its result.
        floats: the nodes of the reference that it was made of; several where it merges them.
        front: the nodes of the reference that turn ``data`` before these read it, where the product does so itself.
        bytes: of its weights as they are stored.
        float_bytes: the same in the reference.
    """

    name: str
    role: str
    layer: int | None
    data: str
    made: str
    floats: tuple[ir.Node, ...]
    front: tuple[ir.Node, ...]
    bytes: int
    float_bytes: int

    @property
    def read(self) -> str:
        """The name of what the matrix multiplies in the reference, behind ``front``."""
        value = self.floats[0].inputs[0]
        return self.data if value is None or value.name is None else value.name


def products_of(reference: ir.Model, after: ir.Model) -> tuple[list[Product], list[str]]:
    """Return the products of ``after`` that have partners in ``reference``, and the names of the others."""
    folding = fold(after.graph)
    roles, layers, constant = roles_of(after.graph, folding), folding.layer_of(), constant_nodes(after.graph)
    exact_constant = constant_nodes(reference.graph)
    exact = [n for n in reference.graph if matrix_of(n, exact_constant) is not None and weight_of(n, 1) is not None]
    by_name = {node.name: node for node in exact}
    by_value: dict[str | None, list[ir.Node]] = {}
    for node in exact:
        by_value.setdefault(node.inputs[0].name if node.inputs[0] else None, []).append(node)
    products, unmatched = [], []
    for node in after.graph:
        matrix = matrix_of(node, constant)
        if matrix is None or node in constant:
            continue
        data = node.inputs[0]
        while data is not None and (maker := data.producer()) is not None and rounds(maker):
            data = maker.inputs[0]
        partner = by_name.get(node.name)
        is_partner = partner is not None and matrix_of(partner, exact_constant) == matrix
        floats = [partner] if is_partner and partner is not None else []
        parts = [] if floats or data is None else by_value.get(data.name, [])
        sizes = [matrix_of(node_, exact_constant) for node_ in parts]
        if parts and sum(size[1] for size in sizes if size is not None) == matrix[1]:
            floats = parts
        plain = all(node_.op_type == "MatMul" for node_ in floats)
        front = _front(floats[0], data.name or "", exact_constant) if data is not None and floats else None
        if data is None or front is None or not plain or node.outputs[0].dtype not in (None, ir.DataType.FLOAT):
            unmatched.append(node.name or "?")
            continue
        products.append(
            Product(
                name=node.name or "",
                role=roles[node],
                layer=layers.get(node),
                data=data.name or "",
                made=node.outputs[0].name or "",
                floats=tuple(floats),
                front=tuple(front),
                bytes=_bytes(constants_of(node, constant)),
                float_bytes=_bytes(node_.inputs[1] for node_ in floats),
            )
        )
    return products, unmatched


def _bytes(values: Iterable[ir.Value | None]) -> int:
    return sum(value.const_value.nbytes for value in values if value is not None and value.const_value is not None)


def matrix_in_floats(product: Product) -> Array:
    """Return the matrix of a product as the reference has it, [K, N]; those of merged products side by side."""
    parts = [node.inputs[1].const_value for node in product.floats if node.inputs[1] is not None]
    arrays = [part.numpy() for part in parts if part is not None]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, 1)


def _front(product: ir.Node, name: str, constant: set[ir.Node]) -> list[ir.Node] | None:
    """Return the nodes that turn the value of a name into what a product reads; ``None`` where another leads to it."""
    nodes: list[ir.Node] = []
    value = product.inputs[0]
    while value is not None and value.name != name:
        maker = value.producer()
        if maker is None or maker in constant or len(nodes) == _FRONT:
            return None
        if any(operand is not None and not operand.is_initializer() for operand in maker.inputs[1:]):
            return None
        nodes.insert(0, maker)
        value = maker.inputs[0]
    return None if value is None else nodes
