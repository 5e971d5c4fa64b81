"""Scales are stored in the fewest bytes that lose nothing, whatever operators read."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.scales import computed_scales, scale_values
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import Inserter
from graphopt.graph.weights import expression_of
from graphopt.passes.base import Pass
from graphopt.passes.common.scale_forms import ScaleForm, bytes_of, shortest_form, write_form

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

SHORT_SCALES = Rule("compact_scales.stored", "{scales} as {form}: {saved} bytes less")
NOT_SHORT = Rule("compact_scales.not-short", "fewer bytes do not hold all of its numbers")

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class CompactScales(Pass):
    """Store scales, minimums and zero points that are numbers in fewer bytes.

    before::

        W = DequantizeLinear(codes, scales)                                 scales: float32 [groups, columns]
        y = MatMulTable(x, codes, scales, ...)                              scales: float32 [tiles, groups, 16]

    after, whichever is shortest and holds each number::

        scales = Cast(scales')                                              float16 or bfloat16
        scales = Reshape(GatherElements(table, Cast(indices); axis=1))       4 or 8 bits, tables of 16 or 256 numbers
        scales = Reshape(Mul(Cast(levels), Cast(steps)))                    uint4, uint8 or int8 [tiles, runs, 8, 16]
                                                                            and float16 [tiles, runs, 1, 16]

    The first is of scales that ``quantize_weights`` rounded for float32 operators, and of checkpoints in bfloat16. The
    second is of scales that a file stores in 8 bits under one number for the whole (E8M0 of MXFP4, E4M3 of NVFP4), and
    of zero points. The third is of the two levels of llama.cpp's K-quants and IQ4_XS: so a matrix takes the bytes that
    it has in the file. Forms are found by the numbers, so no step has to know where scales came from. onnxruntime
    computes these nodes when it loads the model, before it fuses products, so what runs is the same. Scales of
    convolutions and of inputs are few, and stay.

    Every recipe that stores codes gets this step at its end. The step ``widen_scales`` undoes it when an artifact is
    optimized again. ``level_scales`` goes further and rounds scales; what it made stays.
    """

    name: ClassVar[str] = "compact_scales"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower", "float16", "group_experts", "level_scales")

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether the recipe makes codes, or scales were compact as the graph came in."""
        return "codes" in recipe.phases or bool(computed_scales(graph))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Store each scale in fewer bytes that can be; say why another one stays."""
        graph, ledger = model.graph, context.ledger
        order = {node: position for position, node in enumerate(graph)}
        forms: dict[str, ScaleForm | None] = {}
        for scales in scale_values(graph):
            if scales.dtype not in _FLOATS or scales.const_value is None:
                continue
            # What is one tensor under several names stays one.
            expression = expression_of(scales.const_value)
            if expression.digest not in forms:
                forms[expression.digest] = shortest_form(expression)
            form = forms[expression.digest]
            if form is None:
                if scales.dtype == ir.DataType.FLOAT:
                    ledger.skipped(scales, NOT_SHORT())
                continue
            name, uses = scales.name or "scales", [*scales.uses()]
            del graph.initializers[name]
            insert = Inserter(graph, min((use.node for use in uses), key=order.__getitem__), name)
            short_scales = write_form(graph, insert, name, form)
            for use in uses:
                use.node.replace_input_with(use.idx, short_scales)
            fact = SHORT_SCALES(scales=name, form=form.words, saved=expression.nbytes - bytes_of(form))
            for node in insert.nodes:
                ledger.changed(node, fact, [use.node for use in uses])
