"""What two graphs must have in common to be the same: for the tests and for tools/studies/families.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph.weights import expression_of
from graphopt.verification.protobuf import all_messages

_WORDS = ("metadata_props", "doc_string")
_TYPES = ("NodeProto", "GraphProto", "FunctionProto", "TensorProto", "AttributeProto", "ValueInfoProto", "TypeProto")
Names = Mapping[str, str]


def without_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of ``model`` with everything removed that does not change what it computes."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for part in (bare, *(part for kind in _TYPES for part in all_messages(bare, kind))):
        for field in _WORDS:
            if field in part.DESCRIPTOR.fields_by_name:
                part.ClearField(field)
    for field in ("producer_name", "producer_version", "domain", "model_version"):
        bare.ClearField(field)
    for attribute in all_messages(bare, "AttributeProto"):
        for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
            tensor.ClearField("name")
    _number(bare.graph, {}, "")
    functions = sorted(bare.functions, key=lambda function: (function.domain, function.name, function.overload))
    for function in functions:
        _number(function, {}, "")
    _keep(bare.functions, functions, onnx.FunctionProto)
    _sort(bare.opset_import, onnx.OperatorSetIdProto, lambda opset: opset.domain)
    return bare


def _number(graph: Any, outer: Names, prefix: str) -> None:
    """Order and number the nodes and values of a graph or a function, in place.

    Args:
        graph: a ``GraphProto`` or a ``FunctionProto``.
        outer: new names of the values around it.
        prefix: what its own new names begin with.
    """
    is_function = isinstance(graph, onnx.FunctionProto)
    ports = [port if is_function else port.name for port in (*graph.input, *graph.output)]
    outputs = list(graph.output) if is_function else [port.name for port in graph.output]
    # ports of the model and parameters of a function keep their names; those of a subgraph are known by their place
    names = dict(outer) | {name: name if not prefix else f"{prefix}port{ports.index(name)}" for name in ports}
    maker = {name: node for node in graph.node for name in node.output if name}
    tensor_by_name = {} if is_function else {tensor.name: tensor for tensor in graph.initializer}
    tensors: list[Any] = []
    order = list(_needed_nodes(outputs, maker, tensor_by_name, tensors))
    for tensor in tensors:
        names.setdefault(tensor.name, f"{prefix}weight{len(names)}")
    for node in order:
        for name in node.output:
            if name:
                names.setdefault(name, f"{prefix}value{len(names)}")
    for index, node in enumerate(order):
        inner = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs) if graph.node]
        for number, subgraph in enumerate(inner):
            _number(subgraph, names, f"{prefix}{index}.{number}.")
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
        node.name = ""
        _sort(node.attribute, onnx.AttributeProto, lambda attribute: attribute.name)
    for tensor in tensors:
        tensor.name = names[tensor.name]
    _keep(graph.node, order, onnx.NodeProto)
    graph.ClearField("value_info")
    if is_function:
        _sort(graph.opset_import, onnx.OperatorSetIdProto, lambda opset: opset.domain)
        return
    _keep(graph.initializer, tensors, onnx.TensorProto)
    graph.name = ""
    for port in (*graph.input, *graph.output):
        port.name = names[port.name]


def _needed_nodes(
    outputs: list[str], maker: Mapping[str, Any], tensor_by_name: Mapping[str, Any], tensors: list[Any]
) -> Iterator[Any]:
    """Yield the nodes that ``outputs`` need, inputs first; put the initializers that are met into ``tensors``."""
    seen_names: set[str] = set()
    pending: list[tuple[str, Any]] = [(name, None) for name in reversed(outputs)]
    while pending:
        name, ready = pending.pop()
        if ready is not None:
            yield ready
            continue
        node = maker.get(name)
        if name in seen_names:
            continue
        seen_names.add(name)
        if node is None:
            if name in tensor_by_name:
                tensors.append(tensor_by_name[name])
            continue
        if any(sibling in seen_names for sibling in node.output if sibling and sibling != name):
            continue
        pending.append((name, node))
        pending += [(operand, None) for operand in reversed(list(_inputs_of(node)))]


def _inputs_of(node: Any) -> Iterator[str]:
    """Yield the names that a node reads, those in its subgraphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner_node in graph.node:
                yield from _inputs_of(inner_node)
            yield from (port.name for port in graph.output)


def _keep(field: Any, elements: list[Any], kind: type[Any]) -> None:
    copies = [kind.FromString(element.SerializeToString()) for element in elements]
    del field[:]
    field.extend(copies)


def _sort(field: Any, kind: type[Any], key: Any) -> None:
    _keep(field, sorted(field, key=key), kind)


def description(program: ir.Model) -> tuple[bytes, list[str | None], set[str]]:
    """Return a graph with its weights and without names, the names of its nodes in order, and those of its weights.

    The weights of ``program`` are evaluated into memory.
    """
    for value in program.graph.initializers.values():
        expression = expression_of(value.const_value)
        value.const_value = ir.Tensor(np.ascontiguousarray(expression.numpy()), dtype=expression.dtype)
    bare = without_names(ir.to_proto(program)).SerializeToString(deterministic=True)
    return bare, [node.name for node in program.graph], set(program.graph.initializers)
