"""The kernel against the definition, and against files of strangers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.runtime import array_of, ort_value, run
from graphopt.runtime_ops import DOMAIN, library_path
from graphopt.runtime_ops.paged_attention.spec.op import reference
from tests.native import INSTRUCTIONS, ISA_VARIABLE, needs_library, skip_without
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.paged_attention.honest import honest
from tests.runtime_ops.paged_attention.test_op import LIES, SIZES, arrays, requests
from tests.runtime_ops.test_registry import node_of

pytestmark = needs_library

FLOAT32, FLOAT16 = 2e-5, 4e-3
"""Of y: sums of up to 50 products of normal numbers in float32; the last bit of float16 is 1e-3 of numbers up to 4."""


def kernel_session(case: Case) -> onnxruntime.InferenceSession:
    """Open a model of one node, which graphopt's kernel takes."""
    node = node_of(case)
    outputs = list(node.outputs)
    for name, value in zip(("y", "new_keys", "new_values"), outputs, strict=True):
        value.name = f"made_{name}"
    graph = ir.Graph(list(node.inputs), outputs, nodes=[node], opset_imports={"": 23, DOMAIN: 1}, name="one")
    model = ir.Model(graph, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(library_path()))
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])


def by_kernel(case: Case) -> list[np.ndarray]:
    return list(run(kernel_session(case), None, {name: tensor.values for name, tensor in case.inputs.items()}))


@pytest.mark.parametrize("isa", INSTRUCTIONS)
def test_the_kernel_is_the_reference(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa)

    @given(honest())
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def agree(case: Case) -> None:
        y, *after = reference(*arrays(case), **case.attributes)
        found, *stored = by_kernel(case)
        for expected, made in zip(after, stored, strict=True):
            np.testing.assert_array_equal(expected, made)
        limit = FLOAT16 if found.dtype == np.float16 else FLOAT32
        np.testing.assert_allclose(found.astype(np.float64), y, atol=limit)

    agree()


@pytest.mark.parametrize("size", [64, 128, 256])
def test_larger_heads_over_many_blocks(size: int) -> None:
    random, tokens = np.random.default_rng(0), [1, 70, 1, 3]
    past, page = [200, 0, 37, 5], 16
    table = np.full((4, 16), -1, np.int32)
    order = iter(random.permutation(40))
    for row in range(4):
        for column in range(-(-(past[row] + tokens[row]) // page)):
            table[row, column] = next(order)
    normal = random.standard_normal
    inputs = {
        "query": normal((75, 4 * size)).astype(np.float32),
        "key": normal((75, 2 * size)).astype(np.float32),
        "value": normal((75, 2 * size)).astype(np.float32),
        "starts": np.cumsum([0, *tokens]).astype(np.int32),
        "past": np.array(past, np.int32),
        "block_table": table,
        "sink_logits": normal(4).astype(np.float32),
        "keys": normal((40, page, 2, size)).astype(np.float32),
        "values": normal((40, page, 2, size)).astype(np.float32),
    }
    attributes = {**SIZES, "window": 50, "scale": size**-0.5}
    y, keys, _ = reference(*inputs.values(), **attributes)
    case = Case("PagedAttention", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes)
    found, stored, _ = by_kernel(case)
    np.testing.assert_array_equal(stored, keys)
    np.testing.assert_allclose(found, y, atol=FLOAT32)


def test_blocks_are_written_where_they_lie() -> None:
    inputs = requests([3, 2], [2, 3], [[5, 1, -1], [0, 7, -1]])
    y, keys, values = reference(*inputs.values(), **SIZES)
    session = kernel_session(Case("PagedAttention", {n: Tensor(a, "fed") for n, a in inputs.items()}, dict(SIZES)))
    given_values = {name: ort_value(array.copy()) for name, array in inputs.items()}
    binding = session.io_binding()
    for name, value in given_values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("made_y", "cpu")
    binding.bind_ortvalue_output("made_new_keys", given_values["keys"])
    binding.bind_ortvalue_output("made_new_values", given_values["values"])
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(array_of(given_values["keys"]), keys)
    np.testing.assert_array_equal(array_of(given_values["values"]), values)
    np.testing.assert_allclose(binding.get_outputs()[0].numpy(), y, atol=FLOAT32)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_reach_those_that_read_them(odd: float) -> None:
    inputs = requests([2, 1], [5, 4], [[5, 1], [0, 7]])
    inputs["keys"][5, 2, 0, 3] = inputs["values"][0, 1, 1, 6] = odd
    inputs["keys"][1, 3] = inputs["values"][7, 2:] = odd  # beyond what is written: nobody reads it
    for window in (0, 3):
        attributes = {**SIZES, "window": window}
        case = Case("PagedAttention", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes)
        expected = np.isnan(reference(*inputs.values(), **attributes)[0])
        np.testing.assert_array_equal(np.isnan(by_kernel(case)[0]), expected)


@pytest.mark.parametrize(("lie", "message"), LIES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_lie_is_an_error_that_names_the_node(lie: dict[str, Any], message: str) -> None:
    inputs = requests([3, 2], [2, 3], [[5, 1, -1], [0, 7, -1]])
    inputs |= {name: np.array(numbers, np.int32) for name, numbers in lie.items()}
    with pytest.raises(Exception, match="ai.graphopt node 'node': (starts|past|request|two new)"):
        by_kernel(Case("PagedAttention", {n: Tensor(a, "fed") for n, a in inputs.items()}, dict(SIZES)))
