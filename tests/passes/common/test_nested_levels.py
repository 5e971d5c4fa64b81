"""Scales that are codes of 8 bits themselves: stored so again, and the same numbers to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.graph.weights import Concat, Expression, Inline, Reshape, Transpose
from graphopt.passes.common.nested_levels import nested_levels, scales_of_parts
from graphopt.passes.common.table_layout import TileScales
from graphopt.quantization.nested_scales import NestedScales

BLOCK = 256


def nested(seed: int, count: int, table: np.ndarray | None = None) -> NestedScales:
    """Return random scales as bitsandbytes nests them."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, count).astype(np.uint8)
    steps = np.exp2(random.uniform(-12, -4, -(-count // BLOCK))).astype(np.float32)
    values = np.linspace(-1, 1, 256, dtype=np.float32) if table is None else table
    offset = random.uniform(0.01, 0.1, 1).astype(np.float32)
    leaves = [Inline.from_array(array) for array in (codes, values, steps, offset)]
    return NestedScales(leaves[0], leaves[1], leaves[2], BLOCK, leaves[3])


def tiled(groups: int, sources: list[NestedScales]) -> Expression:
    """Return scales of merged matrices as products read them."""
    columns = [Transpose(Reshape.to_dims(source, (-1, groups)), (1, 0)) for source in sources]
    return TileScales(Concat(tuple(columns), 1), columns[0].dtype)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_scales_of_merged_matrices_come_back(seed: int, groups: int, rows: list[int]) -> None:
    """Of any sizes: rows that are no whole blocks, and tiles that are padded."""
    sources = [nested(seed + number, count * groups) for number, count in enumerate(rows)]
    source = tiled(groups, sources)
    form = nested_levels(source)
    assert form is not None
    parts = form.evaluate()
    for name, (dtype, shape) in form.parts.items():
        assert (parts[name].dtype, parts[name].shape) == (dtype.numpy(), shape)
    whole = scales_of_parts(
        **{name: Inline.from_array(array) for name, array in parts.items()}, dims=source.shape, dtype=source.dtype
    )
    assert np.array_equal(whole.numpy(), source.numpy())
    # what was stored so and read again is stored so once more
    again = nested_levels(whole)
    assert again is not None
    assert {name: array.tobytes() for name, array in again.evaluate().items()} == {
        name: array.tobytes() for name, array in parts.items()
    }


@pytest.mark.parametrize("rows", [[64], [64, 16, 16]])
def test_a_run_is_as_long_as_blocks_allow(rows: list[int]) -> None:
    form = nested_levels(tiled(9, [nested(number, 9 * count) for number, count in enumerate(rows)]))
    assert form is not None
    assert form.run == (64 if len(rows) == 1 else 16)


def test_other_numbers_stay() -> None:
    """Numbers without such an origin, numbers that something has moved since, and two tables in one product."""
    sources = [nested(1, 64), nested(2, 64)]
    assert nested_levels(Inline.from_array(tiled(4, sources).numpy())) is None
    swapped = Concat((tiled(4, sources[1:]), tiled(4, sources[1:])), 0)
    assert nested_levels(swapped) is None
    other_table = nested(3, 64, np.linspace(-1, 2, 256, dtype=np.float32))
    assert nested_levels(tiled(4, [sources[0], other_table])) is None
