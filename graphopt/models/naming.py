"""Names that a reader knows, for the nodes and weights of a graph that torch exported.

    node_linear_4, val_225  ->  model.layers.0.mlp.gate_proj.MatMul, model.layers.0.mlp.gate_proj.weight

Nothing here changes what the graph computes.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from typing import TYPE_CHECKING

from graphopt.graph.provenance import SCOPE
from graphopt.graph.weights import WeightTensor
from graphopt.models.ports import values_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir


def name_parts(model: ir.Model, parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Give nodes and weights of ``model`` readable, unique names in place, and drop the exporter's bulky notes.

    Args:
        model: what torch exported; each node says in its metadata which modules it came from.
        parameters: shape of every parameter of the torch model by its dotted name, tied ones under each name.
    """
    _name_weights(model.graph, parameters)
    _name_nodes(model.graph)
    _strip(model)


def _name_weights(graph: ir.Graph, parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Name each initializer after the parameter that it was.

    The exporter's constant folding (a transpose, ``1 + gain``) forgets the name, a tied weight has that of whichever
    module came last, and small constants have none.
    """
    values = list(graph.initializers.values())
    order = {node: number for number, node in enumerate(graph.all_nodes())}
    counts: Counter[str] = Counter()
    names: dict[ir.Value, str] = {}
    originals = {value for value in values if value.name in parameters}
    for value in sorted(values, key=lambda value: value not in originals):
        first = min(value.consumers(), key=lambda node: order[node], default=None)
        names[value] = _unique(_weight_name(value, first, parameters, set(names.values())), counts)
    # In two steps, since one may take the name that another still has.
    for number, value in enumerate(values):
        value.name = f"__{number}"
    for value in values:
        value.name = names[value]


def _weight_name(
    value: ir.Value, first: ir.Node | None, parameters: Mapping[str, tuple[int, ...]], names: set[str]
) -> str:
    tensor = value.const_value
    assert tensor is not None and value.name is not None
    module = "" if first is None else module_of(first)
    # A parameter of the module that reads it first, of the same number of elements, and not yet found elsewhere.
    candidates = [
        name
        for name, shape in parameters.items()
        if name.rpartition(".")[0] == module and math.prod(shape) == tensor.size and name not in names
    ]
    if tensor.dtype.is_floating_point() and len(candidates) == 1:
        return candidates[0]
    if value.name in parameters or "." in value.name:
        return value.name
    if tensor.size <= 4 and not isinstance(tensor, WeightTensor):
        # constant.int64[0,1], and constant.int64.0 for a scalar
        numbers = ",".join(map(str, tensor.numpy().reshape(-1)))
        return f"constant.{tensor.dtype.name.lower()}" + (f"[{numbers}]" if tensor.shape.rank() else f".{numbers}")
    return f"{module}.constant" if module else "constant"


def _name_nodes(graph: ir.Graph) -> None:
    """Name each node ``module.OpType`` and its outputs ``module.OpType.output``, with a number where that is taken."""
    counts: Counter[str] = Counter()
    for node in graph.all_nodes():
        module = module_of(node)
        node.name = _unique(f"{module}.{node.op_type}" if module else node.op_type, counts)
        for index, output in enumerate(node.outputs):
            if not output.is_graph_output():
                output.name = f"{node.name}.output" + (f"_{index}" if index else "")


def module_of(node: ir.Node) -> str:
    """Return the dotted name of the torch module that ``node`` came from; empty for the root, or if unknown."""
    scopes = node.metadata_props.get(SCOPE)
    # ['', 'model', 'model.norm', 'mul_677']: the modules from the root inwards, then the traced operation.
    path = ast.literal_eval(scopes) if scopes else []
    module = str(path[-2]) if len(path) > 1 else ""
    return "" if module.startswith("_") else module


def _unique(name: str, counts: Counter[str]) -> str:
    counts[name] += 1
    return name if counts[name] == 1 else _unique(f"{name}_{counts[name] - 1}", counts)


def _strip(model: ir.Model) -> None:
    """Drop stack traces and other notes of the exporter, all but the scope: they outweigh the graph tenfold."""
    for graph in model.graphs():
        graph.metadata_props.clear()
        graph.doc_string = None
        for value in values_of(graph):
            value.metadata_props.clear()
        for node in graph:
            scope = node.metadata_props.get(SCOPE)
            node.metadata_props.clear()
            node.doc_string = None
            if scope is not None:
                node.metadata_props[SCOPE] = scope
    model.metadata_props.clear()
