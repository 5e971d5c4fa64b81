from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.passes.lower.fuse_rotary import DIFFER, NOT_TURNED, OTHER_SIZES
from tests.graphs import Builder, graph_of, run_pass, session

HEADS, KV_HEADS, SIZE = 4, 2, 8


def rows(
    *,
    value_size: int = SIZE,
    interleaved: tuple[int, int] = (0, 0),
    rotary: int = 0,
    bias: bool = False,
    early: bool = False,
) -> ir.Model:
    """Return a split into queries, keys and values, and rotary embeddings of the first two; angles come behind it."""
    build = Builder(np.random.default_rng(0), [], [])
    widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * value_size]
    x = ir.val("x", ir.DataType.FLOAT, ["batch", "length", sum(widths)])
    turned = (rotary or SIZE) // 2
    angles = ir.val("angles", ir.DataType.FLOAT, ["batch", "length", turned])
    split = ir.node("Split", [x, build.constant("widths", np.array(widths))], {"axis": -1}, num_outputs=3, name="split")
    for output, name, width in zip(split.outputs, "qkv", widths, strict=True):
        output.name, output.dtype, output.shape = name, x.dtype, ir.Shape(["batch", "length", width])
    build.nodes.append(split)
    queries, keys, values = split.outputs
    outputs = [build.op("Neg", [values], widths[2], "negated")] if early else []
    cos, sin = (build.op(kind, [angles], turned, kind.lower()) for kind in ("Cos", "Sin"))
    if bias:
        keys = build.op("Add", [keys, build.weight("bias", widths[1])], widths[1], "biased")
    for part, count, order, width in zip((queries, keys), (HEADS, KV_HEADS), interleaved, widths, strict=False):
        attributes = {"num_heads": count, "interleaved": order, "rotary_embedding_dim": rotary}
        name = f"turned{count}"
        outputs.append(build.op("RotaryEmbedding", [part, cos, sin], width, name, **attributes))
    outputs += [] if early else [build.op("Neg", [values], widths[2], "negated")]
    return graph_of(build, [x, angles], outputs)


def run(model: ir.Model, folder: Path) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    shapes = {value.name or "": [2, 3, value.shape[2]] for value in model.graph.inputs if value.shape}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    outputs: list[np.ndarray] = session(model, folder).run(None, feeds)
    return outputs


@pytest.mark.parametrize("float16", [False, True])
@pytest.mark.parametrize("options", [{}, {"interleaved": (1, 1), "early": True}, {"rotary": 4}])
def test_one_node_splits_and_turns_and_numbers_stay(options: dict[str, Any], float16: bool, tmp_path: Path) -> None:
    made = rows(**options)
    before = run(made, tmp_path / "before")
    report = run_pass(made, "fuse_rotary")
    assert sorted(node.op_type for node in made.graph) == ["Cos", "Neg", "Sin", "SplitRotary"]
    assert [str(change.what) for change in report.changes] == ["splits x, and turns queries and keys"]
    if float16:
        run_pass(made, "float16")
        assert next(node for node in made.graph if node.op_type == "SplitRotary").inputs[1].dtype == ir.DataType.FLOAT16
    for old, new in zip(before, run(made, tmp_path / "after"), strict=True):
        # two products and a sum of numbers up to 3, of float32 or of 11 bits
        np.testing.assert_allclose(new, old, atol=3 * (4 * 2.0**-11 if float16 else 4e-7))


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (rows(bias=True), NOT_TURNED.code),
        (rows(interleaved=(0, 1)), DIFFER.code),
        (rows(value_size=4), OTHER_SIZES.code),
    ],
)
def test_other_splits_in_three_stay(model: ir.Model, code: str) -> None:
    kinds = [node.op_type for node in model.graph]
    report = run_pass(model, "fuse_rotary")
    assert [node.op_type for node in model.graph] == kinds
    assert [skip.reason.code for skip in report.skips] == [code]
