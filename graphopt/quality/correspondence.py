"""Which product of a compressed model stands for which products of its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.folding import fold
from graphopt.analysis.structure.folding.labels import matrix_of, rounds
from graphopt.analysis.structure.folding.trunk import constant_nodes
from graphopt.analysis.structure.products import expert_count
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
        output: the name of its result.
        floats: the nodes of the reference that it was made of; several where it merges them.
        front: the nodes of the reference that turn ``data`` before these read it, where the product does so itself.
        bytes: of its weights as they are stored.
        float_bytes: the same in the reference.
    """

    name: str
    role: str
    layer: int | None
    data: str
    output: str
    floats: tuple[ir.Node, ...]
    front: tuple[ir.Node, ...]
    bytes: int
    float_bytes: int

    @property
    def float_input(self) -> str:
        """The name of what the matrix multiplies in the reference, behind ``front``."""
        value = self.floats[0].inputs[0]
        return self.data if value is None or value.name is None else value.name


def products_of(reference: ir.Model, after: ir.Model) -> tuple[list[Product], list[str]]:
    """Return the products of ``after`` that have partners in ``reference``, and the names of the others."""
    folding = fold(after.graph)
    roles, layers, constant = roles_of(after.graph, folding), folding.layer_of(), constant_nodes(after.graph)
    partners = _Partners(reference)
    products, names_without_partner = [], []
    for node in after.graph:
        matrix = matrix_of(node, constant)
        if matrix is None or node in constant:
            continue
        if expert_count(node) is not None:  # the reference multiplies by each expert elsewhere
            names_without_partner.append(node.name or "?")
            continue
        data = _input_before_rounding(node)
        floats = [] if data is None else partners.find(node.name, data, matrix)
        front = None if data is None or not floats else _front(floats[0], data.name or "", partners.constant)
        is_plain = all(partner.op_type == "MatMul" for partner in floats)
        if data is None or front is None or not is_plain or node.outputs[0].dtype not in (None, ir.DataType.FLOAT):
            names_without_partner.append(node.name or "?")
            continue
        products.append(
            Product(
                name=node.name or "",
                role=roles[node],
                layer=layers.get(node),
                data=data.name or "",
                output=node.outputs[0].name or "",
                floats=tuple(floats),
                front=tuple(front),
                bytes=_bytes(constants_of(node, constant)),
                float_bytes=_bytes(partner.inputs[1] for partner in floats),
            )
        )
    return products, names_without_partner


def _input_before_rounding(node: ir.Node) -> ir.Value | None:
    """Return what a product multiplies, in front of the nodes that round it."""
    data = node.inputs[0]
    while data is not None and (producer := data.producer()) is not None and rounds(producer):
        data = producer.inputs[0]
    return data


class _Partners:
    """The products of a reference, by their names and by what they read."""

    def __init__(self, reference: ir.Model) -> None:
        self.constant = constant_nodes(reference.graph)
        self._by_name: dict[str | None, ir.Node] = {}
        self._by_input: dict[str | None, list[ir.Node]] = {}
        for node in reference.graph:
            if matrix_of(node, self.constant) is not None and weight_of(node, 1) is not None:
                self._by_name[node.name] = node
                self._by_input.setdefault(node.inputs[0].name if node.inputs[0] else None, []).append(node)

    def find(self, name: str | None, data: ir.Value, matrix: tuple[int, int]) -> list[ir.Node]:
        """Return the product of a name and of the same size, or those of ``data`` that are as wide together."""
        partner = self._by_name.get(name)
        if partner is not None and matrix_of(partner, self.constant) == matrix:
            return [partner]
        nodes = self._by_input.get(data.name, [])
        sizes = [matrix_of(node, self.constant) for node in nodes]
        return nodes if sum(size[1] for size in sizes if size is not None) == matrix[1] else []


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
