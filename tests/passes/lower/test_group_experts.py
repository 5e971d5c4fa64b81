from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphopt
from graphopt.analysis.bases.search import find_bases
from graphopt.analysis.structure.experts import expert_products, mixtures_of
from graphopt.artifact import artifact
from graphopt.compile.replay import verify
from graphopt.ort.session import session_of
from graphopt.passes.common.sorted_rows import IN_ORDER, NO_SORT, OTHER_READER, STAYS_SORTED
from graphopt.passes.lower.group_experts import NO_BOUNDS, NOT_PACKED, ONE_NODE, OTHER_STEPS, SHORT_TILE
from graphopt.passes.recipe import load_recipe
from graphopt.runtime_ops import DOMAIN, declare, port
from graphopt.tasks.causal_lm.interface import Interface
from tests.graphs import run_pass
from tests.native import needs_library

pytestmark = needs_library

EXPERTS, WIDTH, INNER = 3, 32, 48


def lowered(folder: Path, recipe: str, *options: str) -> ir.Model:
    """Return the graph of an artifact with the steps of a recipe for CPUs, but for caches and the step under test."""
    model = artifact.read(folder).model
    for step in load_recipe(recipe, options=options).with_lower("ort-cpu").steps:
        if step.name not in ("page_kv", "group_experts"):
            step(model)
    return model


def logits(model: ir.Model, length: int = 7, batch: int = 2) -> np.ndarray:
    interface = Interface.of_graph(model.graph)
    ids = np.random.default_rng(0).integers(0, 300, (batch, length))
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(length)[None].repeat(batch, 0),
        **interface.empty_past(batch),
    }
    with session_of(model) as session:
        names = {value.name for value in session.get_inputs()}
        y: np.ndarray = session.run(["logits"], {name: feeds[name] for name in names})[0]
    return y


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def grouped(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "MatMulExperts"]


def reasons(report: Any) -> set[str]:
    return {str(skip.reason) for skip in report.skips}


@pytest.mark.parametrize(
    "recipe", ["int4-rtn", "mini-rtn", pytest.param("small-rtn", marks=pytest.mark.filterwarnings("ignore"))]
)
def test_an_exported_mixture_has_the_bits_of_products_of_each_expert(
    make_artifact: Callable[[str], Path], recipe: str
) -> None:
    """Integers with codes of 4 bits, a trellis behind a rotation, and minifloats."""
    model = lowered(make_artifact("mixtral"), recipe)
    before, products = [logits(model), logits(model, 1)], expert_products(model.graph)
    assert len(products) == 2 * 4 * 2
    report = run_pass(model, "group_experts")
    assert not report.skips
    facts = [change.what for change in report.changes]
    assert facts.count(ONE_NODE(experts=4)) == facts.count(IN_ORDER()) == 4
    gate_up, down = grouped(model)[:2]
    assert [len(node.inputs[6].shape) for node in (gate_up, down)] == [2, 1]  # tokens are shared by their slots
    # what sorted choices is gone, and so is all that gathered and put back: the router's choice is left
    assert kinds(model)["TopK"] == 2
    assert not {"GatherND", "ScatterND", "CumSum", "Range"} & set(kinds(model))
    for old, new in zip(before, [logits(model), logits(model, 1)], strict=True):
        np.testing.assert_array_equal(new, old)


def test_experts_of_several_formats_are_added_up(make_artifact: Callable[[str], Path]) -> None:
    """A format for each expert: nodes of three formats in each layer's first product, of one in all others."""
    folder = make_artifact("mixtral")
    names = [
        name
        for name in lowered(folder, "rotate-online").graph.initializers
        if name.startswith("model.layers.0.mlp.experts.gate_up_proj")
    ]
    assert len(names) == 4
    formats = {names[1]: {"format": "fp6-e2m3", "group": 32}, names[2]: {"format": "int8", "group": 32}}
    model = lowered(folder, "int4-rtn", f"quantize_weights.matrices={formats}")
    before = logits(model)
    report = run_pass(model, "group_experts")
    assert not report.skips
    facts = [change.what for change in report.changes]
    assert [facts.count(ONE_NODE(experts=experts)) for experts in (1, 2, 4)] == [2, 1, 3]
    assert len(grouped(model)) == 6
    places = [node.inputs[6].producer() for node in grouped(model)[:3]]
    assert [table.inputs[0].const_value.numpy().tolist() for table in places] == [  # type: ignore[union-attr]
        [0, -1, -1, 1],
        [-1, 0, -1, -1],
        [-1, -1, 0, -1],
    ]
    np.testing.assert_array_equal(logits(model), before)


