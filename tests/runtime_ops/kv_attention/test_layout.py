"""The pages of KVAttention: layout, rounding, and which page lies where."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops.kv_attention.spec.append import append, row_of
from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS, LEVELS, PAGES, STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.layout import (
    factors_of_tokens,
    pack_keys,
    pack_values,
    round_page,
    round_with_feedback,
    scales_above,
    scales_below,
    unpack_keys,
    unpack_values,
)
from graphopt.runtime_ops.kv_attention.spec.readings import stored_tokens
from tests.runtime_ops.kv_cases import unit_of

EACH_STORAGE = pytest.mark.parametrize("storage", STORAGES)


def page_of(storage: str, tokens: int, channels: int, leading: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    random, shape = np.random.default_rng(seed), (*leading, tokens, channels)
    if storage in LEVELS:
        return random.integers(0, LEVELS[storage] + 1, shape).astype(np.uint8)
    return random.standard_normal(shape).astype(FLOATS[storage])


PLANES = {
    "int8": (8, [(8, 0, 4, 0)]),
    "int4": (4, [(4, 0, 8, 0)]),
    "int2": (2, [(2, 0, 16, 0)]),
    "int6": (6, [(4, 0, 16, 0), (2, 2, 16, 4)]),
    "int3": (3, [(2, 0, 32, 0), (1, 2, 32, 2)]),
    "int1": (1, [(1, 0, 32, 0)]),
}
"""Bits of a code, and of each plane: its bits, first line in a unit, codes of a unit, first bit in a code."""


def by_definition(page: np.ndarray, storage: str, kind: str) -> np.ndarray:
    """The layout, written down number by number."""
    tokens, channels = page.shape
    bits = PLANES[storage][0] if storage in PLANES else 8
    packed = np.zeros(tokens * channels * bits // 8, page.dtype)
    for t in range(tokens):
        for c in range(channels):
            if storage not in LEVELS:
                index = (t // 16 * channels + c) * 16 + t % 16 if kind == "keys" else t * channels + c
                packed[index] = page[t, c]
                continue
            lane, summed, size = (t, c, channels) if kind == "keys" else (c, t, tokens)
            first, four = PLANES[storage][0], summed // 4
            for bits, line, unit, at in PLANES[storage][1]:
                within = four % (unit // 4)
                lines = lane // 16 * (size * first // 32) + four // (unit // 4) * (unit * first // 32)
                index = ((lines + line + within * bits // 8) * 16 + lane % 16) * 4 + summed % 4
                packed[index] |= (page[t, c] >> at & 2**bits - 1) << within * bits % 8
    return packed


@EACH_STORAGE
@pytest.mark.parametrize(("tokens", "channels"), [(1, 1), (1, 3), (4, 2)])
def test_the_layout_is_the_definition(storage: str, tokens: int, channels: int) -> None:
    tokens, channels = tokens * unit_of(storage), channels * unit_of(storage)
    page = page_of(storage, tokens, channels)
    assert np.array_equal(pack_keys(page, storage), by_definition(page, storage, "keys"))
    assert np.array_equal(pack_values(page, storage), by_definition(page, storage, "values"))


@given(
    st.sampled_from(STORAGES),
    st.sampled_from(PAGES),
    st.integers(1, 8),
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(0, 99),
)
@settings(deadline=None)
def test_unpack_undoes_pack(storage: str, tokens: int, blocks: int, leading: list[int], seed: int) -> None:
    tokens, channels = max(tokens, unit_of(storage)), unit_of(storage) * blocks
    page = page_of(storage, tokens, channels, tuple(leading), seed)
    for pack, unpack in ((pack_keys, unpack_keys), (pack_values, unpack_values)):
        packed = pack(page, storage)
        assert packed.dtype == page.dtype
        unpacked = unpack(packed, tokens, channels, storage)
        assert unpacked.dtype == page.dtype
        assert np.array_equal(unpacked, page)


def test_float16_is_to_the_nearest_and_overflows_to_infinity() -> None:
    page = np.zeros((16, 16), np.float32)
    page[0, :5] = 2049, 2051, 65519, 65520, -1e9  # halves between 2048, 2050 and 2052; the last number that fits
    for pack in (pack_keys, pack_values):
        stored = set(pack(page, "float16").tolist())
        assert stored == {0, 2048, 2052, 65504, np.inf, -np.inf}


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.sampled_from(sorted(LEVELS)),
    st.sampled_from([1.0, 1e-3, 1e-8, 1e-20, 1e-34, 1e3, 1e33]),
)
@settings(deadline=None)
def test_rounding_is_within_half_a_step(numbers: list[float], storage: str, size: float) -> None:
    levels = LEVELS[storage]
    x = np.array(numbers, np.float32) * np.float32(size)
    codes, low, step = round_page(x, -1, levels)
    assert (low.shape, step.shape, low.dtype, step.dtype) == ((), (), np.float16, np.float16)
    assert np.isfinite(low)
    assert np.isfinite(step)
    assert step >= 0
    assert low <= max(x.min(), -65504)
    # what lies beyond float16 becomes the first or the last number
    least, largest = -65504.0, float(low) + levels * 65504.0
    # 3 roundings of float32 in (x - low) (1 / step), 3 in the end of the set by which the step is chosen, and 2 in the
    # step: each 2^-24 of at most `levels` steps
    restored = np.float64(low) + np.float64(step) * codes
    assert (np.abs(restored - x.clip(least, largest)) <= np.float64(step) * (0.5 + levels * 2.0**-21)).all()


@given(st.floats(-7e4, 7e4, width=32) | st.floats(-(2**-13), 2**-13, width=32) | st.floats(width=32))
def test_scales_are_the_nearest_float16_on_one_side(number: float) -> None:
    x = np.array([number], np.float32)
    below, above = scales_below(x)[0], scales_above(x)[0]
    if np.isnan(number):
        assert np.isnan(below)
        assert np.isnan(above)
        return
    inside = np.clip(np.float64(number), -65504, 65504)
    assert below <= inside <= above
    # no float16 lies between
    assert below == above == inside or np.nextafter(below, np.float16(np.inf)) == above


def test_a_number_far_from_zero_is_stored_by_its_low_and_a_small_step() -> None:
    # of float16 numbers near 1000 each second half: alone 1000.3 would become 1000.5
    codes, low, step = round_page(np.array([1000.3, 1000.3], np.float32), 0, 15)
    assert (codes.tolist(), float(low)) == ([15, 15], 1000)
    assert abs(float(low) + 15 * float(step) - 1000.3) < 0.3 * 2**-10  # step is rounded to float16, up


def test_ties_go_to_even_codes() -> None:
    codes, low, step = round_page(np.array([0, 0.5, 1.5, 2.5, 15], np.float32), 0, 15)
    assert (codes.tolist(), float(low), float(step)) == ([0, 0, 2, 2, 15], 0, 1)


def test_what_is_clipped_gets_the_first_or_the_last_code() -> None:
    # of 0 to 16 the middle three quarters are 2 to 14
    codes, low, step = round_page(np.array([0, 2, 3, 5, 14, 16], np.float32), 0, 3, clip=0.75)
    assert (codes.tolist(), float(low), float(step)) == ([0, 0, 0, 1, 3, 3], 2, 4)


def test_the_factor_of_a_key_is_its_size_beside_the_largest_of_each_channel() -> None:
    # shares are 1 and 1, then 1 / 2 and 1 / 4; a key of zeros has no size
    keys = np.array([[4, -8], [2, 2], [0, 0]], np.float32)
    expected = np.array([[1], [np.sqrt((1 / 4 + 1 / 16) / 2)], [1]], np.float16)
    np.testing.assert_array_equal(factors_of_tokens(keys), expected)
    keys[1, 0] = np.inf
    np.testing.assert_array_equal(factors_of_tokens(keys), np.ones((3, 1)))


def test_keys_of_one_direction_and_any_size_are_stored_without_loss() -> None:
    random = np.random.default_rng(0)
    sizes = random.uniform(1, 9, (32, 1)).astype(np.float32)
    direction = random.standard_normal(32).astype(np.float32)
    error = {}
    for token_factors in (0, 1):
        kv = KVAttributes(1, 1.0, page=32, storage="int2", token_factors=token_factors)
        keys = np.concatenate([sizes * direction, np.zeros((32, 32), np.float32)])
        state = append(
            kv, kv.state(1, 2, 32).zeros(), keys[None, :, None], keys[None, :, None], np.array([0]), np.array([64])
        )
        stored, _ = stored_tokens(kv, row_of(state, 0), 0, np.arange(32), 64, 32)
        error[token_factors] = np.abs(stored.numbers - keys[:32]).max()
    # squares of shares are rounded to 2^-14 each
    assert error[1] < 2**-10 * np.abs(keys).max() < error[0]


@given(seed=st.integers(0, 1 << 20), size=st.sampled_from([16, 32]), levels=st.sampled_from([3, 7, 15]))
def test_feedback_makes_the_scores_of_given_queries_nearer(seed: int, size: int, levels: int) -> None:
    random = np.random.default_rng(seed)
    keys = random.standard_normal((1, 64, size)).astype(np.float32)
    # queries of few directions, and a little of all
    queries = random.standard_normal((400, 3)) @ random.standard_normal((3, size))
    queries = queries + 0.3 * random.standard_normal(queries.shape)
    upper = np.linalg.cholesky(np.linalg.inv(queries.T @ queries / 400)).T
    feedback = (upper / np.diag(upper)[:, np.newaxis]).astype(np.float32)[np.newaxis]
    errors = []
    for codes, low, step in (round_page(keys, -2, levels), round_with_feedback(keys, feedback, levels)):
        errors.append(np.square(queries @ (low + step * codes - keys)[0].T).mean())
    # 3 of the directions have most of the weight; the largest of 2400 draws was 0.49
    assert errors[1] < 0.6 * errors[0]


def test_feedback_of_zero_rounds_each_channel_by_itself() -> None:
    keys = np.random.default_rng(0).standard_normal((2, 3, 16, 32)).astype(np.float32)
    for one, other in zip(
        round_page(keys, -2, 15, 0.9),
        round_with_feedback(keys, np.zeros((2, 32, 32), np.float32), 15, 0.9),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("others", "says"), [({"token_factors": 2}, "it is 2"), ({"storage": "float8"}, "1 for float8")]
)
def test_factors_that_are_none_are_refused(others: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"token_factors is 0 or 1, and 0 for floats; .*{says}"):
        attributes(**{"storage": "int4", "token_factors": 1, **others})


@pytest.mark.parametrize(("clip", "storage"), [(0.0, "int4"), (1.5, "int4"), (float("nan"), "int4"), (0.5, "float16")])
def test_a_share_that_is_none_is_refused(clip: float, storage: str) -> None:
    with pytest.raises(ValueError, match="clip is a share above 0 and up to 1"):
        attributes(storage=storage, clip=clip)


def test_a_share_of_values_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="value_clip is a share above 0 and up to 1"):
        attributes(storage="int4", value_clip=1.5)


@pytest.mark.parametrize("bad", [[np.nan, 1], [np.inf, 1], [-np.inf, np.inf], [3e38, -3e38]])
def test_what_is_not_finite_is_stored_as_nan(bad: list[float]) -> None:
    page = np.ones((16, 16), np.float32)
    page[:2, 3] = bad
    page[5] = np.arange(16)
    codes, low, step = round_page(page, 0, 255)
    assert np.isnan(low).tolist() == [channel == 3 for channel in range(16)]
    assert not codes[:, 3].any()
    assert step[3] == 0
    assert codes[5, 4] == 255


def attributes(**others: Any) -> KVAttributes:
    return KVAttributes(**{"kv_heads": 2, "scale": 1.0, **others})


def test_a_page_stays_where_it_is_until_the_cache_wraps() -> None:
    plain = attributes(page=16)
    assert plain.physical_page(np.arange(5), 5).tolist() == [0, 1, 2, 3, 4]
    wrapping = attributes(page=16, policies=(1,), sinks=20)
    assert wrapping.first_pages == 2
    assert wrapping.physical_page(np.arange(9), 5).tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 2]


def test_who_may_wrap() -> None:
    wrapping = attributes(page=16, policies=(1,), sinks=20, recent=30)
    # (P - F) T >= recent + S + T: 3 pages of 16 hold 30 recent tokens, 16 tokens of slack and 2 new ones
    assert wrapping.may_wrap(5, 2)
    assert not wrapping.may_wrap(5, 3)
    assert not wrapping.may_wrap(2, 0)
    assert not attributes(page=16, policies=(1,), sinks=20, recent=30, window=31).may_wrap(5, 2)
    assert not attributes(page=16, policies=(1, 0), sinks=20, recent=30).may_wrap(5, 2)


def test_slots() -> None:
    kept = attributes(storage="int8", sink_pages=2, recent_pages=1, page=16)
    assert kept.slots == 4
    assert kept.slot(np.arange(7)).tolist() == [0, 1, 2, 3, 2, 3, 2]
    # 81 tokens: the newest page is 5, which pushed 3 out
    assert kept.is_recent(np.arange(6), 81).tolist() == [True, True, False, False, True, True]
    assert kept.is_recent(np.arange(5), 80).tolist() == [True, True, False, True, True]
    assert attributes(sink_pages=2, recent_pages=1).slots == 0


@pytest.mark.parametrize(
    ("storage", "dtype", "stored", "scales", "slots"),
    [
        ("float32", "float32", 32 * 48, 0, 0),
        ("float16", "float16", 32 * 48, 0, 0),
        ("bfloat16", FLOATS["bfloat16"], 32 * 48, 0, 0),
        ("float8", FLOATS["float8"], 32 * 48, 0, 0),
        ("int8", "uint8", 32 * 48, 160, 4),
        ("int4", "uint8", 16 * 48, 160, 4),
        ("int6", "uint8", 24 * 48, 160, 4),
        ("int2", "uint8", 8 * 48, 160, 4),
    ],
)
def test_the_shapes_of_the_state(storage: str, dtype: npt.DTypeLike, stored: int, scales: int, slots: int) -> None:
    attrs = attributes(storage=storage, page=32, sink_pages=1, recent_pages=2, policies=(0, 2), summary="mean")
    shapes = attrs.state(3, 7, 48)
    assert [name for name, _ in shapes] == ["keys", "values", "scales", "recent", "summaries"]
    assert shapes.keys.shape == shapes.values.shape == (3, 2, 7, stored)
    assert shapes.keys.dtype == shapes.values.dtype == dtype
    assert shapes.scales.shape == (3, 2, 7, scales)
    assert shapes.scales.dtype == np.float16
    assert shapes.recent.shape == (3, 2, slots, 2 * 32 * 48)
    assert shapes.summaries.shape == (3, 2, 7, 48)
    zeros = shapes.zeros()
    assert sum(tensor.nbytes for tensor in zeros.values()) == shapes.bytes
    assert {name: tensor.shape for name, tensor in zeros.items()} == {name: tensor.shape for name, tensor in shapes}


def test_summaries_follow_the_policies() -> None:
    assert attributes(policies=(0, 1)).state(1, 2, 16).summaries.shape == (1, 2, 2, 0)
    assert attributes(policies=(0, 2)).state(1, 2, 16).summaries.shape == (1, 2, 2, 32)


def test_dimensions_may_be_names() -> None:
    shapes = attributes().state("batch", "pages", 16)
    assert shapes.keys.shape == ("batch", 2, "pages", 64 * 16)
    with pytest.raises(ValueError, match="a dimension is only a name"):
        shapes.zeros()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_heads": 0}, "kv_heads is at least 1, not 0"),
        ({"recent": 0}, "recent is at least 1, not 0"),
        ({"window": -1}, "window is at least 0, not -1"),
        ({"slopes": (float("inf"),)}, r"slopes are finite, not \[inf\]"),
        ({"slopes": (1.0, 1.0), "softcap": 2.0}, "with slopes softcap is 0, policies are dense or streaming"),
        ({"slopes": (1.0, 1.0), "policies": (2,)}, "with slopes softcap is 0, policies are dense or streaming"),
        ({"chunks": 1}, "chunks is 0, or 1 with a window above 0; it is 1 with 0"),
        ({"softcap": float("nan")}, "softcap is at least 0, not nan"),
        ({"scale": float("inf")}, "must be finite"),
        ({"scale": 1e39}, "scale inf and softcap 0.0 must be finite"),
        ({"mass": 1 + 1e-6}, "mass is from 0 to 1"),
        ({"page": 48}, "page is one of .*, not 48"),
        ({"storage": "int5"}, "storage is one of .*, not 'int5'"),
        ({"summary": "median"}, "summary is one of .*, not 'median'"),
        ({"policies": ()}, "one for each of 2 KV heads"),
        ({"policies": (0, 1, 2)}, "one for each of 2 KV heads"),
        ({"policies": (4,)}, "dense"),
    ],
)
def test_refusals(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attributes(**wrong)


@pytest.mark.parametrize(
    ("head_size", "most", "others"),
    [
        (0, 512, {}),
        (24, 512, {}),
        (528, 512, {}),
        (272, 256, {"storage": "int8"}),
        (272, 256, {"policies": (2,)}),
        (272, 256, {"compensate": 1, "policies": (1,)}),
    ],
)
def test_head_sizes(head_size: int, most: int, others: dict[str, Any]) -> None:
    plain = {"storage": "float32", "policies": (0,), "window": 0}
    with pytest.raises(ValueError, match=f"multiple of 16 up to {most}, not {head_size}"):
        attributes(**plain | others).state(1, 1, head_size)


def test_attributes_as_a_node_takes_them() -> None:
    attrs = attributes(policies=(0, 2), softcap=3.0)
    assert attrs.for_node()["policies"] == [0, 2]
    assert KVAttributes(**attrs.for_node()) == attrs


def test_floats_are_those_that_a_node_holds() -> None:
    attrs = attributes(scale=0.1, softcap=1 / 3, mass=1 + 1e-9)
    floats = (attrs.scale, attrs.softcap, attrs.mass)
    assert floats == (float(np.float32(0.1)), float(np.float32(1 / 3)), 1.0)
    node = ir.node("KVAttention", [], attrs.for_node(), domain=DOMAIN)
    read = ir.from_proto(ir.to_proto(node)).attributes
    assert floats == tuple(read[name].value for name in ("scale", "softcap", "mass"))
