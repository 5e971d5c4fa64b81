"""MatMulExperts is MatMulTable, slot by slot: its reference, body and kernels, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.runtime_ops import DOMAIN, OPERATORS, declare, library_path
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.matmul_experts.spec.op import MATMUL_EXPERTS, reference
from graphopt.runtime_ops.matmul_table.spec.activations import MODES, SYMMETRIC
from graphopt.runtime_ops.matmul_table.spec.op import reference as product
from tests.native import INSTRUCTIONS, needs_library, skip_without
from tests.pairwise import pairwise
from tests.runtime_ops import products
from tests.runtime_ops.matmul_table.bound import bound
from tests.runtime_ops.matmul_table.test_kernels import TABLES
from tests.runtime_ops.products import Case, case_of, trellis_case

STACKED = ("codes", "scales", "zero_points", "bias")
ONE = (
    "codes",
    "scales",
    "table",
    "zero_points",
    "bias",
    "rows",
    "columns",
    "group",
    "minimums",
    "trellis",
    "activations",
)
EXPERTS = 5


def stacked(
    cases: list[Case], slots: tuple[int, ...], *, shared: bool = False, none: bool = True, seed: int = 0
) -> Case:
    """Return the experts of ``cases`` as one case; where ``shared``, all slots of the last axis read one row of x."""
    random = np.random.default_rng(seed)
    case = {**cases[0], **{name: np.stack([one[name] for one in cases]) for name in STACKED}}
    if case["zero_points"].size == len(cases):
        case["zero_points"] = case["zero_points"][:1]
    if cases[0]["bias"].size == 1 and not case["bias"].any():
        case["bias"] = np.zeros(1, np.float32)
    leading = slots[:-1] if shared else slots
    case["x"] = random.standard_normal((*leading, case["rows"])).astype(np.float32)
    case["experts"] = np.asarray(random.integers(-1 if none else 0, len(cases), slots), np.int64)
    return case


def some(
    shape: tuple[int, int, int] = (40, 37, 16), bits: int = 4, slots: tuple[int, ...] = (9,), **options: Any
) -> Case:
    of_stack = {name: options.pop(name) for name in ("shared", "none", "seed") if name in options}
    make = trellis_case if options.pop("trellis", False) else case_of
    cases = [make(*shape, bits, seed=expert, **options) for expert in range(EXPERTS)]
    for case in cases:
        case["table"] = cases[0]["table"]
    return stacked(cases, slots, **of_stack)


def of_expert(case: Case, expert: int) -> Case:
    """Return the case of MatMulTable for one expert, with x as it is."""
    one = {name: case[name] for name in ONE if name in case}
    one |= {"x": case["x"], **{name: case[name][expert] for name in ("codes", "scales")}}
    one["zero_points"] = case["zero_points"][expert if len(case["zero_points"]) > 1 else 0]
    one["bias"] = case["bias"] if case["bias"].ndim == 1 else case["bias"][expert]
    return one


def each_slot(case: Case, multiply: Callable[[Case], np.ndarray]) -> np.ndarray:
    """Return y by a function that multiplies by one expert."""
    chosen = case["experts"]
    rows = case["x"][..., None, :] if case["x"].ndim == chosen.ndim else case["x"]
    rows = np.broadcast_to(rows, (*chosen.shape, case["rows"])).reshape(-1, case["rows"])
    y = np.zeros((chosen.size, case["columns"]), np.float64)
    for slot, expert in enumerate(chosen.reshape(-1)):
        if expert >= 0:
            y[slot] = multiply({**of_expert(case, int(expert)), "x": np.ascontiguousarray(rows[slot : slot + 1])})[0]
    return y.reshape(*chosen.shape, case["columns"])


def exact(one: Case) -> np.ndarray:
    return product(**{**one, "activations": "float32"})


def model_of(case: Case, opset: int = 23, *, has_body: bool = True) -> ir.Model:
    inputs, attributes = {name: case[name] for name in MATMUL_EXPERTS.schema.input_names}, {}
    attributes = {name: value for name, value in case.items() if name not in inputs}
    fed = {}
    for name in ("x", "experts"):
        dims = [f"{name}{axis}" for axis in range(case[name].ndim)]
        fed[name] = ir.val(name, ir.DataType.from_numpy(case[name].dtype), ir.Shape(dims))
    fed["x"].shape = ir.Shape([*list(fed["x"].shape)[:-1], case["rows"]])  # type: ignore[arg-type]
    stored = {name: ir.val(name, const_value=ir.tensor(inputs[name], name=name)) for name in inputs if name not in fed}
    node = MATMUL_EXPERTS.node({**fed, **stored}, attributes, name="product")
    y = node.outputs[0]
    y.name = "y"
    graph = ir.Graph(
        list(fed.values()), [y], nodes=[node], initializers=list(stored.values()), opset_imports={"": opset}, name="one"
    )
    model = ir.Model(graph, ir_version=11)
    if has_body:
        declare(model)
    else:
        graph.opset_imports[DOMAIN] = MATMUL_EXPERTS.version
    return model


def run(case: Case, *, library: bool, opset: int = 23, threads: int = 2) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(str(library_path()))
    serialized = ir.to_proto(model_of(case, opset, has_body=not library)).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    y: np.ndarray = session.run(None, {"x": case["x"], "experts": case["experts"]})[0]
    return y


def check(y: np.ndarray, case: Case) -> None:
    """Hold y to the exact product, within what MatMulTable's definition allows."""
    expected = each_slot(case, exact)
    limit = each_slot(case, lambda one: bound(**{name: one[name] for name in one if name != "trellis"}))
    assert y.shape == expected.shape
    assert y.dtype == case["x"].dtype
    assert (np.abs(y - expected) <= limit).all()


