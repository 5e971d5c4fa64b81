from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.cases import batches
from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*draw(batches()), draw(st.integers(1, 40)))
    x = random.standard_normal(shape).astype(draw(st.sampled_from([np.float32, np.float64, np.float16])))
    attributes = {"bits": draw(st.integers(2, 8)), "symmetric": draw(st.integers(0, 1)), "clip": 0.75}
    return Case("RoundTrip", {"x": Tensor(x, "fed")}, attributes)
