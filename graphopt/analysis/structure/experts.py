"""Where the experts of a mixture are multiplied: rows sorted by expert, a part of them for each, one behind the other.

    end_0, end_1, ... = Split(ends)                                        rows of experts up to each, int64
    y = Concat(MatMul(Gather(x, Range(0, end_0)), W_0), MatMul(Gather(x, Range(end_0, end_1)), W_1), ...; axis 0)

So exporters write mixtures (Shazeer et al. 2017). Whatever W is at the moment, a weight or codes, and whatever is done
to rows on their way, each for itself: row r of y is row r of x times the W of the first expert whose end is beyond r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.graph.weights import weight_of
from graphopt.runtime_ops import DOMAIN, signature_of
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS

if TYPE_CHECKING:
    import onnx_ir as ir

_ROW_BY_ROW = (HADAMARD.name, ROUND_ACTIVATIONS.name)
"""Operators of ours that may stand row_nodes the rows of an expert and its product."""


@dataclass(frozen=True)
class Mixture:
    """Products of rows that are sorted by expert.

    Attributes:
        rows: x [n, K].
        products: of each expert in order.
        steps: for each expert the nodes row_nodes its rows and its product, in order.
        ends: the end of each expert's rows, int64 [].
        concat: the node that puts the products together, y [n, N].
    """

    rows: ir.Value
    products: tuple[ir.Node, ...]
    steps: tuple[tuple[ir.Node, ...], ...]
    ends: tuple[ir.Value, ...]
    concat: ir.Node

    @property
    def bounds(self) -> ir.Value | None:
        """The vector [experts] that the ends are the numbers of, in order; ``None`` where they are not."""
        sources = [_element_of(end) for end in self.ends]
        first = sources[0]
        if first is None or sources != [(first[0], index) for index in range(len(sources))]:
            return None
        vector = first[0]
        return vector if vector.shape is not None and list(vector.shape) == [len(sources)] else None


def mixtures_of(graph: ir.Graph) -> list[Mixture]:
    """Return every place where rows that are sorted by expert are multiplied, in order."""
    return [mixture for node in graph if (mixture := _mixture(node)) is not None]


def expert_products(graph: ir.Graph) -> set[ir.Node]:
    """Return the products of all experts."""
    return {product for mixture in mixtures_of(graph) for product in mixture.products}


def _mixture(concat: ir.Node) -> Mixture | None:
    if (
        concat.op_type != "Concat"
        or concat.domain
        or concat.attributes.get_int("axis", 0) != 0
        or len(concat.inputs) < 2
    ):
        return None
    products: list[ir.Node] = []
    steps: list[tuple[ir.Node, ...]] = []
    ends: list[ir.Value] = []
    source, end_before = None, None
    for value in concat.inputs:
        product = None if value is None else value.producer()
        if value is None or product is None or not _is_product(product) or not _feeds_only(value, concat):
            return None
        row_nodes, gather = _rows_of(product)
        part = None if gather is None else _range_of(gather)
        if gather is None or part is None:
            return None
        rows, (start, end) = gather.inputs[0], part
        if not products:
            source = rows
            if not _is_zero(start):
                return None
        elif rows is not source or start is not end_before:
            return None
        end_before = end
        products.append(product)
        steps.append(row_nodes)
        ends.append(end)
    if source is None or source.shape is None or len(source.shape) != 2:
        return None
    return Mixture(source, tuple(products), tuple(steps), tuple(ends), concat)


def _is_product(node: ir.Node) -> bool:
    signature = signature_of(node)
    return (node.op_type, node.domain) == ("MatMul", "") or (signature is not None and signature.is_product)


def _feeds_only(value: ir.Value, reader: ir.Node) -> bool:
    return not value.is_graph_output() and {use.node for use in value.uses()} == {reader} and len(value.uses()) == 1


def _rows_of(product: ir.Node) -> tuple[tuple[ir.Node, ...], ir.Node | None]:
    """Return what is done to the rows of an expert in front of its product, in order, and the node that takes them."""
    row_nodes: list[ir.Node] = []
    value = product.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Gather" and not node.domain and node.attributes.get_int("axis", 0) == 0:
            return tuple(reversed(row_nodes)), node
        if node.domain != DOMAIN or node.op_type not in _ROW_BY_ROW:
            break
        row_nodes.append(node)
        value = node.inputs[0]
    return (), None


def _range_of(gather: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return the first row that ``gather`` takes and the end behind the last, where it takes rows that follow."""
    indices = gather.inputs[1]
    node = None if indices is None else indices.producer()
    if node is None or node.op_type != "Range" or node.domain or len(node.inputs) != 3:
        return None
    start, end, step = node.inputs
    constant = None if step is None else weight_of(node, 2)
    if constant is None or constant.const_value is None or constant.const_value.numpy().tolist() != 1:
        return None
    return None if start is None or end is None else (start, end)


def _is_zero(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.numpy().size == 1 and not tensor.numpy().any()


def _element_of(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Return the vector and the place in it that a number is taken from: ``Squeeze(Split(vector)[place])``."""
    squeeze = value.producer()
    part = None if squeeze is None or squeeze.op_type not in ("Squeeze", "Reshape") else squeeze.inputs[0]
    split = None if part is None else part.producer()
    if part is None or split is None or split.op_type != "Split" or split.domain:
        return None
    if split.attributes.get_int("axis", 0) != 0 or part.shape is None or list(part.shape) != [1]:
        return None
    vector = split.inputs[0]
    return None if vector is None else (vector, list(split.outputs).index(part))
