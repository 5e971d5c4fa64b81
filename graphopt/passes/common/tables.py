"""A table that is looked up, such as that of token embeddings, becomes codes; rows are dequantized when read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import replace
from graphopt.graph.weights import new_weight, weight_of
from graphopt.numerics.formats import format_of
from graphopt.passes.common.logical_codes import set_type
from graphopt.quantization.rounding.lazy_codes import quantize_lazily

if TYPE_CHECKING:
    from graphopt.passes.common.formats import EmbeddingFormat
    from graphopt.passes.context import Ledger
    from graphopt.quantization.rounding.scales import Scale

STORAGE = Rule(
    "quantize_weights.stored",
    "{weight} as {format}",
    group=" in groups of {group}",
    per_column=" with a scale per column",
    asked=" ({asked} does not divide {rows} rows)",
    rounding=" by {rounding}",
    in_place=", in place of {in_place}, as the recipe says for this target",
    few="; its inputs were seen for {few} tokens only, too few for {rounding_asked}",
    dead="; {dead} of its inputs were always 0",
    beside=", {beside} directions of what that loses beside it",
    also=("rows", "rounding_asked", "tokens"),
)
LOOKED_UP = Rule("quantize_weights.looked-up", "{part} of {table} looked up")
ODD_WIDTH = Rule(
    "quantize_weights.odd-width",
    "its width {width} is no multiple of the group {group}, or its indices have no known rank",
)


def quantize_table(
    graph: ir.Graph, node: ir.Node, format_choice: EmbeddingFormat, scale: Scale, ledger: Ledger
) -> None:
    """Store the table that the lookup ``node`` reads as codes, or say why it stays."""
    table, ids, output = weight_of(node, 0), node.inputs[1], node.outputs[0]
    assert table is not None and table.const_value is not None
    width = table.const_value.shape.numpy()[1]
    group = format_choice.group or width
    if ids is None or ids.shape is None or width % group:
        ledger.skipped(node, ODD_WIDTH(width=width, group=group))
        return
    rank = len(ids.shape)
    tensors = quantize_lazily(table.const_value, format_of(format_choice.format), group, scale, is_transposed=True)
    looked_up = []
    for part, tensor in tensors.items():
        part_weight = new_weight(graph, f"{table.name}.{part}", tensor)
        gather = ir.node("Gather", [part_weight, ids], {"axis": 0}, name=f"{node.name}.{part}")
        set_type(gather.outputs[0], f"{output.name}.{part}", tensor.dtype, [*ids.shape, tensor.shape.numpy()[1]])
        graph.insert_before(node, gather)
        ledger.changed(gather, LOOKED_UP(part=part, table=table.name), [node, table])
        looked_up.append(gather.outputs[0])
    reader = ir.node("DequantizeLinear", looked_up, {"axis": rank, "block_size": group}, name=f"{node.name}.dequantize")
    set_type(reader.outputs[0], output.name, table.dtype, [*ids.shape, width])
    replace(node, reader)
    ledger.changed(reader, STORAGE(weight=table.name, format=format_choice.format, group=group), [node, table])
