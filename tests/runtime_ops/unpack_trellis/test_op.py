from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
from hypothesis import given, settings

from graphopt.runtime_ops.unpack_trellis.spec.op import reference
from tests.runtime_ops.bodies import run_body
from tests.runtime_ops.hostile import Case
from tests.runtime_ops.unpack_trellis.honest import honest


@settings(max_examples=25)
@given(honest())
def test_the_body_is_the_reference_to_the_last_bit(case: Case) -> None:
    inputs = [tensor.values for tensor in case.inputs.values()]
    np.testing.assert_array_equal(
        run_body(case.operator, inputs, case.attributes), reference(*inputs, **case.attributes)
    )


def test_frozen_vectors_keep_their_meaning() -> None:
    """Never regenerate the file: a change that it does not survive is a new version of the operator."""
    file = files("graphopt.runtime_ops").joinpath("unpack_trellis", "vectors", "version1.json")
    for frozen in json.loads(file.read_text()):
        types = {"codes": np.uint8, "scales": np.float16, "tables": np.float32}
        inputs = [np.array(frozen[name], dtype) for name, dtype in types.items()]
        attributes = {name: frozen[name] for name in ("rows", "columns", "group")}
        assert reference(*inputs, **attributes).tolist() == frozen["W"]
        assert run_body("UnpackTrellis", inputs, attributes).tolist() == frozen["W"]
