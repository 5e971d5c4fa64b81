from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from graphopt.runtime_ops.matmul_table.spec.levels import pack_levels
from tests.runtime_ops.cases import batches
from tests.runtime_ops.hostile import Case, Tensor

sizes = st.one_of(st.integers(1, 40), st.sampled_from([1, 15, 16, 17, 32, 48, 64, 96, 128, 160]))


# whether zero points are minimums; most files say neither
minimums = st.sampled_from([{}, {}, {"minimums": 0}, {"minimums": 1}])


def packed_weights(draw: st.DrawFn, random: np.random.Generator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    rows, columns, bits = draw(sizes), draw(sizes), draw(st.integers(1, 8))
    group = draw(st.sampled_from([16, 32, 64, 128, rows]))
    tiles, units, groups = -(-columns // 16), -(-rows // 16), -(-rows // group)
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    where = draw(st.sampled_from(["graph", "file"]))
    entries = 2**bits
    zero_points = (tiles, groups, 16) if draw(st.booleans()) else (1, 1, 1)
    inputs = {
        "codes": Tensor(random.integers(0, 256, (tiles, units, 32 * bits), np.uint8), where),
        "scales": Tensor(random.uniform(0.1, 1, (tiles, groups, 16)).astype(dtype), where),
        "table": Tensor(np.sort(random.standard_normal(entries)).astype(np.float32), where),
        "zero_points": Tensor((random.standard_normal(zero_points) * (zero_points[0] > 1)).astype(dtype), where),
        "bias": Tensor(random.standard_normal(columns).astype(np.float32), where),
    }
    sizes_of_node = {"rows": rows, "columns": columns, "group": group}
    if bits == 2 and draw(st.booleans()):
        inputs["codes"].values = random.integers(0, 256, (tiles, units, 52), np.uint8)
        inputs["table"].values = inputs["table"].values[: draw(st.integers(3, 4))]
        return inputs, {**sizes_of_node, "base": 3, **draw(minimums)}
    if draw(st.integers(0, 3)) == 0:
        span, low, width = draw(st.sampled_from([8, 16])), draw(st.integers(-128, 0)), draw(st.sampled_from([4, 6, 8]))
        for name in ("scales", "zero_points") if zero_points[0] > 1 else ("scales",):
            levels = random.integers(low, low + 2**width, (tiles, groups, 16))
            steps = random.uniform(0, 0.1, (tiles, -(-groups // span), 16)).astype(np.float16)
            inputs[name] = Tensor(pack_levels(levels, steps, width, low), where)
        if zero_points[0] == 1:
            inputs["zero_points"] = Tensor(np.zeros((1, 1), np.uint8), where)
        return inputs, {**sizes_of_node, "span": span, "low": low, **draw(minimums)}
    if bits in range(2, 7) and draw(st.booleans()):
        entries = max(16, entries)
        inputs["table"] = Tensor((random.integers(-63, 64, (2, entries)) / 32).astype(np.float32), where)
        return inputs, {**sizes_of_node, "trellis": 1}
    return inputs, {**sizes_of_node, **draw(minimums)}


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs, attributes = packed_weights(draw, random)
    x = random.standard_normal((*draw(batches()), attributes["rows"])).astype(np.float32)
    attributes["activations"] = draw(st.sampled_from(["float32", "bfloat16", "int8", "int16", "uint4"]))
    return Case("MatMulTable", {"x": Tensor(x, "fed"), **inputs}, attributes)
