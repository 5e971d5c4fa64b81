"""The compared methods: caches of graphopt, of llama.cpp, and of papers, as combinations of roundings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tools.studies.caches.rounding import (
    CHANNELS,
    TOKENS,
    Method,
    Round,
    Tail,
    Tensor,
    asymmetric,
    beside_page_before,
    blocks_of_32,
    round_to_table,
    symmetric,
    with_factors,
    with_low_rank,
    with_normalized_pages,
    with_outliers,
)

TAIL = Tail()
CLIPS = {2: 0.9}
FACTORS = {2, 3}
"""Bits of codes for which ``quantize_kv`` clips, and those for which it has factors per token."""

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def of_pages(
    bits: int,
    value_bits: int | None = None,
    *,
    rotates: bool = True,
    clip: float = 1.0,
    value_clip: float | None = None,
    factors: bool = False,
    tail: Tail = TAIL,
    name: str = "",
) -> Method:
    """Return pages of ``KVAttention``: keys with a low and a step per channel and page, values with those per token.

    Args:
        bits: of a key, and of a value where there is no other number.
        value_bits: of a value.
        rotates: heads are rotated first.
        clip: see ``quantize_kv``.
        value_clip: of values, where it is another one.
        factors: whether keys are divided by a factor per token first.
        tail: which pages stay floats.
        name: instead of the bits.
    """
    value_bits, value_clip = value_bits or bits, clip if value_clip is None else value_clip
    keys: Round = partial(asymmetric, axis=TOKENS, bits=bits, clip=clip)
    if factors:
        keys = with_factors(keys)
    values = partial(asymmetric, axis=CHANNELS, bits=value_bits, clip=value_clip)
    title = (name or f"int{bits}") + ("" if value_bits == bits else f" keys, int{value_bits} values")
    title += (
        (", factors" if factors else "") + (", rotated" if rotates else "") + (f", clip {clip}" if clip < 1 else "")
    )
    title += f", values' clip {value_clip}" if value_clip != clip else ""
    return Method(title, (keys, values), (bits + value_bits) / 2, tail, rotates)


def in_pages(name: str, rounds: tuple[Round, Round], bits: float, *, before_rotary: bool = False) -> Method:
    """Return a method in pages with the usual tail, rotated unless keys are rounded before the rotary embedding."""
    return Method(name, rounds, bits, TAIL, not before_rotary, before_rotary)


def methods() -> list[Method]:
    """Return all methods, the most important ones first."""
    method_list = [
        Method(f"llama.cpp {kind}", same_for_both(blocks_of_32, kind=kind), bits) for kind, bits in _LLAMA.items()
    ]
    method_list += [of_pages(bits, clip=CLIPS.get(bits, 1.0), factors=bits in FACTORS) for bits in (6, 4, 3, 2)]
    method_list += [of_pages(4, factors=True), of_pages(3), of_pages(2, clip=CLIPS[2]), of_pages(2)]
    method_list += [of_pages(bits, rotates=False) for bits in (6, 4, 3, 2)]
    method_list += [of_pages(bits, clip=clip) for bits, clip in ((4, 0.95), (3, 0.95), (2, 0.8), (2, 0.7))]
    method_list += [
        of_pages(2, clip=CLIPS[2], tail=Tail(newest=3), name="int2, three newest pages"),
        of_pages(3, 2, clip=CLIPS[2]),
        of_pages(4, 2, clip=CLIPS[2]),
        of_pages(2, 4, clip=CLIPS[2]),
        of_pages(8, 4),
        of_pages(4, 8),
        of_pages(6, factors=True),
        of_pages(6, factors=True, tail=Tail(page=32, first=2, newest=2), name="int6, pages of 32"),
        of_pages(6, tail=Tail(page=32, first=2, newest=2), name="int6, pages of 32"),
        of_pages(8, 6),
        of_pages(4, tail=Tail(newest=0), name="int4, no newest page"),
        of_pages(4, tail=Tail(first=0), name="int4, no first page"),
        of_pages(4, tail=Tail(first=0, newest=-1), name="int4, no floats"),
        of_pages(2, clip=CLIPS[2], factors=True, tail=Tail(newest=3), name="int2, three newest pages"),
        of_pages(2, clip=CLIPS[2], factors=True, tail=Tail(newest=15), name="int2, 15 newest pages"),
        of_pages(2, clip=CLIPS[2], factors=True, tail=Tail(first=4, newest=15), name="int2, 4 first, 15 newest pages"),
        of_pages(4, 2, clip=CLIPS[2], factors=True),
        of_pages(3, 2, clip=CLIPS[2], factors=True),
    ]
    return method_list + of_pairs() + of_papers() + of_blocks()


def of_pairs() -> list[Method]:
    """Return pages whose keys have more bits than their values, beside those of as many bytes."""
    pairs = ((8, 5), (8, 3), (6, 4), (6, 3), (5, 5), (5, 4), (5, 3), (4, 3))
    method_list = [of_pages(keys, values) for keys, values in pairs]
    for keys in (8, 6, 5, 4, 3):
        method_list += [of_pages(keys, 2), of_pages(keys, 2, value_clip=CLIPS[2])]
    for keys, values in ((4, 3), (4, 2), (3, 2)):
        method_list.append(of_pages(keys, values, value_clip=CLIPS.get(values, 1.0), factors=True))
    return method_list


def of_papers() -> list[Method]:
    """Return methods of papers, in pages with the same tail as those of graphopt."""
    method_list = []
    for bits in (3, 2):
        clip = CLIPS.get(bits, 1.0)
        rows, columns = (partial(asymmetric, axis=axis, bits=bits, clip=clip) for axis in (CHANNELS, TOKENS))
        by_error, by_table = partial(asymmetric, bits=bits, shares=SHARES), partial(round_to_table, bits=bits)
        title = f"{bits} bits" + (f", clip {clip}" if clip < 1 else "")
        method_list += [
            in_pages(
                f"KVarN: rows and columns normalized, {title}",
                (with_normalized_pages(columns), with_normalized_pages(rows)),
                bits,
            ),
            in_pages(f"SKVQ: each set clipped by least squares, {bits} bits", by_axis(by_error), bits),
            in_pages(f"KVQuant: tables, {bits} bits", by_axis(by_table), bits),
            in_pages(f"KVQuant: keys before rotary, {title}", (columns, rows), bits, before_rotary=True),
            in_pages(f"KVQuant: 1% outliers, {title}", (with_outliers(columns, 0.01), with_outliers(rows, 0.01)), bits),
            in_pages(f"per token and head, {title}", (rows, rows), bits),
            in_pages(f"GEAR: a residual of rank 2, {title}", (with_low_rank(columns, 2), with_low_rank(rows, 2)), bits),
        ]
    return method_list


def of_blocks() -> list[Method]:
    """Return blocks of the server: each token by itself, the newest too."""
    method_list = []
    for keys, values in ((8, 8), (6, 6), (6, 4), (4, 4), (8, 4)):
        rounds = (partial(symmetric, bits=keys), partial(symmetric, bits=values))
        name = f"blocks of the server, int{keys}" + ("" if keys == values else f" keys, int{values} values")
        method_list.append(Method(f"{name}, rotated", rounds, (keys + values) / 2))
        method_list.append(Method(f"{name}, rotated, keys centred", rounds, (keys + values) / 2, centres=True))
    rows: Round = partial(asymmetric, axis=CHANNELS, bits=4)
    method_list += [
        Method("blocks, int4 with a low per token, rotated", (rows, rows), 4),
        Method("blocks, int4 with a low, keys beside the block before, rotated", (beside_page_before(rows), rows), 4),
        Method(
            "blocks, int4 with a low, keys beside the block before, tail, rotated",
            (beside_page_before(rows), rows),
            4,
            TAIL,
        ),
        Method("blocks, int4 with a low, tail, rotated", (rows, rows), 4, TAIL),
    ]
    return method_list


def same_for_both(function: Callable[..., Tensor], **options: Any) -> tuple[Round, Round]:
    """Return one rounding for keys and values."""
    return partial(function, **options), partial(function, **options)


def by_axis(function: Callable[..., Tensor]) -> tuple[Round, Round]:
    """Return roundings of keys along the tokens of a page, and of values along their channels."""
    return partial(function, axis=TOKENS), partial(function, axis=CHANNELS)


_LLAMA = {"q8_0": 8.5, "q5_0": 5.5, "q4_0": 4.5}
