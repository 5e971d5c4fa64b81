"""Inputs of MatMulTable and MatMulDynamic, and their bodies run by an onnxruntime that has no library of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from hypothesis import strategies as st

from graphopt.runtime_ops import DOMAIN, OPERATORS, declare
from graphopt.runtime_ops.dequantize_trellis.spec.op import values_of
from graphopt.runtime_ops.matmul_table.spec.activations import MODES
from graphopt.runtime_ops.matmul_table.spec.packing import bits_of, pack, tile, unpack

INPUTS = ("x", "codes", "scales", "table", "zero_points", "bias", "left", "right")
Case = dict[str, Any]


def case_of(
    rows: int,
    columns: int,
    group: int,
    bits: int,
    *,
    leading: tuple[int, ...] = (3,),
    entries: int | None = None,
    scale_type: type = np.float32,
    zero_points: bool = False,
    minimums: bool = False,
    bias: bool = False,
    seed: int = 0,
) -> Case:
    """Return the inputs of MatMulTable by name, and its attributes but for ``activations``.

    With ``minimums`` the zero points are minimums.
    """
    random = np.random.default_rng(seed)
    entries = 2**bits if entries is None else entries
    groups = -(-rows // group)
    numbers = random.standard_normal((groups, columns)) if zero_points or minimums else None
    return {
        "x": random.standard_normal((*leading, rows)).astype(np.float32),
        "codes": pack(random.integers(0, entries, (rows, columns)).astype(np.uint8), bits),
        "scales": tile(random.uniform(0.1, 1, (groups, columns)).astype(scale_type)),
        "table": random.standard_normal(entries).astype(np.float32),
        "zero_points": np.zeros((1, 1, 1), scale_type) if numbers is None else tile(numbers.astype(scale_type)),
        "bias": random.standard_normal(columns).astype(np.float32) if bias else np.zeros(1, np.float32),
        "rows": rows,
        "columns": columns,
        "group": group,
        **({"minimums": 1} if minimums else {}),
    }


def trellis_case(rows: int, columns: int, group: int, bits: int, **options: Any) -> Case:
    """Return what :func:`case_of` does, with codes of a trellis; all sums of its tables are bytes."""
    case = case_of(rows, columns, group, bits, **options)
    entries, random = max(16, 2**bits), np.random.default_rng(options.get("seed", 0))
    tables = random.integers(-60, 61, (2, entries))
    tables[:, :2] = [[-67, 67], [-60, 60]]  # whose sums are the least and the largest that there may be
    return {**case, "table": (tables / 32).astype(np.float32), "trellis": 1}


def as_bytes(case: Case) -> Case:
    """Return the case of a trellis with the same weight as codes of 8 bits."""
    codes = unpack(case["codes"], case["rows"], case["columns"])
    values = values_of(codes, case["table"], bits_of(case["codes"].shape)) * 32 + 128
    table = (np.arange(256, dtype=np.float32) - 128) / 32
    others = {key: value for key, value in case.items() if key != "trellis"}
    return {**others, "codes": pack(values.astype(np.uint8), 8), "table": table}


@st.composite
def any_case(draw: st.DrawFn, modes: Sequence[str] = MODES) -> Case:
    """Draw what ``case_of`` takes, and activations of ``modes``."""
    rows, columns = draw(st.integers(1, 300)), draw(st.integers(1, 50))
    case = case_of(
        rows,
        columns,
        draw(st.sampled_from([16, 32, 48, 128, 0])) or rows,
        draw(st.integers(1, 8)),
        leading=(draw(st.integers(0, 35)),),
        zero_points=draw(st.booleans()),
        minimums=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
    return {**case, "activations": draw(st.sampled_from(modes))}


def model_of(name: str, case: Case, opset: int = 23, fed: Sequence[str] = (), *, has_body: bool = True) -> ir.Model:
    """Return a graph of one node of the operator called ``name``; its inputs are x and what is ``fed``.

    A kernel needs no body beside it, which takes half of what such a session takes.
    """
    constants = [ir.val(key, const_value=ir.tensor(case[key], name=key)) for key in INPUTS[1:] if key in case]
    leading = [f"axis{axis}" for axis in range(case["x"].ndim - 1)]
    x = ir.val("x", ir.DataType.from_numpy(case["x"].dtype), ir.Shape([*leading, case["rows"]]))
    attributes = {key: value for key, value in case.items() if key not in INPUTS}
    node = OPERATORS[name].node([x, *constants], attributes, name="product")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", x.type, ir.Shape([*leading, case["columns"]])
    graph = ir.Graph([x], [y], nodes=[node], initializers=constants, opset_imports={"": opset}, name="one")
    for key in fed:
        graph.inputs.append(graph.initializers.pop(key))
    model = ir.Model(graph, ir_version=11)
    if has_body:
        declare(model)
    else:
        graph.opset_imports[DOMAIN] = OPERATORS[name].version
    return model


def run_body(name: str, case: Case, opset: int = 23, optimized: str | None = None) -> np.ndarray:
    """Run the body of the operator called ``name``."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if optimized is not None:
        options.optimized_model_filepath = optimized
    serialized = ir.to_proto(model_of(name, case, opset)).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": case["x"]})[0]
