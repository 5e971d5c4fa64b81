"""What the queries of a call find: tokens as the state gives them back, and which of them the policies allow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.append import Integers, State, append, row_of
from graphopt.runtime_ops.kv_attention.spec.check import check
from graphopt.runtime_ops.kv_attention.spec.compensation import StandIns, stand_ins
from graphopt.runtime_ops.kv_attention.spec.layout import unpack_keys, unpack_values
from graphopt.runtime_ops.kv_attention.spec.weights import dense_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Of pages that are stored as floats: their steps and codes.
_ZERO: Doubles = np.zeros((1, 1))


@dataclass(frozen=True)
class StoredNumbers:
    """Numbers low + step code, float64 [n, D] each; what is stored as a float is its own low, with a step of 0.

    ``error`` is by how much float32 may have another low after this call.
    """

    low: Doubles
    step: Doubles
    codes: Doubles
    error: Doubles

    @property
    def numbers(self) -> Doubles:
        """What the codes stand for, float64 [n, D]."""
        return self.low + self.step * self.codes

    def with_floats(self, numbers: Doubles, error: Doubles) -> StoredNumbers:
        """Return these and, behind them, ``numbers`` [m, D] that are stored as floats."""
        zeros = np.zeros_like(numbers)
        new_parts = (numbers, zeros, zeros, error)
        parts = (self.low, self.step, self.codes, self.error)
        return StoredNumbers(*(np.concatenate(pair) for pair in zip(parts, new_parts, strict=True)))


@dataclass(frozen=True)
class Reading:
    """What the queries of one row and one KV head have before them.

    Attributes:
        row: b.
        columns: of the row's tokens in this call.
        head: the KV head.
        q: float64 [n, G, D], queries for positions from ``sinks`` on.
        first_q: the same for positions below; the object ``q`` where they are the same queries.
        keys, values: of the stored tokens, and of those that stand for what was dropped, [m, D].
        positions: int64 [m], of the tokens.
        query_positions: int64 [n], of the queries.
        counts: float64 [m], the tokens that each stands for: 1 for a stored one.
        is_read: bool [n, m].
        summaries: float32 [P, Z], of the head.
        sink_logits: float64 [G], or ``None``.
    """

    row: int
    columns: slice
    head: int
    q: Doubles
    first_q: Doubles
    keys: StoredNumbers
    values: StoredNumbers
    positions: Integers
    query_positions: Integers
    counts: Doubles
    is_read: Mask
    summaries: Array
    sink_logits: Doubles | None

    def with_dropped(self, tokens: StandIns) -> Reading:
        """Return this and, behind the stored tokens, the tokens that replace those that were dropped."""
        return replace(
            self,
            keys=self.keys.with_floats(tokens.keys, tokens.key_errors),
            values=self.values.with_floats(tokens.values, tokens.value_errors),
            positions=np.concatenate([self.positions, tokens.positions]),
            counts=np.concatenate([self.counts, tokens.counts]),
            is_read=np.concatenate([self.is_read, tokens.is_read], axis=1),
        )


def readings(attrs: KVAttributes, inputs: tuple[Array, ...]) -> tuple[State, Iterator[Reading]]:
    """Append the new tokens, and return the state and what each row and KV head then has before it.

    Args:
        attrs: of the node.
        inputs: of the node.

    Raises:
        ValueError: a shape, a type or a number of tokens does not fit.
    """
    query, key, value, past, new, sink_logits, sink_query, *tensors = inputs
    feedback = tensors.pop() if attrs.key_feedback else None
    state = dict(zip(("keys", "values", "scales", "recent", "summaries"), tensors, strict=True))
    check(attrs, inputs, state)
    batch, columns, width = key.shape
    split = (batch, columns, attrs.kv_heads, width // attrs.kv_heads)
    after = append(
        attrs, state, key.reshape(split), value if attrs.value_size else value.reshape(split), past, new, feedback
    )
    # query heads are group by group: head h reads KV head h div G
    group_shape = (*split[:3], query.shape[2] // width, split[3])
    queries = query.astype(np.float64).reshape(group_shape)
    first_queries = sink_query.astype(np.float64).reshape(group_shape) if sink_query.size else None
    logits = sink_logits.astype(np.float64).reshape(attrs.kv_heads, -1) if sink_logits.size else None

    def read_rows() -> Iterator[Reading]:
        for row in range(batch):
            of_row = row_of(after, row)
            tokens, count = int(past[row] + new[row]), int(new[row])
            positions = stored_positions(attrs, tokens, after["keys"].shape[2])
            query_positions = np.arange(tokens - count, tokens)
            columns_of_row = slice(columns - count, columns)
            for head in range(attrs.kv_heads):
                q = queries[row, columns_of_row, head]
                first_q = q if first_queries is None else first_queries[row, columns_of_row, head]
                keys, values = stored_tokens(attrs, of_row, head, positions, tokens, split[3])
                is_read = read_mask(attrs, head, of_row["summaries"], q, query_positions, positions)
                logit = None if logits is None else logits[head]
                summaries = of_row["summaries"][head] if attrs.summarizes else np.zeros((0, 0), np.float32)
                counts = np.ones(len(positions))
                reading = Reading(
                    row=row,
                    columns=columns_of_row,
                    head=head,
                    q=q,
                    first_q=first_q,
                    keys=keys,
                    values=values,
                    positions=positions,
                    query_positions=query_positions,
                    counts=counts,
                    is_read=is_read,
                    summaries=summaries,
                    sink_logits=logit,
                )
                if attrs.compensate and attrs.policy_of(head).may_drop:
                    token = [tensor.reshape(split)[row, columns_of_row, head] for tensor in (key, value)]
                    new_tokens = np.concatenate(token, axis=-1)[query_positions >= attrs.sinks]
                    before = state["summaries"][row, head]
                    reading = reading.with_dropped(stand_ins(attrs, summaries, before, new_tokens, query_positions))
                policy = attrs.policy_of(head)
                if policy.in_blocks and policy.chooses:
                    weights = dense_weights(attrs, reading)
                    is_read = policy.block_mask(attrs, weights, is_read, query_positions, positions)
                    reading = replace(reading, is_read=is_read)
                yield reading

    return after, read_rows()


def stored_positions(attrs: KVAttributes, tokens: int, pages: int) -> Integers:
    """Return the positions, of a row with ``tokens`` tokens, whose pages no later page has overwritten."""
    newest, stay = (tokens - 1) // attrs.page, min(attrs.first_pages * attrs.page, tokens)
    ring = min(tokens, max(stay, (newest - (pages - attrs.first_pages) + 1) * attrs.page))
    positions: Integers = np.concatenate([np.arange(stay), np.arange(ring, tokens)])
    return positions


def stored_tokens(
    attrs: KVAttributes, state: State, head: int, positions: Integers, tokens: int, channels: int
) -> tuple[StoredNumbers, StoredNumbers]:
    """Return the keys and values of a KV head at ``positions``, [n, D] each, of a row that has ``tokens`` tokens."""
    parts = np.zeros((attrs.parts, 4, len(positions), channels))
    pages, offsets = np.divmod(positions, attrs.page)
    # positions of one page follow one another
    for first, end in itertools.pairwise([*np.flatnonzero(np.diff(pages, prepend=-1)), len(pages)]):
        for index, numbers_of_page in enumerate(_stored_page(attrs, state, head, int(pages[first]), tokens, channels)):
            for part, numbers in enumerate((numbers_of_page.low, numbers_of_page.step, numbers_of_page.codes)):
                if numbers is not _ZERO:
                    parts[index, part, first:end] = numbers[offsets[first:end]] if len(numbers) > 1 else numbers
    if attrs.value_size:
        return StoredNumbers(*parts[0]), StoredNumbers(*parts[0, :, :, : attrs.value_size])
    return StoredNumbers(*parts[0]), StoredNumbers(*parts[1])


def _stored_page(
    attrs: KVAttributes, state: State, head: int, page: int, tokens: int, channels: int
) -> tuple[StoredNumbers, ...]:
    """Return keys and values of a page, of shapes that broadcast to [T, D]; keys alone where values are a part."""
    if attrs.levels is not None and attrs.is_recent(page, tokens):
        slot = state["recent"][head, attrs.slot(page)].reshape(attrs.parts, attrs.page, channels).astype(np.float64)
        return tuple(StoredNumbers(numbers, _ZERO, _ZERO, _ZERO) for numbers in slot)
    physical = attrs.physical_page(page, state["keys"].shape[1])
    shape = (attrs.page, channels)
    keys = unpack_keys(state["keys"][head, physical], *shape, attrs.storage).astype(np.float64)
    parts = [keys]
    if not attrs.value_size:
        parts.append(
            unpack_values(state["values"][head, physical], *shape, attrs.stored_values.name).astype(np.float64)
        )
    if attrs.levels is None:
        return tuple(StoredNumbers(numbers, _ZERO, _ZERO, _ZERO) for numbers in parts)
    scales = state["scales"][head, physical].astype(np.float64)
    key_low, key_step = scales[: 2 * channels].reshape(2, 1, channels)
    lines = scales[2 * channels :].reshape(-1, attrs.page, 1)
    if attrs.token_factors:
        key_low, key_step = key_low * lines[-1], key_step * lines[-1]
    steps = [(key_low, key_step), *([] if attrs.value_size else [lines[:2]])]
    return tuple(StoredNumbers(low, step, codes, _ZERO) for (low, step), codes in zip(steps, parts, strict=True))


def read_mask(
    attrs: KVAttributes, head: int, summaries: Array, queries: Doubles, query_positions: Integers, positions: Integers
) -> Mask:
    """Return which tokens each query reads alone: without what blocks of queries leave out.

    Args:
        attrs: of the node.
        head: the KV head.
        summaries: float32 [Hk, P, Z]; where a head retrieves page l is in place l.
        queries: [n, G, D], the queries that choose pages together.
        query_positions: [n], their positions.
        positions: [m], of the stored tokens.

    Returns:
        bool [n, m].
    """
    p, positions = query_positions[:, None], positions[None]
    visible = (positions <= p) & (positions >= attrs.first_seen(p))
    always = visible & ((positions < attrs.sinks) | (positions > p - attrs.recent))
    policy = attrs.policy_of(head)
    if policy.reads_all:
        return visible
    if policy.chooses:
        summaries = summaries[head] if attrs.retrieves else np.zeros((0, 0), np.float32)
        pages = positions[0] // attrs.page
        for index, q in enumerate(queries):
            always[index] |= visible[index] & np.isin(
                pages, policy.pages(attrs, summaries, q, int(query_positions[index]))
            )
    return always