SLOTS = [(7,), (3, 2), (0,), (2, 0), (2, 3, 2), ()]


@pytest.mark.parametrize(("activations", "slots", "shared"), pairwise(MODES, SLOTS[:-1], [False, True]))
def test_reference_and_body_are_those_of_each_expert(activations: str, slots: tuple[int, ...], shared: bool) -> None:
    case = {**some(slots=slots, shared=shared, zero_points=True, bias=shared), "activations": activations}
    # sums of float64, in another order
    np.testing.assert_allclose(reference(**case), each_slot(case, lambda one: product(**one)), rtol=0, atol=1e-12)
    check(run(case, library=False), case)


@pytest.mark.parametrize("options", [{"minimums": True}, {"bits": 3, "scale_type": np.float16}, {"shape": (37, 5, 37)}])
def test_body_of_other_weights(options: Any) -> None:
    case = {**some(**options), "activations": "int8"}
    check(run(case, library=False), case)


@pytest.mark.parametrize("bits", range(2, 7))
@pytest.mark.parametrize("library", [False, pytest.param(True, marks=needs_library)])
def test_experts_of_a_trellis(bits: int, library: bool) -> None:
    case = {**some((40, 48, 16), bits, trellis=True), "activations": "float32"}
    expected = each_slot(case, lambda one: product(**one))
    np.testing.assert_allclose(reference(**case), expected, rtol=0, atol=1e-12)
    # float32 sums of 40 products of numbers below 4, 4 and 1
    assert np.abs(run(case, library=library) - expected).max() <= 40 * 2.0**-24 * 40 * 16


@pytest.mark.parametrize("opset", [23, 26])
def test_the_body_is_standard_onnx(opset: int) -> None:
    case = {**some(), "activations": "int8"}
    model = model_of(case, opset)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    (function,) = model.functions.values()
    assert {node.domain for node in function.all_nodes()} == {""}
    check(run(case, library=False, opset=opset), case)


def test_the_weights_are_folded(tmp_path: Any) -> None:
    case = {**some(), "activations": "float32"}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = f"{tmp_path}/optimized.onnx"
    onnxruntime.InferenceSession(
        ir.to_proto(model_of(case)).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    nodes = list(ir.load(tmp_path / "optimized.onnx").graph.all_nodes())
    assert not {"If", "BitShift", "BitwiseOr"} & {node.op_type for node in nodes}


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    skip_without(request.param)
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return str(request.param)


@needs_library
@pytest.mark.parametrize(
    ("activations", "slots", "shared", "table"),
    pairwise(SYMMETRIC, [(1, 3), (40,), (17, 3), (2, 0)], [False, True], ["int4", "e2m3"]),
)
def test_kernels_give_the_bits_of_one_expert(
    instructions: str, activations: str, slots: tuple[int, ...], shared: bool, table: str
) -> None:
    """In integer modes the bits of MatMulTable, whose kernel multiplies each row by itself; floats within the bound."""
    values = np.array(TABLES[table], np.float32)
    bits = (len(values) - 1).bit_length()
    case = {
        **some((160, 50, 32), bits, slots, shared=shared, bias=True, scale_type=np.float16),
        "activations": activations,
    }
    case["table"] = values
    y = run(case, library=True)
    check(y, case)
    if activations in ("int8", "int16"):
        np.testing.assert_array_equal(y, by_matmul_table(case))


def by_matmul_table(case: Case) -> np.ndarray:
    """Return y by kernels of MatMulTable: one product of all rows for each expert."""
    chosen, options = case["experts"], onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    rows = case["x"][..., None, :] if case["x"].ndim == chosen.ndim else case["x"]
    rows = np.ascontiguousarray(np.broadcast_to(rows, (*chosen.shape, case["rows"])))
    y = np.zeros((*chosen.shape, case["columns"]), np.float32)
    for expert in range(EXPERTS):
        one = {**of_expert(case, expert), "x": rows}
        serialized = ir.to_proto(products.model_of("MatMulTable", one, has_body=False)).SerializeToString()
        session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
        y = np.where((chosen == expert)[..., None], session.run(None, {"x": rows})[0], y)
    return y


@needs_library
def test_any_order_and_any_number_of_threads_give_the_same_bits() -> None:
    case = {**some((64, 48, 32), 4, (200,), none=False), "activations": "int8"}
    y = run(case, library=True)
    order = np.argsort(case["experts"], kind="stable")
    in_order = {**case, "x": case["x"][order], "experts": case["experts"][order]}
    np.testing.assert_array_equal(run(in_order, library=True), y[order])
    np.testing.assert_array_equal(run(case, library=True, threads=1), y)


@needs_library
@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_kernels_are_the_reference(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 50))
    group = data.draw(st.sampled_from([16, 32, 48, 0])) or rows
    slots = data.draw(st.sampled_from([(1,), (5, 4), (33,), (2, 2, 2), ()]))
    case = some(
        (rows, columns, group),
        data.draw(st.integers(1, 8)),
        slots,
        shared=bool(slots) and data.draw(st.booleans()),
        zero_points=data.draw(st.booleans()),
        scale_type=data.draw(st.sampled_from([np.float16, np.float32])),
        seed=data.draw(st.integers(0, 1000)),
    )
    case["activations"] = data.draw(st.sampled_from(MODES))
    check(run(case, library=True), case)


