"""Tokens that move: keys and values of one row of pages become the next tokens of another row.

    pages of the source -> numbers -> keys turn to their new positions -> pages behind those that the row has

What was rounded is not rounded twice where that can be helped. The numbers of a value share a scale with one another
and with no other token, and its least and largest code stand for its least and largest number, so that they come to the
same codes again. Keys share scales with the other tokens of a page: they are rounded once more, but where whole pages
come to lie in whole pages and do not turn.

Pages, slots, summaries and means are then what :mod:`graphopt.runtime_ops.kv_attention.spec.append` makes of the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.inference.states.rewinding import running_mean
from graphopt.runtime_ops.kv_attention.spec.layout import (
    clip_of_rounded,
    factors_of_tokens,
    pack_keys,
    pack_values,
    round_page,
    unpack_keys,
    unpack_values,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.inference.states.buffers import Row
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

Array = npt.NDArray[Any]
Singles = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StoredTokens:
    """Tokens that follow one another, as a state gives them back.

    Attributes:
        keys: float32 [Hk, n, D].
        values: float32 [Hk, n, D]; of no numbers where values are a part of keys.
        is_rounded: bool [n], whether they come from codes.
    """

    keys: Singles
    values: Singles
    is_rounded: npt.NDArray[np.bool_]

    def turn_keys(self, turn: Singles | None) -> StoredTokens:
        """Return them with other keys: each is multiplied by ``turn``, float32 [Hk, D, D], as a column."""
        if turn is None:
            return self
        return StoredTokens(self.keys @ turn.swapaxes(-1, -2), self.values, self.is_rounded)


def move_tokens(
    layer: PagedLayer,
    source: Mapping[str, Row],
    tokens: int,
    first: int,
    end: int,
    target: Mapping[str, Row],
    count: int,
    turn: Singles | None,
) -> None:
    """Append tokens of one row of a layer to another, which has room for them.

    Args:
        layer: of the graph.
        source: states of the row that they come from, by their names.
        tokens: that the source has.
        first: the first token to move.
        end: behind the last one.
        target: states of the row that they go to, in other buffers.
        count: tokens that the target has.
        turn: what keys are multiplied by, float32 [Hk, D, D].
    """
    kv = layer.attributes
    append_tokens(layer, target, count, read_tokens(layer, source, first, end, tokens).turn_keys(turn))
    if turn is not None or (first - count) % kv.page or kv.levels is None:
        return
    pages = np.arange(-(-first // kv.page), end // kv.page)
    new_pages = pages + (count - first) // kv.page
    is_coded = ~(kv.is_recent(pages, tokens) | kv.is_recent(new_pages, count + end - first))
    names = [name for name in ("keys", "values", "scales") if name in target]
    content = {name: _pages_of(layer, source, name, pages[is_coded]) for name in names if is_coded.any()}
    _write(layer, target, new_pages[is_coded], content)


def read_tokens(layer: PagedLayer, state: Mapping[str, Row], first: int, end: int, tokens: int) -> StoredTokens:
    """Return the tokens from ``first`` to ``end`` of a row that has ``tokens`` tokens."""
    kv, size = layer.attributes, layer.head_size
    pages = np.arange(first // kv.page, -(-end // kv.page))
    keys, values = _numbers_of_codes(layer, state, pages)
    is_rounded = np.zeros(len(pages) * kv.page, bool)
    if kv.levels is not None:
        is_recent = kv.is_recent(pages, tokens)
        is_rounded = np.repeat(~is_recent, kv.page)
        for index in np.flatnonzero(is_recent).tolist():
            slot = state["recent"].get(int(kv.slot(pages[index]))).reshape(kv.kv_heads, kv.parts, kv.page, size)
            keys[:, index] = slot[:, 0]
            if kv.parts > 1:
                values[:, index] = slot[:, 1]
    part = slice(first - int(pages[0]) * kv.page, end - int(pages[0]) * kv.page)
    of_keys, of_values = (
        numbers.reshape(kv.kv_heads, len(is_rounded), numbers.shape[-1])[:, part] for numbers in (keys, values)
    )
    return StoredTokens(of_keys, of_values, is_rounded[part])


def append_tokens(layer: PagedLayer, state: Mapping[str, Row], count: int, new: StoredTokens) -> None:
    """Append tokens to a row that has ``count`` tokens and room for more; arguments as of :func:`move_tokens`."""
    kv = layer.attributes
    total = count + new.keys.shape[1]
    newest, old_newest = (total - 1) // kv.page, (count - 1) // kv.page
    # the pages that change: those that get tokens, and those that were floats and are not among the newest any more
    begin = count // kv.page
    if kv.levels is not None:
        begin = min(begin, max(old_newest - kv.recent_pages, min(kv.sink_pages, old_newest), 0))
    before = (
        read_tokens(layer, state, begin * kv.page, count, count)
        if count > begin * kv.page
        else StoredTokens(new.keys[:, :0], new.values[:, :0], new.is_rounded[:0])
    )
    missing = (newest + 1) * kv.page - total
    keys, values = (
        np.pad(np.concatenate(pair, axis=1), ((0, 0), (0, missing), (0, 0))).reshape(
            kv.kv_heads, newest + 1 - begin, kv.page, pair[0].shape[-1]
        )
        for pair in ((before.keys, new.keys), (before.values, new.values))
    )
    is_rounded = np.pad(np.concatenate([before.is_rounded, new.is_rounded]), (0, missing)).reshape(-1, kv.page)
    pages = np.arange(begin, newest + 1)
    if kv.levels is None:
        _write(layer, state, pages, {"keys": pack_keys(keys, kv.storage)})
        if kv.parts > 1:
            _write(layer, state, pages, {"values": pack_values(values, kv.storage)})
    else:
        is_recent = kv.is_recent(pages, total)
        for index in np.flatnonzero(is_recent).tolist():
            parts = [keys[:, index], values[:, index]][: kv.parts]
            state["recent"].write(int(kv.slot(pages[index])), np.stack(parts, axis=1).reshape(kv.kv_heads, -1))
        code_pages = np.flatnonzero(~is_recent)
        if len(code_pages):
            content = _codes_of(kv, keys[:, code_pages], values[:, code_pages], is_rounded[code_pages])
            _write(layer, state, pages[code_pages], content)
    if kv.summarizes:
        _update_summaries(layer, state, count, new)


def _numbers_of_codes(layer: PagedLayer, state: Mapping[str, Row], pages: Array) -> tuple[Singles, Singles]:
    """Return keys and values [Hk, n, T, D] of pages, where those among the newest may be anything."""
    kv, size = layer.attributes, layer.head_size
    keys: Array = unpack_keys(_pages_of(layer, state, "keys", pages), kv.page, size, kv.storage).astype(np.float32)
    values: Array = np.zeros((*keys.shape[:-1], 0), np.float32)
    if kv.parts > 1:
        of_values = _pages_of(layer, state, "values", pages)
        values = unpack_values(of_values, kv.page, size, kv.stored_values.name).astype(np.float32)
    if kv.levels is None:
        return keys, values
    scales = _pages_of(layer, state, "scales", pages)
    of_keys, of_tokens = scales[..., : 2 * size], scales[..., 2 * size :]
    keys *= of_keys[..., None, size:]
    keys += of_keys[..., None, :size]
    if kv.token_factors:
        keys *= of_tokens[..., -kv.page :, None]
    if kv.parts > 1:
        values *= of_tokens[..., kv.page : 2 * kv.page, None]
        values += of_tokens[..., : kv.page, None]
    return keys, values


def _codes_of(kv: KVAttributes, keys: Singles, values: Singles, is_rounded: Array) -> dict[str, Array]:
    """Return the codes and scales of pages of keys and values [Hk, n, T, D], of which tokens [n, T] were rounded."""
    assert kv.levels is not None
    assert kv.value_levels is not None
    factors = []
    if kv.token_factors:
        factors = [factors_of_tokens(keys)]
        keys = keys / factors[0]
    key_parts = [round_page(keys, -2, kv.levels, clip) for clip in (clip_of_rounded(kv.clip), kv.clip)]
    had_rounded = np.asarray(is_rounded.any(-1))[:, None]
    key_codes = np.where(had_rounded[..., None], key_parts[0][0], key_parts[1][0])
    scales = [np.where(had_rounded, *pair) for pair in zip(key_parts[0][1:], key_parts[1][1:], strict=True)]
    content = {"keys": pack_keys(key_codes, kv.storage)}
    if kv.parts > 1:
        # what was cut off once is not cut off again
        parts = [round_page(values, -1, kv.value_levels, clip) for clip in (1.0, kv.share_of_values)]
        was_rounded = np.broadcast_to(is_rounded, values.shape[:-1])
        value_codes = np.where(was_rounded[..., None], parts[0][0], parts[1][0])
        scales += [np.where(was_rounded, *pair) for pair in zip(parts[0][1:], parts[1][1:], strict=True)]
        content["values"] = pack_values(value_codes, kv.stored_values.name)
    content["scales"] = np.concatenate([*scales, *(part.squeeze(-1) for part in factors)], axis=-1)
    return content


def _pages_of(layer: PagedLayer, state: Mapping[str, Row], name: str, pages: Array) -> Array:
    """Return pages of the text, [Hk, n, ...], from where they lie."""
    physical = layer.attributes.physical_page(pages, state[name].pages).tolist()
    return np.stack([state[name].get(page) for page in physical], axis=1)


def _write(layer: PagedLayer, state: Mapping[str, Row], pages: Array, content: Mapping[str, Array]) -> None:
    """Write pages [Hk, n, ...] of the text to where they lie."""
    for name, numbers in content.items():
        physical = layer.attributes.physical_page(pages, state[name].pages).tolist()
        for index, page in enumerate(physical):
            state[name].write(page, numbers[:, index])


def _update_summaries(layer: PagedLayer, state: Mapping[str, Row], count: int, new: StoredTokens) -> None:
    """Bring the summaries of pages up to date with the tokens behind the first ``count``."""
    kv, size = layer.attributes, layer.head_size
    total = count + new.keys.shape[1]
    pages = np.arange(count // kv.page, -(-total // kv.page))
    summaries = _pages_of(layer, state, "summaries", pages)
    if kv.summary_policy is not None:
        floats = kv.summary_floats(size)
        for offset in range(kv.page):
            positions = pages * kv.page + offset
            index = np.flatnonzero((positions >= count) & (positions < total))
            if len(index):
                # a head of a page is a head to the policy
                part = np.ascontiguousarray(summaries[:, index, :floats]).reshape(-1, floats)
                kv.summary_policy.update_summary(part, new.keys[:, positions[index] - count].reshape(-1, size), offset)
                summaries[:, index, :floats] = part.reshape(kv.kv_heads, len(index), floats)
    if kv.compensate:
        numbers = np.concatenate([new.keys, new.values], axis=-1)
        mean: Array | None = None
        if count > kv.sinks:
            newest = int(kv.physical_page((count - 1) // kv.page, state["summaries"].pages))
            mean = state["summaries"].get(newest)[:, -2 * size :]
        for column, number in enumerate(pages.tolist()):
            first, end = max(count, kv.sinks, number * kv.page), min(total, (number + 1) * kv.page)
            if first < end:
                mean = running_mean(numbers[:, first - count : end - count], mean, first - kv.sinks)
                summaries[:, column, -2 * size :] = mean
    _write(layer, state, pages, {"summaries": summaries})
