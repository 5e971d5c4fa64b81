"""Tokens of all requests one behind the other: the ports that say whose they are, and what follows from these.

cumulative_sequence_lengths  c  int32 [batch + 1]     request b has the tokens c[b] .. c[b + 1] - 1
past_sequence_lengths        p  int32 [batch]         and p[b] tokens before them

token t is of request r(t) = #{b: t >= c[b + 1]}, the i(t) = t - c[r(t)]-th of its new ones, at position p[r(t)] + i(t)
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import BLOCK_TABLE, INPUT_IDS, PAST_LENGTHS, POSITION_IDS, STARTS
from graphopt.graph.editing import Inserter

if TYPE_CHECKING:
    from graphopt.graph.editing import Dims

END = 1 << 62
"""A bound of a ``Slice`` that means the end."""

_BATCH, _TOKENS, _LONGEST = "batch_size", "tokens", "longest"
_INT64 = ir.DataType.INT64


class PackedTokens:
    """The tokens of a graph that takes those of all requests one behind the other, as its only row.

    Args:
        graph: whose ``input_ids`` [batch, length] become [tokens], with ports for the rest.

    Attributes:
        starts: ``cumulative_sequence_lengths``.
        past: ``past_sequence_lengths``.
        table: ``block_table``.
    """

    def __init__(self, graph: ir.Graph) -> None:
        tokens = next(value for value in graph.inputs if value.name == INPUT_IDS)
        index = list(graph.inputs).index(tokens)
        self._ids = ir.val(f"{INPUT_IDS}.packed", tokens.dtype, [_TOKENS])
        self.starts = ir.val(STARTS, ir.DataType.INT32, ["batch_plus_one"])
        self.past = ir.val(PAST_LENGTHS, ir.DataType.INT32, [_BATCH])
        self.table = ir.val(BLOCK_TABLE, ir.DataType.INT32, [_BATCH, "blocks_of_request"])
        _state_one_row(graph, tokens)
        self._make = make = Inserter(graph, graph[0], "tokens")
        self._in_use: ir.Value | None = None
        self._front = make.integers([0])
        tokens.replace_all_uses_with(make.op("Unsqueeze", [self._ids, self._front], [1, _TOKENS], tokens.dtype, "row"))
        positions = next((value for value in graph.inputs if value.name == POSITION_IDS), None)
        if positions is not None:
            row = make.op("Unsqueeze", [self.positions, self._front], [1, _TOKENS], _INT64, "at")
            positions.replace_all_uses_with(row)
            graph.inputs.remove(positions)
        graph.inputs.remove(tokens)
        graph.inputs.insert(index, self._ids)
        self._ids.name = INPUT_IDS
        graph.inputs.extend([self.starts, self.past, self.table])

    @cached_property
    def positions(self) -> ir.Value:
        """[tokens]: the position of each."""
        before = self._op("Gather", [self._wide_past, self._request], [_TOKENS], "before")
        return self._op("Add", [before, self._inside], [_TOKENS], "position")

    @cached_property
    def _wide_starts(self) -> ir.Value:
        return self._op("Cast", [self.starts], ["batch_plus_one"], f"{STARTS}.wide", to=_INT64)

    @cached_property
    def _wide_past(self) -> ir.Value:
        return self._op("Cast", [self.past], [_BATCH], f"{PAST_LENGTHS}.wide", to=_INT64)

    @cached_property
    def _ends(self) -> ir.Value:
        bounds = self._make.integers([1]), self._make.integers([END])
        return self._op("Slice", [self._wide_starts, *bounds], [_BATCH], "ends")

    @cached_property
    def _firsts(self) -> ir.Value:
        bounds = self._front, self._make.integers([-1])
        return self._op("Slice", [self._wide_starts, *bounds], [_BATCH], "firsts")

    @cached_property
    def _count(self) -> ir.Value:
        return self._op("Size", [self._ids], [], "count")

    @cached_property
    def _numbers(self) -> ir.Value:
        return self._range(self._count, _TOKENS, "number")

    @cached_property
    def _request(self) -> ir.Value:
        """[tokens]: which request each is of."""
        column = self._op("Unsqueeze", [self._numbers, self._make.integers([1])], [_TOKENS, 1], "column")
        dims = [_TOKENS, _BATCH]
        is_behind = self._make.op("GreaterOrEqual", [column, self._ends], dims, ir.DataType.BOOL, "behind")
        counts = self._op("Cast", [is_behind], dims, "counted", to=_INT64)
        return self._op("ReduceSum", [counts, self._make.integers([1])], [_TOKENS], "request", keepdims=0)

    @cached_property
    def _inside(self) -> ir.Value:
        """[tokens]: how many new tokens of its request stand before each."""
        first = self._op("Gather", [self._wide_starts, self._request], [_TOKENS], f"{STARTS}.its")
        return self._op("Sub", [self._numbers, first], [_TOKENS], "inside")

    @cached_property
    def _lengths(self) -> ir.Value:
        """[batch, 1]: how many new tokens each request has."""
        lengths = self._op("Sub", [self._ends, self._firsts], [_BATCH], "lengths")
        return self._op("Unsqueeze", [lengths, self._make.integers([1])], [_BATCH, 1], "lengths.column")

    @cached_property
    def _longest(self) -> ir.Value:
        return self._op("ReduceMax", [self._lengths], [], "longest", keepdims=0)

    @cached_property
    def _steps(self) -> ir.Value:
        return self._range(self._longest, _LONGEST, "step")

    @cached_property
    def mask(self) -> ir.Value:
        """int64 [batch, longest]: 1 where a request has so many new tokens."""
        dims = [_BATCH, _LONGEST]
        is_token = self._make.op("Less", [self._steps, self._lengths], dims, ir.DataType.BOOL, "is_token")
        return self._op("Cast", [is_token], dims, "mask", to=_INT64)

    @cached_property
    def rows(self) -> ir.Value:
        """int64 [batch, longest]: which token stands in each column of a request; behind its end, any."""
        first = self._op("Unsqueeze", [self._firsts, self._make.integers([1])], [_BATCH, 1], "firsts.column")
        number = self._op("Add", [first, self._steps], [_BATCH, _LONGEST], "rows.number")
        last = self._op("Sub", [self._count, self._make.integers(1)], [], "last")
        return self._op("Min", [number, last], [_BATCH, _LONGEST], "rows")

    @cached_property
    def columns(self) -> ir.Value:
        """int64 [tokens]: where each token stands among the batch x longest columns of all requests."""
        begin = self._op("Mul", [self._request, self._longest], [_TOKENS], "begin")
        return self._op("Add", [begin, self._inside], [_TOKENS], "columns")

    @cached_property
    def row_positions(self) -> ir.Value:
        """int64 [batch, longest]: the position of each column of a request, as if all were new tokens."""
        before = self._op("Unsqueeze", [self._wide_past, self._make.integers([1])], [_BATCH, 1], "past.column")
        return self._op("Add", [before, self._steps], [_BATCH, _LONGEST], "row_positions")

    @cached_property
    def index_pairs(self) -> ir.Value:
        """int64 [tokens, 2]: the request of each token, and its position."""
        axis, dims = self._make.integers([1]), ir.Shape([_TOKENS, 1])
        parts = [
            self._op("Unsqueeze", [part, axis], dims, f"place.{number}")
            for number, part in enumerate((self._request, self.positions))
        ]
        return self._op("Concat", parts, [_TOKENS, 2], "index_pairs", axis=1)

    def blocks_in_use(self, block: int) -> ir.Value:
        """Return the blocks of so many tokens that requests have, int64 [batch, those of the longest], and 0 behind."""
        if self._in_use is None:
            table = self._op("Cast", [self.table], [_BATCH, None], f"{BLOCK_TABLE}.wide", to=_INT64)
            news = self._op("Squeeze", [self._lengths, self._make.integers([1])], [_BATCH], "news")
            total = self._op("Add", [self._wide_past, news], [_BATCH], "total")
            largest = self._op("ReduceMax", [total], [1], "total.most", keepdims=1)
            up = self._op("Add", [largest, self._make.integers([block - 1])], [1], "total.up")
            count = self._op("Div", [up, self._make.integers([block])], [1], "blocks.count")
            bounds = self._make.integers([0]), count, self._make.integers([1])
            entries = self._op("Slice", [table, *bounds], [_BATCH, "blocks_in_use"], "blocks.found")
            self._in_use = self._op(
                "Max", [entries, self._make.integers(0)], [_BATCH, "blocks_in_use"], "blocks.in_use"
            )
        return self._in_use

    def _range(self, end: ir.Value, size: str, name: str) -> ir.Value:
        zero, step = self._make.integers(0), self._make.integers(1)
        return self._op("Range", [zero, end, step], [size], name)

    def _op(self, op_type: str, inputs: list[ir.Value], dims: Dims, name: str, **attributes: object) -> ir.Value:
        return self._make.op(op_type, inputs, dims, _INT64, name, **attributes)


def _state_one_row(graph: ir.Graph, tokens: ir.Value) -> None:
    """State in all shapes that there is one row, of all tokens."""
    assert tokens.shape is not None
    batch, length = (str(dim) for dim in tokens.shape)
    names: dict[str, int | str] = {batch: 1, length: _TOKENS}
    for node in graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([names.get(str(dim), dim) for dim in value.shape])