@needs_library
def test_float16() -> None:
    case = {**some((64, 48, 32), 4, (6, 2), shared=True, scale_type=np.float16), "activations": "int8"}
    wide = run(case, library=True)
    half = {**case, "x": case["x"].astype(np.float16)}
    y = run(half, library=True)
    assert y.dtype == np.float16
    expected = run({**case, "x": half["x"].astype(np.float32)}, library=True)
    np.testing.assert_array_equal(y, expected.astype(np.float16))
    assert np.abs(y - wide).max() < 0.1


@needs_library
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": np.array([0, EXPERTS] + [0] * 7)}, "expert 5 of slot 1, of 5 experts"),
        ({"experts": np.zeros((9, 2, 1), np.int64)}, "experts must have the shape of x without its last axis"),
        ({"experts": np.zeros(8, np.int64)}, "experts must have the shape of x without its last axis"),
        ({"bias": np.ones(37, np.float32)}, r"bias must be \[0\], or have the shape \[5, 37\], a row for each expert"),
        ({"scales": np.ones((4, 3, 3, 16), np.float32)}, r"scales must have the shape \[experts, 3, 3, 16\]"),
        (
            {"zero_points": np.ones((1, 3, 3, 16), np.float32)},
            r"zero_points must be \[\[\[\[0\]\]\]\], or have the shape",
        ),
        (
            {"codes": np.zeros((3, 3, 128), np.uint8)},
            r"codes must have the shape \[experts, 3, 3, 32 \* bits\] for 40 rows",
        ),
    ],
)
def test_kernels_name_what_is_wrong(wrong: Case, message: str) -> None:
    with pytest.raises(Exception, match=f"'product': {message}"):
        run({**some(), "activations": "int8", **wrong}, library=True)


@needs_library
def test_experts_of_a_trellis_have_whole_tiles() -> None:
    case = {**some((40, 40, 16), 3, trellis=True), "activations": "int8"}
    with pytest.raises(Exception, match="experts of a trellis have a multiple of 16 columns, not 40"):
        run(case, library=True)
    with pytest.raises(ValueError, match="experts of a trellis have a multiple of 16 columns, not 40"):
        reference(**case)


def test_the_reference_refuses_what_does_not_fit() -> None:
    case = {**some(), "activations": "int8"}
    with pytest.raises(ValueError, match=r"experts \[8\] do not fit x \[9, 40\]"):
        reference(**{**case, "experts": case["experts"][:8]})
    with pytest.raises(IndexError):
        reference(**{**case, "experts": np.full(9, EXPERTS)})


def test_cost_counts_the_experts_that_are_read() -> None:
    case = some((64, 48, 32), 4, (2, 2), shared=True, none=False)
    shapes = [case[name].shape for name in MATMUL_EXPERTS.schema.input_names]
    cost = MATMUL_EXPERTS.cost(shapes)
    assert cost.operations == 2 * 4 * 64 * 48
    assert 3 * 4 * 128 * 4 < cost.bytes < 3 * 4 * 128 * 4 + 4 * 1000
    assert OPERATORS["MatMulExperts"] is MATMUL_EXPERTS
    assert model_of({**case, "activations": "int8"}).opset_imports[DOMAIN] == 1
