"""What bodies that are written node by node share: constants, attributes of the node, branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def ints(tape: ir.tape.Tape, *numbers: int) -> ir.Value:
    """Return a constant int64 [len(numbers)]."""
    return tape.op("Constant", [], {"value_ints": numbers})


def number_of(tape: ir.tape.Tape, attribute: str) -> ir.Value:
    """Return the node's integer attribute as int64 [1]."""
    scalar = tape.op("Constant", [], {"value_int": ir.RefAttr("value_int", attribute, ir.AttributeType.INT)})
    return tape.op("Reshape", [scalar, ints(tape, 1)])


def choice(
    tape: ir.tape.Tape, attribute: str, kind: ir.AttributeType, options: Sequence[str] | Sequence[int]
) -> ir.Value:
    """Return the place of the node's attribute among ``options`` as int64 [1]; another value is an error of a Gather.

    ``NonZero`` would say it at once, but onnxruntime does not fold it.
    """
    is_text = kind == ir.AttributeType.STRING
    single_kind, list_kind = ("value_string", "value_strings") if is_text else ("value_int", "value_ints")
    value = tape.op("Constant", [], {single_kind: ir.RefAttr(single_kind, attribute, kind)})
    matches = tape.op("Equal", [tape.op("Constant", [], {list_kind: options}), value])
    countdown = ints(tape, *range(len(options), 0, -1))
    ranks = tape.op("Mul", [tape.op("Cast", [matches], {"to": ir.DataType.INT64}), countdown])
    index = tape.op("Sub", [ints(tape, len(options)), tape.op("ReduceSum", [ranks], {"keepdims": 1})])
    return tape.op("Gather", [ints(tape, *range(len(options))), index])


def branch(name: str, write: Callable[[ir.tape.Tape], ir.Value]) -> ir.Graph:
    """Return a subgraph without inputs; its values are named apart, as names of the outer graph are not seen here."""
    tape = ir.tape.Tape()
    output = write(tape)
    for index, node in enumerate(tape.nodes):
        node.outputs[0].name = f"{name}_{index}"
    return ir.Graph([], [output], nodes=tape.nodes, name=name)


def full_mask(tape: ir.tape.Tape, mask: ir.Value, tokens: ir.Value) -> ir.Value:
    """Return which of the tokens [B, T, ...] are read, bool [B, T], of a mask int64 [B, T], or [B, 0] for all."""
    size = tape.op("Mul", [tape.op("Shape", [mask]), ints(tape, 0, 1)])
    missing = tape.op("Sub", [tape.op("Shape", [tokens], {"end": 2}), size])
    full_of_ones = tape.op("Expand", [tape.op("Constant", [], {"value_int": 1}), missing])
    return tape.op("Cast", [tape.op("Concat", [mask, full_of_ones], {"axis": 1})], {"to": ir.DataType.BOOL})
