"""Biases that stand behind packed products are added inside of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import packed_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import remove, take_place
from graphopt.graph.weights import Concat, Inline, Reshape, WeightTensor, expression_of, new_weight, weight_of
from graphopt.passes.base import Pass
from graphopt.runtime_ops import port, schema_of

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression
    from graphopt.passes.context import Context, Ledger
    from graphopt.passes.recipe import Recipe

BIASES_INSIDE = Rule("fold_biases.folded", "adds {biases}")
READ_BEFORE = Rule("fold_biases.read-before", "{output} is read without the bias too")
BIAS_ALREADY = Rule("fold_biases.already", "it has a bias, and another stands behind it")


class _Part(NamedTuple):
    """Columns of a product, and what adds a bias to them, if anything does."""

    output: ir.Value
    columns: int
    add: ir.Node | None
    bias: ir.Value | None


class FoldBiases(Pass):
    """Let products with packed codes add the biases that stand behind them.

    before::

        y1, y2 = Split(ai.graphopt::MatMulDynamic(x, packed codes, ..., bias = 0), [columns1, columns2])
        z1, z2 = Add(y1, b1), Add(y2, b2)

    after::

        z1, z2 = Split(ai.graphopt::MatMulDynamic(x, packed codes, ..., bias = [b1, b2]), [columns1, columns2])

    The kernel adds b to the sum in float32 as it writes it, which is what ``Add`` did with what it read again, so each
    z has the same bits. It still counts as lossy, and is measured: onnxruntime fuses what stands behind in other ways
    (``BiasGelu``, ``SkipLayerNormalization``), which moves last bits, and a product that rounds its input makes more of
    them. What goes is a pass over memory, and a call, for each bias. A part of a merged product that has none gets
    zeros. Products of one column keep their ``Add``.

    Recipes with work on codes get this step for ``ort-cpu`` where a graph has biases.
    """

    name: ClassVar[str] = "fold_biases"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("lower", "group_experts")

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether the recipe makes codes for a CPU, and the graph adds rows of constants."""
        if recipe.target != "ort-cpu" or "codes" not in recipe.phases:
            return False
        return bool(packed_nodes(graph)) or any(_may_add_bias(node) for node in graph)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Fold the biases behind each packed product that has such a port."""
        for node in packed_nodes(model.graph):
            if "bias" in schema_of(node).input_names and "columns" in node.attributes:
                _fold(model.graph, node, context.ledger)


def _may_add_bias(node: ir.Node) -> bool:
    """Return whether ``node`` adds a constant of several numbers, in whatever form the graph came in."""
    if node.op_type != "Add":
        return node.op_type in ("Gemm", "BiasGelu", "MatMulNBits")
    biases = [weight_of(node, index) for index in range(2)]
    return any(bias is not None and bias.const_value is not None and bias.const_value.size > 1 for bias in biases)


def _fold(graph: ir.Graph, node: ir.Node, ledger: Ledger) -> None:
    """Fold what is added to the output of ``node``, or to its parts; say why a bias stays."""
    parts = _parts(node, ledger)
    if not any(part.add for part in parts):
        return
    schema, placeholder = schema_of(node), port(node, "bias")
    index = schema.index("bias")
    if not schema.inputs[index].is_absent(placeholder):
        ledger.skipped(node, BIAS_ALREADY())
        return
    names = [part.bias.name for part in parts if part.bias is not None]
    tensor = WeightTensor(Concat(tuple(map(_numbers, parts)), 0))
    bias = new_weight(graph, f"{names[0]}.of_product", tensor)
    node.replace_input_with(index, bias)
    if placeholder is not None and not placeholder.uses():
        graph.initializers.pop(placeholder.name or "", None)
    ledger.changed(node, BIASES_INSIDE(biases=names), [part.add for part in parts if part.add is not None])
    for part in parts:
        if part.add is not None:
            take_place(part.add.outputs[0], part.output)
            remove(part.add)


def _parts(node: ir.Node, ledger: Ledger) -> list[_Part]:
    """Return the columns of a product in order, each with the bias behind it."""
    y, columns = node.outputs[0], node.attributes.get_int("columns", 0)
    readers = list(y.uses())
    split = readers[0].node if len(readers) == 1 and not y.is_graph_output() else None
    if split is None or split.op_type != "Split" or split.domain or not _splits_columns(split):
        return [_part(y, columns, ledger)]
    sizes = weight_of(split, 1)
    if sizes is None or sizes.const_value is None:
        return []
    widths = map(int, sizes.const_value.numpy())
    return [_part(output, width, ledger) for output, width in zip(split.outputs, widths, strict=True)]


def _splits_columns(split: ir.Node) -> bool:
    rank = None if split.inputs[0] is None or split.inputs[0].shape is None else len(split.inputs[0].shape)
    return split.attributes.get_int("axis", 0) in (-1, None if rank is None else rank - 1)


def _part(output: ir.Value, columns: int, ledger: Ledger) -> _Part:
    """Return the columns with what adds a bias to them, where nothing else reads them."""
    uses = list(output.uses())
    biases = {use.node: bias for use in uses if (bias := _bias(use.node, use.idx, columns)) is not None}
    if not biases:
        return _Part(output, columns, None, None)
    if len(uses) > 1 or output.is_graph_output():
        ledger.skipped(next(iter(biases)), READ_BEFORE(output=output.name))
        return _Part(output, columns, None, None)
    ((add, bias),) = biases.items()
    return _Part(output, columns, add, bias)


def _bias(node: ir.Node, index: int, columns: int) -> ir.Value | None:
    """Return the constant row that ``node`` adds to its input ``index``."""
    x = node.inputs[index]
    if node.op_type != "Add" or node.domain or x is None or x.dtype != ir.DataType.FLOAT:
        return None
    bias = weight_of(node, 1 - index)
    if bias is None or bias.const_value is None or bias.dtype != ir.DataType.FLOAT:
        return None
    shape = tuple(bias.const_value.shape.numpy())
    # one number may be the same for all columns; a bias of one column looks as if it were absent
    is_row = columns > 1 and shape and shape[-1] == columns and bias.const_value.size == columns
    return bias if is_row and _keeps_rank(x, shape) else None


def _keeps_rank(x: ir.Value, shape: tuple[int, ...]) -> bool:
    """Return whether adding an array of ``shape`` leaves ``x`` with its axes."""
    return len(shape) == 1 or (x.shape is not None and len(x.shape) >= len(shape))


def _numbers(part: _Part) -> Expression:
    """Return the biases of the columns, [columns]; zeros where they have none."""
    if part.bias is None:
        return Inline.from_array(np.zeros(part.columns, np.float32))
    assert part.bias.const_value is not None
    return Reshape(expression_of(part.bias.const_value), (part.columns,))
