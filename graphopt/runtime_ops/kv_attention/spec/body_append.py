"""The first half of the body of ``KVAttention``: new tokens go to their pages, rows side by side.

Nothing is scattered: each place of the state asks which token it holds after the call, and whether that one is new.
Where the reference goes token by token, the body knows the newest page p' <= p of a ring of n pages that a place
belongs to: p' = f + n ((p - f) div n) for the place's own page f.
"""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime_ops.kv_attention.spec.body_storage import (
    as_stored,
    factors_of_tokens,
    packed_keys,
    packed_values,
    restore_numbers,
    round_numbers,
    round_with_feedback,
    unpacked_keys,
    unpacked_values,
)
from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from onnxscript import OpBuilder

    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
    from graphopt.runtime_ops.kv_attention.spec.policies import Policy


@dataclass(frozen=True)
class Call:
    """What both halves of the body know of a call.

    Attributes:
        op: takes the nodes.
        attrs: of the node.
        past: int64 [B, 1], tokens before the call.
        total: int64 [B, 1], tokens after it.
        columns: int64 [1], S.
        pages: int64 [1], P.
        channels: int64 [1], D.
    """

    op: OpBuilder
    attrs: KVAttributes
    past: ir.Value
    total: ir.Value
    columns: ir.Value
    pages: ir.Value
    channels: ir.Value

    def range(self, size: ir.Value) -> ir.Value:
        """Return 0 .. size - 1 for a size int64 [1]."""
        return self.op.Range(0, self.op.Squeeze(size, [0]), 1)

    def newest_page(self) -> ir.Value:
        """Return the page of each row's last token, int64 [B, 1]; -1 where there is none."""
        return self.before(self.total)

    def before(self, tokens: ir.Value) -> ir.Value:
        """Return (tokens - 1) div T, rounded down; -1 for 0 tokens. ONNX divides towards 0."""
        page = self.attrs.page
        return self.op.Sub(self.op.Div(self.op.Add(tokens, page - 1), page), 1)

    def pages_held(self, newest: ir.Value) -> ir.Value:
        """Return which page each physical page holds, int64 [B, P], if ``newest`` [B, 1] is the last one written.

        A physical page that was never written names a page beyond ``newest``. Until a cache wraps, all name themselves.
        """
        op, indices = self.op, self.range(self.pages)
        batch_indices = op.Add(indices, op.Mul(newest, 0))
        first = self.attrs.first_pages
        ring = op.Max(op.Sub(self.pages, first), 1)
        rounds = op.Div(op.Max(op.Sub(newest, indices), 0), ring)
        return op.Where(op.Less(indices, first), batch_indices, op.Add(indices, op.Mul(rounds, ring)))

    def positions(self, pages: ir.Value) -> ir.Value:
        """Return the positions of the tokens of pages [B, n], int64 [B, n, T]."""
        op, page = self.op, self.attrs.page
        return op.Add(op.Mul(op.Unsqueeze(pages, [-1]), page), list(range(page)))

    def new_tokens(self, source: ir.Value, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the new tokens at ``positions`` [B, n, T], and which positions are new.

        Args:
            source: key or value, float [B, S, H D].
            positions: int64 [B, n, T].

        Returns:
            float [B, n, H, T, D], any tokens where a position is not new; bool [B, n, 1, T, 1].
        """
        op, attrs = self.op, self.attrs
        flat = op.Reshape(positions, [0, -1])
        is_new = op.And(op.GreaterOrEqual(flat, self.past), op.Less(flat, self.total))
        from_end = op.Sub(flat, op.Sub(self.total, self.columns))
        column = op.Max(op.Min(from_end, op.Sub(self.columns, 1)), 0)
        tokens = op.GatherND(source, op.Unsqueeze(column, [-1]), batch_dims=1)
        shape = op.Concat([0, -1, attrs.page, attrs.kv_heads], self.channels, axis=0)
        split = op.Transpose(op.Reshape(tokens, shape), perm=[0, 1, 3, 2, 4])
        return split, op.Reshape(is_new, [0, -1, 1, attrs.page, 1])

    def pick(self, tensor: ir.Value, index: ir.Value) -> ir.Value:
        """Return tensor [B, m, ...] at index [B, n], which is brought into range, [B, n, ...]."""
        op = self.op
        last = op.Sub(op.Shape(tensor, start=1, end=2), 1)
        safe = op.Max(op.Min(index, last), 0)
        return op.GatherND(tensor, op.Unsqueeze(safe, [-1]), batch_dims=1)


def by_page(op: OpBuilder, tensor: ir.Value) -> ir.Value:
    """Return [B, H, P, n] as [B, P, H, n], or the other way around."""
    return op.Transpose(tensor, perm=[0, 2, 1, 3])


def heads_with(op: OpBuilder, policies: ir.Value, holds: Callable[[type[Policy]], bool]) -> ir.Value:
    """Return which of ``policies`` [n] are such of which something holds, bool [n]."""
    flags = [op.Equal(policies, policy.number) for policy in POLICIES.values() if holds(policy)]
    return reduce(op.Or, flags)


def value_part(op: OpBuilder, attrs: KVAttributes, K: ir.Value) -> ir.Value:
    """Return the first channels of keys [..., D], which are the values, float [..., V]."""
    return op.Slice(K, [0], [attrs.value_size], [-1])


def append_floats(call: Call, state: ir.Value, source: ir.Value, *, is_keys: bool) -> tuple[ir.Value, ir.Value]:
    """Return keys or values after the call: float [B, P, H, T, D], and as they are stored."""
    op, attrs = call.op, call.attrs
    tokens, is_new = call.new_tokens(source, call.positions(call.pages_held(call.newest_page())))
    unpack, pack = (unpacked_keys, packed_keys) if is_keys else (unpacked_values, packed_values)
    old = unpack(op, by_page(op, state), attrs)
    numbers = op.Where(is_new, as_stored(op, tokens, attrs), old)
    return numbers, by_page(op, pack(op, numbers, attrs))


@dataclass(frozen=True)
class Integers:
    """A state of integers after the call; K and V are float [B, P, H, T, D], as they are read."""

    keys: ir.Value
    values: ir.Value
    scales: ir.Value
    recent: ir.Value
    K: ir.Value
    V: ir.Value


def append_integers(
    call: Call,
    state: tuple[ir.Value, ir.Value, ir.Value, ir.Value],
    key: ir.Value,
    value: ir.Value,
    feedback: ir.Value | None,
) -> Integers:
    """Return the state after the call.

    Args:
        call: what is known of it.
        state: keys, values, scales and recent.
        key: of the new tokens.
        value: the same.
        feedback: the input of that name; ``None`` where the node has none.
    """
    op, attrs = call.op, call.attrs
    slots = op.Concat([0, 0, attrs.slots, attrs.parts, attrs.page], call.channels, axis=0)
    before = op.Transpose(op.Reshape(state[3], slots), perm=[0, 2, 1, 3, 4, 5])  # B, R, H, 2 or 1, T, D
    sources = (key, value)[: attrs.parts]
    codes = _round_pages(call, state, before, sources, feedback)
    after = _fill_slots(call, before, sources)
    newest = call.newest_page()
    page = call.pages_held(newest)
    is_recent = op.Greater(page, op.Sub(newest, attrs.recent_pages + 1))
    if attrs.sink_pages:
        is_recent = op.Or(is_recent, op.Less(page, attrs.sink_pages))
    is_recent = op.Reshape(is_recent, [0, -1, 1, 1, 1])
    floats = call.pick(after, _slot(call, page))
    states = [by_page(op, tensor) for tensor in codes]
    states[2] = op.Cast(states[2], to=ir.DataType.FLOAT)
    keys = unpacked_keys(op, states[0], attrs)
    values = None if attrs.value_size else unpacked_values(op, states[1], attrs)
    count, of_tokens, of_channels = attrs.token_scales, None, states[2]
    if count:
        of_tokens = op.Slice(states[2], [-count * attrs.page], [2**62], [-1])
        of_channels = op.Slice(states[2], [0], [-count * attrs.page], [-1])
    key_low, key_step = op.Split(op.Reshape(of_channels, [0, 0, 0, 2, -1]), axis=3, num_outputs=2, _outputs=2)
    lines = [] if of_tokens is None else _lines(op, of_tokens, count, attrs.page)
    float_keys, rounded_keys = op.Gather(floats, 0, axis=3), restore_numbers(op, keys, key_low, key_step)
    if attrs.token_factors:
        rounded_keys = op.Mul(rounded_keys, lines[-1])
    K = op.Where(is_recent, float_keys, rounded_keys)
    if values is None:
        V = value_part(op, attrs, K)
    else:
        V = op.Where(is_recent, op.Gather(floats, 1, axis=3), restore_numbers(op, values, lines[0], lines[1]))
    recent = op.Reshape(op.Transpose(after, perm=[0, 2, 1, 3, 4, 5]), [0, 0, attrs.slots, -1])
    return Integers(*codes, recent, K, V)


def _lines(op: OpBuilder, scales: ir.Value, count: int, page: int) -> list[ir.Value]:
    """Return each of the ``count`` numbers that tokens have in ``scales`` [B, P, H, count T], [B, P, H, T, 1]."""
    by_line = op.Reshape(scales, [0, 0, 0, count, page, 1])
    return [op.Gather(by_line, index, axis=3) for index in range(count)]


def _slot(call: Call, page: ir.Value) -> ir.Value:
    op, attrs = call.op, call.attrs
    ring = op.Add(op.Mod(op.Sub(page, attrs.sink_pages), attrs.recent_pages + 1), attrs.sink_pages)
    return op.Where(op.Less(page, attrs.sink_pages), page, ring) if attrs.sink_pages else ring


def _fill_slots(call: Call, before: ir.Value, sources: Sequence[ir.Value]) -> ir.Value:
    """Return `recent` [B, R, H, 2 or 1, T, D] after the call; ``sources`` are the new keys and values, or keys alone.

    A place is asked for the newest token at its own offset: behind the last token that is one of an earlier page.
    """
    op, attrs = call.op, call.attrs
    indices = op.Reshape(op.Range(0, attrs.slots, 1), [1, -1, 1])
    offset = list(range(attrs.page))
    newest = call.before(op.Sub(op.Unsqueeze(call.total, [-1]), offset))  # B, 1, T
    rounds = op.Div(op.Max(op.Sub(newest, indices), 0), attrs.recent_pages + 1)
    if attrs.sink_pages:
        rounds = op.Where(op.Less(indices, attrs.sink_pages), 0, rounds)
    page = op.Add(indices, op.Mul(rounds, attrs.recent_pages + 1))
    positions = op.Add(op.Mul(page, attrs.page), offset)
    slots = []
    for index, source in enumerate(sources):
        tokens, is_new = call.new_tokens(source, positions)
        slots.append(op.Unsqueeze(op.Where(is_new, tokens, op.Gather(before, index, axis=3)), [3]))
    return slots[0] if len(slots) == 1 else op.Concat(*slots, axis=3)


def _round_pages(
    call: Call,
    state: tuple[ir.Value, ...],
    before: ir.Value,
    sources: Sequence[ir.Value],
    feedback: ir.Value | None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return keys, values and scales after the pages that leave `recent` in this call were rounded.

    ``sources`` are the new keys and values, or keys alone: then the stored values, of no pages, come back.

    Page l leaves when page l + recent_pages + 1 begins, so at most one for each T columns, and one more.
    """
    op, attrs = call.op, call.attrs
    assert attrs.levels is not None
    assert attrs.value_levels is not None
    slots = attrs.recent_pages + 1
    first = op.Sub(op.Add(call.before(call.past), 1), slots)
    count = op.Div(op.Add(call.columns, attrs.page - 1), attrs.page)
    leaving = op.Add(first, call.range(count))
    positions = call.positions(leaving)
    tensors = []
    scales = []
    last_scales: list[ir.Value] = []
    levels, shares = (attrs.levels, attrs.value_levels), (attrs.clip, attrs.share_of_values)
    roundings = zip(sources, (-2, -1), levels, shares, (packed_keys, packed_values), strict=False)
    for index, (source, axis, largest, share, pack) in enumerate(roundings):
        tokens, is_new = call.new_tokens(source, positions)
        old = call.pick(op.Gather(before, index, axis=3), _slot(call, leaving))
        page = op.Where(is_new, tokens, old)
        if attrs.token_factors and index == 0:
            factors = factors_of_tokens(op, page, call.channels)
            page = op.Div(page, factors)
            last_scales.append(op.Squeeze(factors, [-1]))
        if feedback is not None and index == 0:
            codes, low, step = round_with_feedback(op, page, feedback, call.channels, largest, share)
        else:
            codes, low, step = round_numbers(op, page, axis, largest, share)
        tensors.append(pack(op, codes, attrs))
        scales += [op.Squeeze(low, [axis]), op.Squeeze(step, [axis])]
    tensors.append(op.Concat(*scales, *last_scales, axis=-1))
    last = op.Sub(call.newest_page(), slots)
    page, indices = call.pages_held(last), call.range(call.pages)
    is_written = op.And(op.GreaterOrEqual(page, first), op.LessOrEqual(indices, last))
    if attrs.sink_pages:
        is_written = op.And(is_written, op.GreaterOrEqual(page, attrs.sink_pages))
    is_written = op.Reshape(is_written, [0, 1, -1, 1])
    index_of_page = op.Sub(page, first)
    pages = (*state[: len(sources)], op.Cast(state[2], to=ir.DataType.FLOAT))
    keys, *values, all_scales = (
        op.Where(is_written, by_page(op, call.pick(tensor, index_of_page)), old)
        for tensor, old in zip(tensors, pages, strict=True)
    )
    all_scales = op.Cast(all_scales, to=ir.DataType.FLOAT16)  # which has them as they are
    return keys, values[0] if values else op.Identity(state[1]), all_scales


def append_summaries(call: Call, policy: Policy, summaries: ir.Value, key: ir.Value) -> ir.Value:
    """Return the summaries [B, H, P, Z] after the call, as far as pages are chosen by them."""
    op, attrs = call.op, call.attrs
    means = None
    if attrs.compensate:
        end_of_known = op.Mul(call.channels, -2)
        summaries, means = (
            op.Slice(summaries, [0], end_of_known, [-1]),
            op.Slice(summaries, end_of_known, [2**62], [-1]),
        )
    first = op.Div(call.past, attrs.page)
    count = op.Add(op.Div(op.Add(call.columns, attrs.page - 2), attrs.page), 1)
    new_pages = op.Add(first, call.range(count))
    tokens, is_new = call.new_tokens(key, call.positions(new_pages))  # B, n, H, T, D
    old = call.pick(by_page(op, summaries), new_pages)  # B, n, H, Z
    counts = op.Max(op.Sub(call.past, op.Mul(new_pages, attrs.page)), 0)  # tokens that the summary knows, B, n
    new_summaries = policy.write_summaries(call, old, counts, tokens, is_new)
    index_of_page = op.Sub(call.range(call.pages), first)
    begins = op.Mul(call.range(call.pages), attrs.page)
    is_touched = op.And(op.GreaterOrEqual(index_of_page, 0), op.Less(begins, call.total))
    # a call without tokens for a row touches nothing, and neither does one behind a full page
    has_new = op.And(is_touched, op.Less(op.Max(call.past, begins), call.total))
    after = op.Where(
        op.Reshape(has_new, [0, 1, -1, 1]), by_page(op, call.pick(new_summaries, index_of_page)), summaries
    )
    return after if means is None else op.Concat(after, means, axis=-1)
