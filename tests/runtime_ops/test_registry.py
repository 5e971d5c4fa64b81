"""What every operator has: a schema that its body keeps to, reference, frozen vectors, honest and hostile cases."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import NameFixPass

import graphopt.runtime_ops
from graphopt.ort.session import run
from graphopt.runtime_ops import DOMAIN, FOREIGN, OPERATORS, Operator, Role, declare, port, schema_of, signature_of
from graphopt.runtime_ops.schema import attributes_of
from tests.runtime_ops.cases import FOLDERS, HERE, honest
from tests.runtime_ops.hostile import Case

PACKAGE = Path(graphopt.runtime_ops.__file__).parent
SPECS = sorted(file.parent.parent.name for file in PACKAGE.glob("*/spec/op.py"))
EACH = pytest.mark.parametrize("folder", SPECS)


def operator_of(folder: str) -> Operator:
    operator: Operator = getattr(import_module(f"graphopt.runtime_ops.{folder}.spec.op"), folder.upper())
    return operator


def node_of(case: Case) -> ir.Node:
    values = []
    for name, tensor in case.inputs.items():
        dims = [f"{name}.{axis}" for axis in range(tensor.values.ndim)]
        values.append(ir.val(name, ir.DataType.from_numpy(tensor.values.dtype), ir.Shape(dims)))
    return OPERATORS[case.operator].node(dict(zip(case.inputs, values, strict=True)), case.attributes, name="node")


def run_body(case: Case, opset: int = 23) -> list[np.ndarray]:
    """Run a case by the body alone, in an onnxruntime that has no library of ours."""
    node = node_of(case)
    outputs = list(node.outputs)
    for name, value in zip(OPERATORS[case.operator].schema.output_names, outputs, strict=True):
        value.name = f"made_{name}"
    graph = ir.Graph(list(node.inputs), outputs, nodes=[node], opset_imports={"": opset}, name="one")  # type: ignore[arg-type]
    model = ir.Model(graph, ir_version=11)
    declare(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    serialized = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    return list(run(session, None, {name: tensor.values for name, tensor in case.inputs.items()}))


def test_operators_are_the_folders_that_have_a_spec() -> None:
    assert {operator_of(folder).name for folder in SPECS} == set(OPERATORS)
    assert all(OPERATORS[operator_of(folder).name] is operator_of(folder) for folder in SPECS)
    assert len(SPECS) == len(OPERATORS) >= 7


@EACH
def test_a_schema_is_complete(folder: str) -> None:
    schema = operator_of(folder).schema
    ports = [*schema.inputs, *schema.outputs]
    assert len({each.name for each in schema.inputs}) == len(schema.inputs)
    assert len({each.name for each in schema.outputs}) == len(schema.outputs)
    assert {each.same_type_as for each in ports} - {None} <= set(schema.input_names)
    assert all(each.types or each.same_type_as for each in ports), "each port states its types, or whose type it has"
    assert all(each.columns is None or schema.of_role(Role.CODES) for each in schema.inputs)
    # the words that a reader finds first say something about each input and attribute
    text = inspect.getdoc(import_module(f"graphopt.runtime_ops.{folder}.spec.op")) or ""
    assert f"{DOMAIN}::{schema.name}``, version {schema.version}" in text
    silent = [
        name
        for name in (*schema.input_names, *schema.attributes, *schema.optional)
        if not re.search(rf"\b{name}\b", text)
    ]
    assert silent == []


@EACH
def test_the_vectors_of_its_version_are_frozen(folder: str) -> None:
    file = PACKAGE / folder / "vectors" / f"version{operator_of(folder).version}.json"
    assert file.is_file(), "freeze inputs and outputs: what a file saved today must still mean in a year"
    assert json.loads(file.read_text(encoding="utf-8"))
    tests = "".join(each.read_text(encoding="utf-8") for each in HERE.glob("*/test_*.py"))
    assert re.search(rf'\b{folder}\b.*vectors|vectors.*\b{folder}\b|load\("{folder}"\)', tests), "no test reads them"


@EACH
def test_what_it_is_given_is_tried_honestly_and_with_lies(folder: str) -> None:
    assert folder in FOLDERS, "state an honest case in tests/runtime_ops/<folder>/honest.py"
    # test_hostile.py spoils the honest case of each kernel, unless the operator has a test of its own
    own = HERE / folder / "test_hostile.py"
    assert (PACKAGE / folder / "cpu").is_dir() or not own.is_file()


@EACH
def test_body_reference_and_schema_say_the_same_of_types_and_shapes(folder: str) -> None:
    operator, found = operator_of(folder), []

    @given(honest(folder)())
    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    def agree(case: Case) -> None:
        schema = operator.schema
        arrays = [tensor.values for tensor in case.inputs.values()]
        assert schema.takes(len(case.inputs))
        assert tuple(case.inputs) == schema.input_names[: len(case.inputs)]
        assert set(case.attributes) - set(schema.optional) == set(schema.attributes)
        for each, array in zip(schema.inputs, arrays, strict=False):
            like = each if each.same_type_as is None else schema.inputs[schema.index(each.same_type_as)]
            assert ir.DataType.from_numpy(array.dtype) in like.types, each.name
        expected = operator.reference(*arrays, **case.attributes)
        expected = expected if isinstance(expected, tuple) else (expected,)
        shapes = schema.shapes({name: tensor.values.shape for name, tensor in case.inputs.items()}, case.attributes)
        assert [tuple(shape) for shape in shapes] == [made.shape for made in expected]
        node = node_of(case)
        made = run_body(case)
        assert [each.shape for each in made] == [each.shape for each in expected]
        stated = [None if each.dtype is None else each.dtype.numpy() for each in node.outputs]
        assert [each.dtype for each in made] == stated
        found.append(case)

    agree()
    assert found


@EACH
def test_the_body_has_the_ports_and_parameters_of_the_schema(folder: str) -> None:
    operator = operator_of(folder)

    @given(honest(folder)())
    @settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
    def same(case: Case) -> None:
        body = operator.body_of(node_of(case), 23)
        assert (body.domain, body.name) == (DOMAIN, operator.name)
        assert tuple(value.name for value in body.inputs) == tuple(case.inputs)
        assert tuple(value.name for value in body.outputs) == operator.schema.output_names
        # 0 says nothing, but for the lowest level of scales that have levels
        is_said = {**case.attributes, "low": case.attributes.get("span", 0)}
        given = [name for name in operator.schema.optional if is_said.get(name)]
        # a body that is written for one value of an optional attribute says so in its overload
        free = [name for name in given if name in body.attributes or f"{name}=" not in body.overload]
        assert list(body.attributes) == [*operator.schema.attributes, *free]

    same()


@EACH
def test_models_share_a_body_that_no_pass_renames(folder: str) -> None:
    operator = operator_of(folder)

    @given(honest(folder)())
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    def shared(case: Case) -> None:
        node = node_of(case)
        body = operator.body_of(node, 23)
        model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}), ir_version=10, functions=[body])
        assert model.clone().functions[body.identifier()] is body
        NameFixPass()(model)
        assert body.is_as_made()
        assert operator.body_of(node, 23) is body
        assert operator.is_body(body, node, 23)
        assert [each.op_type for each in body.calls] == [each.op_type for each in body.all_nodes() if each.domain]

    shared()


@EACH
def test_a_cost_is_more_than_nothing(folder: str) -> None:
    @given(honest(folder)().filter(lambda case: all(each.values.size for each in list(case.inputs.values())[:1])))
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    def counted(case: Case) -> None:
        cost = operator_of(folder).cost([tensor.values.shape for tensor in case.inputs.values()])
        assert cost.operations >= 0
        assert cost.bytes > 0

    counted()


def of_matmul(**others: Any) -> ir.Node:
    values = {name: ir.val(name) for name in OPERATORS["MatMulTable"].schema.input_names}
    return OPERATORS["MatMulTable"].node({**values, **others}, {"rows": 32, "columns": 48, "activations": "int8"})


def test_inputs_are_found_by_name() -> None:
    node = of_matmul()
    assert port(node, "table") is node.inputs[3]
    assert schema_of(node).precision(attributes_of(node)) == "int8"
    with pytest.raises(ValueError, match="MatMulTable has no input tabel; it has x, codes, scales, table"):
        port(node, "tabel")
    with pytest.raises(ValueError, match="MatMulTable has no input b"):
        of_matmul(b=ir.val("b"))
    with pytest.raises(ValueError, match="com.example::MatMulTable reads is stated neither"):
        port(ir.node("MatMulTable", [], domain="com.example"), "x")
    with pytest.raises(ValueError, match="::Mul is no operator of ai.graphopt: it has"):
        schema_of(ir.node("Mul", []))


@pytest.mark.parametrize(
    ("shape", "absent"), [([1], True), ([48], False), (["n"], False), ([1, 1], True), (None, False)]
)
def test_a_placeholder_says_that_an_input_is_absent(shape: list[int | str] | None, absent: bool) -> None:
    bias = ir.val("bias", ir.DataType.FLOAT, None if shape is None else ir.Shape(shape))
    schema = OPERATORS["MatMulTable"].schema
    assert schema.inputs[schema.index("bias")].is_absent(bias) is absent
    assert schema.inputs[schema.index("bias")].is_absent(None)
    assert not schema.inputs[schema.index("codes")].is_absent(bias)


def test_an_empty_tensor_is_the_placeholder_of_a_state() -> None:
    schema = OPERATORS["KVAttention"].schema
    scales = schema.inputs[schema.index("scales")]
    assert scales.is_absent(ir.val("scales", ir.DataType.FLOAT, ir.Shape(["batch", 2, "pages", 0])))
    assert not scales.is_absent(ir.val("scales", ir.DataType.FLOAT, ir.Shape(["batch", 2, "pages", 64])))


@given(st.sampled_from(sorted(FOREIGN)))
def test_operators_of_others_are_described_too(key: tuple[str, str]) -> None:
    domain, name = key
    signature = signature_of(ir.node(name, [], domain=domain))
    assert signature is FOREIGN[key]
    assert signature.of_role(Role.CODES)
    assert signature.of_role(Role.SCALES)
    assert signature_of(ir.node("MatMul", [])) is None
