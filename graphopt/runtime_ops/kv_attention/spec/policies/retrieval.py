"""Each query reads the pages of the highest scores besides, made of the query and a summary of each page's keys."""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.runtime_ops.kv_attention.spec.policies.policy import (
    Policy,
    candidate_pages,
    parameter,
    write_candidates,
)

if TYPE_CHECKING:
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
    from graphopt.runtime_ops.kv_attention.spec.body_append import Call

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

PAGES = Rule("sparse_kv.pages", "{budget} pages by {summary}", channels=" in the largest {channels} channels")
PAGES_OF_MASS = Rule(
    "sparse_kv.pages-of-mass",
    "pages with {mass} of the mass{most} by {summary}",
    channels=" in the largest {channels} channels",
)
AT_MOST = Rule("sparse_kv.at-most", ", {budget} pages at most,")

SUMMARIES = ("bounds", "mean")


@dataclass(frozen=True)
class Retrieval(Policy):
    """The best pages by their summaries.

    Attributes:
        budget: further pages that retrieval reads, at most. 0 with ``mass`` sets no limit.
        summary: what a page is judged by: "bounds", the range of each channel of its keys (Quest, Tang et al. 2024), or
            "mean", their mean (TriForce, Sun et al. 2024).
        mass: share, over 0 and up to 1, of the softmax of the pages' scores: retrieval reads the fewest pages that have
            it together (top-p: Twilight, Lin et al. 2025). By default it reads as many as ``budget`` says.
        channels: of a query, those that are largest, by which retrieval judges pages (SparQ, Ribar et al. 2024); all by
            default.
    """

    name: ClassVar[str] = "retrieval"
    number: ClassVar[int] = 2
    has_kernel: ClassVar[bool] = True
    budget: int = parameter(0, option=16)
    summary: str = parameter("bounds", option="bounds", choices=SUMMARIES)
    mass: float = parameter(0.0, most=1)
    channels: int = parameter(0)

    @property
    def chooses(self) -> bool:
        """See :class:`Policy`."""
        return self.budget > 0 or self.mass > 0

    def summary_floats(self, head_size: int) -> int:
        """See :class:`Policy`: the least and the largest key of each channel, or its mean."""
        return head_size if self.summary == "mean" else 2 * head_size

    def update_summary(self, summary: Array, key: Array, offset: int) -> None:
        """See :class:`Policy`."""
        channels = key.shape[-1]
        if self.summary == "mean":
            with np.errstate(invalid="ignore", over="ignore"):
                summary[:] = key if offset == 0 else summary + (key - summary) / np.float32(offset + 1)
        else:
            lowest, highest = summary[:, :channels], summary[:, channels:]
            lowest[:] = key if offset == 0 else np.minimum(lowest, key)
            highest[:] = key if offset == 0 else np.maximum(highest, key)

    def pages(self, attributes: KVAttributes, summaries: Array, queries: Doubles, position: int) -> Integers:
        """See :class:`Policy`."""
        candidates = candidate_pages(attributes, position)
        scores = self.page_scores(summaries[candidates], queries)
        return candidates[self.best_pages(scores, attributes.scale)]

    def page_scores(self, summaries: Array, queries: Doubles) -> Singles:
        """Return how much each page promises to a group of queries that choose together.

        Args:
            summaries: [n, Z], of the pages.
            queries: [G, D].

        Returns:
            float32 [n]: the largest over the queries; NaN counts as infinite.
        """
        low, high = self.key_range(summaries, queries.shape[-1])
        used, q = self.used_channels(queries), queries[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            products = q[..., used] * low[:, used]
            if self.summary == "bounds":
                products = np.maximum(products, q[..., used] * high[:, used])
            of_head = products.sum(axis=-1).astype(np.float32)
        scores: Singles = np.where(np.isnan(of_head), np.float32(np.inf), of_head).max(axis=0)
        return scores

    def used_channels(self, queries: Doubles) -> Integers:
        """Return the channels of queries [G, D] that page scores use, in their order.

        A channel counts by the sum of |q| over the queries, float32, one query after the other; NaN counts as infinite.
        Of equal ones the lower channel is used.
        """
        channels = queries.shape[-1]
        if not 0 < self.channels < channels:
            return np.arange(channels)
        with np.errstate(over="ignore"):
            sums = reduce(np.add, np.abs(queries.astype(np.float32)))
        return np.sort(np.argsort(-np.where(np.isnan(sums), np.inf, sums), kind="stable")[: self.channels])

    def best_pages(self, scores: Singles, scale: float) -> Integers:
        """Return which of the candidates with these scores [n] are read, the best first; of equal ones the lower."""
        order = np.argsort(-scores, kind="stable")
        if 0 < self.mass < 1:
            # as many as have the mass together: those before which it is not there yet
            weights = page_weights(scores, scale)[order]
            order = order[np.cumsum(weights) - weights < self.mass * weights.sum()]
        return order[: self.budget] if self.budget or not self.mass else order

    def key_range(self, summaries: Array, channels: int) -> tuple[Doubles, Doubles]:
        """Return the least and the largest key of each page by its summary, float64 [n, D] each; the mean twice."""
        summaries = summaries.astype(np.float64)
        low = summaries[:, :channels]
        return low, low if self.summary == "mean" else summaries[:, channels : 2 * channels]

    def write_summaries(
        self, call: Call, old: ir.Value, counts: ir.Value, tokens: ir.Value, is_new: ir.Value
    ) -> ir.Value:
        """See :class:`Policy`."""
        op = call.op
        was_empty = op.Reshape(op.Equal(counts, 0), [0, -1, 1, 1])
        if self.summary == "mean":
            count = op.Cast(op.Reshape(counts, [0, -1, 1, 1]), to=ir.DataType.FLOAT)
            new_counts = op.Squeeze(op.ReduceSum(op.Cast(is_new, to=ir.DataType.FLOAT), [3], keepdims=1), [4])
            old_sum = op.Where(was_empty, 0.0, op.Mul(old, count))
            total = op.Add(old_sum, op.ReduceSum(op.Where(is_new, tokens, 0.0), [3], keepdims=0))
            return op.Div(total, op.Max(op.Add(count, new_counts), 1.0))
        low, high = op.Split(old, axis=3, num_outputs=2, _outputs=2)
        lowest = op.ReduceMin(op.Where(is_new, tokens, math.inf), [3], keepdims=0)
        highest = op.ReduceMax(op.Where(is_new, tokens, -math.inf), [3], keepdims=0)
        low = op.Min(op.Where(was_empty, math.inf, low), lowest)
        high = op.Max(op.Where(was_empty, -math.inf, high), highest)
        return op.Concat(low, high, axis=3)

    def write_pages(
        self, call: Call, query: ir.Value, summaries: ir.Value, positions: ir.Value, reach: ir.Value
    ) -> ir.Value:
        """See :class:`Policy`."""
        op = call.op
        columns = op.Unsqueeze(op.Transpose(summaries, perm=[0, 1, 3, 2]), [2])  # B, H, 1, Z, P
        query = self._write_largest_channels(call, query) if self.channels else query
        if self.summary == "bounds":
            # max(q min, q max) is q max where q > 0, else q min
            low, high = op.Split(columns, axis=3, num_outputs=2, _outputs=2)
            scores = op.Add(op.MatMul(op.Max(query, 0.0), high), op.MatMul(op.Min(query, 0.0), low))
        else:
            scores = op.MatMul(query, columns)
        best = op.ReduceMax(op.Where(op.IsNaN(scores), math.inf, scores), [2], keepdims=0)
        is_candidate = write_candidates(call, positions, reach)
        count = op.Min(call.pages, self.budget) if self.budget else call.pages
        _, order = op.TopK(op.Where(is_candidate, best, -math.inf), count, _outputs=2)
        flags = op.Expand(1.0, op.Shape(order))
        if 0 < self.mass < 1:
            weights = op.Where(is_candidate, _write_page_weights(call, best, is_candidate), 0.0)
            threshold = op.Mul(op.ReduceSum(weights, [-1], keepdims=1), self.mass)
            before = op.CumSum(op.GatherElements(weights, order, axis=-1), -1, exclusive=1)
            flags = op.Cast(op.Less(before, threshold), to=ir.DataType.FLOAT)
        is_best = op.ScatterElements(op.Expand(0.0, op.Shape(best)), order, flags, axis=-1)
        return op.And(op.Greater(is_best, 0.5), is_candidate)

    def _write_largest_channels(self, call: Call, query: ir.Value) -> ir.Value:
        """Return the query [B, H, G, S, D] with 0 in all but the channels that are largest for the G heads together."""
        op = call.op
        sums = op.ReduceSum(op.Abs(query), [2], keepdims=1)
        sums = op.Where(op.IsNaN(sums), math.inf, sums)
        _, order = op.TopK(sums, op.Min(call.channels, self.channels), _outputs=2)
        zeros = op.Expand(0.0, op.Shape(sums))
        is_largest = op.ScatterElements(zeros, order, op.Expand(1.0, op.Shape(order)), axis=-1)
        return op.Where(op.Greater(is_largest, 0.5), query, 0.0)

    def tokens_read(self, attributes: KVAttributes, visible: int) -> int:
        """See :class:`Policy`."""
        tokens = min(visible, attributes.sinks + attributes.recent)
        return min(visible, tokens + (self.budget * attributes.page if self.budget else visible))

    def besides(self) -> Fact | None:
        """See :class:`Policy`."""
        channels = self.channels or None
        if not self.mass:
            return PAGES(budget=self.budget, summary=self.summary, channels=channels)
        limit = AT_MOST(budget=self.budget) if self.budget else None
        return PAGES_OF_MASS(mass=self.mass, most=limit, summary=self.summary, channels=channels)


def page_weights(scores: Singles, scale: float) -> Doubles:
    """Return exp(scale (score - the highest score)), [n]: 1 for those of the highest score, at most 1 for others.

    NaN counts as 0: scores that are infinitely far below, with a scale of 0.
    """
    if not len(scores):
        return np.zeros(0)
    with np.errstate(invalid="ignore", over="ignore"):
        differences = scale * (scores.astype(np.float64) - float(scores.max()))
        weights = np.exp(np.minimum(differences, 0))
    weights = np.where(np.isnan(weights), 0.0, weights)
    return np.where(scores == scores.max(), 1.0, weights)


def _write_page_weights(call: Call, scores: ir.Value, is_candidate: ir.Value) -> ir.Value:
    """Write the nodes of :func:`page_weights`, the highest score being that of the candidates; [B, H, S, P]."""
    op = call.op
    highest = op.ReduceMax(op.Where(is_candidate, scores, -math.inf), [-1], keepdims=1)
    weights = op.Exp(op.Min(op.Mul(op.Sub(scores, highest), call.attrs.scale), 0.0))
    # the difference of two infinite scores is NaN
    weights = op.Where(op.IsNaN(weights), 0.0, weights)
    return op.Where(op.Equal(scores, highest), 1.0, weights)
