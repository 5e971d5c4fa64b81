from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphopt.analysis.structure.contrib import state_caches
from graphopt.graph.editing import Inserter, shared_constant, take_place
from graphopt.passes.common.sinks import sinks_of
from graphopt.passes.lift.canonicalize.mask_input import one_mask
from tests.contrib_graphs import FLOAT32, Layer, group_query_model, run, tokens
from tests.graphs import relative, run_pass

FLOAT, BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


def spelled_out(
    *,
    factor: str = "product",
    mask: str = "add",
    keys: str = "last",
    softcap: float = 0.0,
    guard: bool = False,
    repeated: bool = True,
    shift: bool = False,
) -> tuple[ir.Model, ir.Node]:
    """Return a model whose attention is products and a softmax on caches that are concatenated, and the softmax."""
    model = group_query_model(Layer(groups=2 if repeated else 4, window=50, softcap=softcap))
    state_caches(model)
    run_pass(model, "canonicalize")
    graph = model.graph
    node = next(node for node in graph if node.op_type == "Attention")
    query, key, value, near, past_key, past_value = node.inputs
    insert = Inserter(graph, node, "by_hand")
    values = {each.name: each for other in graph for each in other.outputs}
    columns, rows = (values[f"window_mask.50.{name}.output"] for name in ("columns", "query_column"))
    causal = insert.op("LessOrEqual", [columns, rows], list(near.shape)[2:], BOOL, "causal")
    whole = insert.op("And", [near, causal], list(near.shape), BOOL, "visible")
    scale = 0.3

    def number(number: float) -> ir.Value:
        return shared_constant(graph, f"number.{number}", np.array(number, np.float32))

    def times(x: ir.Value, by: float, suffix: str) -> ir.Value:
        return insert.op("Mul", [number(by), x], list(x.shape), FLOAT, suffix)

    node.attributes["scale"] = ir.AttrFloat32("scale", scale)
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    node.replace_input_with(3, whole)
    presents = []
    for past, new, old, suffix in (
        (past_key, key, node.outputs[1], "keys"),
        (past_value, value, node.outputs[2], "values"),
    ):
        both = insert.op("Concat", [past, new], list(old.shape), FLOAT, suffix, axis=-2)
        presents.append((old, both))
        if repeated:
            batch, groups, length, size = both.shape
            expanded = [batch, groups, 2, length, size]
            wide = insert.op(
                "Unsqueeze", [both, insert.integers([2])], [batch, groups, 1, length, size], FLOAT, f"{suffix}.5"
            )
            wide = insert.op("Expand", [wide, insert.integers([1, 1, 2, 1, 1])], expanded, FLOAT, f"{suffix}.wide")
            dims = [batch, groups * 2, length, size]
            both = insert.op("Reshape", [wide, insert.integers([0, 4, -1, 16])], dims, FLOAT, f"{suffix}.repeated")
        if suffix == "keys":
            key = both
        else:
            value = both
    batch, heads, length, size = key.shape
    upright = [batch, heads, size, length]
    if keys == "last":
        turned = insert.op("Transpose", [key], upright, FLOAT, "turned", perm=[0, 1, 3, 2])
    else:
        # As GPT-2's were: heads apart, positions first.
        first = insert.op("Transpose", [key], [batch, length, heads, size], FLOAT, "first", perm=[0, 2, 1, 3])
        turned = insert.op("Transpose", [first], upright, FLOAT, "turned", perm=[0, 2, 3, 1])
    if factor in ("query", "both"):
        query = times(query, scale if factor == "query" else scale**0.5, "scaled_query")
    if factor == "both":
        turned = times(turned, scale**0.5, "scaled_keys")
    dims = list(near.shape)
    dims[1] = heads
    scores = insert.op("MatMul", [query, turned], dims, FLOAT, "scores")
    if factor == "product":
        scores = insert.op("Div", [scores, number(1 / scale)], dims, FLOAT, "divided")
    if softcap:
        scores = insert.op("Tanh", [times(scores, 1 / softcap, "inside")], dims, FLOAT, "tanh")
        scores = times(scores, softcap, "capped")
    lowest = number(float(np.finfo(np.float32).min))
    if mask == "where":
        scores = insert.op("Where", [whole, scores, lowest], dims, FLOAT, "masked")
    elif mask == "where not":
        hidden = insert.op("Not", [whole], list(near.shape), BOOL, "hidden")
        scores = insert.op("Where", [hidden, number(-1e4), scores], dims, FLOAT, "masked")
    elif mask == "add":
        added = insert.op("Where", [whole, number(0.0), lowest], list(near.shape), FLOAT, "added")
        scores = insert.op("Add", [scores, added], dims, FLOAT, "masked")
    else:
        # GPT-J's: order by Where, padding added.
        scores = insert.op("Where", [causal, scores, lowest], dims, FLOAT, "ordered")
        added = insert.op("Where", [near, number(0.0), lowest], list(near.shape), FLOAT, "added")
        scores = insert.op("Add", [added, scores], dims, FLOAT, "masked")
    if shift:
        largest = insert.op("ReduceMax", [scores, insert.integers([-1])], [*dims[:3], 1], FLOAT, "largest")
        scores = insert.op("Sub", [scores, largest], dims, FLOAT, "shifted")
    probabilities = insert.op("Softmax", [scores], dims, FLOAT, "softmax", axis=-1)
    softmax = probabilities.producer()
    if guard:
        nan = insert.op("IsNaN", [probabilities], dims, BOOL, "nan")
        probabilities = insert.op("Where", [nan, number(0.0), probabilities], dims, FLOAT, "guarded")
    y = insert.op("MatMul", [probabilities, value], list(node.outputs[0].shape), FLOAT, "mixed")
    take_place(node.outputs[0], y)
    for old, new in presents:
        take_place(old, new)
    graph.remove(node, safe=True)
    assert softmax is not None
    return model, softmax


