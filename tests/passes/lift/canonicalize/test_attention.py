"""Attention as the standard op has it: grouped heads, the cache inside, and what keeps a cache outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import TopologicalSortPass

from graphopt.artifact import artifact
from graphopt.graph.diagnostics import PassReport
from graphopt.ort.session import open_session
from graphopt.passes.context import Ledger
from graphopt.passes.lift.canonicalize.attention import group_heads, take_cache
from tests.passes.lift.canonicalize.common import canonicalize


def test_grouped_heads_are_read_once(llama_artifact: Path) -> None:
    model = artifact.read(llama_artifact).model
    canonicalize(model)
    for node in (node for node in model.graph if node.op_type == "Attention"):
        assert [value.shape[1] for value in node.inputs[:3]] == [4, 2, 2]


@pytest.mark.parametrize("heads", [1, 4])
def test_tiled_heads_are_read_once_by_queries_in_another_order(heads: int, tmp_path: Path) -> None:
    """As JetMoE repeats them: query head h reads KV head h mod 2; a guard behind it that is the same for all heads."""
    model = ir.from_proto(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 23]>
            g (float[1, 4, n, 4] q, float[1, 2, n, 4] k, float[1, 2, n, 4] v, bool[1, {heads}, n, n] mask,
               bool[1, 1, n, 1] blind)
            => (float[1, 4, n, 4] z)
            <int64[4] once = {{1, 1, 1, 1}}, int64[4] twice = {{1, 2, 1, 1}}, float zero = {{0.0}},
             float[1, 2, n, 4] k1, float[1, 4, n, 4] k2, float[1, 4, n, 4] v2, float[1, 4, n, 4] y>
            {{
                k1 = Expand(k, once)
                k2 = Tile(k1, twice)
                v2 = Tile(v, twice)
                y = Attention(q, k2, v2, mask)
                guarded = Where(blind, zero, y)
                z = Neg(guarded)
            }}"""
        )
    )
    ir.save(model, tmp_path / "before.onnx")
    report = PassReport(name="canonicalize", effect="exact")
    group_heads(model, Ledger(report))
    ir.save(model, tmp_path / "after.onnx")
    (attention,) = (node for node in model.graph if node.op_type == "Attention")
    # a mask of its own for each head would have to change places too
    assert attention.inputs[1].shape[1] == (2 if heads == 1 else 4)
    (guard,) = (node for node in model.graph if node.op_type == "Where")
    assert guard.inputs[2] is attention.outputs[0]
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal((1, count, 5, 4)).astype(np.float32)
        for name, count in zip("qkv", (4, 2, 2), strict=True)
    }
    feeds |= {"mask": random.random((1, heads, 5, 5)) < 0.7, "blind": np.arange(5).reshape(1, 1, 5, 1) == 2}
    found = [open_session(tmp_path / f"{name}.onnx").run(None, feeds)[0] for name in ("before", "after")]
    # sums of 4 products in float32, in another order
    np.testing.assert_allclose(*found, atol=1e-6)


def test_onnxruntime_gives_zeros_to_a_query_that_sees_no_key(tmp_path: Path) -> None:
    """The guard around Attention may go because of this; it is a fact about the runtime, so it is tested there."""
    shape = [1, 2, 3, 4]
    inputs = [ir.val(name, ir.DataType.FLOAT, shape) for name in ("q", "k", "v")]
    mask = ir.val("mask", ir.DataType.BOOL, [1, 1, 3, 3])
    node = ir.node("Attention", [*inputs, mask], {"is_causal": 1})
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape(shape)
    graph = ir.Graph([*inputs, mask], node.outputs, nodes=[node], opset_imports={"": 23}, name="blind")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "blind.onnx")
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name in "qkv"}
    hidden = np.array([[[[0, 1, 1]] * 3]], bool)  # with causality, query 0 sees nothing
    y = open_session(tmp_path / "blind.onnx").run(None, {**feeds, "mask": hidden})[0]
    assert np.array_equal(y[:, :, 0], np.zeros_like(y[:, :, 0]))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("mask_of", ["v", "present_v"])
def test_a_cache_that_the_mask_is_computed_from_stays_outside(mask_of: str) -> None:
    """Doge's mask gates keys by their values: inside Attention the mask would need what the node makes."""
    model = ir.from_proto(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 23]>
            g (float[1, 2, n, 4] q, float[1, 2, n, 4] k, float[1, 2, n, 4] v, float[1, 2, p, 4] past_k,
               float[1, 2, p, 4] past_v)
            => (float[1, 2, n, 4] y, float[1, 2, t, 4] present_k, float[1, 2, t, 4] present_v)
            {{
                present_k = Concat<axis = 2>(past_k, k)
                present_v = Concat<axis = 2>(past_v, v)
                gates = ReduceMean<keepdims = 1>({mask_of})
                mask = Identity(gates)
                y = Attention(q, present_k, present_v, mask)
            }}"""
        )
    )
    report = PassReport(name="canonicalize", effect="exact")
    take_cache(model, Ledger(report))
    (attention,) = (node for node in model.graph if node.op_type == "Attention")
    if mask_of == "v":
        assert len(attention.outputs) == 3
        assert [change.what.code for change in report.changes] == ["canonicalize.cache-taken"]
    else:
        assert len(attention.outputs) == 1
        assert [str(skip.reason) for skip in report.skips] == [
            "mask is computed from present_v, the cache with the new tokens, which the node would only then make"
        ]
    TopologicalSortPass()(model)  # raises where the graph has a circle


def test_what_else_reads_the_cache_stands_behind_attention() -> None:
    """Granite's sinks weigh the output by a sum over all scores, which is computed in front of the softmax."""
    model = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 23]>
            g (float[1, 2, n, 4] q, float[1, 2, n, 4] k, float[1, 2, n, 4] v, float[1, 2, p, 4] past_k,
               float[1, 2, p, 4] past_v)
            => (float[1, 2, n, 4] z, float[1, 2, t, 4] present_k, float[1, 2, t, 4] present_v)
            {
                present_k = Concat<axis = 2>(past_k, k)
                total = ReduceSum<keepdims = 0>(present_k)
                present_v = Concat<axis = 2>(past_v, v)
                y = Attention(q, present_k, present_v)
                z = Mul(y, total)
            }"""
        )
    )
    take_cache(model, Ledger(PassReport(name="canonicalize", effect="exact")))
    order = [node.op_type for node in model.graph]
    assert order.index("Attention") < order.index("ReduceSum") < order.index("Mul")
    model.clone()  # raises where a node stands in front of what it reads
