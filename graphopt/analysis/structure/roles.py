"""What each node is for, told by structure: q_proj, down_proj, attention, norm, lm_head. No name is read.

    q, k, v     products between the residual stream and what attention asks, compares and reads; qkv where merged
    o           a product of what attention makes
    down        a product of what other products of its segment make
    gate        passes an activation before it is multiplied by another product; up does not
    router      ranked by a TopK

A node that only makes the matrix of a product, or rounds its input, has the role of the product.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.folding import Folding, mixers
from graphopt.analysis.structure.folding.labels import matrix_of, rounds
from graphopt.analysis.structure.folding.trunk import constant_nodes, is_product, readers_of
from graphopt.runtime_ops import signature_of

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER_ROLE, SHARED_ROLE = "other", "shared"

_LAYOUT = frozenset({"Reshape", "Transpose", "Cast", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Concat"})
"""What carries the numbers of a product on as they are."""

_PARTS = frozenset({"Split", "Slice", "SwiGLU"})
_MATRICES = 2


class _Finder:
    def __init__(self, graph: ir.Graph, folding: Folding) -> None:
        self.graph, self.segment_of, nodes = graph, folding.cuts.segment_of, list(graph)
        self.constant = constant_nodes(nodes)
        self.readers = readers_of(nodes)
        self.products = [node for node in nodes if self._is_weighted(node)]
        self.product_set = set(self.products)
        self.mixers = mixers(nodes)
        self._mixing = {mixer.node for mixer in self.mixers}
        self.roles: dict[ir.Node, str] = {mixer.node: "attention" for mixer in self.mixers}

    def _is_weighted(self, node: ir.Node) -> bool:
        if not is_product(node) or node in self.constant:
            return False
        right = node.inputs[1] if len(node.inputs) > 1 else None
        is_constant = right is not None and (right.is_initializer() or right.producer() in self.constant)
        return is_constant or matrix_of(node, self.constant) is not None

    def trace_back(self, value: ir.Value | None, segment: int | None) -> tuple[set[ir.Node], list[ir.Node]]:
        """Return the products and attentions that ``value`` is made of, within a segment, and what is between."""
        ends: set[ir.Node] = set()
        middle: list[ir.Node] = []
        visits: set[ir.Node | None] = {None}
        waiting = [] if value is None else [value.producer()]
        while waiting:
            node = waiting.pop()
            if node in visits or node is None or self.segment_of.get(node) != segment:
                continue
            visits.add(node)
            if node in self.product_set or node in self._mixing:
                ends.add(node)
            else:
                middle.append(node)
                waiting += [operand.producer() for operand in node.inputs if operand is not None]
        return ends, middle

    def consumers(self, node: ir.Node) -> Iterator[ir.Node]:
        """Yield what reads the numbers of a product, a bias or another layout between left out."""
        waiting, visits = [*self.readers[node]], set[ir.Node]()
        while waiting:
            reader = waiting.pop()
            if reader in visits:
                continue
            visits.add(reader)
            if reader.op_type in _LAYOUT or (
                reader.op_type == "Add" and any(v and v.is_initializer() for v in reader.inputs)
            ):
                waiting += self.readers[reader]
            else:
                yield reader

    def find(self) -> dict[ir.Node, str]:
        self._attention()
        self._routers()
        for node in self.products:
            if node not in self.roles:
                ends, _ = self.trace_back(node.inputs[0], self.segment_of.get(node))
                if ends & self._mixing:
                    self.roles[node] = "o_proj"
                elif any(self.roles.get(producer) != "router" for producer in ends):
                    self.roles[node] = "down_proj"
        for node in self.products:
            if node not in self.roles:
                self.roles[node] = self._upward(node)
        return self.roles

    def _attention(self) -> None:
        letters: dict[ir.Node, set[str]] = {}
        for mixer in self.mixers:
            for letter, value in zip("qkv", (mixer.query, mixer.key, mixer.value), strict=True):
                ends, middle = self.trace_back(value, self.segment_of.get(mixer.node))
                for node in ends & self.product_set:
                    letters.setdefault(node, set()).add(letter)
                for node in middle:
                    if "Normalization" in node.op_type and not ends & self.product_set - self._before(node):
                        self.roles.setdefault(node, f"{letter}_norm")
        for node, names in letters.items():
            self.roles[node] = "".join(letter for letter in "qkv" if letter in names) + "_proj"

    def _before(self, node: ir.Node) -> set[ir.Node]:
        return self.trace_back(node.inputs[0], self.segment_of.get(node))[0]

    def _routers(self) -> None:
        for node in self.graph:
            value = node.inputs[0] if node.op_type == "TopK" else None
            if value is not None and value.dtype is not None and value.dtype.is_floating_point():
                ends, _ = self.trace_back(value, self.segment_of.get(node))
                self.roles.update(
                    {product: "router" for product in ends & self.product_set if product not in self.roles}
                )

    def _upward(self, node: ir.Node) -> str:
        """Tell gate from up, and a product of the residual stream in no MLP from both."""
        reads = list(self.consumers(node))
        if any(reader.op_type in _PARTS for reader in reads):
            return "gate_up_proj"
        gates = False
        for reader in reads:
            if reader.op_type == "Mul" and len(reader.inputs) == _MATRICES:
                sides = [self.trace_back(value, self.segment_of.get(node))[0] for value in reader.inputs]
                if any(side and node not in side for side in sides):
                    return "up_proj"
            gates = gates or self._is_gated(reader, node)
        return "gate_proj" if gates else "up_proj"

    def _is_gated(self, start: ir.Node, node: ir.Node) -> bool:
        """Return whether another product multiplies what is made of ``node`` from ``start`` on."""
        waiting, visits = [start], set[ir.Node]()
        while waiting:
            reader = waiting.pop()
            if (
                reader in visits
                or reader in self.product_set
                or self.segment_of.get(reader) != self.segment_of.get(node)
            ):
                continue
            visits.add(reader)
            if reader.op_type == "Mul":
                sides = [self.trace_back(value, self.segment_of.get(node))[0] for value in reader.inputs]
                if any(side and node not in side for side in sides):
                    return True
            waiting += self.readers[reader]
        return False


def roles_of(graph: ir.Graph, folding: Folding) -> dict[ir.Node, str]:
    """Return the role of every node of a graph: of one that no rule knows ``other``, or ``shared`` by segments."""
    finder = _Finder(graph, folding)
    roles = finder.find()
    layers = folding.layer_of()
    tables = {sizes for node in graph if _looks_up(node, finder) for sizes in [_rows(node)]}
    for node in graph:
        matrix = matrix_of(node, finder.constant)
        if node.op_type in ("Conv", "ConvTranspose"):
            roles[node] = "conv"
        elif node in finder.product_set and node not in layers:
            roles[node] = "lm_head" if matrix is not None and matrix[1] in tables else "head"
        elif _looks_up(node, finder) and node in folding.cuts.segment_of and node not in layers:
            roles[node] = "embedding"
        elif "Normalization" in node.op_type:
            roles.setdefault(node, "norm")
        elif node.op_type in ("RotaryEmbedding", "SplitRotary"):
            roles.setdefault(node, "rotary")
    for node in reversed(list(graph)):
        if node in finder.constant or rounds(node):
            readings = Counter(roles[reader] for reader in finder.readers[node] if reader in roles)
            if readings:
                roles[node] = readings.most_common(1)[0][0]
        roles.setdefault(node, OTHER_ROLE if node in folding.cuts.segment_of else SHARED_ROLE)
    return roles


def _looks_up(node: ir.Node, finder: _Finder) -> bool:
    table = node.inputs[0] if node.op_type.startswith("Gather") and node.inputs else None
    if node.op_type.startswith("Gather") and signature_of(node) is not None:
        return True  # our lookup of packed codes
    return table is not None and (table.is_initializer() or table.producer() in finder.constant)


def _rows(node: ir.Node) -> int | None:
    """Return how many rows the table of a lookup has."""
    if columns := node.attributes.get_int("columns", 0):
        return columns
    table, axis = node.inputs[0], node.attributes.get_int("gather_axis", node.attributes.get_int("axis", 0))
    size = table.shape[axis] if table is not None and table.shape and axis < len(table.shape) else None
    return size if isinstance(size, int) else None
