"""Rotary angles: the product of positions and frequencies that each rotary embedding turns by.

They are made as::

    p = Cast(Unsqueeze(positions));  w = Expand(Cast(frequencies [pairs]))
    angle = Transpose(MatMul(w, p))  or  Mul(p, w)
    RotaryEmbedding(x, Cos(angle), Sin(angle))

with any number of operators between that only move numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule, Skip

TABLE = Rule("rotary.table", "it looks its angles up in a table by positions, and canonicalize has not lifted it")
FOREIGN = Rule("rotary.foreign", "{op} turns queries and keys itself, and canonicalize has not lifted it")
INSIDE = Rule("rotary.inside", "it lies inside a branch or loop of the graph")
NOT_ANGLES = Rule("rotary.not-angles", "its input {input} is no {wave} of an angle, but comes from {op} {node}")
NO_FREQUENCIES = Rule(
    "rotary.no-frequencies", "its angles {node} are no product of positions with constant frequencies"
)
OTHER_PAIRS = Rule("rotary.other-pairs", "it turns {pairs} pairs, and {frequencies} has {count} numbers")
TWO_ANGLES = Rule("rotary.two-angles", "its cosine and its sine are of different angles, {cos} and {sin}")
READ_TOO = Rule("rotary.read-too", "its angles are read by {op} {node} too, which is no rotary embedding")
NOT_LIFTED = Rule(
    "rotary.not-lifted",
    "its {wave} is of an angle that no RotaryEmbedding turns by: a rotation may be spelled out there",
)
NO_ROTARY = Rule(
    "rotary.none", "the graph has no RotaryEmbedding: it has no rotary positions, or canonicalize did not find them"
)

_LAYOUT = frozenset(("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
_WAVES = {1: "Cos", 2: "Sin"}
_INDICES = 3


@dataclass(frozen=True)
class RotaryAngles:
    """Angles that one product makes of positions.

    Attributes:
        product: ``Mul`` or ``MatMul``.
        side: the input of the product that comes from the frequencies; the other one comes from positions.
        path: what lies between the frequencies and the product, in order.
        frequencies: the initializer, one number for each pair of coordinates.
        waves: the ``Cos`` and ``Sin`` nodes that read the angles.
        rotaries: the rotary embeddings that turn by them.
    """

    product: ir.Node
    side: int
    path: tuple[ir.Node, ...]
    frequencies: ir.Value
    waves: tuple[ir.Node, ...]
    rotaries: tuple[ir.Node, ...]

    @property
    def positions(self) -> ir.Value:
        """The side of the product that comes from positions."""
        value = self.product.inputs[1 - self.side]
        assert value is not None
        return value

    @property
    def radians(self) -> npt.NDArray[np.float64]:
        """The frequencies, in radians per token, [pairs]."""
        assert self.frequencies.const_value is not None
        return np.asarray(self.frequencies.const_value.numpy(), np.float64).ravel()


def rotary_angles(graph: ir.Graph) -> list[RotaryAngles] | Skip:
    """Return the angles of all rotary embeddings of ``graph``, or the first that is not understood and why."""
    products: dict[ir.Node, RotaryAngles] = {}
    for node in graph.all_nodes():
        reason = _foreign(node)
        if reason is None and node.op_type == "RotaryEmbedding":
            reason = INSIDE() if node.graph is not graph else _find(node, products)
        if reason is not None:
            return Skip(where=node.name or "?", reason=reason)
    lifted_waves = {wave for angles in products.values() for wave in angles.waves}
    for node in graph.all_nodes():
        if (
            node.op_type in _WAVES.values()
            and not node.domain
            and node not in lifted_waves
            and _is_angle(node.inputs[0])
        ):
            return Skip(where=node.name or "?", reason=NOT_LIFTED(wave=node.op_type))
    return list(products.values()) or Skip(where="graph", reason=NO_ROTARY())


def _is_angle(value: ir.Value | None) -> bool:
    """Return whether ``value`` may be positions times constant frequencies, or these twice side by side."""
    node = _producer_behind(value, "Mod")
    if node is not None and node.op_type == "Concat":
        node = _producer_behind(node.inputs[0], "Mod")
    if node is None or node.op_type not in ("Mul", "MatMul") or node.domain:
        return False
    return any(_constant(operand) is not None for operand in node.inputs)


def _find(rotary: ir.Node, products: dict[ir.Node, RotaryAngles]) -> Fact | None:
    """Add the angles of a rotary embedding to ``products``, or return why they are not understood."""
    product = _product_of(rotary)
    if isinstance(product, Fact):
        return product
    if product not in products:
        angles = _angles(product)
        if isinstance(angles, Fact):
            return angles
        products[product] = angles
    return _other_pairs(rotary, products[product])


def _foreign(node: ir.Node) -> Fact | None:
    """Return why a node of another domain turns what it reads, if it does."""
    if node.domain and (node.op_type == "RotaryEmbedding" or node.attributes.get_int("do_rotary", 0) == 1):
        return FOREIGN(op=f"{node.domain}::{node.op_type}")
    return None


def _product_of(rotary: ir.Node) -> ir.Node | Fact:
    """Return the product that makes the angles of a rotary embedding, or why there is none."""
    if len(rotary.inputs) > _INDICES and rotary.inputs[_INDICES] is not None:
        return TABLE()
    products: list[ir.Node] = []
    for index, wave in _WAVES.items():
        value = rotary.inputs[index]
        node = _producer_behind(value, "Mul")
        if value is None or node is None or node.op_type != wave or node.domain:
            op, made_by = ("no node", "") if node is None else (node.op_type, node.name)
            return NOT_ANGLES(input=value.name if value is not None else "", wave=wave, op=op, node=made_by)
        angle = node.inputs[0]
        product = _producer_behind(angle, "Mod")
        if product is None or product.op_type not in ("Mul", "MatMul") or product.domain:
            return NO_FREQUENCIES(node=None if angle is None else angle.name)
        products.append(product)
    cos, sin = products
    return cos if cos is sin else TWO_ANGLES(cos=cos.name, sin=sin.name)


def _producer_behind(value: ir.Value | None, through: str) -> ir.Node | None:
    """Return the node that makes ``value``, behind what moves numbers and an operator ``through`` with one number."""
    while value is not None:
        node = value.producer()
        if node is None:
            return None
        source = _moved_value(node, through)
        if source is None:
            return node
        value = source
    return None


def _moved_value(node: ir.Node, through: str) -> ir.Value | None:
    """Return what ``node`` only moves, or combines with one constant number by the operator ``through``."""
    if not node.domain and node.op_type in _LAYOUT:
        return node.inputs[0]
    if node.domain or node.op_type != through:
        return None
    single = [
        value is not None and value.const_value is not None and value.const_value.size == 1 for value in node.inputs
    ]
    return node.inputs[single.index(False)] if sorted(single) == [False, True] else None


def _angles(product: ir.Node) -> RotaryAngles | Fact:
    """Return the angles that ``product`` makes, if one of its sides is constant and only rotary embeddings read it."""
    sides = [_constant(value) for value in product.inputs]
    constants = [index for index, side in enumerate(sides) if side is not None]
    if len(constants) != 1 or not _is_outer(product, constants[0]):
        return NO_FREQUENCIES(node=product.name)
    side = sides[constants[0]]
    assert side is not None
    frequencies, path = side
    waves, rotaries, waiting = dict[ir.Node, None](), dict[ir.Node, None](), [product.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            return READ_TOO(op="the output", node=value.name)
        for use in value.uses():
            node = use.node
            turns = node.op_type == "RotaryEmbedding" and not node.domain and use.idx in _WAVES
            if turns:
                rotaries[node] = None
            elif node.op_type in _WAVES.values() or any(_moved_value(node, op) is value for op in ("Mul", "Mod")):
                waiting.extend(node.outputs)
                if node.op_type in _WAVES.values():
                    waves[node] = None
            else:
                return READ_TOO(op=node.op_type, node=node.name)
    return RotaryAngles(product, constants[0], path, frequencies, tuple(waves), tuple(rotaries))


def _constant(value: ir.Value | None) -> tuple[ir.Value, tuple[ir.Node, ...]] | None:
    """Return the initializer behind ``value`` and the nodes that move its numbers to there."""
    path: list[ir.Node] = []
    while value is not None:
        if value.is_initializer() and value.const_value is not None and not value.is_graph_input():
            return value, tuple(reversed(path))
        node = value.producer()
        if node is None or node.domain or node.op_type not in _LAYOUT:
            return None
        path.append(node)
        value = node.inputs[0]
    return None


def _is_outer(product: ir.Node, side: int) -> bool:
    """Return whether ``product`` multiplies each position by each frequency: a ``MatMul`` sums over one number."""
    value = product.inputs[side]
    if product.op_type == "Mul":
        return True
    dims = None if value is None or value.shape is None else list(value.shape)
    return dims is not None and len(dims) >= 2 and dims[-1 if side == 0 else -2] == 1


def _other_pairs(rotary: ir.Node, angles: RotaryAngles) -> Fact | None:
    """Return that a rotary embedding turns another number of pairs than there are frequencies, if it states one."""
    cos, count = rotary.inputs[1], len(angles.radians)
    pairs = None if cos is None or cos.shape is None else cos.shape[-1]
    if isinstance(pairs, int) and pairs != count:
        return OTHER_PAIRS(pairs=pairs, frequencies=angles.frequencies.name, count=count)
    return None
