"""Tokens of texts of mixed length stand one behind the other: padding takes part in attention alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.ports import ATTENTION_MASK
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import Dims, Inserter, shared_constant
from graphopt.passes.base import Pass
from graphopt.passes.interface.pack_tokens.token_wise import Rows, TokenAxes, token_wise_regions

if TYPE_CHECKING:
    from graphopt.passes.context import Context

_INT64 = ir.DataType.INT64
_TOKENS = "tokens"

PACKED_NODES = Rule(
    "pack_tokens.packed",
    "it and {others} nodes beside it see tokens one behind the other, without padding: {products} products",
)
NO_MASK = Rule("pack_tokens.no-mask", "the graph has no input of this name, so nothing tells tokens from padding")
NO_NAMES = Rule("pack_tokens.no-names", "it is {shape}, and not [batch, length] with two names")
NO_PRODUCTS = Rule(
    "pack_tokens.no-products", "no product treats the tokens [{batch}, {length}] of this mask one by one"
)


class PackTokens(Pass):
    """Leave padding out of all that treats tokens one by one: products, norms, activations, lookups.

    before::

        x                                           [batch, length, width]
        y = f(x)                                    token by token

    after::

        places = NonZero(attention_mask)            [tokens, 2], of each token its text and its column
        number = max(CumSum(attention_mask) - 1, 0) [batch, length], of each place its token
        y'     = f(GatherND(x, places))             [1, tokens, width]
        y      = GatherND(y', number)               [batch, length, width], in front of attention alone

    f computes the row of a token of that row alone, so rows of tokens are what they were, in the order of the mask. A
    batch of texts of 20 to 200 tokens computes as many rows as it has tokens, and not 200 for each text
    (ByteTransformer, Zhai et al. 2023, section 4.2: a prefix sum over the mask, zero padding elsewhere). Attention and
    whatever else sees several tokens get the batch back, in which a place of padding holds the row of the token before
    it; the mask hides it, as it hid the row of a padding token. What the graph gives out is 0 there.

    Positions and what belongs to a whole text are looked up for each token: v [1, length, ...] becomes the rows of the
    columns of the tokens, v [batch, 1, ...] those of their texts.

    A batch without padding pays for the lookups: four rows of ``width`` a layer. Where padding changes what a graph
    computes for tokens, such as a mean over all columns, the run before and after the pass shows it, and the pass is
    refused. A mask without any token is an error in onnxruntime's ``GatherND``.
    """

    name: ClassVar[str] = "pack_tokens"
    effect: ClassVar[Effect] = "exact"

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Pack each region of token-wise nodes; say why there is none."""
        graph, ledger = model.graph, context.ledger
        mask = next((value for value in graph.inputs if value.name == ATTENTION_MASK), None)
        if mask is None:
            ledger.skipped(ATTENTION_MASK, NO_MASK())
            return
        names = [str(dim) for dim in mask.shape or () if not isinstance(dim, int)]
        if mask.shape is None or len(mask.shape) != 2 or len(set(names)) != 2:
            ledger.skipped(mask, NO_NAMES(shape=str(mask.shape)))
            return
        axes = TokenAxes(*names)
        regions = list(token_wise_regions(graph, axes))
        if not regions:
            ledger.skipped(mask, NO_PRODUCTS(batch=axes.batch, length=axes.length))
            return
        inside = {node: rows for region in regions for node, rows in region.items()}
        packing = _Packing(graph, mask, axes)
        packing.pack({node: inside[node] for node in list(graph) if node in inside})
        for region in regions:
            first = next(iter(region))
            products = sum(node.op_type == "MatMul" for node in region)
            ledger.changed(first, PACKED_NODES(others=len(region) - 1, products=products), [first])


class _Packing:
    """Lookups between batches and packed tokens, each made once.

    Args:
        graph: the graph.
        mask: of padding, [batch, length].
        axes: the names of its dimensions.
    """

    def __init__(self, graph: ir.Graph, mask: ir.Value, axes: TokenAxes) -> None:
        self._graph, self._axes, self._mask = graph, axes, mask
        self._rows_of: dict[tuple[ir.Value, Rows], ir.Value] = {}
        make = Inserter(graph, graph[0], "tokens")
        batch, length = axes.batch, axes.length
        self._is_token = make.op("Cast", [mask], [batch, length], ir.DataType.BOOL, "real", to=ir.DataType.BOOL)
        text_and_column = make.op("NonZero", [self._is_token], [2, _TOKENS], _INT64, "found")
        pairs = make.op("Transpose", [text_and_column], [_TOKENS, 2], _INT64, "places", perm=[1, 0])
        self._indices = make.op("Unsqueeze", [pairs, make.integers([0])], [1, _TOKENS, 2], _INT64, "row")
        halves: list[tuple[Dims, ir.DataType]] = [([1, _TOKENS], _INT64)] * 2
        split = make.node("Split", [text_and_column], halves, "of_each", axis=0, num_outputs=2)
        self._text, self._column = split.outputs
        counts = make.op("Cast", [self._is_token], [batch, length], _INT64, "counts", to=_INT64)
        flat = make.op("Reshape", [counts, make.integers([-1])], [None], _INT64, "flat")
        sums = make.op("CumSum", [flat, make.integers(0)], [None], _INT64, "sums")
        before = make.op("Sub", [sums, make.integers(1)], [None], _INT64, "before")
        number = make.op("Max", [before, make.integers(0)], [None], _INT64, "number")
        shape = make.op("Shape", [mask], [2], _INT64, "shape")
        column = make.op("Concat", [shape, make.integers([1])], [3], _INT64, "column_shape", axis=0)
        number = make.op("Reshape", [number, column], [batch, length, 1], _INT64, "number_of_each")
        row = make.op("Mul", [number, make.integers(0)], [batch, length, 1], _INT64, "only_row")
        self._numbers = make.op("Concat", [row, number], [batch, length, 2], _INT64, "numbers", axis=-1)

    def pack(self, region: dict[ir.Node, dict[int, Rows]]) -> None:
        """Let the nodes of a region read and make packed rows, and those around it what they read before."""
        for node in region:
            for value in node.outputs:
                self._unpack(value, region)
        for node, rows in region.items():
            for index, kind in rows.items():
                operand = node.inputs[index]
                assert operand is not None
                if kind != "same" and operand.producer() not in region:
                    node.replace_input_with(index, self._rows(operand, kind, node))
            for value in node.outputs:
                assert value.shape is not None
                value.shape = ir.Shape([1, _TOKENS, *value.shape[2:]])

    def _unpack(self, value: ir.Value, region: dict[ir.Node, dict[int, Rows]]) -> None:
        """Give readers outside of the region, and the app, a batch again."""
        uses = [use for use in value.uses() if use.node not in region]
        is_output = value.is_graph_output()
        if not uses and not is_output:
            return
        name = str(value.name)
        node = ir.node("GatherND", [value, self._numbers], name=f"{name}.unpack")
        batch = node.outputs[0]
        batch.type, batch.shape, batch.name = value.type, value.shape, f"{name}.batch"
        producer = value.producer()
        assert producer is not None and producer.graph is not None
        producer.graph.insert_after(producer, node)
        for use in uses:
            use.node.replace_input_with(use.idx, batch)
        if is_output:
            self._give_out(value, batch)

    def _give_out(self, value: ir.Value, batch: ir.Value) -> None:
        """Make what the graph gives out 0 where there is padding: it would be the row of another token."""
        assert value.shape is not None and value.dtype is not None
        last, name = self._graph[-1], str(value.name)
        make = Inserter(self._graph, last, name)
        axes = make.integers(list(range(2, len(value.shape))))
        dims = [*value.shape[:2], *[1] * (len(value.shape) - 2)]
        is_token = make.op("Unsqueeze", [self._is_token, axes], dims, ir.DataType.BOOL, "real")
        zero = shared_constant(self._graph, f"{_TOKENS}.zero.{value.dtype.name}", np.zeros((), value.dtype.numpy()))
        result = make.op("Where", [is_token, batch, zero], value.shape, value.dtype, "of_tokens")
        for node in reversed(make.nodes):  # behind all that is there
            self._graph.remove(node)
            self._graph.insert_after(last, node)
        index = list(self._graph.outputs).index(value)
        self._graph.outputs[index] = result
        value.name = f"{name}.packed"
        result.name = name

    def _rows(self, value: ir.Value, kind: Rows, reader: ir.Node) -> ir.Value:
        """Return the rows of ``value`` for each token, [1, tokens, ...]."""
        key = value, kind
        if key not in self._rows_of:
            assert value.shape is not None
            make = Inserter(self._graph, reader, f"{value.name}.pack.{kind}")
            if kind == "tokens":
                dims = [1, _TOKENS, *value.shape[2:]]
                self._rows_of[key] = make.op("GatherND", [value, self._indices], dims, value.dtype, "rows")
            elif kind == "texts":
                flat = make.op(
                    "Squeeze", [value, make.integers([1])], [self._axes.batch, *value.shape[2:]], value.dtype
                )
                dims = [1, _TOKENS, *value.shape[2:]]
                self._rows_of[key] = make.op("Gather", [flat, self._text], dims, value.dtype, "rows")
            else:
                axis = next(axis for axis, dim in enumerate(value.shape) if str(dim) == self._axes.length)
                flat = value
                if axis:
                    dims = list(value.shape[1:])
                    flat = make.op("Squeeze", [value, make.integers([0])], dims, value.dtype)
                assert flat.shape is not None
                dims = [1, _TOKENS, *flat.shape[1:]]
                self._rows_of[key] = make.op("Gather", [flat, self._column], dims, value.dtype, "rows")
        return self._rows_of[key]
