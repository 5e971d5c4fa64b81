"""What ``ai.graphopt::PagedAttention`` means, in NumPy: request by request, token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import LANES, MOST_LATENT, PAGES, first_seen
from graphopt.runtime_ops.paged_attention.spec.layout import (
    STORAGES,
    first_with_residual,
    head_size,
    latent_width,
    pack,
    pack_latents,
    residual_slots,
    restore_tokens,
    store_tokens,
    unpack,
    unpack_latents,
    width,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]


def reference(  # noqa: PLR0913, the attributes of the node
    *inputs: Array,
    kv_heads: int,
    window: int,
    scale: float,
    softcap: float,
    storage: str,
    value_size: int = 0,
    chunks: int = 0,
    key_feedback: int = 0,
    chooses: int = 0,
    residuals: int = 0,
    slopes: tuple[float, ...] = (),
) -> tuple[Array, ...]:
    """Return y, float64 in the shape of `query`, and the blocks and scales after the call.

    With a ``value_size`` heads of y have so many numbers.

    Args:
        inputs: all of the node, see :mod:`graphopt.runtime_ops.paged_attention.spec.schema`.
        kv_heads: as the node has it, and so are the others.
        window: tokens, 0 for none.
        scale: of q . k.
        softcap: 0 for none.
        storage: of the blocks.
        value_size: 0 where values are stored.
        chunks: 1 where the window is a chunk.
        key_feedback: 1 where the last input is ``feedback``.
        chooses: 1 where the last inputs are an empty ``feedback`` and ``choice``.
        residuals: 1 where the newest tokens of a block have second codes.
        slopes: of biases by distance, one for each query head, or none.

    Raises:
        ValueError: shapes or numbers do not fit one another; nothing is computed then.
    """
    _check_reach(kv_heads, window, chunks)
    _check_kinds(
        storage, window, value_size=value_size, key_feedback=key_feedback, chooses=chooses, residuals=residuals
    )
    inputs, feedback, choice = _without_trailing(inputs, key_feedback=key_feedback, chooses=chooses)
    query, key, value, starts, past, block_table, sink_logits, keys, values, key_scales, value_scales = inputs
    _check_pools(keys, values, (key_scales, value_scales), kv_heads, storage, value_size)
    size = 2 * keys.shape[3] if value_size else head_size(keys.shape[3], storage)
    tokens = _check_tokens(query, key, key if value_size else value, sink_logits, kv_heads, size)
    if value_size and value.shape != (0,):
        raise ValueError(f"PagedAttention: with a value_size value is [0], not {list(value.shape)}")
    _check_rows(starts, past, block_table, tokens)
    if feedback is not None and (feedback.dtype != np.float16 or feedback.shape != (kv_heads, size, size)):
        raise ValueError(
            f"PagedAttention: feedback is float16 {[kv_heads, size, size]}, not {feedback.dtype} {list(feedback.shape)}"
        )
    q = query.reshape(tokens, kv_heads, -1, size).astype(np.float64)
    if len(slopes) not in (0, kv_heads * q.shape[2]) or (slopes and softcap) or not np.isfinite(slopes).all():
        raise ValueError(
            f"PagedAttention: slopes are finite, one for each of {kv_heads * q.shape[2]} query heads, and softcap is 0 "
            f"with them; they are {list(slopes)} and {softcap}"
        )
    of_heads = np.zeros(q.shape[1:3])
    if slopes:
        of_heads = np.array(slopes, np.float32).astype(np.float64).reshape(of_heads.shape)
    blocks, slots = _slots(starts, past, block_table, keys).T
    if choice is not None:
        choice = _rows_of_chosen(choice, query, starts, past)
    if value_size:
        latents = unpack_latents(keys, values, storage).copy()
        latents[blocks, :, slots] = store_tokens(key.reshape(tokens, kv_heads, size), storage)[0]
        K = restore_tokens(latents, None, storage)
        y = _attend_all(
            q, K, K[..., :value_size], inputs, scale, (window, chunks), softcap, slopes=of_heads, choice=choice
        )
        return y.reshape(*query.shape[:-1], -1), *pack_latents(latents, storage), key_scales, value_scales
    after, scales, numbers, rests = [], [], [], []
    for pool, given, new, are_keys in ((keys, key_scales, key, True), (values, value_scales, value, False)):
        held, block_scales = unpack(pool, storage, are_keys=are_keys).copy(), given.copy()
        of_keys = feedback if are_keys else None
        new_tokens, steps = store_tokens(new.reshape(tokens, kv_heads, size), storage, of_keys)
        by_head = None
        if steps is not None:
            by_head = block_scales.reshape(len(pool), kv_heads, keys.shape[1])  # a view
        if residuals and by_head is not None:
            exact = new.reshape(tokens, kv_heads, size).astype(np.float32)
            codes, second_steps = store_tokens(_residual(exact, new_tokens, steps, storage), storage)
            assert second_steps is not None
            rests.append(_residuals(restore_tokens(held, by_head, storage), (codes, second_steps), storage, inputs))
            lasting, target_slots = _lasting_residuals(starts, past, slots, keys.shape[1])
            held[blocks[lasting], :, target_slots] = codes[lasting]
            by_head[blocks[lasting], :, target_slots] = second_steps[lasting]
        held[blocks, :, slots] = new_tokens
        if by_head is not None:
            by_head[blocks, :, slots] = steps
        after.append(pack(held, storage, are_keys=are_keys))
        scales.append(block_scales)
        numbers.append(restore_tokens(held, by_head, storage))
    y = _attend_all(
        q, numbers[0], numbers[1], inputs, scale, (window, chunks), softcap, slopes=of_heads, residuals=rests
    )
    return y.reshape(query.shape), *after, *scales


def _attend_all(  # noqa: PLR0913, what a call computes with
    q: Doubles,
    keys: Doubles,
    values: Doubles,
    inputs: tuple[Array, ...],
    scale: float,
    reach: tuple[int, int],
    softcap: float,
    *,
    slopes: Doubles,
    choice: Array | None = None,
    residuals: Sequence[list[Doubles]] = (),
) -> Doubles:
    """Return y [T, Hk, G, V] for q [T, Hk, G, D] over blocks of keys [N, Hk, P, D] and values [N, Hk, P, V].

    Residuals of keys and of values are [L, Hk, D] for each request, or there are none.
    """
    _, _, _, starts, past, block_table, sink_logits, *_ = inputs
    page, kv_heads = keys.shape[2], keys.shape[1]
    y = np.zeros((*q.shape[:3], values.shape[-1]))
    for row, before in enumerate(past.tolist()):
        span = range(int(starts[row]), int(starts[row + 1]))
        pages = block_table[row, : -(-(before + len(span)) // page)]
        K, V = (token[pages].swapaxes(1, 2).reshape(-1, kv_heads, token.shape[-1]) for token in (keys, values))
        for position, token in enumerate(span, start=before):
            visible = np.arange(int(first_seen(position, *reach)), position + 1)
            if choice is not None:
                visible = choice[token][choice[token] >= 0]
            biases = slopes[..., None] * (visible - position)
            of_keys, of_values = K[visible], V[visible]
            if residuals:
                begin = position - position % page
                first = begin + first_with_residual(position % page + 1, page)
                is_twice = (visible >= max(begin, first))[:, None, None]
                of_keys = of_keys + np.where(is_twice, residuals[0][row][visible], 0)
                of_values = of_values + np.where(is_twice, residuals[1][row][visible], 0)
            y[token] = _attend(q[token], of_keys, of_values, sink_logits, float(np.float32(scale)), softcap, biases)
    return y


def _residual(exact: Array, codes: Array, scales: Array | None, storage: str) -> Array:
    """Return what the codes of tokens [T, Hk, D] leave of them, float32, by float32."""
    levels = STORAGES[storage].levels
    assert levels is not None and scales is not None
    remainder: Array = exact - scales[..., None] * (codes.astype(np.float32) - np.float32(levels / 2))
    return remainder


def _residuals(
    numbers: Doubles, new: tuple[Array, Array | None], storage: str, inputs: tuple[Array, ...]
) -> list[Doubles]:
    """Return what residuals add to the tokens of each request, [L, Hk, D]; 0 where there are none, or none is read.

    Args:
        numbers: what blocks hold before the call, [N, Hk, P, D].
        new: codes and scales of residuals of the new tokens.
        storage: of the blocks.
        inputs: of the node.
    """
    _, _, _, starts, past, table, *_ = inputs
    page, target_slots, by_row = numbers.shape[2], residual_slots(numbers.shape[2]), []
    of_new = restore_tokens(*new, storage)
    for row, before in enumerate(past.tolist()):
        count = int(starts[row + 1] - starts[row])
        of_row = np.zeros((-(-(before + count) // page) * page, numbers.shape[1], numbers.shape[3]))
        begin, stored_count = before - before % page, before % page
        kept_tokens = np.arange(max(0, first_with_residual(stored_count + 1, page)), stored_count)
        if count and len(kept_tokens):
            of_row[begin + kept_tokens] = numbers[table[row, before // page], :, target_slots[kept_tokens]]
        of_row[before : before + count] = of_new[starts[row] : starts[row + 1]]
        by_row.append(of_row)
    return by_row


def _lasting_residuals(starts: Array, past: Array, slots: Array, page: int) -> tuple[Array, Array]:
    """Return which new tokens have a residual in their block after the call, and in which slots, int64 [n] each."""
    ends = np.repeat(past + np.diff(starts), np.diff(starts))
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, np.diff(starts), strict=True)])
    counts = np.minimum(ends - (positions - slots), page)
    lasting = np.flatnonzero(slots >= first_with_residual(counts, page))
    lasting = lasting[slots[lasting] < page - 1]
    return lasting, residual_slots(page)[slots[lasting]]


def _attend(q: Doubles, K: Doubles, V: Doubles, sinks: Array, scale: float, softcap: float, biases: Doubles) -> Doubles:
    """Return y [Hk, G, V] of one token, for q [Hk, G, D], K [n, Hk, D], V [n, Hk, V] and biases [Hk, G, n]."""
    is_bad = ~np.isfinite(K).all(axis=-1, keepdims=True) | ~np.isfinite(V)
    scores = np.einsum("hgd,nhd->hgn", q, np.where(np.isfinite(K).all(axis=-1, keepdims=True), K, 0)) * scale
    if softcap:
        cap = float(np.float32(softcap))
        scores = cap * np.tanh(scores / cap)
    scores = scores + biases
    logits = sinks.astype(np.float64).reshape(*q.shape[:2], -1) if sinks.size else np.zeros((*q.shape[:2], 0))
    all_scores = np.concatenate([scores, logits], axis=-1)
    weights = np.exp(all_scores - all_scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    y: Doubles = np.einsum("hgn,nhd->hgd", weights[..., : len(K)], np.where(is_bad, 0, V))
    spoils = np.asarray(is_bad.any(axis=0))
    return np.where(spoils[:, None], np.nan, y)


def _slots(starts: Array, past: Array, table: Array, keys: Array) -> npt.NDArray[np.int64]:
    """Return the block and the slot of each new token, int64 [T, 2]."""
    slots: list[tuple[int, int]] = []
    new_blocks: list[int] = []
    size = keys.shape[1]
    for row, before in enumerate(past.tolist()):
        total = before + int(starts[row + 1] - starts[row])
        block_count = -(-total // size)
        if block_count > table.shape[1]:
            raise ValueError(f"PagedAttention: request {row} has {total} tokens and {table.shape[1]} blocks of {size}")
        for block in table[row, :block_count].tolist():
            if not 0 <= block < len(keys):
                raise ValueError(f"PagedAttention: request {row} needs block {block} of {len(keys)}")
        slots += [(int(table[row, token // size]), token % size) for token in range(before, total)]
        new_blocks += table[row, before // size : block_count].tolist() if total > before else []
    if len({*new_blocks}) < len(new_blocks):
        raise ValueError("PagedAttention: a block is written for two requests, or twice for one")
    return np.array(slots, np.int64).reshape(-1, 2)


def _check_reach(kv_heads: int, window: int, chunks: int) -> None:
    if kv_heads < 1 or window < 0:
        raise ValueError(f"PagedAttention: kv_heads is at least 1 and window at least 0, not {kv_heads} and {window}")
    if chunks not in (0, 1) or (chunks and not window):
        raise ValueError(f"PagedAttention: chunks is 0, or 1 with a window above 0; they are {chunks} and {window}")


def _check_kinds(
    storage: str, window: int, *, value_size: int, key_feedback: int, chooses: int, residuals: int
) -> None:
    if storage not in STORAGES:
        raise ValueError(f"PagedAttention: storage is one of {', '.join(STORAGES)}, not {storage!r}")
    if key_feedback not in (0, 1) or (key_feedback and STORAGES[storage].levels is None):
        raise ValueError(f"PagedAttention: key_feedback is 0, or 1 for integers; it is {key_feedback} for {storage}")
    if residuals not in (0, 1) or (residuals and STORAGES[storage].levels is None):
        raise ValueError(f"PagedAttention: residuals is 0, or 1 for integers; it is {residuals} for {storage}")
    if chooses not in (0, 1) or (chooses and (not value_size or window)):
        raise ValueError(
            f"PagedAttention: chooses is 0, or 1 with a value_size and no window; it is {chooses} with {value_size} "
            f"and {window}"
        )


def _without_trailing(
    inputs: tuple[Array, ...], *, key_feedback: int, chooses: int
) -> tuple[tuple[Array, ...], Array | None, Array | None]:
    """Return the inputs that all nodes have, ``feedback``, and ``choice``; ``None`` where the node has none."""
    if not chooses:
        return (inputs[:-1], inputs[-1], None) if key_feedback else (inputs, None, None)
    *required_inputs, empty, choice = inputs
    if empty.shape != (0,):
        raise ValueError(f"PagedAttention: feedback is [0] where tokens are chosen, not {list(empty.shape)}")
    return tuple(required_inputs), None, choice


def _rows_of_chosen(choice: Array, query: Array, starts: Array, past: Array) -> Array:
    """Return the positions that tokens read as [T, K].

    Raises:
        ValueError: they do not rise, or are not from 0 to that of their token, or there are none.
    """
    if choice.ndim != query.ndim or choice.shape[:-1] != query.shape[:-1]:
        raise ValueError(f"PagedAttention: choice is {list(query.shape[:-1])} and K, not {list(choice.shape)}")
    positions = [before + i for row, before in enumerate(past.tolist()) for i in range(starts[row + 1] - starts[row])]
    rows: Array = choice.reshape(len(positions), -1)
    for token, (numbers, position) in enumerate(zip(rows.tolist(), positions, strict=True)):
        count = next((index for index, number in enumerate(numbers) if number == -1), len(numbers))
        rises = all(a < b for a, b in pairwise(numbers[:count]))
        is_in_range = all(0 <= number <= position for number in numbers[:count])
        if not count or not rises or not is_in_range or any(number != -1 for number in numbers[count:]):
            raise ValueError(
                f"PagedAttention: token {token} chooses positions that rise from 0 to {position} at most, one at "
                f"least, and -1 behind them; it chooses {numbers}"
            )
    return rows


def _check_pools(
    keys: Array, values: Array, scales: tuple[Array, Array], kv_heads: int, storage: str, value_size: int
) -> None:
    """Refuse blocks that do not fit one another."""
    if value_size % LANES or not 0 <= value_size <= MOST_LATENT:
        raise ValueError(f"PagedAttention: value_size is a multiple of {LANES} up to {MOST_LATENT}, not {value_size}")
    if keys.ndim != 4 or keys.shape != values.shape or keys.dtype != values.dtype or keys.shape[2] != kv_heads:
        raise ValueError(f"PagedAttention: keys and values are [N, P, {kv_heads}, W], not {list(keys.shape)}")
    if keys.dtype != STORAGES[storage].dtype:
        raise ValueError(f"PagedAttention: blocks of {storage} are {STORAGES[storage].dtype}, not {keys.dtype}")
    if keys.shape[1] not in PAGES:
        raise ValueError(f"PagedAttention: a block has one of {PAGES} tokens, not {keys.shape[1]}")
    try:
        if value_size:
            latent_width(2 * keys.shape[3], storage, keys.shape[1])
        else:
            width(head_size(keys.shape[3], storage), storage)
    except ValueError as error:
        raise ValueError(f"PagedAttention: {error}") from error
    if value_size > 2 * keys.shape[3]:
        raise ValueError(f"PagedAttention: value_size is {value_size}, and a token has {2 * keys.shape[3]} numbers")
    shape = (0,) if STORAGES[storage].levels is None else keys.shape[:3]
    for tensor in scales:
        if tensor.shape != shape:
            raise ValueError(f"PagedAttention: scales of {storage} are {list(shape)}, not {list(tensor.shape)}")


def _check_tokens(query: Array, key: Array, value: Array, sinks: Array, kv_heads: int, size: int) -> int:
    """Return the number of tokens, or refuse tensors that do not fit one another."""
    across, tokens = kv_heads * size, int(np.prod(key.shape[:-1]))
    if key.shape != value.shape or key.shape[-1] != across:
        raise ValueError(f"PagedAttention: key and value are [..., {across}], not {list(key.shape)}")
    if query.shape[:-1] != key.shape[:-1] or not query.shape[-1] or query.shape[-1] % across:
        raise ValueError(f"PagedAttention: query is {list(key.shape[:-1])} and G {across}, not {list(query.shape)}")
    if sinks.shape not in ((0,), (query.shape[-1] // size,)):
        raise ValueError(f"PagedAttention: sink_logits are {[query.shape[-1] // size]} or [0], not {list(sinks.shape)}")
    return tokens


def _check_rows(starts: Array, past: Array, table: Array, tokens: int) -> None:
    """Refuse lengths that do not fit one another or the tokens."""
    if past.ndim != 1 or starts.shape != (len(past) + 1,) or table.ndim != 2 or len(table) != len(past):
        raise ValueError("PagedAttention: starts is [B + 1], past [B] and block_table [B, C]")
    if starts[0] != 0 or starts[-1] != tokens or (np.diff(starts.astype(np.int64)) < 0).any():
        raise ValueError(f"PagedAttention: starts rises from 0 to {tokens}, not {starts.tolist()}")
    if (past < 0).any():
        raise ValueError(f"PagedAttention: past is at least 0, not {past.tolist()}")
