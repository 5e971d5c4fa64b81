from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.cases import batches, matrices
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.matmul_table.honest import packed_weights


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs, attributes = packed_weights(draw, random)
    rows = attributes["rows"]
    x = random.standard_normal((*draw(batches()), rows)).astype(np.float32)
    a = draw(st.sampled_from([n for n in (1, 2, 4, 12, 16) if rows % n == 0]))
    b = draw(st.sampled_from([n for n in (1, 2, 4, 8, 20) if rows % (a * n) == 0]))
    attributes |= {"bits": draw(st.sampled_from([8, 4])), "clip": draw(st.sampled_from([1.0, 0.5]))}
    return Case("MatMulDynamic", {"x": Tensor(x, "fed"), **inputs, **matrices(a, b)}, attributes)
