"""What only a kernel can see, it reports under the name of the node; each fault by itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from graphopt.numerics.rotations import hadamard
from tests.native import needs_library
from tests.runtime_ops.hostile import NODE, Case, Tensor, check, run

pytestmark = needs_library


def weights(rows: int = 40, columns: int = 20, bits: int = 4, group: int = 16, operator: str = "MatMulTable") -> Case:
    random = np.random.default_rng(0)
    tiles, units, groups = -(-columns // 16), -(-rows // 16), -(-rows // group)
    inputs = {
        "x": Tensor(random.standard_normal((3, rows)).astype(np.float32), "fed"),
        "codes": Tensor(random.integers(0, 256, (tiles, units, 32 * bits), np.uint8)),
        "scales": Tensor(np.ones((tiles, groups, 16), np.float32)),
        "table": Tensor(np.arange(2**bits, dtype=np.float32)),
        "zero_points": Tensor(np.zeros((1, 1, 1), np.float32)),
        "bias": Tensor(np.zeros(1, np.float32)),
    }
    attributes: dict[str, Any] = {"rows": rows, "columns": columns, "group": group}
    if operator == "MatMulTable":
        return Case(operator, inputs, attributes | {"activations": "int8"})
    inputs |= {"left": Tensor(hadamard(4)), "right": Tensor(hadamard(2))}
    return Case(operator, inputs, attributes | {"bits": 8, "clip": 1.0})


def of_shape(*shape: int, dtype: type = np.float32, where: str = "graph") -> Tensor:
    return Tensor(np.ones(shape, dtype), where)


@pytest.mark.parametrize("operator", ["MatMulTable", "MatMulDynamic"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"rows": 0}, "rows and columns must be"),
        ({"rows": -40}, "rows and columns must be"),
        ({"columns": 2**63 - 1}, "rows and columns must be"),
        ({"rows": 2**62 + 40, "columns": 4}, "rows and columns must be"),
        ({"rows": 2**31, "columns": 2**31}, "codes must have the shape"),
        ({"rows": 48}, "the last axis of x must have 48"),
        ({"rows": 49}, "codes must have the shape"),
        ({"columns": 33}, "codes must have the shape"),
        ({"group": 0}, "group must be"),
        ({"group": -16}, "group must be"),
        ({"group": 24}, "group must be"),
        ({"group": 2**63 - 16}, "group must be"),
        ({"group": 32}, "scales must have the shape"),
        ({"rows": None}, "rows must be there, and be an integer"),
        ({"columns": 20.0}, "columns must be there, and be an integer"),
        ({"group": "16"}, "group must be there, and be an integer"),
        ({"codes": of_shape(2, 3, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 0, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 288, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 100, dtype=np.uint8)}, "codes must have the shape"),
        ({"codes": of_shape(2, 3, 128, dtype=np.uint8, where="fed")}, "codes must be an initializer"),
        ({"scales": of_shape(2, 3, 15, where="fed")}, "scales must have the shape"),
        ({"scales": of_shape(2, 3, where="fed")}, "scales must have the shape"),
        ({"table": of_shape(16, where="fed")}, "table must be an initializer"),
        ({"zero_points": of_shape(1, 1, 1, where="fed")}, "zero_points must be"),
        ({"zero_points": of_shape(0, 1, 1, where="fed")}, "zero_points must be"),
        ({"bias": of_shape(1, where="fed")}, "bias must be an initializer"),
        ({"scales": of_shape(2, 3)}, "scales must have the shape"),
        ({"scales": of_shape(2, 3, 15)}, "scales must have the shape"),
        ({"zero_points": of_shape(1, 1, 1)}, "zero_points must be"),
        ({"zero_points": of_shape(2, 2, 16)}, "zero_points must be"),
        ({"zero_points": of_shape(0, 1, 1)}, "zero_points must be"),
        ({"bias": of_shape(1)}, "bias must be"),
        ({"bias": of_shape(0)}, "bias must be"),
        ({"bias": of_shape(1, 20)}, "bias must be"),
        ({"table": of_shape(0)}, "table must have from 1 to 16 numbers"),
        ({"table": of_shape(17)}, "table must have from 1 to 16 numbers"),
        ({"table": of_shape(4, 4)}, "table must have from 1 to 16 numbers"),
        ({"table": of_shape(15)}, "a code is 15, in a table of 15 numbers"),
        ({"table": Tensor(np.array([0, np.nan], np.float32))}, "entry 1 of the table is no finite number"),
        ({"table": Tensor(np.array([np.inf], np.float32))}, "entry 0 of the table is no finite number"),
        ({"x": of_shape(where="fed")}, "the last axis of x must have 40 numbers"),
        ({"x": of_shape(40, 3, where="fed")}, "the last axis of x must have 40 numbers"),
        ({"x": of_shape(3, 0, where="fed")}, "the last axis of x must have 40 numbers"),
    ],
)
def test_a_product_names_its_node(operator: str, what: dict[str, Any], says: str, tmp_path: Path) -> None:
    case = weights(operator=operator)
    for name, value in what.items():
        if isinstance(value, Tensor):
            case.inputs[name] = value
        elif value is None:
            del case.attributes[name]
        else:
            case.attributes[name] = value
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*{says}"):
        run(file, fed)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"bits": 5}, "bits must be 8 or 4"),
        ({"bits": 2**32 + 8}, "bits must be 8 or 4"),
        ({"bits": None}, "bits must be there"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"clip": 1.5}, "clip must be above 0"),
        ({"clip": float("nan")}, "clip must be above 0"),
        ({"clip": 1}, "clip must be there, and be a float"),
    ],
)
def test_rounding_by_token_names_its_node(attributes: dict[str, Any], says: str, tmp_path: Path) -> None:
    case = weights(operator="MatMulDynamic")
    case.attributes = {name: value for name, value in (case.attributes | attributes).items() if value is not None}
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*{says}"):
        run(file, fed)


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (of_shape(3, 3, dtype=np.int8), "40 rows of the weights are no multiple of 4 x 3"),
        (of_shape(0, 0, dtype=np.int8), "right must be a square matrix"),
        (of_shape(2, 2, 1, dtype=np.int8), "right must be a square matrix"),
        (of_shape(2, 2, dtype=np.int8, where="fed"), "right must be an initializer"),
        (Tensor(np.zeros((2, 2), np.int8)), "right has an entry that is neither 1 nor -1"),
    ],
)
def test_a_rotation_in_front_of_a_product_names_its_node(matrix: Tensor, says: str, tmp_path: Path) -> None:
    case = weights(operator="MatMulDynamic")
    case.inputs["right"] = matrix
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*{says}"):
        run(file, fed)


@pytest.mark.parametrize(
    "activations", ["", "int", "int88", "INT8", "x" * 15, "x" * 16, "x" * 100_000, b"\xff", "%s%n"]
)
def test_activations_of_no_kind_are_an_error(activations: str, tmp_path: Path) -> None:
    case = weights()
    case.attributes["activations"] = activations
    file, fed = case.model(tmp_path)
    with pytest.raises(Exception, match=f"node '{NODE}': .*activations must be"):
        run(file, fed)


@pytest.mark.parametrize("operator", ["Hadamard", "MatMulDynamic", "MatMulTable"])
@pytest.mark.parametrize("start", [0, 1, 2, 4, 13, 60])
def test_external_data_lies_where_whole_numbers_may(operator: str, start: int, tmp_path: Path) -> None:
    if operator == "Hadamard":
        matrices = {"left": Tensor(hadamard(4)), "right": Tensor(hadamard(20))}
        case = Case(operator, {"x": Tensor(np.ones((3, 80), np.float32), "fed"), **matrices})
    else:
        case = weights(operator=operator)
        case.inputs["zero_points"] = of_shape(2, 3, 16)
        case.inputs["bias"] = of_shape(20)
    expected = check(case, tmp_path)
    assert expected is not None
    for tensor in case.inputs.values():
        if tensor.where == "graph":
            tensor.where = "file"
    case.start = start
    if operator == "Hadamard" or start % 4 == 0:
        assert np.array_equal(check(case, tmp_path), expected)
    else:
        file, fed = case.model(tmp_path)
        with pytest.raises(Exception, match=f"node '{NODE}': scales lies at no multiple of 4 bytes"):
            run(file, fed)


@pytest.mark.parametrize(
    "name", ["", "n" * 100_000, "%s%n%s%1000000d", "\u00e4\u4e16\U0001f600" * 100, "n" + "\u4e16" * 100]
)
def test_a_node_may_have_any_name(name: str, tmp_path: Path) -> None:
    file, fed = Case(
        "Hadamard",
        {"x": of_shape(3, where="fed"), "left": of_shape(2, 2, dtype=np.int8), "right": of_shape(1, 1, dtype=np.int8)},
    ).model(tmp_path)
    model = onnx.load(file)
    model.graph.node[0].name = name
    onnx.save(model, file)
    with pytest.raises(Exception, match=re.escape(f"ai.graphopt node '{name[:60]}")):
        run(file, fed)
