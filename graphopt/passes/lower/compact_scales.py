"""Scales, and codes of three values, are stored in fewer bytes where that loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import reads_packed
from graphopt.analysis.structure.scales import leveled_nodes, scale_values, widened_scales
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import name_output, shared_constant
from graphopt.graph.weights import Cast, Expression, Part, WeightTensor, expression_of, new_weight
from graphopt.passes.base import Pass
from graphopt.passes.common.float8_scales import Float8Scales, float8_scales
from graphopt.passes.common.leveled_scales import EXACT, leveled_scales, read_levels
from graphopt.passes.common.nested_levels import NestedLevels, nested_levels
from graphopt.passes.common.scale_levels import PackedLevels, packed_levels
from graphopt.passes.common.table_layout import DigitCodes
from graphopt.runtime_ops import port, schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.passes.context import Context, Ledger
    from graphopt.passes.recipe import Recipe

FLOAT16_SCALES = Rule("compact_scales.stored", "{scales} in float16: {saved} bytes less")
FLOAT8_SCALES = Rule("compact_scales.float8", "{scales} in floats of 8 bits under a step: {saved} bytes less")
NESTED_SCALES = Rule("compact_scales.nested", "{scales} in codes of 8 bits, {run} under a step: {saved} bytes less")
LEVELS = Rule("compact_scales.levels", "{scales} as {form}: {saved} bytes less")
DIGITS = Rule("compact_scales.digits", "{codes} as digits of base 3, five in a byte: {saved} bytes less")
NOT_HALF = Rule("compact_scales.not-half", "float16 does not hold all of its numbers")

_TWO_BITS = 64  # bytes of a unit
_HALF, _WIDE = ir.DataType.FLOAT16, ir.DataType.FLOAT


class CompactScales(Pass):
    """Store scales and minimums of packed codes, and codes of three values, in fewer bytes.

    before::

        W = DequantizeLinear(codes, scales)                                 scales: float32 [groups, columns]
        y = MatMulTable(x, codes, scales, table, minimums, ...)             scales: float32 [tiles, groups, 16]

    after::

        W = DequantizeLinear(codes, Cast(scales'; to float32))              scales': float16
        y = MatMulTable(x, codes, scales', table, minimums', ...; span, low)      scales': uint8 [tiles, bytes]
        y = MatMulTable(x, codes, Cast(Mul(Cast(levels), steps)), ...)            levels: float8, steps: float64
        y = MatMulTable(x, digits, scales, table, ...; base)                      digits: uint8 [tiles, units, 52]
        y = MatMulTable(x, codes, Cast(Transpose(Reshape(Add(Mul(Gather(table, Cast(levels)), steps), offsets)))), ...)

    ``DequantizeLinear`` makes float32 of float32 scales only, but ``quantize_weights`` rounds scales to float16 where
    float16 has their range, so the numbers stay what they are. onnxruntime folds the ``Cast`` when it loads the model,
    before it fuses products, so what runs is the same. In groups of 32 a weight of 4 bits takes 4.5 bits in the file,
    not 5. Scales of convolutions and of inputs are few, and stay.

    Scales of llama.cpp's K-quants and IQ4_XS are integers of 4, 6 or 8 bits under a float16 number for 8 or 16 groups,
    and so are their minimums. Kernels for CPUs read both as they are, so a matrix takes the bytes that it has in the
    file, and nothing is computed when it is opened. Such levels are found by the numbers, and only where each number
    comes back to the last bit, so no step has to know where scales came from. Kernels for GPUs read floats.

    Scales of NVFP4 are floats of 8 bits (E4M3) under one number for a matrix. onnxruntime makes floats of them when it
    loads the model; the product is made in float64, so that it is rounded once, as where the checkpoint was read.
    Steps are [1, 1, 1], and of matrices that were merged [tiles, 1, 16], one for each column.

    Scales of bitsandbytes that are quantized again are codes of 8 bits in a table of 256 numbers, which is multiplied
    by a number for 256 codes and shifted by another. Codes, in rows as in the checkpoint, and both numbers are stored:
    float32 [runs, 1], where a run is as long as blocks of all merged matrices allow.

    Codes of a table of three numbers (BitNet b1.58, llama.cpp's TQ1_0 and TQ2_0) become digits of base 3, five in a
    byte: 1.625 bits for a weight instead of 2. Kernels for CPUs take them apart in the first call, when they copy codes
    into large pages anyway, so what runs behind it is the same. Kernels for GPUs read codes of 2 bits.

    Every recipe that stores codes gets this step at its end. The step ``widen_scales`` undoes it when an artifact is
    optimized again.
    """

    name: ClassVar[str] = "compact_scales"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower", "float16", "group_experts", "level_scales")

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether the recipe makes codes, or scales were compact as the graph came in."""
        return "codes" in recipe.phases or bool(
            widened_scales(graph) or leveled_nodes(graph) or leveled_scales(graph, EXACT)
        )

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Store each scale in levels or float16 that can be; say why another one stays."""
        graph, ledger = model.graph, context.ledger
        if context.target != "ort-cuda":
            _store_levels(graph, ledger)
            _store_digits(graph, ledger)
        order = {node: position for position, node in enumerate(graph)}
        _store_bytes(graph, ledger, order)
        made_of: dict[str, WeightTensor] = {}
        for scales in scale_values(graph):
            if scales.dtype != _WIDE or scales.const_value is None:
                continue
            numbers = np.asarray(scales.const_value.numpy())
            with np.errstate(over="ignore"):
                exact = np.array_equal(numbers.astype(np.float16).astype(np.float32), numbers)
            if not exact:
                ledger.skipped(scales, NOT_HALF())
                continue
            # What is one tensor under several names stays one.
            expression = expression_of(scales.const_value)
            narrow = made_of.setdefault(expression.digest, WeightTensor(Cast(expression, _HALF)))
            name, uses = scales.name or "scales", [*scales.uses()]
            del graph.initializers[name]
            cast = ir.node("Cast", [new_weight(graph, name, narrow)], {"to": _WIDE}, name=f"{name}.wide")
            half_scales = name_output(cast, scales)
            first = min((use.node for use in uses), key=order.__getitem__)
            graph.insert_before(first, cast)
            for use in uses:
                use.node.replace_input_with(use.idx, half_scales)
            ledger.changed(cast, FLOAT16_SCALES(scales=name, saved=2 * numbers.size), [use.node for use in uses])


def _store_levels(graph: ir.Graph, ledger: Ledger) -> None:
    """Let nodes that read packed codes read scales in two levels, where their numbers are such."""
    forms: dict[tuple[str, ...], list[PackedLevels] | None] = {}
    replacements: dict[ir.Value, ir.Value] = {}
    for node, values in [(node, values) for node in graph if (values := _numbers_of(node)) is not None]:
        sources = [expression_of(value.const_value) for value in values]
        key = tuple(source.digest for source in sources)
        if key not in forms:
            forms[key] = _levels_of(sources)
        levels = forms[key]
        if levels is None:
            continue
        for value, form in zip(values, levels, strict=True):
            if value not in replacements:
                name = value.name or "scales"
                del graph.initializers[name]
                replacements[value] = new_weight(graph, name, WeightTensor(Part(form, "packed")))
            node.replace_input_with(node.inputs.index(value), replacements[value])
            difference = form.source.nbytes - Part(form, "packed").nbytes
            ledger.changed(node, LEVELS(scales=value.name, form=form.words, saved=difference), [node])
        if len(values) == 1:
            rank = len(replacements[values[0]].shape or ())
            zero = shared_constant(graph, "no_zero_points.levels", np.zeros((1,) * rank, np.uint8))
            placeholder = port(node, "zero_points")
            node.replace_input_with(schema_of(node).index("zero_points"), zero)
            if placeholder is not None and not placeholder.uses():
                graph.initializers.pop(placeholder.name or "", None)
        node.attributes.add(ir.AttrInt64("span", levels[0].span))
        node.attributes.add(ir.AttrInt64("low", levels[0].low))


def _store_digits(graph: ir.Graph, ledger: Ledger) -> None:
    """Let nodes read codes of a table of three numbers as digits."""
    for codes in dict.fromkeys(port(node, "codes") for node in graph if reads_packed(node)):
        if codes is None or not codes.is_initializer() or codes.const_value is None:
            continue
        source, uses = expression_of(codes.const_value), [*codes.uses()]
        if source.shape[-1] != _TWO_BITS or not all(_reads_three(use.node, codes) for use in uses):
            continue
        digits, name = DigitCodes(source), codes.name or "codes"
        del graph.initializers[name]
        digit_codes = new_weight(graph, name, WeightTensor(digits))
        for use in uses:
            use.node.replace_input_with(use.idx, digit_codes)
            use.node.attributes.add(ir.AttrInt64("base", 3))
        savings = source.nbytes - digits.nbytes
        ledger.changed(uses[0].node, DIGITS(codes=name, saved=savings), [use.node for use in uses])


def _reads_three(node: ir.Node, codes: ir.Value) -> bool:
    """Return whether a node reads packed codes, each of which is one of three in a table."""
    if not reads_packed(node) or "base" not in schema_of(node).optional or port(node, "codes") is not codes:
        return False
    table = port(node, "table")
    return table is not None and table.is_initializer() and table.const_value is not None and table.shape == (3,)


def _store_bytes(graph: ir.Graph, ledger: Ledger, order: Mapping[ir.Node, int]) -> None:
    """Make scales that nodes with packed codes read of bytes and steps, where their numbers are such products."""
    forms: dict[str, Float8Scales | NestedLevels | None] = {}
    for scales in dict.fromkeys(port(node, "scales") for node in graph if reads_packed(node)):
        if scales is None or not scales.is_initializer() or scales.const_value is None:
            continue
        uses = [*scales.uses()]
        if scales.dtype not in (_WIDE, _HALF) or not all(port(use.node, "scales") is scales for use in uses):
            continue
        source = expression_of(scales.const_value)
        if source.digest not in forms:
            forms[source.digest] = nested_levels(source) or float8_scales(source)
        form = forms[source.digest]
        savings = 0 if form is None else source.nbytes - sum(Part(form, name).nbytes for name in form.parts)
        if form is None or savings <= 0:
            continue
        fact = (
            NESTED_SCALES(scales=scales.name, run=form.run, saved=savings)
            if isinstance(form, NestedLevels)
            else FLOAT8_SCALES(scales=scales.name, saved=savings)
        )
        for node in read_levels(graph, scales, form, order):
            ledger.changed(node, fact, [use.node for use in uses])


def _numbers_of(node: ir.Node) -> list[ir.Value] | None:
    """Return the scales and, where there are any, the zero points of packed codes; ``None`` where levels cannot be."""
    if not reads_packed(node) or "span" not in schema_of(node).optional or node.attributes.get_int("span", 0) != 0:
        return None
    values = _present_numbers(node)
    # what others read as numbers, or beside other zero points, has to stay
    are_free = all(
        value.is_initializer()
        and value.const_value is not None
        and value.dtype in (_WIDE, _HALF)
        and all(reads_packed(use.node) and _present_numbers(use.node) == values for use in value.uses())
        for value in values
    )
    return values if are_free else None


def _present_numbers(node: ir.Node) -> list[ir.Value]:
    inputs = {spec.name: spec for spec in schema_of(node).inputs}
    values = [(inputs[name], port(node, name)) for name in ("scales", "zero_points")]
    return [value for spec, value in values if value is not None and not spec.is_absent(value)]


def _levels_of(sources: list[Expression]) -> list[PackedLevels] | None:
    """Return what stores scales and zero points in two levels; ``None`` where no such levels take fewer bytes."""
    levels = packed_levels(sources)
    if levels is None:
        return None
    is_shorter = sum(Part(form, "packed").nbytes for form in levels) < sum(source.nbytes for source in sources)
    return levels if is_shorter else None