def test_the_whole_pipeline_takes_and_proves_it(make_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_artifact("mixtral")
    compiled = graphopt.optimize(folder, "int4-rtn", tmp_path / "int4", target="ort-cpu", quality_tokens=64, force=True)
    assert len(grouped(compiled.model)) == 4
    proof = verify(folder, tmp_path / "int4")
    assert "failed" not in {check.status for check in proof.checks}
    portable = graphopt.optimize(folder, "int4-rtn", quality_tokens=64, force=True)
    assert not grouped(portable.model)


def test_a_basis_analysis_goes_around_slots_that_share_a_token(make_artifact: Callable[[str], Path]) -> None:
    model = lowered(make_artifact("mixtral"), "int4-rtn")
    run_pass(model, "group_experts")
    pins = {(pin.node, pin.side) for basis in find_bases(model.graph) for pin in basis.pins}
    of_tokens = [node for node in grouped(model) if len(node.inputs[6].shape) == 2]
    assert {(node.name, "observed") for node in of_tokens} <= pins


def mixture(*, counts: bool = False, columns: int = INNER, ends: int = EXPERTS) -> tuple[ir.Model, list[ir.Node]]:
    """Return y = Concat of one product for each expert, of rows whose ends are an input of the graph; and the products.

    With ``counts`` each end is an input of its own.
    """
    random = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", WIDTH])
    nodes: list[ir.Node] = []

    def op(
        op_type: str, inputs: list[ir.Value | None], dims: list[Any], dtype: ir.DataType, **attributes: Any
    ) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes, name=f"{op_type}{len(nodes)}"))
        value = nodes[-1].outputs[0]
        value.name, value.dtype, value.shape = f"v{len(nodes)}", dtype, ir.Shape(dims)
        return value

    stored: list[ir.Value] = []

    def constant(name: str, array: np.ndarray) -> ir.Value:
        stored.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        return stored[-1]

    zero, one, axes = (constant(name, np.array(number)) for name, number in (("0", 0), ("1", 1), ("[0]", [0])))
    bounds = ir.val("ends", ir.DataType.INT64, [ends])
    inputs = [x]
    if counts:
        inputs += [ir.val(f"end{expert}", ir.DataType.INT64, []) for expert in range(ends)]
        numbers = inputs[1:]
    else:
        inputs.append(bounds)
        split = ir.node("Split", [bounds], {"axis": 0, "num_outputs": ends}, num_outputs=ends, name="split")
        nodes.append(split)
        for index, value in enumerate(split.outputs):
            value.name, value.dtype, value.shape = f"part{index}", ir.DataType.INT64, ir.Shape([1])
        numbers = [op("Squeeze", [value, axes], [], ir.DataType.INT64) for value in split.outputs]
    products, start = [], zero
    for expert, end in enumerate(numbers):
        rows = op("Range", [start, end, one], [None], ir.DataType.INT64)
        part = op("Gather", [x, rows], [None, WIDTH], ir.DataType.FLOAT, axis=0)
        weight = constant(f"W{expert}", random.standard_normal((WIDTH, columns)).astype(np.float32))
        products.append(op("MatMul", [part, weight], [None, columns], ir.DataType.FLOAT))
        start = end
    y = op("Concat", products, ["rows", columns], ir.DataType.FLOAT, axis=0)  # type: ignore[arg-type]
    y.name = "y"
    graph = ir.Graph(inputs, [y], nodes=nodes, initializers=stored, opset_imports={"": 23}, name="mixture")
    return ir.Model(graph, ir_version=11), [value.producer() for value in products]  # type: ignore[misc]


def coded(model: ir.Model, format: str = "int4", group: int = 16) -> ir.Model:
    linear = {"format": format, "group": group}
    run_pass(model, "quantize_weights", linear=linear, embedding=None)
    run_pass(model, "lower", target="ort-cpu")
    return model


def run(model: ir.Model, counts: list[int]) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((sum(counts), WIDTH)).astype(np.float32)
    with session_of(model) as session:
        y: np.ndarray = session.run(None, {"x": x, "ends": np.cumsum(counts)})[0]
    return y


