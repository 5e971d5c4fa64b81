"""What makes a node of one graph the same operation as a node of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops import OPERATORS
from graphopt.verification.certificate.reasons import ATTRIBUTE, BODY, OPERATOR, OUTPUTS, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx

    from graphopt.graph.diagnostics import Fact

HADAMARD = ("ai.graphopt", "Hadamard")


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer, or of a node ``Constant``; ``None`` for what is computed or given."""
    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain or set(node.attributes) != {"value"}:
        return None
    return node.attributes["value"].as_tensor()


def difference(node: ir.Node, before: ir.Node) -> Fact | None:
    """Return how the operation of ``node`` differs from that of ``before``, or ``None``."""
    if (node.domain, node.op_type, node.overload) != (before.domain, before.op_type, before.overload):
        return OPERATOR(op=node.op_type, before=before.op_type)
    if len(node.outputs) != len(before.outputs):
        return OUTPUTS(outputs=len(node.outputs), before=len(before.outputs))
    for name in sorted({*node.attributes, *before.attributes}):
        attribute, old_attribute = node.attributes.get(name), before.attributes.get(name)
        if attribute is None or old_attribute is None or _bytes(attribute) != _bytes(old_attribute):
            return ATTRIBUTE(attribute=name)
    return None


def inputs_of(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs of a node, then the outer values that its subgraphs read, in a fixed order."""
    inputs = list(node.inputs)
    while inputs and inputs[-1] is None:
        inputs.pop()
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inputs.extend(_captured_values(attribute.as_graph()))
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                inputs.extend(_captured_values(graph))
    return inputs


def model_difference(before: ir.Model, after: ir.Model) -> Fact | None:
    """Return how the operators that nodes may name differ: their versions, and their bodies in the model."""
    for domain in sorted({*before.opset_imports, *after.opset_imports}):
        old, new = before.opset_imports.get(domain), after.opset_imports.get(domain)
        if old != new and not (old is None and domain == HADAMARD[0]):
            return VERSION(old=old, domain=domain or "ONNX", new=new)
    for key in sorted({*before.functions, *after.functions}):
        body, new_body = before.functions.get(key), after.functions.get(key)
        if body is None and key[:2] == HADAMARD:
            continue
        if body is not None and body is new_body:
            continue
        if body is None or new_body is None or _function_bytes(body) != _function_bytes(new_body):
            return BODY(domain=key[0], op=key[1])
    return None


def has_foreign_body(after: ir.Model, node: ir.Node) -> bool:
    """Return whether ``after`` brings a body for a node of ours that is not the operator's own."""
    body, opset = after.functions.get(node.op_identifier()), after.opset_imports.get("")
    if body is None or opset is None:
        return False
    return _function_bytes(body) != _function_bytes(OPERATORS[node.op_type].body_of(node, opset))


def live_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that outputs of ``graph`` are computed from, in graph order."""
    live: set[ir.Node] = set()
    pending = [node for value in graph.outputs if (node := value.producer()) is not None]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += [n for value in inputs_of(node) if value is not None and (n := value.producer()) is not None]
    return [node for node in graph if node in live]


def _captured_values(graph: ir.Graph) -> Iterator[ir.Value]:
    inner: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in inputs_of(node):
            if value is not None and value not in inner:
                yield value
        inner.update(node.outputs)
    yield from (value for value in graph.outputs if value not in inner)


def _bytes(attribute: ir.Attr) -> bytes:
    return bytes(ir.serde.serialize_attribute(attribute).SerializeToString(deterministic=True))


def _function_bytes(function: ir.Function) -> bytes:
    proto = ir.serde.serialize_function(function)
    _forget_types(proto)
    return bytes(proto.SerializeToString(deterministic=True))


def _forget_types(part: onnx.FunctionProto | onnx.GraphProto) -> None:
    """Remove the types and shapes that somebody inferred: they are no part of what a body computes."""
    del part.value_info[:]
    for node in part.node:
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                if graph.node:
                    _forget_types(graph)
