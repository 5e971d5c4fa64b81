"""Inputs, outputs and dimensions of an exported graph, by the names of :mod:`graphopt.tasks.causal_lm.interface`.

    input.past_key_values.layers.0.keys [s44, 2, s36, 16]  ->  past_key_values.0.key [batch, 2, past, 16]

Nothing here changes what the graph computes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    ENCODER_MASK,
    ENCODER_STATES,
    INDEXER,
    INPUT_FEATURES,
    INPUT_IDS,
    INPUTS_EMBEDS,
    POSITION_IDS,
    PREVIOUS_HIDDEN,
    TOKEN_TYPE_IDS,
    exported_name,
    is_cross_port,
    past_port,
    present_port,
)
from graphopt.graph.provenance import SCOPE
from graphopt.graph.weights import new_weight
from graphopt.models.states import other_input

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from graphopt.tasks import Task

BATCH, LENGTH, PAST, KEYS, SOURCE = "batch", "length", "past", "past + length", "source"
"""Names of the dimensions that vary."""

_LAST_STATES = "encoder_last_hidden_state"
DECODER_INPUT_IDS = "decoder_input_ids"
_FIRST_INPUTS = (
    *(INPUT_FEATURES, INPUT_IDS, INPUTS_EMBEDS, PREVIOUS_HIDDEN),
    *(ATTENTION_MASK, ENCODER_MASK, TOKEN_TYPE_IDS, POSITION_IDS),
)


def name_ports(graph: ir.Graph, task: Task) -> None:
    """Name inputs, outputs and dimensions of ``graph`` in place, and put the inputs in order.

    Args:
        graph: what ``transformers.exporters.OnnxExporter`` made of a model.
        task: what kind of model it is.

    Raises:
        InputError: the graph keeps a state that is neither a key-value cache nor a recurrent state.
    """
    if task.dimensions:
        _name_signals(graph, task)
        return
    if any(value.name == DECODER_INPUT_IDS for value in graph.inputs):
        _split_encoder_from_decoder(graph)
    _drop_constant_states(graph)
    _drop_unused(graph)
    _name_heads_of_indexers(graph)
    _rename(graph)
    _name_dimensions(graph)
    _read_first(graph)
    _repeat_positions(graph)


def _name_signals(graph: ir.Graph, task: Task) -> None:
    """Name the dimensions of images or recordings, and drop the outputs that nobody reads."""
    names = [value.name or "" for value in graph.outputs]
    dropped_names = set(names).difference(task.remaining_outputs(names))
    _drop_outputs(graph, {value for value in graph.outputs if value.name in dropped_names})
    symbols: dict[str, str] = {}
    for value in graph.inputs:
        for dimension, meaning in zip(value.shape or (), task.dimensions.get(value.name or "", ()), strict=False):
            if isinstance(dimension, ir.SymbolicDim):
                symbols.setdefault(str(dimension), meaning)
    _rename_dimensions(graph, symbols)


def _split_encoder_from_decoder(graph: ir.Graph) -> None:
    """Keep one half of an encoder-decoder: what makes keys and values of the source, or what makes the text.

    A graph with a past is the decoder: what it was given of the source passes through it, and that is dropped. One
    without a past is the first run of the whole model: all but the keys and values of the source is dropped.
    """
    is_decoder = any(exported_name(value.name or "") is not None for value in graph.inputs)
    if is_decoder:
        _drop_outputs(graph, {value for value in graph.outputs if _is_input(value)})
        names = {ATTENTION_MASK: ENCODER_MASK, DECODER_INPUT_IDS: INPUT_IDS}
    else:
        outputs = {value for value in graph.outputs if is_cross_port(exported_name(value.name or "") or "")}
        if any(value.name == INPUT_FEATURES for value in graph.inputs):
            # onnxruntime-genai, which runs such models, wants the last states too.
            states = next(value for value in graph.outputs if value.name == _LAST_STATES)
            graph.outputs.remove(states)
            graph.outputs.append(states)
            states.name = ENCODER_STATES
            outputs.add(states)
        _drop_outputs(graph, set(graph.outputs) - outputs)
        names = {}
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
        value.name = names.get(value.name or "", value.name)


def _is_input(output: ir.Value) -> bool:
    producer = output.producer()
    origin = None if producer is None or producer.op_type != "Identity" else producer.inputs[0]
    return origin is not None and origin.is_graph_input()


def _drop_outputs(graph: ir.Graph, outputs: Collection[ir.Value]) -> None:
    """Drop outputs of ``graph``, and nodes and weights that only they need; sizes are read from other inputs."""
    remaining = [value for value in graph.outputs if value not in outputs]
    graph.outputs.clear()
    graph.outputs.extend(remaining)
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
    _read_first(graph)


def _drop_constant_states(graph: ir.Graph) -> None:
    """Drop inputs that only pass through to an output: the width of each sliding window, which the cache object holds.

    The exporter traces a sliding-window layer with the full cache, and applies the window, a constant, in its mask.
    """
    for value in [value for value in graph.inputs if exported_name(value.name or "") is None]:
        readers = value.consumers()
        if not readers or any(node.op_type != "Identity" or not node.outputs[0].is_graph_output() for node in readers):
            continue
        for node in readers:
            graph.outputs.remove(node.outputs[0])
            graph.remove(node, safe=True)
        graph.inputs.remove(value)


def _drop_unused(graph: ir.Graph) -> None:
    """Drop ``token_type_ids`` where nothing reads it: some architectures take it and leave it."""
    for value in [value for value in graph.inputs if value.name == TOKEN_TYPE_IDS and not value.uses()]:
        graph.inputs.remove(value)


def _name_heads_of_indexers(graph: ir.Graph) -> None:
    """Give keys of indexers the axis of heads that all caches have: [batch, past, size] -> [batch, 1, past, size]."""
    axis = None
    for values, op_type in ((graph.inputs, "Squeeze"), (graph.outputs, "Unsqueeze")):
        for index, value in enumerate(list(values)):
            name = exported_name(value.name or "") or ""
            cache = past_port(name) or present_port(name)
            if cache is None or cache.part != INDEXER or value.shape is None or len(value.shape) != 3:
                continue
            axis = axis or new_weight(graph, "heads_of_indexers", ir.tensor([1], ir.DataType.INT64))
            batch, *sizes = value.shape
            port = ir.val(value.name, value.dtype, ir.Shape([batch, 1, *sizes]))
            if op_type == "Squeeze":
                node = ir.node(op_type, [port, axis])
                (rows,) = node.outputs
                rows.type, rows.shape = value.type, value.shape
                neighbour = next(iter(value.consumers()), None)
                value.replace_all_uses_with(rows)
                graph.insert_before(graph[0], node)
            else:
                node = ir.node(op_type, [value, axis], outputs=[port])
                neighbour = value.producer()
                graph.append(node)
            # so that it is part of their layer
            if neighbour is not None and SCOPE in neighbour.metadata_props:
                node.metadata_props[SCOPE] = neighbour.metadata_props[SCOPE]
            value.name = f"{value.name}.row"
            values[index] = port


def _rename(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *graph.outputs):
        name = exported_name(value.name or "")
        if name is not None:
            value.name = name
        elif value.is_graph_input() and value.name not in _FIRST_INPUTS:
            raise other_input(value.name, None if value.shape is None else [str(size) for size in value.shape])
    first = [value for name in _FIRST_INPUTS for value in graph.inputs if value.name == name]
    caches = [value for value in graph.inputs if value not in first]
    graph.inputs.clear()
    graph.inputs.extend([*first, *caches])


def _name_dimensions(graph: ir.Graph) -> None:
    """Name the symbols that torch numbered, everywhere: ``s44`` -> ``batch``, ``s36 + s70`` -> ``past + length``."""
    names: dict[str, str] = {}
    has_caches = any(past_port(value) is not None for value in graph.inputs)
    for value in graph.inputs:
        port, name = past_port(value), value.name or ""
        columns = {ATTENTION_MASK: KEYS if has_caches else LENGTH, ENCODER_MASK: SOURCE}.get(name, LENGTH)
        meaning = {0: BATCH} if port else {0: BATCH, 1: columns}
        if is_cross_port(name):
            meaning = {0: BATCH, 2: SOURCE}
        if name == POSITION_IDS and value.shape is not None and len(value.shape) == 3:
            meaning = {1: BATCH, 2: LENGTH}
        if port is not None and port.grows:
            meaning[2] = PAST
        for axis, dimension in enumerate(value.shape or ()):
            # An input that shares the symbol of another (position_ids, every further cache) says the same again.
            if isinstance(dimension, ir.SymbolicDim) and axis in meaning:
                names.setdefault(str(dimension), meaning[axis])
    _rename_dimensions(graph, names)


def _rename_dimensions(graph: ir.Graph, names: Mapping[str, str]) -> None:
    for value in values_of(graph):
        if value.shape is not None:
            value.shape = ir.Shape([_dimension(dimension, names) for dimension in value.shape])


def _read_first(graph: ir.Graph) -> None:
    """Let a size that several inputs have be read from the first of these.

    The exporter takes any: Shape(past_key_values.3.value) in one model is Shape(position_ids) in a deeper one.
    """
    for node in graph.all_nodes():
        value = node.inputs[0] if node.op_type == "Shape" else None
        if value is None or not value.is_graph_input():
            continue
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
        sizes = list(value.shape or ())[start:end]
        is_known = all(isinstance(size, int) or size.value is not None for size in sizes)
        candidates = (
            candidate
            for candidate in graph.inputs
            if candidate.shape is not None and list(candidate.shape)[start:end] == sizes
        )
        node.replace_input_with(0, next(candidates, value) if sizes and is_known else value)


def _repeat_positions(graph: ir.Graph) -> None:
    """Repeat positions that all rows share for each row of a batch, where a ``RotaryEmbedding`` turns by them.

        RotaryEmbedding(x [batch, ...], Cos(p w), Sin(p w))               p [1, length]
          ->   RotaryEmbedding(x, Cos(p' w), Sin(p' w))                   p' = Expand(p, [batch, 1])

    ONNX defines its operands with as many rows as ``x`` has, and onnxruntime does not broadcast them. An encoder that
    counts its positions itself (ModernBERT) counts them once for all rows.
    """
    rotaries = [node for node in graph if node.op_type == "RotaryEmbedding" and len(node.inputs) == 3]
    paths = [_path_of_one_row(rotary, index) for rotary in rotaries for index in (1, 2)]
    rows_by_value: dict[ir.Value, ir.Value] = {}
    for path in paths:
        node, side = path[-1]
        value = node.inputs[side]
        if value is None or not _has_one_row(value):
            continue
        rows_by_value[value] = rows_by_value.get(value) or _repeat(graph, value)
        node.replace_input_with(side, rows_by_value[value])
    for node in {node for path in paths for node, _ in path[1:]}:
        output = node.outputs[0]
        if output.shape is not None and _has_one_row(output):
            output.shape = ir.Shape([ir.SymbolicDim(BATCH), *output.shape[1:]])


def _path_of_one_row(node: ir.Node, index: int) -> list[tuple[ir.Node, int]]:
    """Return the nodes, with an input each, by which one row for all came to input ``index`` of ``node``, it first."""
    value = node.inputs[index]
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type not in ("Cos", "Sin", "Mul", "Cast", "Unsqueeze"):
        return [(node, index)]
    operands = [side for side, operand in enumerate(producer.inputs) if operand is not None and _has_one_row(operand)]
    return [(node, index), *(_path_of_one_row(producer, operands[0]) if len(operands) == 1 else [])]


def _has_one_row(value: ir.Value) -> bool:
    """Return whether a value that is computed has one row, whatever the batch is."""
    return not value.is_initializer() and value.shape is not None and len(value.shape) > 1 and value.shape[0] == 1


def _repeat(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Insert nodes that repeat ``value`` [1, ...] for each row of the first input, and return [batch, ...]."""
    producer, dimensions = value.producer(), list(value.shape or ())
    other_sizes = new_weight(
        graph, f"{value.name}.other_sizes", ir.tensor([1] * (len(dimensions) - 1), ir.DataType.INT64)
    )
    rows = ir.node("Shape", [graph.inputs[0]], {"start": 0, "end": 1})
    sizes = ir.node("Concat", [rows.outputs[0], other_sizes], {"axis": 0})
    expand = ir.node("Expand", [value, sizes.outputs[0]])
    for node, shape in ((rows, [1]), (sizes, [len(dimensions)])):
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape(shape)
    expand.outputs[0].type = value.type
    expand.outputs[0].shape = ir.Shape([ir.SymbolicDim(BATCH), *dimensions[1:]])
    assert producer is not None
    graph.insert_after(producer, [rows, sizes, expand])
    return expand.outputs[0]


def _dimension(dimension: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | ir.SymbolicDim:
    symbol = None if isinstance(dimension, int) else dimension.value
    if isinstance(dimension, int) or symbol is None:
        return dimension
    # The exporter writes a dimension that it traced as symbolic and found to be fixed as the symbol "8".
    if symbol.isdigit():
        return int(symbol)
    formula = re.sub(r"\bs\d+\b", lambda match: names.get(match[0], match[0]), symbol)
    return ir.SymbolicDim(KEYS if formula == f"{LENGTH} + {PAST}" else formula)


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield every value of ``graph`` and its subgraphs: inputs, initializers, and what nodes compute."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
