from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.cases import batches
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.matmul_table.honest import packed_weights


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs, attributes = packed_weights(draw, random)
    del inputs["bias"]
    columns = attributes["columns"]
    ids = random.integers(-columns, columns, draw(batches()))
    return Case("GatherTable", {"ids": Tensor(ids, "fed"), **inputs}, attributes)