@settings(max_examples=6)
@given(
    factor=st.sampled_from(["product", "query", "both"]),
    mask=st.sampled_from(["add", "where", "where not", "two"]),
    keys=st.sampled_from(["last", "first"]),
    softcap=st.sampled_from([0.0, 2.0]),
    guard=st.booleans(),
    repeated=st.booleans(),
    shift=st.booleans(),
)
@example(factor="both", mask="two", keys="last", softcap=2.0, guard=True, repeated=True, shift=False)
@example(factor="product", mask="where not", keys="first", softcap=0.0, guard=False, repeated=False, shift=True)
def test_products_and_a_softmax_become_attention(
    factor: str, mask: str, keys: str, softcap: float, guard: bool, repeated: bool, shift: bool
) -> None:
    # Keys that lie position by position are heads apart again before they are repeated, never after.
    repeated &= keys == "last"
    model, _ = spelled_out(
        factor=factor, mask=mask, keys=keys, softcap=softcap, guard=guard, repeated=repeated, shift=shift
    )
    calls = tokens(2, 5, 3, 1)
    before = run(model, *calls)
    run_pass(model, "canonicalize")
    kinds = Counter(node.op_type for node in model.graph)
    assert (kinds["Attention"], kinds["Softmax"], kinds["Tanh"]) == (1, 0, 0)
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    assert node.attributes.get_float("scale") == pytest.approx(0.3)
    assert node.attributes.get_float("softcap", 0.0) == pytest.approx(softcap)
    if keys == "last":
        assert [value.name for value in node.inputs[4:]] == ["past_key_values.0.key", "past_key_values.0.value"]
        assert node.inputs[1].shape[1] == (2 if repeated else 4)
    assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32


