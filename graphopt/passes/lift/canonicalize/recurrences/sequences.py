"""What a step computes of its tokens alone, for all tokens at once: the same nodes, with an axis of tokens in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import shared_constant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.graph.editing.builders import Inserter
    from graphopt.passes.lift.canonicalize.recurrences.steps import Steps

NOT_TOGETHER = Rule(
    "canonicalize.recurrence-not-together", "its step computes {tensor} by {op}, which takes token by token"
)

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64

_OF_ONE = frozenset(
    (
        "Abs",
        "Cast",
        "Elu",
        "Exp",
        "Identity",
        "LeakyRelu",
        "Log",
        "Neg",
        "Reciprocal",
        "Relu",
        "Sigmoid",
        "Softplus",
        "Sqrt",
        "Tanh",
    )
)
_OF_SEVERAL = frozenset(("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"))
_OF_AXES = frozenset(("Squeeze", "Unsqueeze", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceSum", "ReduceSumSquare"))


class Sequences:
    """Makes, in front of a recurrence, tensors of all tokens [T, ..] of the values of its step.

    Args:
        steps: the recurrence.
        insert: makes nodes; ``None`` where only :meth:`why_not` is asked.
        ranks: of the values of a step.
    """

    def __init__(self, steps: Steps, insert: Inserter | None, ranks: Mapping[ir.Value, int]) -> None:
        self._ranks = ranks
        self._constants = frozenset(steps.constants)
        self._sequences: dict[ir.Value, ir.Value] = {}
        self._tokens = frozenset(tokens.inside for tokens in steps.tokens)
        if insert is None:
            return
        self._insert = insert
        for tokens in steps.tokens:
            rank = ranks[tokens.inside] + 1
            order = [tokens.axis, *(axis for axis in range(rank) if axis != tokens.axis)]
            outside = tokens.outside
            self._sequences[tokens.inside] = (
                outside if tokens.axis == 0 else self._op("Transpose", [outside], perm=order)
            )

    def sequence_of(self, value: ir.Value) -> ir.Value:
        """Return a value of all tokens; :meth:`why_not` must have no reason against it."""
        if value in self._constants and value not in self._sequences:
            self._sequences[value] = self._outside(value)
        if value not in self._sequences:
            node = value.producer()
            assert node is not None
            operands = [None if operand is None else self.sequence_of(operand) for operand in node.inputs]
            self._sequences[value] = self._clone(node, operands)
        return self._sequences[value]

    def has_tokens(self, value: ir.Value) -> bool:
        """Return whether what :meth:`sequence_of` returns has an axis of tokens."""
        if value in self._constants:
            return False
        node = value.producer()
        if value in self._tokens or node is None:
            return True
        return any(operand is not None and self.has_tokens(operand) for operand in node.inputs)

    def why_not(self, value: ir.Value) -> Fact | None:
        """Return why a value cannot be computed for all tokens at once, or ``None``."""
        node = value.producer()
        if value in self._constants or value in self._tokens or node is None:
            return None
        if not self._is_known(node):
            return NOT_TOGETHER(tensor=value.name, op=node.op_type)
        reasons = (self.why_not(operand) for operand in node.inputs if operand is not None)
        return next((reason for reason in reasons if reason is not None), None)

    def _is_known(self, node: ir.Node) -> bool:
        if node.domain:
            return False
        if node.op_type in ("Transpose", *_OF_ONE, *_OF_SEVERAL):
            return True
        has_constant = len(node.inputs) > 1 and node.inputs[1] is not None and node.inputs[1] in self._constants
        return has_constant and (node.op_type in _OF_AXES or node.op_type == "Reshape")

    def _clone(self, node: ir.Node, operands: list[ir.Value | None]) -> ir.Value:
        """Return what a node makes of operands that have an axis of tokens in front, where they are no constants."""
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        first = node.inputs[0]
        assert first is not None
        if not any(operand is not None and self.has_tokens(operand) for operand in node.inputs):
            return self._op(node.op_type, operands, **attributes)
        if node.op_type in _OF_SEVERAL:
            rank = max(self.rank(operand) for operand in node.inputs if operand is not None)
            operands = [
                new
                if old is None or new is None or not self.has_tokens(old)
                else self.align(new, rank - self.rank(old))
                for old, new in zip(node.inputs, operands, strict=True)
            ]
        elif node.op_type == "Transpose":
            perm = attributes.get("perm") or range(self.rank(first))[::-1]
            attributes["perm"] = [0, *(axis + 1 for axis in perm)]
        elif node.op_type in (*_OF_AXES, "Reshape"):
            assert node.inputs[1] is not None
            numbers = ir.convenience.get_const_tensor(node.inputs[1])
            assert numbers is not None
            old_numbers = numbers.numpy().reshape(-1).tolist()
            is_shape = node.op_type == "Reshape"
            axes = [axis + 1 if axis >= 0 else axis for axis in old_numbers]
            operands[1] = self._insert.integers([0, *old_numbers] if is_shape else axes)
        return self._op(node.op_type, operands, **attributes)

    def align(self, new: ir.Value, missing: int) -> ir.Value:
        """Return a tensor of all tokens with so many axes of one element more, behind that of the tokens."""
        if missing <= 0:
            return new
        return self._op("Unsqueeze", [new, self._insert.integers(list(range(1, missing + 1)))])

    def _outside(self, constant: ir.Value) -> ir.Value:
        """Return a constant of a step as one of the graph."""
        if constant.name and self._insert.graph.initializers.get(constant.name) is constant:
            return constant
        assert constant.const_value is not None
        array = constant.const_value.numpy()
        name = f"{self._insert.nodes[0].name if self._insert.nodes else 'recurrence'}.{constant.name}"
        return shared_constant(self._insert.graph, name, array)

    def rank(self, value: ir.Value) -> int:
        """Return how many axes a value of a step has."""
        if value in self._ranks:
            return self._ranks[value]
        assert value.const_value is not None
        return len(value.const_value.shape)

    def _op(self, op_type: str, inputs: list[ir.Value | None], **attributes: object) -> ir.Value:
        number = len(self._insert.nodes)
        return self._insert.op(op_type, inputs, None, _FLOAT, f"{op_type}.{number}", **attributes)
