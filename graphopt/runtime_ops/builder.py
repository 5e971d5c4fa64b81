"""Bodies that are written operator by operator with onnxscript's builder, which is heavy to import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder, build_function

from graphopt.runtime_ops.schema import DOMAIN, Schema

Write = Callable[[OpBuilder, Mapping[str, ir.Value]], Sequence[ir.Value]]


def build_body(schema: Schema, overload: str, opset: int, write: Write) -> ir.Function:
    """Return a body of an operator.

    Args:
        schema: of the operator.
        overload: which of its bodies it is.
        opset: the ONNX opset that it is written in.
        write: writes it: takes the builder and the inputs by name, returns the outputs in order. It gives the builder
            inputs by place and attributes by name.
    """

    def trace(op: OpBuilder, *inputs: ir.Value) -> Sequence[ir.Value]:
        outputs = write(_Builder(op.builder.graph).op, dict(zip(schema.input_names, inputs, strict=True)))
        for name, value in zip(schema.output_names, outputs, strict=True):
            value.name = name
        return outputs

    inputs = [ir.Value(name=name) for name in schema.input_names]
    function = build_function(trace, inputs, domain=DOMAIN, name=schema.name, opset_imports={"": opset})
    return ir.Function(DOMAIN, schema.name, overload, graph=function.graph, attributes=schema.parameters)


class _Builder(GraphBuilder):
    """Writes what onnxscript's builder writes, in less than a third of the time: it looks up each operator once.

    From the signature of an operator, which takes as long as all else, onnxscript learns only which arguments are
    inputs and which are attributes. And where it does not know the type of an input, as is so for most nodes of a body,
    it finds that nothing can be inferred after it has written all types that it knows as protobuf.
    """

    def _get_schema(self, op_type: str, domain: str, version: int | None) -> onnx.defs.OpSchema | None:
        return _schema_of(op_type, domain, version)

    def _partition_inputs_attributes(
        self, schema: onnx.defs.OpSchema | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        if schema is None or len(kwargs) < 2:
            return args, kwargs
        order = _order_of(schema.name, schema.since_version)
        return args, {name: kwargs[name] for name in sorted(kwargs, key=order.index)}

    def _infer_shapes(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is not None and value.type is None:
                # what onnxscript notes at the node, word for word, as bodies in files have it
                fault = f"Type of input {index} value {value.name} of node {node.name} not known"
                node.metadata_props["pkg.onnxscript.shape_inference_error"] = fault
                return
        super()._infer_shapes(node)


@functools.cache
def _order_of(op_type: str, version: int) -> list[str]:
    """Return the attributes of a standard operator in the order in which onnxscript writes them."""
    return list(onnx.defs.get_schema(op_type, version).attributes)


@functools.cache
def _schema_of(op_type: str, domain: str, version: int | None) -> onnx.defs.OpSchema | None:
    try:
        return None if version is None else onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
