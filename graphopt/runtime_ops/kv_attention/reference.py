"""What ``ai.graphopt::KVAttention`` means, in NumPy: written from the definition, to be read and not to be fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.append import Integers, State, append
from graphopt.runtime_ops.kv_attention.attributes import DENSE, RETRIEVAL, KVAttributes
from graphopt.runtime_ops.kv_attention.check import check
from graphopt.runtime_ops.kv_attention.layout import unpack_keys, unpack_values

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def reference(
    query: Array,
    key: Array,
    value: Array,
    past: Integers,
    new: Integers,
    sink_logits: Array,
    sink_query: Array,
    keys: Array,
    values: Array,
    scales: Array,
    newest: Array,
    summaries: Array,
    /,
    **attributes: Any,
) -> tuple[Array, ...]:
    """Return what the operator means; inputs and attributes are those of :mod:`graphopt.runtime_ops.kv_attention.op`.

    The state is rounded in float32 as the operator says, page scores are exact and then rounded to float32, and
    everything behind them is float64. No input is changed.

    Returns:
        y float64 [B, S, Hq D] and the state after the call: keys, values, scales, recent, summaries.

    Raises:
        ValueError: an attribute, a shape, a type or a number of tokens does not fit; nothing is computed then.
    """
    attrs = KVAttributes(**attributes)
    state = {"keys": keys, "values": values, "scales": scales, "recent": newest, "summaries": summaries}
    check(attrs, query, key, value, past, new, sink_logits, sink_query, state)
    batch, columns, width = key.shape
    channels = width // attrs.kv_heads
    split_key, split_value = (each.reshape(batch, columns, attrs.kv_heads, channels) for each in (key, value))
    state = append(attrs, state, split_key, split_value, past, new)
    # query heads are group by group: head h reads KV head h div G
    y = np.zeros((batch, columns, attrs.kv_heads, query.shape[2] // width, channels))
    queries = query.astype(np.float64).reshape(y.shape)
    first_queries = sink_query.astype(np.float64).reshape(y.shape) if sink_query.size else queries
    logits = sink_logits.astype(np.float64).reshape(attrs.kv_heads, -1) if sink_logits.size else None
    for row in range(batch):
        of_row = {name: tensor[row] for name, tensor in state.items()}
        tokens, count = int(past[row] + new[row]), int(new[row])
        positions = stored_positions(attrs, tokens, keys.shape[2])
        asked = np.arange(tokens - count, tokens)
        these = slice(columns - count, columns)
        for head in range(attrs.kv_heads):
            K, V = stored_tokens(attrs, of_row, head, positions, tokens, channels)
            q, first_q = queries[row, these, head], first_queries[row, these, head]
            is_read = read_mask(attrs, head, of_row["summaries"][head], q, asked, positions)
            logit = None if logits is None else logits[head]
            y[row, these, head] = attend(attrs, q, first_q, K, V, positions, is_read, logit)
    return (y.reshape(query.shape), *state.values())


def stored_positions(attrs: KVAttributes, tokens: int, pages: int) -> Integers:
    """Return the positions, of a row with ``tokens`` tokens, whose pages no later page has overwritten."""
    positions = np.arange(tokens)
    page, newest = positions // attrs.page, (tokens - 1) // attrs.page
    kept: Integers = positions[(page < attrs.first_pages) | (page > newest - (pages - attrs.first_pages))]
    return kept


def stored_tokens(
    attrs: KVAttributes, state: State, head: int, positions: Integers, tokens: int, channels: int
) -> tuple[Doubles, Doubles]:
    """Return the keys and values of a KV head at ``positions`` as the state gives them back, float64 [n, D] each."""
    K, V = np.empty((2, len(positions), channels))
    pages = positions // attrs.page
    for page in np.unique(pages):
        page_keys, page_values = _stored_page(attrs, state, head, int(page), tokens, channels)
        these = pages == page
        offsets = positions[these] % attrs.page
        K[these], V[these] = page_keys[offsets], page_values[offsets]
    return K, V


def _stored_page(
    attrs: KVAttributes, state: State, head: int, page: int, tokens: int, channels: int
) -> tuple[Doubles, Doubles]:
    """Return keys and values of a page, float64 [T, D] each."""
    if attrs.levels is not None and attrs.is_recent(page, tokens):
        keys, values = state["recent"][head, attrs.slot(page)].reshape(2, attrs.page, channels).astype(np.float64)
        return keys, values
    physical = attrs.physical_page(page, state["keys"].shape[1])
    shape = (attrs.page, channels)
    keys = unpack_keys(state["keys"][head, physical], *shape, attrs.storage).astype(np.float64)
    values = unpack_values(state["values"][head, physical], *shape, attrs.storage).astype(np.float64)
    if attrs.levels is None:
        return keys, values
    scales = state["scales"][head, physical].astype(np.float64)
    key_low, key_step = scales[: 2 * channels].reshape(2, 1, channels)
    value_low, value_step = scales[2 * channels :].reshape(2, attrs.page, 1)
    return key_low + key_step * keys, value_low + value_step * values


def read_mask(
    attrs: KVAttributes, head: int, summaries: Array, queries: Doubles, asked: Integers, positions: Integers
) -> Mask:
    """Return which tokens each query reads.

    Args:
        attrs: of the node.
        head: the KV head.
        summaries: float32 [P, Z], of the head.
        queries: [n, G, D], the queries that choose pages together.
        asked: [n], their positions.
        positions: [m], of the stored tokens.

    Returns:
        bool [n, m].
    """
    p, positions = asked[:, None], positions[None]
    visible = (positions <= p) & ((positions > p - attrs.window) if attrs.window else True)
    always = visible & ((positions < attrs.sinks) | (positions > p - attrs.recent))
    policy = attrs.policy(head)
    if policy == DENSE:
        return visible
    if policy == RETRIEVAL:
        pages = positions[0] // attrs.page
        for index, q in enumerate(queries):
            candidates = np.unique(pages[visible[index] & ~always[index]])
            scores = page_scores(attrs, summaries[attrs.physical_page(candidates, len(summaries))], q)
            chosen = candidates[np.argsort(-scores, kind="stable")[: attrs.budget]]
            always[index] |= visible[index] & np.isin(pages, chosen)
    return always


def page_scores(attrs: KVAttributes, summaries: Array, queries: Doubles) -> npt.NDArray[np.float32]:
    """Return how much each page promises to a group of queries that choose together.

    bounds is the largest dot product that a key within the bounds can have (Quest, Tang et al. 2024); mean is that of
    the mean key (TriForce, Sun et al. 2024).

    Args:
        attrs: of the node.
        summaries: [n, Z], of the pages.
        queries: [G, D].

    Returns:
        float32 [n].
    """
    channels, q = queries.shape[-1], queries[:, None]
    known = summaries.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        products = q * known[:, :channels]
        if attrs.summary == "bounds":
            products = np.maximum(products, q * known[:, channels:])
        of_head = products.sum(axis=-1).astype(np.float32)
    scores: npt.NDArray[np.float32] = np.where(np.isnan(of_head), np.float32(np.inf), of_head).max(axis=0)
    return scores


def attend(
    attrs: KVAttributes,
    q: Doubles,
    first_q: Doubles,
    K: Doubles,
    V: Doubles,
    positions: Integers,
    is_read: Mask,
    sink_logit: Doubles | None,
) -> Doubles:
    """Return the softmax over what is read times its values.

    Args:
        attrs: of the node.
        q: [n, G, D]; queries for positions from ``sinks`` on.
        first_q: [n, G, D]; queries for positions below.
        K: [m, D].
        V: [m, D].
        positions: [m], of the stored tokens.
        is_read: bool [n, m].
        sink_logit: [G], or ``None``.

    Returns:
        [n, G, D]. Where a key that is read is not finite all channels are NaN, where a value is not, its channel is.
    """
    bad_keys, bad_values = ~np.isfinite(K).all(axis=-1, keepdims=True), ~np.isfinite(V)
    K, V = np.where(bad_keys, 0, K), np.where(bad_values, 0, V)
    with np.errstate(invalid="ignore", over="ignore"):
        scores = np.where(positions < attrs.sinks, first_q @ K.T, q @ K.T) * float(np.float32(attrs.scale))
        if attrs.softcap:
            softcap = float(np.float32(attrs.softcap))
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(is_read[:, None], scores, -np.inf)
        largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        if sink_logit is not None:
            largest = np.maximum(largest, sink_logit[:, None])
        largest = np.where(np.isneginf(largest), 0, largest)  # nothing is read
        weights = np.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        if sink_logit is not None:
            total += np.exp(sink_logit[:, None] - largest)
        y = weights @ V / np.where(total == 0, 1, total)
    bad = is_read.astype(np.int64) @ (bad_keys | bad_values)
    return np.where(bad[:, None] > 0, np.nan, y)
