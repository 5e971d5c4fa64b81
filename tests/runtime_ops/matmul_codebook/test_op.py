"""Body and kernel against the definition, and the definition against frozen vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.runtime_ops.dequantize_codebook.spec.op import reference as dequantize
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.matmul_codebook.spec.op import MATMUL_CODEBOOK, reference
from tests.native import INSTRUCTIONS, needs_library, skip_without
from tests.runtime_ops.dequantize_codebook.test_op import case_of, load
from tests.runtime_ops.hostile import Case
from tests.runtime_ops.matmul_codebook.honest import honest
from tests.runtime_ops.states import arrays, by_kernel
from tests.runtime_ops.test_registry import run_body


def check(case: Case, outputs: list[np.ndarray]) -> None:
    """Sums of K products in float32, in any order: half an ulp for each addition and each factor, of all magnitudes."""
    x, *operands = arrays(case)
    y = reference(x, *operands, **case.attributes)
    weight = np.abs(dequantize(*operands, **case.attributes).astype(np.float64))
    size = np.abs(x.astype(np.float64)) @ weight
    limit = (len(weight) + 8) * np.finfo(np.float32).eps * size
    if y.dtype == np.float16:
        limit += np.finfo(np.float16).eps * np.abs(y.astype(np.float64)) + 1e-7
    assert outputs[0].shape == y.shape
    assert outputs[0].dtype == y.dtype
    assert (np.abs(outputs[0].astype(np.float64) - y) <= limit + 1e-30).all()


@given(honest())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_body_is_the_reference(case: Case) -> None:
    check(case, run_body(case))


@needs_library
@pytest.mark.parametrize("isa", INSTRUCTIONS)
def test_the_kernel_is_the_reference(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa)

    @given(honest())
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def agree(case: Case) -> None:
        check(case, by_kernel(case))

    agree()


@needs_library
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("x", (2, 63), r"x must be \[..., 64\]"),
        ("codes", (1, 8, 32), "axis 0 of codes must be 2, and is 1"),
        ("codes", (2, 8, 30), "axis 2 of codes must be 32, and is 30"),
        ("scales", (2, 2, 16), "axis 1 of scales must be 1, and is 2"),
        ("levels", (2, 1, 8), "axis 1 of levels must be 2, and is 1"),
        ("level_table", (2, 8), "axis 1 of level_table must be 16, and is 8"),
        ("books", (255, 8), "axis 0 of books must be 256, and is 255"),
        ("books", (256, 3), "1, 2, 4, 8 or 16 numbers, and has 3"),
        ("shifts", (3,), r"shifts must be \[1\] or \[2\]"),
    ],
)
def test_shapes_that_do_not_fit_are_errors_of_reference_and_kernel(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    case = case_of(load("matmul_codebook")[0], "MatMulCodebook")
    case.inputs[name].values = np.zeros(shape, case.inputs[name].values.dtype)
    with pytest.raises(ValueError, match="must be|are none"):
        reference(*arrays(case), **case.attributes)
    with pytest.raises(Exception, match=f"node 'node': .*{message}"):
        by_kernel(case)


@needs_library
@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("axis", 2, "axis must be 0 to 1, and is 2"),
        ("sign_bits", 3, "have 0, 7 or 8 signs, not 3"),
        ("group", 12, "multiples of the 8 numbers"),
        ("span", -1, "span must be 1 to"),
    ],
)
def test_attributes_that_do_not_fit_are_errors_of_the_kernel(attribute: str, value: int, message: str) -> None:
    case = case_of(load("matmul_codebook")[0], "MatMulCodebook")
    case.attributes[attribute] = value
    with pytest.raises(Exception, match=f"node 'node': .*{message}"):
        by_kernel(case)


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    for frozen in load("matmul_codebook"):
        case = case_of(frozen, "MatMulCodebook")
        y = reference(*arrays(case), **case.attributes)
        np.testing.assert_allclose(y, np.array(frozen["y"]), rtol=1e-6, atol=1e-6)
        check(case, run_body(case))


def test_cost() -> None:
    # 3 rows of 24 numbers times 2 tiles of 16 columns
    shapes = [(3, 24), (2, 3, 32), (2, 1, 16), (2, 1, 8), (2, 16), (256, 8), (1,)]
    cost = MATMUL_CODEBOOK.cost(shapes)
    assert cost.operations == 2 * 3 * 32 * 24
    assert cost.bytes == 192 + 16 + 4 * (72 + 96 + 32 + 32 + 2048 + 1)
