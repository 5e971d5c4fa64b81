"""Queries of a prompt read, block by block, the pages that hold most of their attention; later ones read everything."""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.runtime_ops.kv_attention.spec.policies.policy import Policy, parameter

if TYPE_CHECKING:
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
    from graphopt.runtime_ops.kv_attention.spec.body_append import Call

Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PAGES_OF_BLOCKS = Rule(
    "sparse_kv.pages-of-blocks",
    "pages with {mass} of the attention of a prompt's blocks of {block} tokens, by each {stride}th of their queries",
)

MOST_BLOCK = 1024
"""Queries of a block, at most."""


@dataclass(frozen=True)
class SparsePrefill(Policy):
    """Blocks of queries choose pages together by what some of them, asked in full, attend to.

    Attributes:
        prefill_mass: share, over 0 and up to 1, of the attention of the queries that are asked: pages are left out as
            long as those together hold no more than the rest. At 1 prompts are read densely.
        query_block: tokens of a block, whose queries choose together; a multiple of ``query_stride``. What a call has
            of a block that is not whole, as when text is decoded, reads all tokens.
        query_stride: of the queries of a block each n-th is asked: its attention to all tokens is computed, so no
            summaries of pages are needed (sampled queries: SampleAttention, Zhu et al. 2024; a mass in blocks:
            FlexPrefill, Lai et al. 2025; XAttention, Xu et al. 2025).
    """

    name: ClassVar[str] = "sparse_prefill"
    number: ClassVar[int] = 3
    has_kernel: ClassVar[bool] = True
    reads_all: ClassVar[bool] = True
    in_blocks: ClassVar[bool] = True
    prefill_mass: float = parameter(0.0, option=0.98, most=1)
    query_block: int = parameter(0, option=64, most=MOST_BLOCK)
    query_stride: int = parameter(0, option=16, most=MOST_BLOCK)

    @property
    def chooses(self) -> bool:
        """See :class:`Policy`."""
        return self.query_block > 0

    def tokens_read(self, attributes: KVAttributes, visible: int) -> int:
        """See :class:`Policy`: once the prompt is read, all."""
        del attributes
        return visible

    def check(self) -> None:
        """See :class:`Policy`."""
        if self.query_block and (not self.query_stride or self.query_block % self.query_stride):
            raise ValueError(
                f"KVAttention: query_block is a multiple of query_stride, which is at least 1, or 0: they are "
                f"{self.query_block} and {self.query_stride}"
            )

    def block_mask(
        self, attributes: KVAttributes, weights: Doubles, visible: Mask, query_positions: Integers, positions: Integers
    ) -> Mask:
        """See :class:`Policy`.

        Of a whole block, W[page] is the sum, over the queries that are asked and their heads, of the weights of those
        tokens of a page that the query would not read in any case. Pages are left out from the lowest W on, of equal
        ones the later page first, as long as their W together are less than (1 - mass) times queries and heads. Where
        a W is not finite none is left out.
        """
        is_read, page = visible.copy(), positions // attributes.page
        for block in self.whole_blocks(query_positions):
            of_pages, limit = self.page_weights(attributes, weights, block, query_positions, positions)
            if not np.isfinite(of_pages).all():
                continue
            order = np.lexsort((-np.arange(len(of_pages)), of_pages))
            left_out_pages = order[np.cumsum(of_pages[order]) < limit]
            p, t = query_positions[block, None], positions[None]
            always = (t < attributes.sinks) | (t > p - attributes.recent)
            is_read[block] &= always | ~np.isin(page, left_out_pages)[None]
        return is_read

    def whole_blocks(self, query_positions: Integers) -> list[slice]:
        """Return which queries, at these positions one after the other, are whole blocks."""
        if not len(query_positions):
            return []
        begin, end = int(query_positions[0]), int(query_positions[-1]) + 1
        firsts = range(-(-begin // self.query_block) * self.query_block, end - self.query_block + 1, self.query_block)
        return [slice(first - begin, first - begin + self.query_block) for first in firsts]

    def page_weights(
        self,
        attributes: KVAttributes,
        weights: Doubles,
        block: slice,
        query_positions: Integers,
        positions: Integers,
    ) -> tuple[Doubles, float]:
        """Return W of each page of a block of queries, float64 [P], and what those left out have together at most.

        Args:
            attributes: of the node.
            weights: float64 [n, G, m], of all queries.
            block: of the queries.
            query_positions: [n].
            positions: [m], of the tokens.
        """
        asked_queries = slice(block.start + self.query_stride - 1, block.stop, self.query_stride)
        p, t = query_positions[asked_queries, None], positions[None]
        other_tokens = (t >= attributes.sinks) & (t <= p - attributes.recent)
        of_tokens = np.where(other_tokens[:, None], weights[asked_queries], 0).sum(axis=(0, 1))
        of_pages = np.zeros(int(positions[-1]) // attributes.page + 1)
        np.add.at(of_pages, positions // attributes.page, of_tokens)
        return of_pages, (1 - self.prefill_mass) * weights[asked_queries].shape[0] * weights.shape[1]

    def write_block_mask(
        self, call: Call, weights: ir.Value, visible: ir.Value, positions: ir.Value, token_positions: ir.Value
    ) -> ir.Value:
        """See :class:`Policy`."""
        op, attrs = call.op, call.attrs
        p = op.Squeeze(positions, [1])  # B, S, 1
        past, total = op.Unsqueeze(call.past, [-1]), op.Unsqueeze(call.total, [-1])
        block = op.Div(op.Max(p, 0), self.query_block)
        begin = op.Mul(block, self.query_block)
        # a column without a token has a position in front of the call
        is_whole = op.And(op.GreaterOrEqual(begin, past), op.LessOrEqual(op.Add(begin, self.query_block), total))
        is_whole = op.And(is_whole, op.GreaterOrEqual(p, past))
        is_asked = op.And(is_whole, op.Equal(op.Mod(op.Max(p, 0), self.query_stride), self.query_stride - 1))
        same_block = op.Equal(block, op.Transpose(block, perm=[0, 2, 1]))
        asks = op.Cast(op.And(same_block, op.Transpose(is_asked, perm=[0, 2, 1])), to=ir.DataType.FLOAT)  # B, S, S
        other_tokens = op.And(
            op.GreaterOrEqual(token_positions, attrs.sinks),
            op.LessOrEqual(token_positions, op.Sub(positions, attrs.recent)),
        )  # B, 1, S, N
        heads = op.Shape(weights, start=2, end=3)
        of_tokens = op.Where(other_tokens, op.ReduceSum(weights, [2], keepdims=0), 0.0)
        shape = op.Concat([0, 0, 0], call.pages, [attrs.page], axis=0)
        shares = op.ReduceSum(op.Reshape(of_tokens, shape), [-1], keepdims=0)  # B, H, S, P
        # 0 times NaN is NaN: a query that asks in another block would spoil this one
        is_bad = op.IsNaN(shares)
        has_bad = op.Greater(op.MatMul(op.Unsqueeze(asks, [1]), op.Cast(is_bad, to=ir.DataType.FLOAT)), 0.5)
        of_pages = op.MatMul(op.Unsqueeze(asks, [1]), op.Where(is_bad, 0.0, shares))
        # of equal ones the later page goes first
        backwards = op.Slice(of_pages, [-1], [-(2**62)], [-1], [-1])
        lowest, order = op.TopK(backwards, call.pages, axis=-1, largest=0, _outputs=2)
        remainder = np.float32((1 - self.prefill_mass) * (self.query_block // self.query_stride))
        limit = op.Mul(op.Cast(heads, to=ir.DataType.FLOAT), float(remainder))
        is_left_out = op.Cast(op.Less(op.CumSum(lowest, -1), limit), to=ir.DataType.FLOAT)
        flags = op.ScatterElements(op.Expand(0.0, op.Shape(of_pages)), order, is_left_out, axis=-1)
        left_out_pages = op.Greater(op.Slice(flags, [-1], [-(2**62)], [-1], [-1]), 0.5)
        any_bad = op.Cast(op.ReduceMax(op.Cast(has_bad, to=ir.DataType.UINT8), [-1], keepdims=1), to=ir.DataType.BOOL)
        left_out_pages = op.And(op.And(left_out_pages, op.Not(any_bad)), op.Unsqueeze(is_whole, [1]))
        tokens = op.Expand(op.Unsqueeze(left_out_pages, [-1]), [1, 1, 1, 1, attrs.page])
        return op.And(visible, op.Not(op.And(op.Reshape(tokens, [0, 0, 0, -1]), other_tokens)))

    def besides(self) -> Fact | None:
        """See :class:`Policy`."""
        return PAGES_OF_BLOCKS(mass=self.prefill_mass, block=self.query_block, stride=self.query_stride)
