from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.matmul_table.honest import minimums


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, columns, entries = draw(st.integers(1, 40)), draw(st.integers(1, 20)), draw(st.integers(1, 256))
    group = draw(st.sampled_from([16, rows]))
    groups, dtype = -(-rows // group), draw(st.sampled_from([np.float32, np.float16]))
    zero_points = (groups, columns) if draw(st.booleans()) else (1, 1)
    inputs = {
        "codes": random.integers(0, entries, (rows, columns)).astype(np.uint8),
        "scales": random.uniform(0.1, 1, (groups, columns)).astype(dtype),
        "table": random.standard_normal(entries).astype(np.float32),
        "zero_points": (random.standard_normal(zero_points) * (zero_points != (1, 1))).astype(dtype),
    }
    attributes = {"group": group, **draw(minimums)}
    return Case("Dequantize", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes)
