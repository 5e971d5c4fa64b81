"""Rewinding a cache in pages to fewer tokens.

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
    from graphopt.inference.decoding.buffer import Row

Array = npt.NDArray[Any]


def first_length(layer: PagedLayer, oldest: int) -> int:
    """Return the least number of tokens to which a row can be rewound whose pages before ``oldest`` are overwritten."""
    kv = layer.attributes
    if oldest <= kv.first_pages:
        return 0
    # The query that comes next, at the position of the new length, reads the newest positions with its own, and, where
    # there are means, that of the page before them.
    return (oldest + kv.compensate) * kv.page + max(kv.recent, kv.window) - 1


def check_length(layer: PagedLayer, oldest: int, tokens: int, kept: int, row: int) -> None:
    """Refuse to rewind a row to ``kept`` tokens.

    Raises:
        InputError: it has fewer, or pages that would be read again have been overwritten.
    """
    if not 0 <= kept <= tokens:
        raise InputError(
            f"row {row} has {tokens} tokens and cannot be rewound to {kept}", remedy=f"give a number from 0 to {tokens}"
        )
    first = first_length(layer, oldest)
    if 0 < kept < min(first, tokens):
        raise InputError(
            f"row {row} cannot be rewound from {tokens} to {kept} tokens: newer pages have taken the place of those "
            f"that it would read in layer {layer.number}",
            remedy=f"rewind to {first} or more, or to 0" if first <= tokens else "feed the whole text again",
        )


def moves(layer: PagedLayer, tokens: int, kept: int) -> bool:
    """Return whether :func:`rewind_row` has anything to write."""
    kv = layer.attributes
    if kept == 0 or kept == tokens:
        return False
    return bool(kv.summarizes and kept % kv.page) or next(_floats_again(layer, tokens, kept), None) is not None


def rewind_row(layer: PagedLayer, state: Mapping[str, Row], tokens: int, kept: int) -> None:
    """Bring the states of a row, by their names, from ``tokens`` tokens back to ``kept``, where they lie."""
    kv = layer.attributes
    if kept == 0 or kept == tokens:
        return
    newest = (kept - 1) // kv.page
    for page in _floats_again(layer, tokens, kept):
        state["recent"].write(int(kv.slot(page)), _decoded(layer, state, page))
    if kv.retrieves and kept % kv.page:
        physical = int(kv.physical_page(newest, state["keys"].places))
        keys, _ = _floats(layer, state, newest, kept % kv.page)
        if kv.summary == "mean":
            summary = _running_mean(keys, None, 0)
        else:
            summary = np.concatenate([keys.min(axis=1), keys.max(axis=1)], axis=-1)
        summaries = state["summaries"].read(physical)
        summaries[:, : kv.known(layer.head_size)] = summary
        state["summaries"].write(physical, summaries)
    if kv.compensate and kept % kv.page and kept > kv.sinks:
        _follow(layer, state, kept)


def _floats_again(layer: PagedLayer, tokens: int, kept: int) -> Iterator[int]:
    """Yield the pages of integers that become floats again, because another page took their slots."""
    kv = layer.attributes
    if kv.levels is None:
        return
    newest, was = (kept - 1) // kv.page, (tokens - 1) // kv.page
    yield from range(max(kv.sink_pages, newest - kv.recent_pages), min(newest, was - kv.recent_pages - 1) + 1)


def _decoded(layer: PagedLayer, state: Mapping[str, Row], page: int) -> Array:
    """Return a page of codes as a slot of floats, [KV heads, 2 T D]."""
    kv, size = layer.attributes, layer.head_size
    physical = int(kv.physical_page(page, state["keys"].places))
    scales = state["scales"].read(physical)
    key_low, key_step, value_low, value_step = np.split(scales, [size, 2 * size, 2 * size + kv.page], axis=-1)
    keys = unpack_keys(state["keys"].read(physical), kv.page, size, kv.storage)
    values = unpack_values(state["values"].read(physical), kv.page, size, kv.storage)
    floats = (
        key_low[:, None, :] + key_step[:, None, :] * keys.astype(np.float32),
        value_low[:, :, None] + value_step[:, :, None] * values.astype(np.float32),
    )
    return np.concatenate([each.reshape(len(each), -1) for each in floats], axis=-1)


def _follow(layer: PagedLayer, state: Mapping[str, Row], kept: int) -> None:
    """Compute the mean of all tokens from the sinks up to ``kept`` again, in place, in the summary of the last page."""
    kv, size = layer.attributes, layer.head_size
    page, summaries = (kept - 1) // kv.page, state["summaries"]
    here, before = (int(place) for place in kv.physical_page([page, page - 1], state["keys"].places))
    known = max(0, page * kv.page - kv.sinks)  # tokens that the mean of the page before is of
    first = max(kv.sinks - page * kv.page, 0)
    tokens = np.concatenate(_floats(layer, state, page, kept % kv.page), axis=-1)[:, first:]
    summary = summaries.read(here)
    summary[:, -2 * size :] = _running_mean(tokens, summaries.read(before)[:, -2 * size :] if known else None, known)
    summaries.write(here, summary)


def _running_mean(tokens: Array, mean: Array | None, count: int) -> Array:
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
        slot = state["recent"].read(int(kv.slot(page))).reshape(-1, 2, kv.page, size)
        return slot[:, 0, :tokens], slot[:, 1, :tokens]
    physical = int(kv.physical_page(page, state["keys"].places))
    keys = unpack_keys(state["keys"].read(physical), kv.page, size, kv.storage)
    values = unpack_values(state["values"].read(physical), kv.page, size, kv.storage)
    return keys[:, :tokens].astype(np.float32), values[:, :tokens].astype(np.float32)


def alike(layers: Sequence[PagedLayer]) -> list[list[int]]:
    """Return the places of layers by what rewinding does to them; those whose pages go round each by itself."""
    found: dict[object, list[int]] = {}
    for place, layer in enumerate(layers):
        kind = place if layer.wraps else (layer.attributes, layer.head_size)
        found.setdefault(kind, []).append(place)
    return list(found.values())
