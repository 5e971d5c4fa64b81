"""What ``ai.graphopt::KVAttention`` refuses: shapes, types and numbers of tokens that do not fit one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

Array = npt.NDArray[Any]

MOST_TOKENS = 1 << 62
"""Of a row; positions beyond are no longer safe to add to in int64."""


def check(attributes: KVAttributes, inputs: Sequence[Array], state: Mapping[str, Array]) -> None:
    """Raise ``ValueError`` where the inputs of a call do not fit its attributes or one another.

    Args:
        attributes: of the node.
        inputs: of the node, of which the first seven are no state; with ``key_feedback`` its last one is ``feedback``.
        state: by the names of the inputs.
    """
    query, key, value, past, new, sink_logits, sink_query = inputs[:7]
    if key.ndim != 3 or key.shape[2] % attributes.kv_heads:
        raise ValueError(f"KVAttention: key is [B, S, {attributes.kv_heads} D], not {list(key.shape)}")
    batch, columns, width = key.shape
    if query.ndim != 3 or not query.shape[2] or query.shape[2] % width:
        raise ValueError(f"KVAttention: query is [{batch}, {columns}, G {width}], not {list(query.shape)}")
    heads = query.shape[2] * attributes.kv_heads // width
    pages = state["keys"].shape[2] if state["keys"].ndim == 4 else 0
    shapes = attributes.state(batch, pages, width // attributes.kv_heads)
    if len(attributes.slopes) not in (0, heads):
        raise ValueError(f"KVAttention: slopes are one for each of {heads} query heads, not {len(attributes.slopes)}")
    _check_tensor("query", query, (batch, columns, query.shape[2]))
    _check_tensor("key", key, key.shape)
    _check_tensor("value", value, (0,) if attributes.value_size else key.shape)
    _check_tensor("past", past, (batch,), np.int64)
    _check_tensor("new", new, (batch,), np.int64)
    _check_tensor("sink_logits", sink_logits, (heads,) if sink_logits.shape != (0,) else (0,))
    _check_tensor("sink_query", sink_query, query.shape if sink_query.shape != (0,) else (0,))
    if attributes.key_feedback:
        size = width // attributes.kv_heads
        _check_tensor("feedback", inputs[-1], (attributes.kv_heads, size, size), np.float16)
    for name, tensor in shapes:
        is_used = attributes.summarizes if name == "summaries" else attributes.levels or name in ("keys", "values")
        is_used = is_used and (name != "values" or not attributes.value_size)
        shape = state[name].shape if not is_used and state[name].ndim == 4 and not state[name].size else tensor.shape
        _check_tensor(name, state[name], shape, tensor.dtype)
    _check_lengths(attributes, past, new, pages, columns)


def _check_lengths(attributes: KVAttributes, past: Array, new: Array, pages: int, columns: int) -> None:
    for row, (before, count) in enumerate(zip(past.tolist(), new.tolist(), strict=True)):
        if before < 0:
            raise ValueError(f"KVAttention: past[{row}] is {before}, a number of tokens is at least 0")
        if not 0 <= count <= columns:
            raise ValueError(f"KVAttention: new[{row}] is {count}, which is not from 0 to the {columns} columns")
        if before + count > MOST_TOKENS:
            raise ValueError(f"KVAttention: row {row} would have {before + count} tokens, more than 2^62")
        capacity = pages * attributes.page
        if before + count > capacity and not attributes.may_wrap(pages, columns):
            raise ValueError(
                f"KVAttention: row {row} would have {before + count} tokens, and the cache holds {capacity}, in "
                f"{pages} pages of {attributes.page}; give it more pages, or, where all heads stream, fewer columns"
            )


def _check_tensor(name: str, tensor: Array, shape: tuple[Any, ...], dtype: npt.DTypeLike = np.float32) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"KVAttention: {name} is {np.dtype(dtype)} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
        )
