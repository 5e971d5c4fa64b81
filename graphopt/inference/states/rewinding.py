"""Rewinding pages to fewer tokens.

    float storages:    nothing moves: what lies behind the end is written again before it is read
    integer storages:  the newest pages become floats again; where another page took the slot, from the codes
    summaries:         that of the last page is computed again from the keys that stay; the mean of all dropped tokens,
                       which streaming reads, from that of the page before and the keys and values that stay; token by
                       token as the operator does, so that float32 and the pages of integers that are floats still give
                       the same bits

What was rounded stays rounded: for integers, a page that had left the window of floats comes back with that error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.runtime_ops.kv_attention.spec.layout import unpack_keys, unpack_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.inference.states.buffers import Row

Array = npt.NDArray[Any]


def first_length(layer: PagedLayer, oldest: int) -> int:
    """Return the least number of tokens to which a row can be rewound whose pages before ``oldest`` are overwritten."""
    kv = layer.attributes
    if oldest <= kv.first_pages:
        return 0
    # The query that comes next, at the position of the new length, reads the newest positions with its own, and, where
    # there are means, that of the page before them.
    return (oldest + kv.compensate) * kv.page + max(kv.recent, kv.window) - 1


def check_length(layer: PagedLayer, oldest: int, tokens: int, length: int, row: int) -> None:
    """Refuse to rewind a row of ``tokens`` tokens to ``length`` of them.

    Raises:
        InputError: pages that would be read again have been overwritten.
    """
    first = first_length(layer, oldest)
    if 0 < length < min(first, tokens):
        raise InputError(
            f"row {row} cannot be rewound from {tokens} to {length} tokens: newer pages have taken the place of those "
            f"that it would read in layer {layer.number}",
            remedy=f"rewind to {first} or more, or to 0" if first <= tokens else "feed the whole text again",
        )


def is_rewind_free(layer: PagedLayer, tokens: int, length: int) -> bool:
    """Return whether :func:`rewind_row` has nothing to write."""
    kv = layer.attributes
    if length == 0 or length == tokens:
        return True
    return not (kv.summarizes and length % kv.page) and not any(True for _ in _pages_to_decode(layer, tokens, length))


def rewind_row(layer: PagedLayer, state: Mapping[str, Row], tokens: int, length: int) -> None:
    """Bring the states of a row, by their names, from ``tokens`` tokens back to ``length``, where they lie."""
    kv = layer.attributes
    if length == 0 or length == tokens:
        return
    newest = (length - 1) // kv.page
    for page in _pages_to_decode(layer, tokens, length):
        state["recent"].write(int(kv.slot(page)), _decode(layer, state, page))
    if kv.retrieves and length % kv.page:
        physical = int(kv.physical_page(newest, state["keys"].pages))
        keys, _ = _floats(layer, state, newest, length % kv.page)
        if kv.summary == "mean":
            summary = running_mean(keys, None, 0)
        else:
            summary = np.concatenate([keys.min(axis=1), keys.max(axis=1)], axis=-1)
        summaries = state["summaries"].get(physical)
        summaries[:, : kv.summary_floats(layer.head_size)] = summary
        state["summaries"].write(physical, summaries)
    if kv.compensate and length % kv.page and length > kv.sinks:
        _rewind_mean(layer, state, length)


def _pages_to_decode(layer: PagedLayer, tokens: int, length: int) -> Iterator[int]:
    """Yield the pages of integers that become floats again, because another page took their slots."""
    kv = layer.attributes
    if kv.levels is None:
        return
    newest, old_newest = (length - 1) // kv.page, (tokens - 1) // kv.page
    yield from range(max(kv.sink_pages, newest - kv.recent_pages), min(newest, old_newest - kv.recent_pages - 1) + 1)


def _decode(layer: PagedLayer, state: Mapping[str, Row], page: int) -> Array:
    """Return a page of codes as a slot of floats, [KV heads, 2 T D], or [KV heads, T D] of rows that are both."""
    kv, size = layer.attributes, layer.head_size
    physical = int(kv.physical_page(page, state["keys"].pages))
    scales = state["scales"].get(physical)
    key_scales, of_tokens = np.split(scales, [2 * size], axis=-1)
    key_low, key_step = np.split(key_scales, 2, axis=-1)
    keys = unpack_keys(state["keys"].get(physical), kv.page, size, kv.storage)
    floats = [key_low[:, None, :] + key_step[:, None, :] * keys.astype(np.float32)]
    if kv.token_factors:
        floats[0] *= of_tokens[:, -kv.page :, None]
    if not kv.value_size:
        value_low, value_step = of_tokens[:, : kv.page, None], of_tokens[:, kv.page : 2 * kv.page, None]
        values = unpack_values(state["values"].get(physical), kv.page, size, kv.stored_values.name)
        floats.append(value_low + value_step * values.astype(np.float32))
    return np.concatenate([part.reshape(len(part), -1) for part in floats], axis=-1)


def _rewind_mean(layer: PagedLayer, state: Mapping[str, Row], length: int) -> None:
    """Compute the mean of all tokens from the sinks up to ``length`` again, in the summary of the last page."""
    kv, size = layer.attributes, layer.head_size
    page, summaries = (length - 1) // kv.page, state["summaries"]
    newest, previous = map(int, kv.physical_page([page, page - 1], state["keys"].pages))
    count = max(0, page * kv.page - kv.sinks)  # tokens that the mean of the page before is of
    first = max(kv.sinks - page * kv.page, 0)
    tokens = np.concatenate(_floats(layer, state, page, length % kv.page), axis=-1)[:, first:]
    summary = summaries.get(newest)
    summary[:, -2 * size :] = running_mean(tokens, summaries.get(previous)[:, -2 * size :] if count else None, count)
    summaries.write(newest, summary)


def running_mean(tokens: Array, mean: Array | None, count: int) -> Array:
    """Return the mean of ``count`` tokens, ``mean``, and of more, [heads, tokens, numbers]; rounded each time."""
    for token in np.moveaxis(tokens, 1, 0):
        count += 1
        mean = token if mean is None else mean + (token - mean) / np.float32(count)
    assert mean is not None
    return mean


def _floats(layer: PagedLayer, state: Mapping[str, Row], page: int, tokens: int) -> tuple[Array, Array]:
    """Return the first keys and values of the newest page of a row, float32 [KV heads, tokens, D] each."""
    kv, size = layer.attributes, layer.head_size
    if kv.levels is not None:
        slot = state["recent"].get(int(kv.slot(page))).reshape(-1, 2, kv.page, size)
        return slot[:, 0, :tokens], slot[:, 1, :tokens]
    physical = int(kv.physical_page(page, state["keys"].pages))
    keys = unpack_keys(state["keys"].get(physical), kv.page, size, kv.storage)
    values = unpack_values(state["values"].get(physical), kv.page, size, kv.stored_values.name)
    return keys[:, :tokens].astype(np.float32), values[:, :tokens].astype(np.float32)


def group_layers(layers: Sequence[PagedLayer]) -> list[list[int]]:
    """Return the indices of layers by what rewinding does to them; those whose pages go round each by itself."""
    groups: dict[object, list[int]] = {}
    for index, layer in enumerate(layers):
        kind = index if layer.wraps else (layer.attributes, layer.head_size)
        groups.setdefault(kind, []).append(index)
    return list(groups.values())
