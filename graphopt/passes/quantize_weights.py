"""Weights become codes, scales and perhaps zero points, in the layout that onnxruntime fuses into its own kernel."""

from __future__ import annotations

from typing import ClassVar, Literal

import onnx_ir as ir
from pydantic import Field

from graphopt.analysis.structure import head_nodes, linear_nodes, lookups, router_nodes, token_lookups
from graphopt.formats import format_of
from graphopt.passes.base import Effect, Ledger, Options, Pass
from graphopt.rounding.lazy import LazyQuantized
from graphopt.weights import new_weight, weight_of

# onnxruntime fuses DequantizeLinear -> MatMul for blocks of these sizes only.
_GROUPS = (16, 32, 64, 128, 256)


class LinearFormat(Options):
    """A number format for matrices, and how many rows share a scale; onnxruntime fuses these groups and no others."""

    format: Literal["int4", "int8", "uint4", "uint8"] = "int4"
    group: Literal[16, 32, 64, 128, 256] = 64


class EmbeddingFormat(Options):
    """A number format for tables that are looked up, and how many weights of a row share a scale (``None``: all).

    ONNX's ``Gather`` takes no codes of 4 bits.
    """

    format: Literal["int8", "uint8"] = "int8"
    group: int | None = Field(default=None, ge=1)


class QuantizeWeightsOptions(Options):
    """Formats of matrices, token embedding and head (``None`` leaves one as it is), and how scales are chosen."""

    step: Literal["quantize_weights"] = "quantize_weights"
    linear: LinearFormat | None = LinearFormat()
    embedding: EmbeddingFormat | None = EmbeddingFormat()
    head: LinearFormat | None = LinearFormat(format="int8", group=128)
    scale: Literal["extreme", "least_squares"] = "least_squares"


