from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    """Rows of tokens, heads of which all or a part is turned, in either order of pairs."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
    size = draw(st.sampled_from([2, 6, 8, 20]))
    rotary = draw(st.sampled_from(sorted({2, size // 2 // 2 * 2 or 2, size})))
    rows, tokens = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 5]))
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    angles = random.uniform(0, 6, (rows, tokens, rotary // 2))
    inputs = {
        "x": random.standard_normal((rows, tokens, (heads + 2 * kv_heads) * size)),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
    }
    attributes = {"heads": heads, "kv_heads": kv_heads, "rotary": rotary, "rotary_interleaved": draw(st.integers(0, 1))}
    return Case("SplitRotary", {name: Tensor(array.astype(dtype), "fed") for name, array in inputs.items()}, attributes)
