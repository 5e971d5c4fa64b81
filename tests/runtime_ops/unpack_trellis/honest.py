from __future__ import annotations

from hypothesis import strategies as st

from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile
from tests.runtime_ops.dequantize_trellis.honest import honest as logical
from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    case = draw(logical())
    codes, scales, tables = (tensor.values for tensor in case.inputs.values())
    inputs = {"codes": pack(codes, case.attributes["bits"]), "scales": tile(scales), "tables": tables}
    rows, columns = codes.shape
    attributes = {"rows": rows, "columns": columns, "group": case.attributes["group"]}
    return Case("UnpackTrellis", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes)
