"""The library of native operators, as tests need it: whether there is to be one, and which instructions it can use."""

from __future__ import annotations

import functools
import os
import platform

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.ort.session import session_of
from graphopt.runtime_ops import declare, library_path
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.library import PATH_VARIABLE

EMULATOR_VARIABLE = "GRAPHOPT_EMULATOR"
"""Names the command that runs emulated kernels, where the library is ``emulated/bridge.cc``."""

_ON_ARM = EMULATOR_VARIABLE in os.environ or platform.machine() in ("aarch64", "arm64")
INSTRUCTIONS = ("scalar", "neon", "dotprod", "i8mm") if _ON_ARM else ("scalar", "avx2", "avxvnni", "avx512")
"""What the library may have kernels for, the fastest last."""

needs_library = pytest.mark.skipif(
    os.environ.get(PATH_VARIABLE) == "", reason=f"{PATH_VARIABLE} says that there is no library of native operators"
)
"""Skips where someone took the library away. Where it is just not there the installation is broken, and tests fail."""


@functools.cache
def lacks(instructions: str) -> str | None:
    """Return why this machine cannot run kernels for ``instructions``, or ``None``; any other error is an error.

    All operators choose between their kernels by the same function, so one of them tells for all.
    """
    assert library_path() is not None, "the library of native operators is not there: install graphopt again"
    values = [ir.val(name, ir.DataType.INT8, [1, 1]) for name in ("left", "right")]
    x = ir.val("x", ir.DataType.FLOAT, [1])
    node = HADAMARD.node([x, *values], name="probe")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    model = ir.Model(ir.Graph([x, *values], node.outputs, nodes=[node], opset_imports={"": 23}), ir_version=11)
    declare(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(ISA_VARIABLE, instructions)
        try:
            with session_of(model) as session:
                unit = np.ones((1, 1), np.int8)
                session.run(None, {"x": np.ones(1, np.float32), "left": unit, "right": unit})
        except Exception as error:
            if ISA_VARIABLE not in str(error):
                raise
            return str(error)
    return None


def skip_without(instructions: str) -> None:
    """Skip the test where this machine lacks ``instructions``; every machine has "scalar"."""
    reason = lacks(instructions)
    assert reason is None or instructions != "scalar", reason
    if reason is not None:
        pytest.skip(f"this machine has no {instructions}")


def here() -> list[str]:
    """Return the sets of instructions that this machine has."""
    return [instructions for instructions in INSTRUCTIONS if lacks(instructions) is None]
