"""Operators with a state, by body, reference and kernel: all outputs of one node."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.ort.session import run
from graphopt.runtime_ops import DOMAIN, OPERATORS, library_path
from tests.runtime_ops.hostile import FLOATS, INTEGERS, Case, examples, other_attribute, other_shape
from tests.runtime_ops.test_registry import node_of


def arrays(case: Case) -> list[np.ndarray]:
    return [tensor.values for tensor in case.inputs.values()]


def by_reference(case: Case) -> list[np.ndarray]:
    return list(OPERATORS[case.operator].reference(*arrays(case), **case.attributes))


def by_kernel(case: Case, threads: int = 2) -> list[np.ndarray]:
    """Run one node, which graphopt's kernel takes."""
    node = node_of(case)
    for name, value in zip(OPERATORS[case.operator].schema.output_names, node.outputs, strict=True):
        value.name = f"made_{name}"
    imports = {"": 23, DOMAIN: 1}
    graph = ir.Graph(list(node.inputs), list(node.outputs), nodes=[node], opset_imports=imports, name="one")  # type: ignore[arg-type]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = False  # each tensor in memory of its own, so that a sanitizer sees where it ends
    options.register_custom_ops_library(str(library_path()))
    serialized = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    return list(run(session, None, {name: tensor.values for name, tensor in case.inputs.items()}))


@st.composite
def hostile(draw: st.DrawFn, honest: st.SearchStrategy[Case]) -> Case:
    """Return an honest case, some of whose shapes, numbers and attributes are changed."""
    case = draw(honest)
    for _ in range(draw(st.integers(1, 3))):
        tensor = case.inputs[draw(st.sampled_from(sorted(case.inputs)))]
        match draw(st.sampled_from(["number", "shape", "shape", "attribute"])):
            case "number" if tensor.values.size:
                tensor.values = flat = tensor.values.copy()
                is_float = flat.dtype.kind == "f"
                number = draw(st.sampled_from(FLOATS)) if is_float else draw(st.sampled_from(INTEGERS[:8]))
                with np.errstate(over="ignore"):
                    flat.reshape(-1)[draw(st.integers(0, flat.size - 1))] = np.array(number).astype(flat.dtype)
            case "shape":
                shape = other_shape(draw, list(tensor.values.shape))
                tensor.values = np.resize(tensor.values, shape).astype(tensor.values.dtype)
            case "attribute":
                other_attribute(draw, case.attributes, INTEGERS, ["", "silu", "none", "x" * 100])
    return case


def check_hostile(honest: st.SearchStrategy[Case], usual: int = 100) -> None:
    """Run hostile cases: each has an error that names the node, or a result as the reference defines it."""
    counts: Counter[bool] = Counter()

    @given(hostile(honest))
    @settings(max_examples=examples(usual), deadline=None, suppress_health_check=list(HealthCheck))
    def no_crash(case: Case) -> None:
        try:
            outputs = by_kernel(case)
        except Exception as error:
            message = str(error)
            counts[False] += 1
            # onnxruntime refuses some by itself, before it calls a kernel
            is_named = "ai.graphopt node 'node'" in message or "ai.graphopt node" not in message
            if not is_named:
                raise
            return
        counts[True] += 1
        expected = by_reference(case)
        assert [output.shape for output in outputs] == [output.shape for output in expected]
        if all(np.isfinite(array).all() and np.abs(array).max(initial=0) < 1e3 for array in [*arrays(case), *expected]):
            size = max(np.abs(array.astype(np.float64)).max(initial=0) for array in [*arrays(case), *expected])
            for output, stated in zip(outputs, expected, strict=True):
                # other tests check the error: here, that it was computed from these numbers and no others
                np.testing.assert_allclose(
                    output.astype(np.float64), stated.astype(np.float64), atol=1e-2 * size + 1e-3
                )

    no_crash()
    assert min(counts[False], counts[True]) > 0, "results and errors were to be tried both"
