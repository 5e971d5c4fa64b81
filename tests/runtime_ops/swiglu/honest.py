from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.cases import batches
from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    """Rows of any number, of halves below, at and beyond a line of 16 numbers."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns = draw(st.sampled_from([0, 1, 3, 8, 15, 16, 17, 48, 100]))
    x = 3 * random.standard_normal((*draw(batches()), 2 * columns))
    return Case("SwiGLU", {"x": Tensor(x.astype(draw(st.sampled_from([np.float32, np.float16]))), "fed")})
