"""Kernels for ARM on emulated processors: the bits of x86's scalar kernels, whatever instructions a processor has.

``make test-native`` runs the other tests of kernels on one of them too.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.numerics.rotations import hadamard
from graphopt.runtime_ops import declare, library_path
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.matmul_dynamic.spec.op import MATMUL_DYNAMIC
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE
from tests.native import EMULATOR_VARIABLE, needs_library
from tests.pairwise import pairwise
from tests.runtime_ops.emulated.processors import BRIDGE, PROCESSORS, command, lacking
from tests.runtime_ops.matmul_table.test_kernels import INTEGERS, OTHER_TABLES, TABLES
from tests.runtime_ops.products import Case, any_case, case_of, model_of

pytestmark = needs_library  # the bits that are compared with are those of the library here

# QEMU and a cross compiler are Debian's, not Python's: where they are absent, the reason names what is.
_LACKING = lacking()
if _LACKING is not None:
    pytest.skip(_LACKING, allow_module_level=True)  # nothing here runs without an emulator

SETS = ("scalar", "neon", "dotprod", "i8mm")


@dataclass
class Processor:
    """An emulated processor: the library of its kernels, and the sets of instructions that it has."""

    library: Path
    sets: tuple[str, ...]
    environment: pytest.MonkeyPatch

    def run(self, model: ir.Model, feeds: dict[str, np.ndarray], instructions: str, library: Path) -> np.ndarray:
        """Run the one node of a model by the kernels of a library, held to a set of instructions."""
        self.environment.setenv(ISA_VARIABLE, instructions)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(library))
        serialized = ir.to_proto(model).SerializeToString()
        session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
        result: np.ndarray = session.run(None, feeds)[0]
        return result

    def same(self, model: ir.Model, feeds: dict[str, np.ndarray]) -> None:
        """Each set of instructions gives the bits of this machine's scalar kernels."""
        library = library_path()
        assert library is not None
        expected = self.run(model, feeds, "scalar", library)
        for instructions in self.sets:
            found = self.run(model, feeds, instructions, self.library)
            assert found.dtype == expected.dtype
            # processors make other NaN, and all of them are NaN
            assert np.array_equal(found, expected, equal_nan=True), instructions
            finite = np.isfinite(expected)
            assert found[finite].tobytes() == expected[finite].tobytes(), instructions


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processor]:
    # each copy of the library has a process of its own
    library = tmp_path_factory.mktemp("emulated") / f"{request.param}.so"
    shutil.copy(BRIDGE, library)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(EMULATOR_VARIABLE, command(request.param))
        yield Processor(library, SETS[: SETS.index(PROCESSORS[request.param]) + 1], environment)


def test_it_has_the_sets_that_the_system_says_and_no_other(processor: Processor) -> None:
    chosen = ctypes.CDLL(str(processor.library)).graphopt_instructions
    chosen.argtypes, chosen.restype = [], ctypes.c_char_p
    processor.environment.setenv(ISA_VARIABLE, "")
    assert chosen() == processor.sets[-1].encode()
    for instructions in (*SETS, "avx2"):
        processor.environment.setenv(ISA_VARIABLE, instructions)
        assert chosen() == (instructions.encode() if instructions in processor.sets else None)


def of_product(processor: Processor, case: Case, name: str = MATMUL_TABLE.name) -> None:
    processor.same(model_of(name, case), {"x": case["x"]})


@pytest.mark.parametrize(("bits", "activations", "count"), pairwise(range(1, 9), INTEGERS, [1, 2, 4, 5, 6, 13, 30]))
def test_products_of_every_width(processor: Processor, bits: int, activations: str, count: int) -> None:
    case = case_of(100, 37, 48, bits, leading=(count,), zero_points=bits % 2 == 0, bias=True)
    of_product(processor, {**case, "activations": activations})


@pytest.mark.parametrize(("name", "count"), pairwise([*TABLES, *OTHER_TABLES], [1, 3, 8]))
def test_products_of_every_kind_of_table(processor: Processor, name: str, count: int) -> None:
    table = np.array({**TABLES, **OTHER_TABLES}[name], np.float32)
    case = case_of(176, 37, 64, (len(table) - 1).bit_length(), leading=(count,))
    of_product(processor, {**case, "table": table, "activations": "int8"})


@pytest.mark.parametrize("count", [1, 4, 17])
def test_the_largest_sums_there_are(processor: Processor, count: int) -> None:
    """Bytes of -128 times 127, 512 of them: what overflows if two products do not fit 16 bits."""
    case = case_of(1024, 16, 1024, 8, leading=(count,))
    case["codes"] = np.zeros_like(case["codes"])
    case["x"] = np.where(np.arange(1024) % 3 == 2, -1, 1).astype(np.float32) + 0 * case["x"]
    for table in (np.arange(256) - 128.0, 255.0 - np.arange(256), np.arange(256) * 128.0 - 32768 + 1):
        of_product(processor, {**case, "table": table.astype(np.float32), "activations": "int8"})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=any_case(INTEGERS))
def test_any_product(processor: Processor, case: Case) -> None:
    of_product(processor, case)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e-38, 3e38, -0.0])
def test_what_is_hostile_in_x(processor: Processor, bad: float) -> None:
    case = case_of(96, 40, 32, 4, leading=(14,), zero_points=True)
    case["x"][3, 40] = case["x"][13, 95] = bad
    case["x"][5] = bad
    for activations in INTEGERS:
        of_product(processor, {**case, "activations": activations})


@pytest.mark.parametrize(("orders", "count"), pairwise([(1, 1), (12, 8), (8, 4)], [1, 5, 14]))
def test_dynamic(processor: Processor, orders: tuple[int, int], count: int) -> None:
    case = case_of(96, 40, 96, 4, leading=(count,))
    case |= {"left": hadamard(orders[0]), "right": hadamard(orders[1]), "bits": 8, "clip": 0.9}
    of_product(processor, case, MATMUL_DYNAMIC.name)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    orders=st.sampled_from([(64, 64), (12, 8), (36, 32), (36, 16), (1, 12), (12, 1), (2, 1), (52, 16), (144, 20)]),
    runs=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_transforms(processor: Processor, dtype: type, orders: tuple[int, int], runs: int, seed: int) -> None:
    width = orders[0] * orders[1]
    x = np.random.default_rng(seed).standard_normal((runs, width)).astype(dtype)
    values = [ir.val(name, ir.DataType.INT8, [None, None]) for name in ("left", "right")]
    given_x = ir.val("x", ir.DataType.from_numpy(x.dtype), ir.Shape(["runs", width]))
    node = HADAMARD.node([given_x, *values], name="transform")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", given_x.type, given_x.shape
    model = ir.Model(ir.Graph([given_x, *values], [y], nodes=[node], opset_imports={"": 23}), ir_version=11)
    declare(model)
    processor.same(model, {"x": x, "left": hadamard(orders[0]), "right": hadamard(orders[1])})
