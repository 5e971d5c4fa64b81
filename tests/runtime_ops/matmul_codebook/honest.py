from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.cases import batches
from tests.runtime_ops.dequantize_codebook.honest import matrices
from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    """Rows of floats or float16 times a matrix of codes, any number of them."""
    inputs, attributes = draw(matrices())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    x = random.standard_normal((*draw(batches()), attributes["rows"])).astype(dtype)
    fed = {"x": x, **inputs}
    return Case("MatMulCodebook", {name: Tensor(array, "fed") for name, array in fed.items()}, attributes)