def test_padding_of_one_row_is_broadcast_over_queries_that_onnxruntime_wants_spelled_out() -> None:
    model, _ = spelled_out(mask="add")
    added = next(node for node in model.graph if node.name == "by_hand.added")
    # A mask [1, 1, 1, keys] that shows all but every third key: no pattern of ours, so it stays a mask.
    insert = Inserter(model.graph, added, "odd")
    columns = next(v for node in model.graph for v in node.outputs if v.name == "window_mask.50.columns.output")
    third = insert.op("Mod", [columns, insert.integers(3)], list(columns.shape), ir.DataType.INT64)
    shown = insert.op("Less", [third, insert.integers(2)], list(columns.shape), BOOL)
    shown = insert.op("Unsqueeze", [shown, insert.integers([0, 1, 2])], [1, 1, 1, columns.shape[0]], BOOL)
    added.replace_input_with(0, shown)
    added.outputs[0].shape = shown.shape
    calls = tokens(2, 5, 1)
    before = run(model, *calls)
    report = run_pass(model, "canonicalize")
    assert any("neither causal nor causal with padding" in str(skip.reason) for skip in report.skips)
    assert Counter(node.op_type for node in model.graph)["Attention"] == 1
    assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32


@pytest.mark.parametrize("bias", ["of batch and heads", "zeros"])
def test_scores_that_are_scaled_before_heads_are_unfolded_are_attention(bias: str) -> None:
    """As Bloom and the Japanese GPT-NeoX write it: baddbmm of [batch x heads, ...], then a reshape to heads."""
    model, softmax = spelled_out(repeated=False, factor="query")
    graph = model.graph
    scores = softmax.inputs[0].producer().inputs[0].producer()  # before the mask
    assert scores.op_type == "MatMul"
    insert, folded_operands = Inserter(graph, scores, "folded"), []
    for index, value in enumerate(scores.inputs):
        dims = list(value.shape)
        sizes = insert.op("Shape", [value], [2], ir.DataType.INT64, f"sizes{index}", start=2)
        target = insert.op("Concat", [insert.integers([-1]), sizes], [3], ir.DataType.INT64, f"to{index}", axis=0)
        dims = [ir.SymbolicDim("4*batch"), *dims[2:]]
        folded_operands.append(insert.op("Reshape", [value, target], dims, FLOAT, f"x{index}"))
    dims = list(scores.outputs[0].shape)
    flat = [ir.SymbolicDim("4*batch"), *dims[2:]]
    product = insert.op("MatMul", folded_operands, flat, FLOAT, "product")
    scaled = insert.op("Mul", [product, shared_constant(graph, "half", np.array(0.5, np.float32))], flat, FLOAT, "half")
    heads, rows = (
        insert.op("Shape", folded_operands[:1], [1], ir.DataType.INT64, f"size{axis}", start=axis, end=axis + 1)
        for axis in (0, 1)
    )
    keys = insert.op("Shape", folded_operands[1:], [1], ir.DataType.INT64, "keys", start=2)
    if bias == "zeros":
        sizes = insert.op("Concat", [heads, rows, keys], [3], ir.DataType.INT64, "sizes", axis=0)
        none = shared_constant(graph, "none", np.array(0, np.float32))
        added = insert.op("Expand", [none, sizes], flat, FLOAT, "zeros")
    else:
        by_head = shared_constant(graph, "by_head", np.linspace(-1, 1, 4, dtype=np.float32).reshape(1, 4, 1))
        query = scores.inputs[0]
        batch = insert.op("Shape", [query], [1], ir.DataType.INT64, "batch", start=0, end=1)
        count = insert.op("Squeeze", [keys, insert.integers([0])], [], ir.DataType.INT64, "count")
        ends = [insert.integers(0), count, insert.integers(1)]
        numbers = insert.op("Range", ends, [dims[3]], ir.DataType.INT64, "numbers")
        columns = insert.op("Cast", [numbers], [dims[3]], FLOAT, "columns", to=FLOAT)
        of_heads = insert.op("Mul", [by_head, columns], [1, 4, dims[3]], FLOAT, "of_heads")
        wide = insert.op("Concat", [batch, insert.integers([4]), keys], [3], ir.DataType.INT64, "wide", axis=0)
        each = insert.op("Expand", [of_heads, wide], [dims[0], 4, dims[3]], FLOAT, "each")
        target = insert.op("Concat", [insert.integers([-1, 1]), keys], [3], ir.DataType.INT64, "folds", axis=0)
        added = insert.op("Reshape", [each, target], [flat[0], 1, dims[3]], FLOAT, "bias")
    biased = insert.op("Add", [added, scaled], flat, FLOAT, "biased")
    target = insert.op("Concat", [insert.integers([-1, 4]), rows, keys], [4], ir.DataType.INT64, "target", axis=0)
    scores.outputs[0].replace_all_uses_with(insert.op("Reshape", [biased, target], dims, FLOAT, "unfolded"))
    calls = tokens(2, 5, 3, 1)
    before = run(model, *calls)
    run_pass(model, "canonicalize")
    kinds = Counter(node.op_type for node in model.graph)
    assert (kinds["Attention"], kinds["Softmax"]) == (1, 0)
    assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32


