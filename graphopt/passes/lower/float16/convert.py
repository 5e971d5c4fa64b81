"""Constants, and the types of what is computed from them, in float16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.structure.ports import past_port
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.weights import Cast, WeightTensor, expression_of, new_weight
from graphopt.passes.lower.float16.wide import LARGEST, NARROW, STAYS_FLOAT32, WIDE, follows
from graphopt.runtime_ops import DOMAIN, schema_of

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

Weight = npt.NDArray[Any]

# What a number that only has to be low, as in masks, may be read by.
_COMPARISONS = ("Where", "Add", "Sub", "Max", "Min", "Clip")

OUT_OF_RANGE = Rule("float16.beyond", "{tensor} has a number of {reach:.3g}, beyond float16")
CUT_OFF = Rule("float16.cut-off", "{reach:.3g} becomes {largest:g}, the largest float16")


def convert_weights(graph: ir.Graph, wide: dict[ir.Node, Fact], ledger: Ledger) -> None:
    """Give readers in float16 a float16 copy of each constant; where it has no such copy, they join ``wide``."""
    tensors = []
    for value in graph.initializers.values():
        tensor = value.const_value
        if value.dtype != WIDE or tensor is None or not any(follows(*use, wide) for use in value.uses()):
            continue
        numbers = np.abs(tensor.numpy())
        reach = float(np.max(numbers, initial=0, where=np.isfinite(numbers)))
        tensors.append((value, tensor, reach))
        hides = tensor.size == 1 and all(use.node.op_type in _COMPARISONS for use in value.uses())
        if reach > LARGEST and not hides:
            for node, _ in value.uses():
                if node not in wide:
                    wide[node] = OUT_OF_RANGE(tensor=value.name, reach=reach)
                    ledger.skipped(node, STAYS_FLOAT32(why=wide[node]))
    for value, tensor, reach in tensors:
        uses = list(value.uses())
        followers = [use for use in uses if follows(*use, wide)]
        if not followers:
            continue
        copy = value
        if len(followers) < len(uses):
            copy = new_weight(graph, f"{value.name}.float16", tensor)
            for node, index in followers:
                node.replace_input_with(index, copy)
        copy.const_value, copy.type = _to_float16(tensor, copy.name), ir.TensorType(NARROW)
        if reach > LARGEST:
            ledger.changed(copy, CUT_OFF(reach=reach, largest=LARGEST), [value])


def _to_float16(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    return WeightTensor(Cast(expression_of(tensor), NARROW, saturate=True), name)


def narrow_values(graph: ir.Graph, wide: dict[ir.Node, Fact]) -> set[ir.Value]:
    """Return what becomes float16: results of nodes that are not wide, and caches that grow, which they read."""
    narrow = {
        value
        for node in graph
        for index, value in enumerate(node.outputs)
        if value.dtype == WIDE and node not in wide and _is_activations(node, index)
    }
    for value in graph.inputs:
        grows = past_port(value) is not None and value.dtype == WIDE
        if grows and all(follows(*use, wide) for use in value.uses()):
            narrow.add(value)
    return narrow


def _is_activations(node: ir.Node, index: int) -> bool:
    """Return whether output ``index`` has the type of the activations; state tensors of ours keep theirs."""
    if node.domain != DOMAIN:
        return True
    schema = schema_of(node)
    return schema.follows_data(schema.outputs[index])


def retype(node: ir.Node) -> None:
    """Let a node say float16 where an attribute says what type it makes."""
    for name in ("to", "dtype", "output_dtype"):
        if node.attributes.get_int(name, 0) == WIDE:
            node.attributes[name] = ir.AttrInt64(name, NARROW)
    if node.op_type in ("Constant", "ConstantOfShape") and "value" in node.attributes:
        tensor = node.attributes["value"].as_tensor()
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_to_float16(tensor, tensor.name).numpy()))
