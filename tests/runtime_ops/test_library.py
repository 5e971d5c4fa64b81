"""The shared library of kernels: onnxruntime takes it, our header is onnxruntime's ABI, bodies still run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import graphopt.runtime_ops
from graphopt.errors import InputError
from graphopt.numerics.rotations import hadamard
from graphopt.ort.session import open_session
from graphopt.runtime_ops import declare, library_path
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD, reference
from graphopt.runtime_ops.library import PATH_VARIABLE
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS
from tests.native import INSTRUCTIONS, here, needs_library, skip_without

ROUNDING = {"activations": "int8", "group": 0, "clip": 1.0}


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A file with a node that the library has a kernel for, and behind it a node that it has none for."""
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape(["rows", 96]))
    matrices = [ir.val(f"m{n}", const_value=ir.tensor(hadamard(n), name=f"m{n}")) for n in (12, 8)]
    turn = HADAMARD.node([x, *matrices], name="turn")
    rounding = ROUND_ACTIVATIONS.node([turn.outputs[0]], ROUNDING, name="rounding")
    for name, node in (("turned", turn), ("y", rounding)):
        value = node.outputs[0]
        value.name, value.type, value.shape = name, x.type, x.shape
    outputs = [turn.outputs[0], rounding.outputs[0]]
    graph = ir.Graph([x], outputs, nodes=[turn, rounding], initializers=matrices, opset_imports={"": 23}, name="both")
    model = ir.Model(graph, ir_version=11)
    declare(model)
    ir.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def what_runs(file: Path, native: bool) -> set[str]:
    optimized = file.with_name("optimized.onnx")
    open_session(file, optimized_to=optimized, native=native)
    return {node.op_type for node in ir.load(optimized).graph}


@needs_library
def test_the_kernel_takes_its_node_and_other_nodes_run_their_body(both: Path) -> None:
    assert what_runs(both, native=True) >= {"Hadamard", "Round"}
    assert what_runs(both, native=True).isdisjoint({"MatMul", "RoundActivations"})
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    expected = reference(x, hadamard(12), hadamard(8))
    for native in (True, False):
        turned, y = open_session(both, native=native).run(None, {"x": x})
        assert np.abs(turned - expected).max() < 1e-6 * np.abs(expected).max() * np.sqrt(96)
        assert np.array_equal(y, ROUND_ACTIVATIONS.reference(turned, **ROUNDING))


@needs_library
def test_an_installation_has_it() -> None:
    path = library_path()
    assert path is not None
    assert path.is_file()


@needs_library
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_instructions_are_tested_where_the_machine_has_them(instructions: str) -> None:
    skip_without(instructions)
    assert instructions in here()


def test_without_the_library_the_body_runs(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Hadamard" not in what_runs(both, native=False)
    monkeypatch.setenv(PATH_VARIABLE, "")
    assert library_path() is None
    assert "Hadamard" not in what_runs(both, native=True)


def test_a_library_that_is_none_is_an_error_that_names_it(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = both.with_name("other.so")
    other.write_bytes(b"no library")
    monkeypatch.setenv(PATH_VARIABLE, str(other))
    with pytest.raises(InputError, match="cannot load graphopt's kernels") as error:
        open_session(both)
    assert error.value.file == other


@needs_library
def test_it_needs_nothing_but_the_c_and_cpp_libraries() -> None:
    try:
        said = subprocess.run(["readelf", "--dynamic", str(library_path())], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("readelf is not installed")
    needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", said.stdout))
    if "libasan" in needed:
        pytest.skip("this build has sanitizers, which are libraries too")
    assert needed <= {"libc", "libm", "libstdc++", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}


@needs_library
def test_many_sessions_share_one_domain(both: Path) -> None:
    x = np.ones((1, 96), np.float32)
    sessions = [open_session(both) for _ in range(3)]
    first = sessions.pop(0).run(None, {"x": x})
    for session in sessions:
        assert all(np.array_equal(a, b) for a, b in zip(session.run(None, {"x": x}), first, strict=True))


# A library of one function, which returns what our header finds in the onnxruntime that loads it.
PROBE = """
#include "abi/onnxruntime.h"

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase* base) {
  using namespace graphopt;
  const OrtApi* api = base->GetApi(kApiVersion);
  ReleaseStatus::call(api, CreateStatus::call(api, kFail, "not this one"));
  return CreateStatus::call(api, kInvalidArgument, base->GetVersionString());
}
"""


def test_our_header_is_the_abi_of_the_onnxruntime_that_is_installed(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or pytest.skip("there is no C++ compiler")
    (tmp_path / "probe.cc").write_text(PROBE)
    include = Path(graphopt.runtime_ops.__file__).parent
    what = ["-std=c++17", "-shared", "-fPIC", f"-I{include}", "-o", tmp_path / "probe.so", tmp_path / "probe.cc"]
    subprocess.run([compiler, *what], check=True)
    with pytest.raises(Exception, match=re.escape(onnxruntime.__version__)) as error:
        onnxruntime.SessionOptions().register_custom_ops_library(str(tmp_path / "probe.so"))
    assert type(error.value).__name__ == "InvalidArgument"
    # The other positions are called whenever a kernel runs or fails; the tests of each operator do both.
