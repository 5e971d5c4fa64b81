from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.cases import batches
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.matmul_table.honest import packed_weights

STACKED = ("codes", "scales", "zero_points")


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs, attributes = packed_weights(draw, random)
    rows, columns, count = attributes["rows"], attributes["columns"], draw(st.integers(1, 5))
    if attributes.get("trellis") and columns % 16:
        columns = attributes["columns"] = -(-columns // 16) * 16
    for name in STACKED:
        tensor = inputs[name]
        is_absent = tensor.values.size == 1 and not tensor.values.any()
        # bytes of two levels stay whole tiles: others would make steps that are not finite
        axis = 0 if name != "codes" and tensor.values.dtype == np.uint8 else None
        tensor.values = np.stack([np.roll(tensor.values, expert, axis) for expert in range(1 if is_absent else count)])
    bias = random.standard_normal((count, columns)) if draw(st.booleans()) else np.zeros(1)
    inputs["bias"].values = bias.astype(np.float32)
    slots = draw(batches())
    experts = random.integers(-1, count, slots)
    leading = slots[:-1] if slots and draw(st.booleans()) else slots
    x = random.standard_normal((*leading, rows)).astype(np.float32)
    attributes["activations"] = draw(st.sampled_from(["float32", "bfloat16", "int8", "int16", "uint4"]))
    stacked = {"x": Tensor(x, "fed"), **inputs, "experts": Tensor(np.asarray(experts, np.int64), "fed")}
    return Case("MatMulExperts", stacked, attributes)