class QuantizeWeights(Pass[QuantizeWeightsOptions]):
    """Store matrices and the token embedding as codes with a scale per group, rounded to nearest.

    before::

        y = MatMul(x, W)                                   e = Gather(E, ids)

    after, with groups of rows of W and along the columns of E::

        y = MatMul(x, DequantizeLinear(codes, scales; axis=0, block_size=group))
        e = DequantizeLinear(Gather(codes, ids), Gather(scales, ids); axis=-1)

    W is about (code - zero point) x scale. onnxruntime turns the first form into one ``MatMulNBits`` kernel when it
    loads the model; the second looks up codes, so that a step dequantizes the rows it reads and not the whole table. A
    product that chooses experts is left as it is.
    """

    name: ClassVar[str] = "quantize_weights"
    effect: ClassVar[Effect] = "lossy"
    options_type: ClassVar[type[Options]] = QuantizeWeightsOptions

    def rewrite(self, model: ir.Model, ledger: Ledger) -> None:
        """Quantize what the options name; say why anything else with weights stays."""
        graph = model.graph
        heads, routers, tokens = head_nodes(graph), router_nodes(graph), set(token_lookups(graph))
        for node in linear_nodes(graph):
            wanted = self.options.head if node in heads else self.options.linear
            if node in routers - heads:
                ledger.skipped(node, "it chooses experts: its few columns stay in floating point")
            elif wanted is None:
                ledger.skipped(node, "the recipe leaves it in floating point")
            else:
                self._quantize_matrix(graph, node, wanted, ledger)
        for node in lookups(graph):
            if node not in tokens:
                ledger.skipped(node, "a table that is not looked up by input_ids")
            elif self.options.embedding is None:
                ledger.skipped(node, "the recipe leaves it in floating point")
            else:
                self._quantize_table(graph, node, self.options.embedding, ledger)
        left = set(linear_nodes(graph))
        for node in graph:
            weight = weight_of(node, 1) if node.op_type in ("MatMul", "Gemm") else None
            if weight is not None and node not in left:
                ledger.skipped(node, f"{node.op_type} with a weight of shape {list(weight.shape or ())}, not a matrix")

    def ensures(self, model: ir.Model) -> None:
        """Promise also that no original weight is left in the file beside its codes."""
        super().ensures(model)
        initializers = model.graph.initializers
        left = [name for name in initializers if f"{name}.codes" in initializers and not initializers[name].uses()]
        if left:
            raise ir.passes.PostconditionError(f"{self.name} left originals beside their codes: {', '.join(left)}")

    def _quantize_matrix(self, graph: ir.Graph, node: ir.Node, wanted: LinearFormat, ledger: Ledger) -> None:
        weight = weight_of(node, 1)
        assert weight is not None and weight.const_value is not None
        rows, columns = weight.const_value.shape.numpy()
        group = next((size for size in reversed(_GROUPS) if size <= wanted.group and rows % size == 0), None)
        if group is None:
            ledger.skipped(node, f"its {rows} rows are no multiple of any group that onnxruntime fuses {_GROUPS}")
            return
        lazily = LazyQuantized(weight, format_of(wanted.format), group, self.options.scale)
        parts = [new_weight(graph, f"{weight.name}.{part}", tensor) for part, tensor in lazily.tensors().items()]
        dequantize = ir.node(
            "DequantizeLinear", parts, {"axis": 0, "block_size": group}, name=f"{node.name}.dequantize"
        )
        _typed(dequantize.outputs[0], f"{weight.name}.dequantized", weight.dtype, [rows, columns])
        graph.insert_before(node, dequantize)
        node.replace_input_with(1, dequantize.outputs[0])
        note = "" if group == wanted.group else f" ({wanted.group} does not divide {rows} rows)"
        ledger.changed(dequantize, f"{weight.name} as {wanted.format} in groups of {group}{note}", [weight])
        _drop(graph, weight)

    def _quantize_table(self, graph: ir.Graph, node: ir.Node, wanted: EmbeddingFormat, ledger: Ledger) -> None:
        table, ids, output = weight_of(node, 0), node.inputs[1], node.outputs[0]
        assert table is not None and table.const_value is not None
        width = table.const_value.shape.numpy()[1]
        group = wanted.group or width
        if ids is None or ids.shape is None or width % group:
            reason = f"its width {width} is no multiple of the group {group}, or its indices have no known rank"
            ledger.skipped(node, reason)
            return
        rank = len(ids.shape)
        lazily = LazyQuantized(table, format_of(wanted.format), group, self.options.scale, transposed=True)
        looked_up = []
        for part, tensor in lazily.tensors().items():
            stored = new_weight(graph, f"{table.name}.{part}", tensor)
            gather = ir.node("Gather", [stored, ids], {"axis": 0}, name=f"{node.name}.{part}")
            _typed(gather.outputs[0], f"{output.name}.{part}", tensor.dtype, [*ids.shape, tensor.shape.numpy()[1]])
            graph.insert_before(node, gather)
            ledger.changed(gather, f"{part} of {table.name} looked up", [node, table])
            looked_up.append(gather.outputs[0])
        dequantize = ir.node(
            "DequantizeLinear", looked_up, {"axis": rank, "block_size": group}, name=f"{node.name}.dequantize"
        )
        made, name = dequantize.outputs[0], output.name
        graph.insert_before(node, dequantize)
        output.replace_all_uses_with(made, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        _typed(made, name, table.dtype, [*ids.shape, width])
        ledger.changed(dequantize, f"{table.name} as {wanted.format} in groups of {group}", [node, table])
        _drop(graph, table)


def _typed(value: ir.Value, name: str | None, dtype: ir.DataType | None, shape: list[int | ir.SymbolicDim]) -> None:
    value.name, value.shape = name, ir.Shape(shape)
    value.type = None if dtype is None else ir.TensorType(dtype)


def _drop(graph: ir.Graph, weight: ir.Value) -> None:
    # The original must not stay in the file beside its codes, unless something else still reads it.
    if not weight.uses() and not weight.is_graph_output():
        del graph.initializers[weight.name or ""]