def test_heads_that_are_folded_into_the_batch_and_a_lower_bound_of_scores_are_no_other_attention() -> None:
    """As XGLM writes it: products and the softmax on [batch x heads, ...], and a maximum with the lowest number."""
    model, softmax = spelled_out(repeated=False)
    graph = model.graph
    (probabilities,) = softmax.outputs
    (mixed,) = (use.node for use in probabilities.uses())
    masked = softmax.inputs[0]
    scores = masked.producer().inputs[0].producer().inputs[0].producer()  # before the mask and the scale
    assert scores.op_type == "MatMul"
    calls = tokens(2, 5, 3, 1)
    before = run(model, *calls)
    bound = shared_constant(graph, "bound", np.array(np.finfo(np.float32).min))
    insert = Inserter(graph, softmax, "bounded")
    softmax.replace_input_with(0, insert.op("Max", [masked, bound], list(probabilities.shape), FLOAT, "max"))
    for number, node in enumerate((scores, softmax, mixed)):
        insert, operands = Inserter(graph, node, f"folded{number}"), list(node.inputs[:2])
        for index, value in enumerate(operands):
            dims = list(value.shape)
            sizes = insert.op("Shape", [value], [2], ir.DataType.INT64, f"sizes{index}", start=2)
            target = insert.op("Concat", [insert.integers([-1]), sizes], [3], ir.DataType.INT64, f"to{index}", axis=0)
            folded = insert.op("Reshape", [value, target], [ir.SymbolicDim("4*batch"), *dims[2:]], FLOAT, f"x{index}")
            node.replace_input_with(index, folded)
        (output,) = node.outputs
        users, dims = list(output.uses()), list(output.shape)
        output.shape = ir.Shape([ir.SymbolicDim("4*batch"), *dims[2:]])
        after = Inserter(graph, users[0].node, f"unfolded{number}")
        rows = after.op("Shape", operands[:1], [1], ir.DataType.INT64, "rows", start=2, end=3)
        columns = after.op("Shape", operands[-1:], [1], ir.DataType.INT64, "columns", start=3)
        target = after.op("Concat", [after.integers([-1, 4]), rows, columns], [4], ir.DataType.INT64, "target", axis=0)
        unfolded = after.op("Reshape", [output, target], dims, FLOAT, "heads")
        for use in users:
            use.node.replace_input_with(use.idx, unfolded)
    assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32
    run_pass(model, "canonicalize")
    kinds = Counter(node.op_type for node in model.graph)
    assert (kinds["Attention"], kinds["Softmax"], kinds["Max"]) == (1, 0, 0)
    assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32


