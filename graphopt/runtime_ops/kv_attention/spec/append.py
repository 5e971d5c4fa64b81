"""The first half of what ``ai.graphopt::KVAttention`` means: new tokens go to their pages. In NumPy, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import LANES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.layout import (
    factors_of_tokens,
    pack_keys,
    pack_values,
    round_page,
    round_with_feedback,
    to_storage,
)

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
State = dict[str, Array]
"""keys, values, scales, recent and summaries, by these names."""


def append(
    attributes: KVAttributes,
    state: State,
    key: Array,
    value: Array,
    past: Integers,
    new: Integers,
    feedback: Array | None = None,
) -> State:
    """Return the state after the new tokens.

    Args:
        attributes: of the node.
        state: as the shapes of ``KVAttributes.state``; it is left as it is.
        key: float32 [B, S, Hk, D].
        value: float32 [B, S, Hk, D].
        past: int64 [B], tokens of each row that the state holds.
        new: int64 [B], tokens of each row to append, its last columns.
        feedback: float16 [Hk, D, D], with ``key_feedback``.
    """
    state = {name: tensor.copy() for name, tensor in state.items()}
    columns = key.shape[1]
    value = key[..., :0] if attributes.value_size else value
    for row, (before, count) in enumerate(zip(past.tolist(), new.tolist(), strict=True)):
        of_row = row_of(state, row)
        for index in range(count):
            column = columns - count + index
            _append_token(attributes, of_row, key[row, column], value[row, column], before + index, feedback)
    return state


def row_of(state: State, row: int) -> State:
    """Return views of a row of the state; unused states may have fewer rows, and are returned whole."""
    return {name: tensor[row] if row < len(tensor) else tensor for name, tensor in state.items()}


def _append_token(
    attributes: KVAttributes, state: State, key: Array, value: Array, position: int, feedback: Array | None
) -> None:
    """Put the token at ``position``, key and value [Hk, D], into the state of a row, all tensors without their B."""
    heads, channels = key.shape
    page, offset = divmod(position, attributes.page)
    physical = int(attributes.physical_page(page, state["keys"].shape[1]))
    if attributes.levels is None:
        keys = state["keys"][:, physical].reshape(heads, -1, channels, LANES)  # a view, as these bytes are contiguous
        keys[:, offset // LANES, :, offset % LANES] = to_storage(key, attributes.storage)
        if not attributes.value_size:
            values = state["values"][:, physical].reshape(heads, -1, channels)
            values[:, offset] = to_storage(value, attributes.storage)
    else:
        oldest = page - (attributes.recent_pages + 1)
        if offset == 0 and oldest >= attributes.sink_pages:
            _round_page(attributes, state, oldest, channels, feedback)
        slot = state["recent"][:, int(attributes.slot(page))].reshape(heads, attributes.parts, -1, channels)
        for part, token in enumerate((key, value)[: attributes.parts]):
            slot[:, part, offset] = token
    if attributes.summary_policy is not None:
        summary = state["summaries"][:, physical, : attributes.summary_floats(channels)]
        attributes.summary_policy.update_summary(summary, key, offset)
    if attributes.compensate and position >= attributes.sinks:
        _follow(attributes, state["summaries"][..., -2 * channels :], np.concatenate([key, value], axis=-1), position)


def _round_page(attributes: KVAttributes, state: State, page: int, channels: int, feedback: Array | None) -> None:
    """Round a page that leaves `recent` to its codes."""
    assert attributes.levels is not None
    assert attributes.value_levels is not None
    physical = int(attributes.physical_page(page, state["keys"].shape[1]))
    slot = state["recent"][:, int(attributes.slot(page))]
    keys, *values = np.moveaxis(slot.reshape(len(slot), attributes.parts, attributes.page, channels), 1, 0)
    factors = [factors_of_tokens(keys)] if attributes.token_factors else []
    for of_tokens in factors:
        with np.errstate(over="ignore"):
            keys = np.divide(keys, of_tokens, dtype=np.float32)
    if feedback is None:
        key_codes, *scales = round_page(keys, -2, attributes.levels, attributes.clip)
    else:
        key_codes, *scales = round_with_feedback(keys, feedback.astype(np.float32), attributes.levels, attributes.clip)
    state["keys"][:, physical] = pack_keys(key_codes, attributes.storage)
    for part in values:
        value_codes, *of_values = round_page(part, -1, attributes.value_levels, attributes.share_of_values)
        state["values"][:, physical] = pack_values(value_codes, attributes.stored_values.name)
        scales += of_values
    state["scales"][:, physical] = np.concatenate([*scales, *(of_tokens.squeeze(-1) for of_tokens in factors)], axis=-1)


def _follow(attributes: KVAttributes, means: Array, token: Array, position: int) -> None:
    """Bring the mean of all tokens from the sinks on up to date, in the page of the newest.

    Args:
        attributes: of the node.
        means: [Hk, P, 2 D], mean keys and mean values; changed in place.
        token: key and value, [Hk, 2 D].
        position: of the token, not below the sinks.
    """
    page, offset = divmod(position, attributes.page)
    current, before = attributes.physical_page([page, page if offset else page - 1], means.shape[1])
    count = position - attributes.sinks + 1
    with np.errstate(invalid="ignore", over="ignore"):
        means[:, current] = token if count == 1 else means[:, before] + (token - means[:, before]) / np.float32(count)
