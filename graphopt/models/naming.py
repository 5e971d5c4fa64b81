"""Names that a reader knows: of inputs, outputs, dimensions, nodes and weights of a graph that torch exported.

    input.past_key_values.layers.0.keys [s44, 2, s36, 16]  ->  past_key_values.0.key [batch, 2, past, 16]
    node_linear_4, val_225                                 ->  model.layers.0.mlp.gate_proj.MatMul and .weight

Nothing here changes what the graph computes.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.provenance import SCOPE

BATCH, LENGTH, PAST, KEYS = "batch", "length", "past", "past + length"
"""Names of the dimensions that vary."""

# The side is told only where both sides have the name.
_CACHE = re.compile(r"(?:(input|output)\.)?past_key_values\.layers\.(\d+)\.(key|value)s")
_FIRST_INPUTS = ("input_ids", "attention_mask", "position_ids")


def name_parts(model: ir.Model, parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Give inputs, outputs, dimensions, nodes and weights of ``model`` readable, unique names, in place.

    Args:
        model: what ``transformers.exporters.OnnxExporter`` made of a causal language model.
        parameters: shape of every parameter of the torch model by its dotted name, tied ones under each name.

    Raises:
        InputError: the graph keeps a state that is not a key-value cache.
    """
    graph = model.graph
    _drop_constant_states(graph)
    _name_ports(graph)
    _name_dimensions(graph)
    _name_weights(graph, parameters)
    _name_nodes(graph)
    _strip(model)


def _drop_constant_states(graph: ir.Graph) -> None:
    """Drop inputs that only pass through to an output: the width of each sliding window, a constant of the cache object.

    The exporter traces a sliding-window layer with the full cache, and applies the window in its mask.
    """
    for value in [value for value in graph.inputs if _CACHE.fullmatch(value.name or "") is None]:
        readers = value.consumers()
        if not readers or any(node.op_type != "Identity" or not node.outputs[0].is_graph_output() for node in readers):
            continue
        for node in readers:
            graph.outputs.remove(node.outputs[0])
            graph.remove(node, safe=True)
        graph.inputs.remove(value)


def _name_ports(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *graph.outputs):
        match = _CACHE.fullmatch(value.name or "")
        if match is not None:
            side = "present" if match[1] == "output" else "past_key_values"
            value.name = f"{side}.{match[2]}.{match[3]}"
        elif value.is_graph_input() and value.name not in _FIRST_INPUTS:
            raise InputError(
                "the model keeps a state, or takes an input, that is none of tokens, mask, positions and key-value cache",
                tensor=value.name,
                shape=None if value.shape is None else [str(dimension) for dimension in value.shape],
                remedy="graphopt takes decoder-only models in which every layer with a state has a key-value cache",
            )
    first = [value for name in _FIRST_INPUTS for value in graph.inputs if value.name == name]
    caches = [value for value in graph.inputs if value not in first]
    graph.inputs.clear()
    graph.inputs.extend([*first, *caches])


def _name_dimensions(graph: ir.Graph) -> None:
    """Name the symbols that torch numbered, everywhere: ``s44`` -> ``batch``, ``s36 + s70`` -> ``past + length``."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        cache = (value.name or "").startswith("past_key_values.")
        meaning = {0: BATCH, 2: PAST} if cache else {0: BATCH, 1: KEYS if value.name == "attention_mask" else LENGTH}
        for axis, dimension in enumerate(value.shape or ()):
            # An input that shares the symbol of another (position_ids, every further cache) says the same again.
            if isinstance(dimension, ir.SymbolicDim) and axis in meaning:
                names.setdefault(str(dimension), meaning[axis])
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([_dimension(dimension, names) for dimension in value.shape])


def _dimension(dimension: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | ir.SymbolicDim:
    symbol = None if isinstance(dimension, int) else dimension.value
    if isinstance(dimension, int) or symbol is None:
        return dimension
    # The exporter writes a dimension that it traced as symbolic and found to be fixed as the symbol "8".
    if symbol.isdigit():
        return int(symbol)
    named = re.sub(r"\bs\d+\b", lambda match: names.get(match[0], match[0]), symbol)
    return ir.SymbolicDim(KEYS if named == f"{LENGTH} + {PAST}" else named)


def _name_weights(graph: ir.Graph, parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Name each initializer after the parameter it was: the exporter's constant folding (a transpose, ``1 + gain``)
    forgets the name, a tied weight has the name of whichever module came last, and small constants have none."""
    values = list(graph.initializers.values())
    taken: Counter[str] = Counter()
    names: dict[ir.Value, str] = {}
    own = {value for value in values if value.name in parameters}
    for value in sorted(values, key=lambda value: value not in own):
        names[value] = _unique(_weight_name(value, parameters, set(names.values())), taken)
    # In two steps, since one may take the name that another still has.
    for number, value in enumerate(values):
        value.name = f"__{number}"
    for value in values:
        value.name = names[value]


def _weight_name(value: ir.Value, parameters: Mapping[str, tuple[int, ...]], taken: set[str]) -> str:
    tensor = value.const_value
    assert tensor is not None and value.name is not None
    readers = value.consumers()
    module = module_of(readers[0]) if readers else ""
    # A parameter of the module that reads it first, of the same number of elements, and not yet found elsewhere.
    candidates = [
        name
        for name, shape in parameters.items()
        if name.rpartition(".")[0] == module and math.prod(shape) == tensor.size and name not in taken
    ]
    if tensor.dtype.is_floating_point() and len(candidates) == 1:
        return candidates[0]
    if value.name in parameters or "." in value.name:
        return value.name
    if tensor.size <= 4:
        # constant.int64[0,1], and constant.int64.0 for a scalar
        numbers = ",".join(map(str, tensor.numpy().reshape(-1)))
        return f"constant.{tensor.dtype.name.lower()}" + (f"[{numbers}]" if tensor.shape.rank() else f".{numbers}")
    return f"{module}.constant" if module else "constant"


def _name_nodes(graph: ir.Graph) -> None:
    """Name each node ``module.OpType`` and its outputs ``module.OpType.output``, with a number where that is taken."""
    taken: Counter[str] = Counter()
    for node in graph.all_nodes():
        module = module_of(node)
        node.name = _unique(f"{module}.{node.op_type}" if module else node.op_type, taken)
        for index, output in enumerate(node.outputs):
            if not output.is_graph_output():
                output.name = f"{node.name}.output" + (f"_{index}" if index else "")


def module_of(node: ir.Node) -> str:
    """Return the dotted name of the torch module that ``node`` came from; empty for the root, or where nobody said."""
    scopes = node.metadata_props.get(SCOPE)
    # ['', 'model', 'model.norm', 'mul_677']: the modules from the root inwards, then the traced operation.
    path = ast.literal_eval(scopes) if scopes else []
    module = str(path[-2]) if len(path) > 1 else ""
    return "" if module.startswith("_") else module


def _unique(name: str, taken: Counter[str]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else _unique(f"{name}_{taken[name] - 1}", taken)


def _strip(model: ir.Model) -> None:
    """Drop stack traces and other notes of the exporter, all but the scope: they outweigh the graph tenfold."""
    for graph in model.graphs():
        graph.metadata_props.clear()
        graph.doc_string = None
        for value in _values(graph):
            value.metadata_props.clear()
        for node in graph:
            scope = node.metadata_props.get(SCOPE)
            node.metadata_props.clear()
            node.doc_string = None
            if scope is not None:
                node.metadata_props[SCOPE] = scope
    model.metadata_props.clear()


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