@pytest.mark.parametrize("axis", [-1, 1])
def test_sinks_that_scale_the_output_are_scores_of_the_same_attention(axis: int) -> None:
    """As Granite writes them; over another axis than that of keys they are no sinks."""
    model, softmax = spelled_out(repeated=False)
    graph = model.graph
    (mixed,) = (use.node for use in softmax.outputs[0].uses())
    y, users = mixed.outputs[0], list(mixed.outputs[0].uses())
    insert = Inserter(graph, users[0].node, "sinks")
    logits = shared_constant(graph, "sink_logits", np.linspace(-2, 2, 4, dtype=np.float32).reshape(1, 4, 1))
    dims = list(softmax.inputs[0].shape)
    total = insert.op(
        "ReduceLogSumExp", [softmax.inputs[0], insert.integers([axis])], dims[:3], FLOAT, "total", keepdims=0
    )
    if axis == 1:  # [batch, length, keys]: as wide as it has to be
        total = insert.op("ReduceMax", [total, insert.integers([-1])], [dims[0], dims[2]], FLOAT, "most", keepdims=0)
        total = insert.op("Unsqueeze", [total, insert.integers([1])], [dims[0], 1, dims[2]], FLOAT, "all")
    over = insert.op("Sub", [total, logits], dims[:3], FLOAT, "over")
    share = insert.op("Sigmoid", [over], dims[:3], FLOAT, "share")
    column = insert.op("Unsqueeze", [share, insert.integers([-1])], [*dims[:3], 1], FLOAT, "column")
    scaled = insert.op("Mul", [y, column], list(y.shape), FLOAT, "scaled")
    for use in users:
        use.node.replace_input_with(use.idx, scaled)
    calls = tokens(2, 5, 3, 1)
    before = run(model, *calls)
    run_pass(model, "canonicalize")
    (node,) = (node for node in graph if node.op_type == "Attention")
    assert (sinks_of(node) is not None) == (axis == -1)
    assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32


def test_probabilities_that_something_else_reads_stay() -> None:
    model, softmax = spelled_out()
    extra = ir.node("ReduceSum", [softmax.outputs[0]], {"keepdims": 0}, name="entropy")
    extra.outputs[0].name, extra.outputs[0].dtype = "sum", FLOAT
    model.graph.append(extra)
    model.graph.outputs.append(extra.outputs[0])
    report = run_pass(model, "canonicalize")
    assert [str(s.reason) for s in report.skips if s.where == "by_hand.softmax"] == [
        "its probabilities are read elsewhere too"
    ]
    assert Counter(node.op_type for node in model.graph)["Softmax"] == 1


def test_a_softmax_over_something_else_than_keys_stays() -> None:
    model, softmax = spelled_out()
    softmax.attributes["axis"] = ir.AttrInt64("axis", 2)
    report = run_pass(model, "canonicalize")
    assert any("the softmax is not over keys" in str(skip.reason) for skip in report.skips)


@pytest.mark.parametrize(("mask", "factor", "stays"), [("add", 0.5, False), ("add", -0.5, True), ("where", 0.5, True)])
def test_scores_are_multiplied_behind_a_mask_that_is_added(mask: str, factor: float, stays: bool) -> None:
    model, softmax = spelled_out(mask=mask)
    calls = tokens(2, 5, 3, 1)
    insert = Inserter(model.graph, softmax, "hot")
    scores = softmax.inputs[0]
    softmax.replace_input_with(
        0,
        insert.op(
            "Mul",
            [scores, shared_constant(model.graph, "half", np.array(factor, np.float32))],
            list(scores.shape),
            FLOAT,
        ),
    )
    before = run(model, *calls)
    run_pass(model, "canonicalize")
    kinds = Counter(node.op_type for node in model.graph)
    assert (kinds["Attention"], kinds["Softmax"]) == (not stays, stays)
    if not stays:
        assert max(relative(a, b) for a, b in zip(before, run(model, *calls), strict=True)) < FLOAT32


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_what_is_hidden_gets_the_lowest_number_of_the_type_that_is_added(dtype: ir.DataType) -> None:
    model = group_query_model(Layer())
    visible, added = (ir.val(name, kind, [2, 1, 3, 3]) for name, kind in (("visible", BOOL), ("added", dtype)))
    mask = one_mask(Inserter(model.graph, model.graph[-1], "one"), [(visible, False), (added, False)])
    assert mask is not None
    lowest = mask.producer().inputs[2].const_value.numpy()
    assert (mask.dtype, lowest.dtype) == (dtype, dtype.numpy())
    assert lowest == ml_dtypes.finfo(lowest.dtype).min
