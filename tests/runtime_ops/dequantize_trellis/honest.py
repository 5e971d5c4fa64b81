from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, columns, bits = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 6))
    group = draw(st.sampled_from([16, rows]))
    entries = 2 ** draw(st.integers(1, min(6, 2 * bits)))
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    inputs = {
        "codes": random.integers(0, 2**bits, (rows, columns)).astype(np.uint8),
        "scales": random.uniform(0.1, 1, (-(-rows // group), columns)).astype(dtype),
        "tables": random.standard_normal((2, entries)).astype(np.float32),
    }
    return Case(
        "DequantizeTrellis",
        {name: Tensor(array, "fed") for name, array in inputs.items()},
        {"bits": bits, "group": group},
    )
