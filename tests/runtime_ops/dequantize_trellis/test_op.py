from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings

from graphopt.numerics.formats import FORMATS
from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops.dequantize_trellis.spec.op import reference
from tests.runtime_ops.bodies import run_body
from tests.runtime_ops.dequantize_trellis.honest import honest
from tests.runtime_ops.hostile import Case


@settings(max_examples=25)
@given(honest())
def test_the_body_is_the_reference_to_the_last_bit(case: Case) -> None:
    inputs = [tensor.values for tensor in case.inputs.values()]
    np.testing.assert_array_equal(
        run_body(case.operator, inputs, case.attributes), reference(*inputs, **case.attributes)
    )


@pytest.mark.parametrize("name", ["t2", "t3", "t4"])
@pytest.mark.parametrize("columns", [48, 37, 3, 1])
@pytest.mark.parametrize("opset", [CANONICAL_OPSETS[0], CANONICAL_OPSETS[-1]])
def test_it_is_what_the_format_means(name: str, columns: int, opset: int) -> None:
    format, random = FORMATS[name], np.random.default_rng(0)
    codes = random.integers(0, 2**format.bits, (32, columns)).astype(np.uint8)
    scales = 2.0 ** random.integers(-3, 3, (2, columns)).astype(np.float32)  # so that all products are exact
    inputs = [codes, scales, format.operands["tables"]]
    made = run_body("DequantizeTrellis", inputs, {"bits": format.bits, "group": 16}, opset)
    np.testing.assert_array_equal(made, format.decode(codes, np.repeat(scales, 16, 0)))


def test_what_does_not_fit_is_an_error() -> None:
    codes, scales = np.zeros((32, 5), np.uint8), np.ones((2, 5), np.float32)
    with pytest.raises(ValueError, match="tables of 12 values do not fit codes of 3 bits"):
        reference(codes, scales, np.ones((2, 12), np.float32), 3, 16)
    with pytest.raises(ValueError, match="tables of 8 values do not fit codes of 1 bits"):
        reference(codes, scales, np.ones((2, 8), np.float32), 1, 16)
    with pytest.raises(ValueError, match=r"scales must be \[4, 5\], not \[2, 5\]"):
        reference(codes, scales, np.ones((2, 16), np.float32), 3, 8)


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    file = files("graphopt.runtime_ops").joinpath("dequantize_trellis", "vectors", "version1.json")
    for frozen in json.loads(file.read_text()):
        types = {"codes": np.uint8, "scales": np.float16, "tables": np.float32}
        inputs = [np.array(frozen[name], dtype) for name, dtype in types.items()]
        attributes = {name: frozen[name] for name in ("bits", "group")}
        assert reference(*inputs, **attributes).tolist() == frozen["W"]
        assert run_body("DequantizeTrellis", inputs, attributes).tolist() == frozen["W"]
