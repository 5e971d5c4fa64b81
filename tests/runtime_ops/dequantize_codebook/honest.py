from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from graphopt.runtime_ops.dequantize_codebook.spec.packing import slice_bits
from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def matrices(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return a matrix of codes: entries of any size along both axes, of one or two books, with and without signs."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size, axis = draw(st.sampled_from([1, 2, 4, 8, 8, 16])), draw(st.integers(0, 1))
    rows, columns = draw(st.sampled_from([1, 7, 16, 40, 64, 300])), draw(st.sampled_from([1, 15, 16, 33, 48]))
    index, second = draw(st.sampled_from([1, 4, 8, 9, 11])), draw(st.sampled_from([0, 0, 3, 8]))
    signs = draw(st.sampled_from(sorted({0, size - 1, size})))
    shifts, level_bits = draw(st.integers(1, 2)), draw(st.sampled_from([0, 3, 4]))
    while index + second + signs + shifts - 1 > 32:
        second = 0
        signs = 0
    group, span = (size * draw(st.sampled_from([1, 2, 4, 400])) for _ in range(2))
    tiles = -(-columns // 16)
    bits = index + second + signs + shifts - 1

    def codes(count: int, width: int) -> np.ndarray:
        return slice_bits(random.integers(0, 2**width, (tiles, count, 16), np.uint32, endpoint=False), width)

    levels = codes(-(-rows // group), level_bits) if level_bits else np.zeros((1, 1, 1), np.uint8)
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    inputs = {
        "codes": codes(-(-rows // size), bits),
        "scales": random.uniform(0.1, 1, (tiles, -(-rows // span), 16)).astype(dtype),
        "levels": levels,
        "level_table": random.standard_normal((2, 2**level_bits)).astype(np.float32),
        "books": random.standard_normal((2**index + (2**second if second else 0), size)).astype(np.float32),
        "shifts": random.standard_normal(shifts).astype(np.float32),
    }
    attributes = {
        "rows": rows,
        "columns": columns,
        "axis": axis,
        "index_bits": index,
        "second_bits": second,
        "sign_bits": signs,
        "level_bits": level_bits,
        "group": group,
        "span": span,
    }
    return inputs, attributes


@st.composite
def honest(draw: st.DrawFn) -> Case:
    inputs, attributes = draw(matrices())
    return Case("DequantizeCodebook", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes)
