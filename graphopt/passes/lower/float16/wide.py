"""Which nodes keep float32, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.analysis.structure.contrib import MICROSOFT
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.runtime_ops import DOMAIN, port, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDE, NARROW = ir.DataType.FLOAT, ir.DataType.FLOAT16

LARGEST = float(np.finfo(np.float16).max)
_SMALLEST = float(np.finfo(np.float16).tiny)

# Their standard has float16, and onnxruntime's kernels for the CPU fail in it when they run.
_NOT_IN_ONNXRUNTIME = ("ScatterElements", "ScatterND")

# Operators of onnxruntime's own, all of whose floats have one type, which may be float16.
_OF_MICROSOFT = ((MICROSOFT, "SkipSimplifiedLayerNormalization"), (MICROSOFT, "SkipLayerNormalization"))

STAYS_FLOAT32 = Rule("float16.stays-float32", "stays float32: {why}")
OF_POSITIONS = Rule("float16.of-positions", "sines and cosines of positions are made of it")
FLOAT32_ALONE = Rule("float16.float32-alone", "{op} takes float32 alone")
OTHER_DOMAIN = Rule("float16.other-domain", "it is an operator of {domain}, whose types are not known here")
WIDENS = Rule("float16.widens", "it widens what was float16 before")
SCALES_BEYOND = Rule("float16.scales-beyond", "its scales are not known to have float16's range")
NOT_ON_CPU = Rule("float16.not-on-cpu", "onnxruntime's {op} has no float16 on a CPU")
NUMBER_IN_ATTRIBUTE = Rule("float16.number-in-attribute", "a number in an attribute is float32")
NO_FLOAT16 = Rule("float16.no-float16", "{op} has no float16 in its place")


def wide_nodes(graph: ir.Graph, opset: int) -> dict[ir.Node, Fact]:
    """Return the nodes that keep float32, each with the reason."""
    wide: dict[ir.Node, Fact] = {}
    waiting = [node for node in graph if node.op_type in ("Sin", "Cos")]
    while waiting:
        node = waiting.pop()
        if node not in wide:
            wide[node] = OF_POSITIONS()
            made_by = (value.producer() for value in node.inputs if value is not None)
            waiting += [producer for producer in made_by if producer is not None]
    for node in graph:
        reason = _refusal(node, opset)
        if reason is not None:
            wide.setdefault(node, reason)
            if node.op_type == "DequantizeLinear" and (rows := _rows_of_scales(node)) is not None:
                wide.setdefault(rows, reason)
    return wide


def _refusal(node: ir.Node, opset: int) -> Fact | None:
    """Return why a node cannot compute in float16, or ``None``."""
    if node.domain == DOMAIN:
        data = schema_of(node).data
        return None if data is not None and NARROW in data.types else FLOAT32_ALONE(op=node.op_type)
    if (node.domain, node.op_type) in _OF_MICROSOFT:
        return None
    if node.domain:
        return OTHER_DOMAIN(domain=node.domain)
    if node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == NARROW:
        return WIDENS()
    if node.op_type == "DequantizeLinear":
        return None if _scales_fit(node) else SCALES_BEYOND()
    if node.op_type in _NOT_IN_ONNXRUNTIME:
        return NOT_ON_CPU(op=node.op_type)
    if node.op_type == "Constant" and "value" not in node.attributes:
        return NUMBER_IN_ATTRIBUTE()
    schema = onnx.defs.get_schema(node.op_type, opset)
    allowed_types = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            if value is not None and value.dtype == WIDE:
                kind = formal[min(index, len(formal) - 1)].type_str
                if "tensor(float16)" not in allowed_types.get(kind, [kind]):
                    return NO_FLOAT16(op=node.op_type)
    return None


def _scales_fit(dequantize: ir.Node) -> bool:
    """Return whether float16 has all scales that a node may read, of which none becomes 0, subnormal or infinite."""
    rows = _rows_of_scales(dequantize)
    scales = port(dequantize, "x_scale") if rows is None else rows.inputs[0]
    if scales is None or not scales.is_initializer() or scales.const_value is None:
        return False
    numbers = np.abs(scales.const_value.numpy())
    return bool(np.all((numbers == 0) | ((numbers >= _SMALLEST) & (numbers <= LARGEST))))


def _rows_of_scales(dequantize: ir.Node) -> ir.Node | None:
    """Return what takes the scales of an embedding, those of the tokens that are asked for; else ``None``."""
    scales = port(dequantize, "x_scale")
    made_by = None if scales is None else scales.producer()
    return made_by if made_by is not None and made_by.op_type == "Gather" else None


def follows(node: ir.Node, index: int, wide: Iterable[ir.Node]) -> bool:
    """Return whether input ``index`` of ``node`` is to be float16."""
    if node in wide:
        return False
    if node.domain != DOMAIN:
        return True
    schema = schema_of(node)
    return schema.follows_data(schema.input(index))
