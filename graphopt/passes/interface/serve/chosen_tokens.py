"""Tokens that a trained indexer chooses, of requests that share blocks.

The key of an indexer stands behind the latent of its token in one row of a block, so it goes wherever that goes. The
keys of stored tokens are read from the blocks, those of new tokens are what the call computes, rounded as blocks round:

    K  [batch, positions, size] = ScatterND(<numbers of the blocks that the table names>, <places of new tokens>, new)
    s  [batch, longest, positions] = <the model's arithmetic> of K and the new tokens of each request as a row
    best = TopK(Where(j <= past + i, s, -inf), Min(k, positions))
    chosen [1, tokens, best] = the positions <= past + i among them in rising order, -1 behind them

What a model computes scores by is left as it is: it is not looked into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, clone_node, shared_constant
from graphopt.runtime_ops.kv_attention.spec.attributes import LANES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.graph.editing import Dims
    from graphopt.passes.common.choices import Choice
    from graphopt.passes.interface.serve.packed_tokens import PackedTokens

OTHER_OPERAND = Rule(
    "serve.other-operand",
    "{input}, by which {node} chooses tokens, is neither a constant nor has a row for each new token",
)

_INT64, _BOOL = ir.DataType.INT64, ir.DataType.BOOL
_BATCH, _LONGEST, _BLOCKS, _POSITIONS, _BEST = "batch_size", "longest", "blocks_in_use", "positions", "best"
_NO_POSITION = np.iinfo(np.int64).max


def why_not_chosen(choice: Choice) -> Fact | None:
    """Return why scores of a choice cannot be computed for each request by itself; ``None`` where they can."""
    for operand in _operands(choice):
        leading = None if operand.shape is None else list(map(str, operand.shape))[:2]
        assert choice.new.shape is not None
        if leading != list(map(str, choice.new.shape))[:2]:
            return OTHER_OPERAND(input=operand.name, node=choice.top.name)
    return None


def _operands(choice: Choice) -> list[ir.Value]:
    """Return what the scores are computed of besides keys and constants."""
    step_values = {choice.present, *(output for node in choice.steps for output in node.outputs)}
    inputs = [value for node in choice.steps for value in node.inputs if value is not None and value not in step_values]
    return list(dict.fromkeys(value for value in inputs if value.const_value is None))


class ChosenTokens:
    """The positions that tokens read, by the ``TopK`` that chooses them: layers may share a choice.

    Args:
        graph: with tokens in one row.
        tokens: of the graph.
        block: tokens of a block.
    """

    def __init__(self, graph: ir.Graph, tokens: PackedTokens, block: int) -> None:
        self._graph, self._tokens, self._block = graph, tokens, block
        self._positions_of: dict[ir.Node, ir.Value] = {}

    def choose(self, choice: Choice, before: ir.Node, first: int, pools: Sequence[ir.Value]) -> ir.Value:
        """Return the positions, int32 [1, tokens, best].

        Args:
            choice: what is chosen by.
            before: the attention that reads it; the first of several has the keys in its cache.
            first: the first of the numbers of a row that are a key of the indexer.
            pools: the blocks that hold these rows, see ``PagedAttention`` with a ``value_size``.
        """
        if choice.top not in self._positions_of:
            insert = Inserter(self._graph, before, f"{choice.top.name}.of_requests")
            keys = self._keys(insert, choice, first, pools)
            self._positions_of[choice.top] = self._best(insert, choice.count, self._scores(insert, choice, keys))
        return self._positions_of[choice.top]

    def _keys(self, insert: Inserter, choice: Choice, first: int, pools: Sequence[ir.Value]) -> ir.Value:
        """Return the keys of all tokens of each request, [batch, positions, size]; anything behind them."""
        lines, groups = self._block // (2 * LANES), choice.size // LANES
        table = self._tokens.blocks_in_use(self._block)
        shape = pools[0].shape
        assert shape is not None
        of_row = 2 * int(str(shape[3])) // LANES
        # a block of latents is [lines, numbers / 16, 16 numbers x 16 tokens], half of its lines in each pool
        of_block = insert.op(
            "Mul", [table, insert.integers(lines * of_row)], [_BATCH, _BLOCKS], _INT64, "first_of_block"
        )
        column = insert.op("Unsqueeze", [of_block, insert.integers([2, 3])], [_BATCH, _BLOCKS, 1, 1], _INT64, "column")
        inside = np.arange(lines)[:, None] * of_row + first // LANES + np.arange(groups)
        indices = shared_constant(self._graph, f"serve.indices.{lines}.{of_row}.{first}.{groups}", inside)
        dims: Dims = [_BATCH, _BLOCKS, lines, groups]
        index = insert.op("Add", [column, indices], dims, _INT64, "index")
        halves = []
        for number, pool in enumerate(pools):
            square = LANES * LANES
            squares = insert.op(
                "Reshape", [pool, insert.integers([-1, square])], [None, square], pool.dtype, f"squares{number}"
            )
            halves.append(insert.op("Gather", [squares, index], [*dims, square], pool.dtype, f"half{number}"))
        numbers = insert.op(
            "Concat", halves, [_BATCH, _BLOCKS, 2 * lines, groups, LANES**2], halves[0].dtype, "numbers", axis=2
        )
        squares_of_lines = insert.op(
            "Reshape",
            [numbers, insert.integers([0, -1, groups, LANES, LANES])],
            [_BATCH, None, groups, LANES, LANES],
            numbers.dtype,
            "squares_of_lines",
        )
        rows_of_lines = insert.op(
            "Transpose",
            [squares_of_lines],
            [_BATCH, None, LANES, groups, LANES],
            numbers.dtype,
            "rows_of_lines",
            perm=[0, 1, 4, 2, 3],
        )
        rows_dims: Dims = [_BATCH, _POSITIONS, choice.size]
        rows = insert.op(
            "Reshape", [rows_of_lines, insert.integers([0, -1, choice.size])], rows_dims, numbers.dtype, "rows"
        )
        of_tokens: Dims = ["tokens", choice.size]
        new = insert.op("Squeeze", [choice.new, insert.integers([0])], of_tokens, choice.new.dtype, "new")
        if numbers.dtype != choice.new.dtype:
            new = insert.op("Cast", [new], of_tokens, numbers.dtype, "new_stored", to=numbers.dtype)
        keys = insert.op("ScatterND", [rows, self._tokens.index_pairs, new], rows_dims, numbers.dtype, "keys")
        if numbers.dtype != choice.new.dtype:
            keys = insert.op("Cast", [keys], rows_dims, choice.new.dtype, "keys_read", to=choice.new.dtype)
        return keys

    def _scores(self, insert: Inserter, choice: Choice, keys: ir.Value) -> ir.Value:
        """Return scores [batch, longest, positions] by the model's own arithmetic."""
        value_of: dict[ir.Value, ir.Value] = {choice.present: keys}
        for operand in _operands(choice):
            assert operand.shape is not None
            dims = [_BATCH, _LONGEST, *list(operand.shape)[2:]]
            name = f"{len(value_of)}"
            rows_of_operand = insert.op(
                "Gather", [operand, self._tokens.rows], [1, *dims], operand.dtype, f"rows_of_operand{name}", axis=1
            )
            value_of[operand] = insert.op(
                "Squeeze", [rows_of_operand, insert.integers([0])], dims, operand.dtype, f"row{name}"
            )
        for node in choice.steps:
            inputs = [None if value is None else value_of.get(value, value) for value in node.inputs]
            copy = clone_node(node, inputs, f"{node.name}.of_requests")
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.name, new.type = f"{old.name}.of_requests", old.type
                value_of[old] = new
            insert.graph.insert_before(insert.before, copy)
        return value_of[choice.scores]

    def _best(self, insert: Inserter, count: int, scores: ir.Value) -> ir.Value:
        """Return the positions of the best scores, int32 [1, tokens, best], rising, -1 behind them."""
        dtype, dims = scores.dtype, [_BATCH, _LONGEST, _POSITIONS]
        length = insert.op("Shape", [scores], [1], _INT64, "length", start=2, end=3)
        end = insert.op("Squeeze", [length], [], _INT64, "end")
        positions = insert.op("Range", [insert.integers(0), end, insert.integers(1)], [_POSITIONS], _INT64, "position")
        of_query = insert.op(
            "Unsqueeze", [self._tokens.row_positions, insert.integers([2])], [_BATCH, _LONGEST, 1], _INT64, "of_query"
        )
        is_seen = insert.op("LessOrEqual", [positions, of_query], dims, _BOOL, "is_seen")
        number = np.float32 if dtype is None else dtype.numpy()
        hidden, lowest = (
            shared_constant(self._graph, f"serve.{name}.{np.dtype(number).name}", np.array(value, number))
            for name, value in (("hidden", -np.inf), ("lowest", np.finfo(number).min))
        )
        # NaN would leave the order of all others open
        is_lost = insert.op("IsNaN", [scores], dims, _BOOL, "is_lost")
        numbers = insert.op("Where", [is_lost, lowest, scores], dims, dtype, "known")
        seen_scores = insert.op("Where", [is_seen, numbers, hidden], dims, dtype, "seen_scores")
        count_of_best = insert.op("Min", [length, insert.integers([count])], [1], _INT64, "count_of_best")
        best: Dims = [_BATCH, _LONGEST, _BEST]
        top = insert.node("TopK", [seen_scores, count_of_best], [(best, dtype), (best, _INT64)], "top", axis=-1)
        is_real = insert.op("LessOrEqual", [top.outputs[1], of_query], best, _BOOL, "is_real")
        no_position = insert.integers(_NO_POSITION)
        real = insert.op("Where", [is_real, top.outputs[1], no_position], best, _INT64, "real")
        rising = insert.node(
            "TopK", [real, count_of_best], [(best, _INT64), (best, _INT64)], "rising", axis=-1, largest=0
        )
        is_behind = insert.op("Equal", [rising.outputs[0], no_position], best, _BOOL, "is_behind")
        positions_or_none = insert.op(
            "Where", [is_behind, insert.integers(-1), rising.outputs[0]], best, _INT64, "positions_or_none"
        )
        narrow = insert.op("Cast", [positions_or_none], best, ir.DataType.INT32, "narrow", to=ir.DataType.INT32)
        sizes = insert.op("Concat", [insert.integers([1, -1]), count_of_best], [3], _INT64, "sizes", axis=0)
        flat = insert.op("Reshape", [narrow, sizes], [1, "columns", _BEST], ir.DataType.INT32, "flat")
        return insert.op(
            "Gather", [flat, self._tokens.columns], [1, "tokens", _BEST], ir.DataType.INT32, "chosen", axis=1
        )