@pytest.mark.parametrize("format", ["int4", "fp6-e2m3", "t3"])
def test_rows_that_something_else_sorted_are_compared_with_their_ends(format: str) -> None:
    model = coded(mixture()[0], format)
    calls = [[3, 0, 4], [0, 0, 0], [0, 9, 1]]
    before = [run(model, call) for call in calls]
    report = run_pass(model, "group_experts")
    assert [change.what for change in report.changes if change.what == ONE_NODE(experts=EXPERTS)]
    assert reasons(report) == {str(STAYS_SORTED(reason=NO_SORT()))}
    assert len(grouped(model)) == 1
    for call, old in zip(calls, before, strict=True):
        np.testing.assert_array_equal(run(model, call), old)


def test_what_is_no_mixture_is_none() -> None:
    model, products = mixture()
    (found,) = mixtures_of(model.graph)
    assert found.products == tuple(products)
    assert found.bounds is model.graph.inputs[1]
    # another row in front, a product that something else reads too, a part that another tensor gives
    for change in ("start", "reader", "rows"):
        model, products = mixture()
        gather = products[1].inputs[0].producer()  # type: ignore[union-attr]
        assert gather is not None
        if change == "start":
            gather.inputs[1].producer().replace_input_with(0, model.graph.initializers["1"])  # type: ignore[union-attr]
        elif change == "reader":
            model.graph.outputs.append(products[1].outputs[0])
        else:
            other = ir.val("other", ir.DataType.FLOAT, ["rows", WIDTH])
            model.graph.inputs.append(other)
            gather.replace_input_with(0, other)
        assert mixtures_of(model.graph) == []


def test_floats_and_ends_of_their_own_stay_and_say_why() -> None:
    model, _ = mixture()
    report = run_pass(model, "group_experts")
    assert reasons(report) == {str(NOT_PACKED(expert=0, op_type="MatMul"))}
    model, _ = mixture(counts=True)
    assert reasons(run_pass(coded(model), "group_experts")) == {str(NO_BOUNDS())}
    model, _ = mixture(columns=40)
    assert reasons(run_pass(coded(model, "t3"), "group_experts")) == {str(SHORT_TILE(columns=40, tile=16))}
    assert not grouped(model)


def test_rows_of_one_expert_that_are_rounded_by_token_stay(make_artifact: Callable[[str], Path]) -> None:
    model = lowered(make_artifact("mixtral"), "w4a8-rtn")
    report = run_pass(model, "group_experts")
    assert reasons(report) == {str(NOT_PACKED(expert=0, op_type="MatMulDynamic"))}


def test_a_rotation_of_one_expert_alone_stays() -> None:
    model, products = mixture()
    coded(model)
    (first, *_) = [node for node in model.graph if node.op_type == "MatMulTable"]
    unit = ir.val("unit", const_value=ir.tensor(np.ones((1, 1), np.int8), name="unit"))
    two = ir.val("two", const_value=ir.tensor(np.array([[1, 1], [1, -1]], np.int8), name="two"))
    for value in (unit, two):
        model.graph.register_initializer(value)
    rotation = ir.node("Hadamard", [first.inputs[0], unit, two], domain=DOMAIN, name="rotation")
    rotation.outputs[0].name = "rotated"
    rotation.outputs[0].dtype, rotation.outputs[0].shape = ir.DataType.FLOAT, ir.Shape([None, WIDTH])
    model.graph.insert_before(first, rotation)
    first.replace_input_with(0, rotation.outputs[0])
    declare(model)
    assert reasons(run_pass(model, "group_experts")) == {str(OTHER_STEPS())}
    assert products


def test_what_mixes_sorted_rows_keeps_them_sorted(make_artifact: Callable[[str], Path]) -> None:
    """A sum over all rows would not change, but what else reads them in that order might: it is not looked into."""
    model = lowered(make_artifact("mixtral"), "int4-rtn")
    first = next(mixtures_of(model.graph)[index] for index in (0,))
    spy = ir.node("CumSum", [first.concat.outputs[0], model.graph.initializers["constant.int64.0"]], name="spy")
    spy.outputs[0].name, spy.outputs[0].dtype = "spied", ir.DataType.FLOAT
    spy.outputs[0].shape = first.concat.outputs[0].shape
    model.graph.insert_after(first.concat, spy)
    model.graph.outputs.append(spy.outputs[0])
    before = logits(model)
    report = run_pass(model, "group_experts")
    reason = OTHER_READER(node="spy", op_type="CumSum")
    assert reasons(report) == {str(STAYS_SORTED(reason=reason))}
    assert len(report.skips) == 2
    np.testing.assert_array_equal(logits(model), before)
    assert port(grouped(model)[0], "experts").producer().op_type == "TopK"  # type: ignore[union-attr]
