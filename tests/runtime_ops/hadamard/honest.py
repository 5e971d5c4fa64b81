from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.cases import batches, matrices
from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    a, b = (draw(st.sampled_from([1, 2, 4, 8, 12, 16, 20, 28, 32])) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*draw(batches()), a * b * draw(st.integers(0, 3)))
    x = random.standard_normal(shape).astype(draw(st.sampled_from([np.float32, np.float32, np.float64, np.float16])))
    where = draw(st.sampled_from(["graph", "fed", "file"]))
    return Case("Hadamard", {"x": Tensor(x, "fed"), **matrices(a, b, where)})
