"""The state tensors of ``KVAttention`` as inputs and outputs of the graph: those that its attributes put to use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.paged_caches import PagedLayer, layer_of
from graphopt.analysis.structure.ports import STATES, CachePort, token_port
from graphopt.graph.editing import shared_constant
from graphopt.runtime_ops import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableSequence


def connect(graph: ir.Graph, node: ir.Node, layer: PagedLayer) -> None:
    """Give ``node`` the attributes of ``layer``, and the graph the state ports that they ask for.

    States that were ports before and are in use no longer disappear from the graph; new ones stand behind those of the
    same layer.
    """
    for name, value in layer.attributes.for_node().items():
        node.attributes[name] = ir.convenience.convert_attribute(name, value)
    tokens = token_port(graph)
    assert tokens is not None and tokens.shape is not None
    batch = tokens.shape
    rows = batch[0] if isinstance(batch[0], int) else str(batch[0].value)
    used = layer.states(rows, f"pages.{layer.number}")
    schema = schema_of(node)
    for state in STATES:
        index, output = schema.index(state), schema.output_index(f"new_{state}")
        past, present = node.inputs[index], node.outputs[output]
        tensor = used.get(state)
        port = past if past is not None and past.is_graph_input() else None
        if tensor is None:
            if port is not None:
                graph.inputs.remove(port)
            if present.is_graph_output():
                graph.outputs.remove(present)
            # pages of values have the type of those of keys, and scales are float16, also where they are none
            types = {"values": layer.attributes.stored.dtype, "scales": np.dtype(np.float16)}
            number = types.get(state, np.dtype(np.float32))
            name = "no_state" if number == np.float32 else f"no_state.{number.name}"
            placeholder = shared_constant(graph, name, np.zeros((0, 0, 0, 0), number))
            node.replace_input_with(index, placeholder)
            present.name, present.shape = f"{node.name}.no_{state}", ir.Shape([0, 0, 0, 0])
            present.type = ir.TensorType(ir.DataType.from_numpy(number))
            continue
        if port is None:
            port = ir.val(layer.port(state))
            _insert(graph.inputs, port, node.inputs[index - 1])
            node.replace_input_with(index, port)
        if not present.is_graph_output():
            _insert(graph.outputs, present, node.outputs[output - 1])
            present.name = CachePort(layer.number, state).present
        for value in (port, present):  # copies of a graph share types: none is edited
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(tensor.dtype)), ir.Shape(tensor.shape)


def _insert(ports: MutableSequence[ir.Value], port: ir.Value, predecessor: ir.Value | None) -> None:
    """Put ``port`` behind another, or at the end where that is not among the ports."""
    indices = [index for index, port in enumerate(ports) if port is predecessor]
    ports.insert(indices[0] + 1 if indices else len(ports), port)


def change(graph: ir.Graph, node: ir.Node, update: Mapping[str, Any]) -> PagedLayer:
    """Change what the attributes of a ``KVAttention`` node say, and its ports with it; return what they say now."""
    layer = layer_of(node)
    layer = replace(layer, attributes=replace(layer.attributes, **update))
    connect(graph, node, layer)
    return layer


def graph_input(graph: ir.Graph, name: str) -> ir.Value:
    """Return the input of the graph called ``name``, which is there."""
    return next(value for value in graph.inputs if value.name == name)
