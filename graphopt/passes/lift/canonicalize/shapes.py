"""Types and shapes of values that an exporter left out, as far as the rest of the graph implies them.

Older exporters compute the target of a reshape at run time and state no shape behind it; a pass that reads heads and
sizes off the graph would find none. onnxruntime's symbolic shape inference finds them again. Only structure and small
integer constants go in: no weight is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnxscript.optimizer import fold_constants

from graphopt.analysis.structure.ports import token_port
from graphopt.errors import MissingDependencyError
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import Inserter, bypass, shared_constant
from graphopt.graph.weights import weight_of
from graphopt.passes.common.nodes import attentions
from graphopt.passes.lift.canonicalize.cleanup import merge_and_prune

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

_SMALL = 64

SHAPES_STATED = Rule(
    "canonicalize.shapes-stated", "stated the shapes of {values} value(s) that had none, or only in part"
)
NOT_INFERRED = Rule(
    "canonicalize.shapes-not-inferred", "shapes that it leaves out could not be inferred, at least in part ({error})"
)


def state_shapes(model: ir.Model, ledger: Ledger) -> None:
    """State the shapes of what has none, or only in part; nothing is done where products and reshapes have theirs."""
    lacking = [value for node in model.graph for value in node.outputs if value.name and _lacks(value)]
    # Masks, integers and booleans, are understood by running them, whatever their shapes.
    # onnxruntime's inference does not know the standard Attention; exporters that write it state shapes.
    if attentions(model) or not any(_is_product_or_reshape(value) for value in lacking):
        return
    values, why_not = _inferred_values(_without_weights(model))
    if why_not:
        ledger.skipped("graph", NOT_INFERRED(error=why_not))
    count = 0
    for value in lacking:
        inferred_value = values.get(value.name or "")
        if inferred_value is None or inferred_value.shape is None:
            continue
        value.shape, value.type = ir.Shape(list(inferred_value.shape)), value.type or inferred_value.type
        count += 1
    if not count:
        return
    ledger.report_change("graph", SHAPES_STATED(values=count))
    # Sizes are known now, so half of a head's size and the target of a reshape are constants.
    _pick_sizes(model)
    fold_constants(model, output_size_limit=_SMALL, should_fold=_is_small_integer)
    merge_and_prune(model, ledger)


def _inferred_values(model: ir.Model) -> tuple[dict[str, ir.Value], str]:
    """Return values of ``model`` with the shapes that could be inferred, by name, and why others could not be.

    Raises:
        MissingDependencyError: a package is missing that onnxruntime's inference needs.
    """
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
    except ImportError as error:
        raise MissingDependencyError(str(error), remedy='pip install "graphopt[cpu]"') from error
    # What `infer_shapes` does, but for this: where a node cannot be followed it leaves a file in the current folder,
    # and nothing of what was inferred.
    inference: Any = SymbolicShapeInference(int_max=2**31 - 1, auto_merge=True, guess_output_rank=False, verbose=0)
    is_complete, why_not = True, ""
    try:
        inference._preprocess(ir.to_proto(model))
        while inference.run_:
            is_complete = inference._infer_impl()
    except Exception as error:  # whatever it raises: what it cannot follow stays as it is
        why_not = str(error) or type(error).__name__
    infos = (info for info in inference.known_vi_.values() if info.type.WhichOneof("value") == "tensor_type")
    values = {info.name: ir.serde.deserialize_value_info_proto(info, None) for info in infos}
    return values, why_not or ("" if is_complete else "some nodes are not known to onnxruntime's inference")


def _pick_sizes(model: ir.Model) -> None:
    """Take sizes from constants where they are known, else from the shape of the tokens.

    A node that reads batch and length off the residual stream would keep it from being rotated.
    """
    tokens = token_port(model.graph)
    tokens = None if tokens is None or tokens.shape is None else tokens
    for node in list(model.graph):
        shape = node.inputs[0].producer() if node.op_type == "Gather" and node.inputs[0] is not None else None
        index = weight_of(node, 1)
        if shape is None or shape.op_type != "Shape" or shape.inputs[0] is None or shape.inputs[0].shape is None:
            continue
        if index is None or index.const_value is None or index.const_value.size != 1:
            continue
        dims = list(shape.inputs[0].shape)[shape.attributes.get_int("start", 0) : shape.attributes.get_int("end", 99)]
        index_array = np.asarray(index.const_value.numpy())
        if not -len(dims) <= index_array.item() < len(dims) or node.outputs[0].is_graph_output():
            continue
        size = dims[index_array.item()]
        if isinstance(size, int):
            constant = shared_constant(
                model.graph, f"size.{size}.{index_array.ndim}", np.full(index_array.shape, size, np.int64)
            )
            bypass(node, constant)
        elif tokens is not None and shape.inputs[0] is not tokens:
            _pick_from_tokens(model.graph, node, size, tokens, scalar=index_array.ndim == 0)


def _pick_from_tokens(graph: ir.Graph, node: ir.Node, size: ir.SymbolicDim, tokens: ir.Value, *, scalar: bool) -> None:
    assert tokens.shape is not None
    dims = list(tokens.shape)[:2]
    if size.value is None or size not in dims:
        return
    axis, insert = dims.index(size), Inserter(graph, node, node.name or "size")
    size_value = insert.op("Shape", [tokens], [1], ir.DataType.INT64, start=axis, end=axis + 1)
    if scalar:
        size_value = insert.op("Squeeze", [size_value], [], ir.DataType.INT64)
    bypass(node, size_value)


def _is_small_integer(node: ir.Node) -> bool | None:
    """Return whether to fold ``node``, or ``None`` to leave that to the size of what it gives."""
    return None if all(value.dtype is None or value.dtype.is_integer() for value in node.outputs) else False


def _is_product_or_reshape(value: ir.Value) -> bool:
    node = value.producer()
    active = value.dtype is None or value.dtype.is_floating_point()
    return active and node is not None and not node.domain and node.op_type in ("MatMul", "Gemm", "Reshape")


def _lacks(value: ir.Value) -> bool:
    return value.dtype is None or value.shape is None or any(_unknown(dim) for dim in value.shape)


def _unknown(dim: int | ir.SymbolicDim) -> bool:
    # ONNX's own inference gives what it does not know a name of its own each time.
    return isinstance(dim, ir.SymbolicDim) and (dim.value is None or dim.value.startswith("unk__"))


def _without_weights(model: ir.Model) -> ir.Model:
    """Return a copy in which every constant but small integers is an input."""
    copy = model.clone()
    # onnxruntime's inference knows axes that are an input of some reductions only, and all have the shape of a sum.
    for node in copy.graph:
        if not node.domain and node.op_type.startswith("Reduce") and len(node.inputs) > 1:
            node.op_type = "ReduceSum"
    for value in (value for node in copy.graph for value in node.outputs if value.name and _lacks(value)):
        value.shape = None
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or (tensor.size <= _SMALL and not tensor.dtype.is_floating_point()):
            continue
        value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
        del copy.graph.initializers[name]
        value.const_value = None
        copy.graph.inputs.append(value)
    return copy
