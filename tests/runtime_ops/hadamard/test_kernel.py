"""The native kernel of Hadamard against the reference, on every set of instructions that this machine has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.numerics.rotations import hadamard
from graphopt.ort.session import open_session
from graphopt.runtime_ops import declare
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD, reference
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from tests.native import INSTRUCTIONS, here, needs_library

pytestmark = needs_library

# What a sum of ab numbers may be off by, in parts of the norm of its run.
TOLERANCE = {np.float16: 1e-3, np.float32: 1e-6, np.float64: 1e-14}
# Both Sylvester's; one core; cores inside and beside Sylvester's; two cores; narrower than a vector; wide; the largest;
# Paley's second construction over the primes with a product of their own, and over the field of 25, which has none.
PAIRS = [
    (64, 64),
    (12, 8),
    (88, 64),
    (96, 56),
    (144, 20),
    (1, 12),
    (12, 1),
    (1, 1),
    (2, 1),
    (4, 4),
    (148, 128),
    (160, 160),
    (36, 16),
    (36, 32),
    (36, 64),
    (36, 128),
    (76, 16),
    (124, 48),
    (52, 16),
]


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[type, int], Path]:
    """A file for each type and rank of x, whose matrices are inputs too."""
    made = {}
    for dtype in TOLERANCE:
        for rank in range(4):
            type_ = ir.DataType.from_numpy(np.dtype(dtype))
            x = ir.val("x", type_, ir.Shape([f"axis{axis}" for axis in range(rank)]))
            matrices = [ir.val(name, ir.DataType.INT8, None) for name in ("left", "right")]
            node = HADAMARD.node([x, *matrices], name="a node of mine")
            y = node.outputs[0]
            y.name, y.type, y.shape = "y", x.type, x.shape
            graph = ir.Graph([x, *matrices], [y], nodes=[node], opset_imports={"": 23}, name="one")
            model = ir.Model(graph, ir_version=11)
            declare(model)
            made[dtype, rank] = tmp_path_factory.mktemp("hadamard") / "model.onnx"
            ir.save(model, made[dtype, rank])
    return made


class Kernel:
    """Runs the kernel with the given set of instructions; sessions are created once."""

    def __init__(self, file: dict[tuple[type, int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.monkeypatch = file, monkeypatch
        self.sessions: dict[tuple, onnxruntime.InferenceSession] = {}

    def session(self, dtype: type, rank: int, isa: str = "", threads: int = 1) -> onnxruntime.InferenceSession:
        key = (dtype, rank, isa, threads)
        if key not in self.sessions:
            self.monkeypatch.setenv(ISA_VARIABLE, isa)
            self.sessions[key] = open_session(self.file[dtype, rank], threads=threads)
        return self.sessions[key]

    def __call__(self, x: np.ndarray, left: np.ndarray, right: np.ndarray, *key: object) -> np.ndarray:
        session = self.session(x.dtype.type, x.ndim, *key)
        return session.run(None, {"x": x, "left": left, "right": right})[0]


@pytest.fixture(scope="module")
def kernel(file: dict[tuple[type, int], Path]) -> Kernel:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Kernel(file, monkeypatch)


def test_instructions_that_nobody_has_are_an_error(kernel: Kernel) -> None:
    names = f"{', '.join(INSTRUCTIONS[:-1])} or {INSTRUCTIONS[-1]}"
    with pytest.raises(Exception, match=f"'a node of mine'.*GRAPHOPT_OPS_ISA must be {names}"):
        kernel.session(np.float32, 1, "avx3")


def check(kernel: Kernel, x: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Each set of instructions gives the same bits, near the reference."""
    first, *others = (kernel(x, left, right, isa) for isa in here())
    expected = reference(x.astype(np.float64), left, right)
    assert (first.shape, first.dtype) == (x.shape, x.dtype)
    order = len(left) * len(right)
    apart, result, given = (
        np.linalg.norm(each.astype(np.float64).reshape(-1, order), axis=-1) for each in (first - expected, expected, x)
    )
    # matrices of any signs may take x to next to nothing; what was added up on the way was as large as x
    assert (apart <= TOLERANCE[x.dtype.type] * np.maximum(result, given)).all()
    for other in others:
        assert np.array_equal(first, other)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pair", PAIRS)
def test_it_is_the_reference(kernel: Kernel, dtype: type, pair: tuple[int, int]) -> None:
    a, b = pair
    x = np.random.default_rng(a).standard_normal((2, 3, 2 * a * b) if a * b < 10_000 else (2, a * b)).astype(dtype)
    x.reshape(-1, a * b)[1] = 0
    check(kernel, x, hadamard(a), hadamard(b))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_matrices_of_signs(kernel: Kernel, a: int, b: int, runs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    left, right = (random.choice(np.array([-1, 1], np.int8), (n, n)) for n in (a, b))
    check(kernel, random.standard_normal((2, runs * a * b)).astype(np.float32), left, right)


@given(st.integers(1, 20), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 16, 20]), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_matrices_that_come_apart_but_for_their_diagonal(kernel: Kernel, n: int, outer: int, b: int, seed: int) -> None:
    """As Paley's second construction makes them; here with any signs on the diagonal, and inside a larger matrix."""
    random = np.random.default_rng(seed)
    core = np.kron(random.choice(np.array([-1, 1], np.int8), (n, n)), np.array([[1, 1], [1, -1]], np.int8))
    np.fill_diagonal(core, random.choice(np.array([-1, 1], np.int8), 2 * n))
    left = np.kron(hadamard(outer) if outer != 3 else np.ones((3, 3), np.int8), core).astype(np.int8)
    right = random.choice(np.array([-1, 1], np.int8), (b, b))
    check(kernel, random.standard_normal((2, 2 * len(left) * b)).astype(np.float32), left, right)


SYLVESTER = hadamard(16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("outer", [1, 2])
@pytest.mark.parametrize("leading", [1, 3])
def test_paley_inside_the_right_matrix(kernel: Kernel, dtype: type, outer: int, leading: int) -> None:
    """Columns of its core lie side by side there too, and what comes behind it stays in place."""
    right = np.kron(np.kron(hadamard(outer), hadamard(36)), SYLVESTER).astype(np.int8)
    x = np.random.default_rng(0).standard_normal((3, leading * len(right))).astype(dtype)
    check(kernel, x, np.ones((1, 1), np.int8), right)
    left = np.kron(hadamard(36), hadamard(4)).astype(np.int8)
    check(kernel, x[:, : 144 * 4], left, hadamard(4))
    check(kernel, x[:, : 144 * 3], left, np.ones((3, 3), np.int8))  # 12 columns are no whole vector


@given(st.integers(0, 35), st.integers(0, 35), st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_almost_paley(kernel: Kernel, row: int, column: int, both: int) -> None:
    """One entry that differs, or two that lie as symmetry wants it: it is another matrix, whatever its order."""
    left = hadamard(36).copy()
    left[row, column] *= -1
    if both == 2 and row != column:
        left[column, row] *= -1
    check(kernel, np.random.default_rng(0).standard_normal((2, 36 * 16)).astype(np.float32), left, SYLVESTER)


@pytest.mark.parametrize("pair", [(64, 64), (88, 64), (12, 8), (36, 64)])
def test_threads_change_no_bit(kernel: Kernel, pair: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal((700, pair[0] * pair[1])).astype(np.float32)
    one, two = (kernel(x, *(hadamard(n) for n in pair), "", threads) for threads in (1, 2))
    assert np.array_equal(one, two)
    # every row by itself, and so not in the same task
    alone = np.concatenate([kernel(x[i : i + 1], *(hadamard(n) for n in pair)) for i in (0, 350, 699)])
    assert np.array_equal(one[[0, 350, 699]], alone)


@pytest.mark.parametrize(
    ("dtype", "pair"), [(np.float32, (64, 64)), (np.float32, (36, 64)), (np.float32, (36, 128)), (np.float64, (36, 64))]
)
@pytest.mark.parametrize("shift", [0, 8, 16, 56])
def test_tensors_that_lie_anywhere_and_do_not_fit_the_caches(
    kernel: Kernel, dtype: type, pair: tuple[int, int], shift: int
) -> None:
    size = np.dtype(dtype).itemsize * (order := pair[0] * pair[1])
    rows = -(-(9 << 20) // size) // 3 * 3
    source, target = (np.zeros(rows * size + 128, np.uint8) for _ in range(2))
    x, y = (
        buffer[-buffer.ctypes.data % 64 + shift :][: rows * size].view(dtype).reshape(rows, order)
        for buffer in (source, target)
    )
    x[:] = np.random.default_rng(0).standard_normal((rows, order))
    matrices = dict(zip(("left", "right"), map(hadamard, pair), strict=True))
    binding = (session := kernel.session(dtype, 2)).io_binding()
    for name, matrix in matrices.items():
        binding.bind_cpu_input(name, matrix)
    binding.bind_input("x", "cpu", 0, dtype, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, dtype, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)
    assert np.array_equal(y, np.concatenate([kernel(part, **matrices) for part in np.split(x.copy(), 3)]))
    assert np.abs(y[:3] - reference(x[:3], **matrices)).max() < 1e-5
    assert not np.delete(target, np.s_[(begin := -target.ctypes.data % 64 + shift) : begin + rows * size]).any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("pair", [(8, 8), (12, 8), (4, 12), (36, 16)])
def test_what_is_not_finite_stays_in_its_run(kernel: Kernel, bad: float, pair: tuple[int, int]) -> None:
    order = pair[0] * pair[1]
    left, right = (hadamard(n) for n in pair)
    x = np.random.default_rng(0).standard_normal((3, 2 * order)).astype(np.float32)
    tame, x[1, 5] = x.copy(), bad
    for isa in here():
        y, expected = kernel(x, left, right, isa), kernel(tame, left, right, isa)
        assert not np.isfinite(y[1, :order]).any()
        y[1, :order] = expected[1, :order]
        assert np.array_equal(y, expected)


@pytest.mark.parametrize("size", [3e38, 1e-30])
def test_large_numbers_do_not_overflow_and_small_ones_do_not_vanish(kernel: Kernel, size: float) -> None:
    x = np.zeros((2, 4096), np.float32)
    x[0, :9] = size
    x[1] = np.random.default_rng(0).uniform(-1, 1, 4096) * size / 2**6
    check(kernel, x, hadamard(64), hadamard(64))


def test_every_float16_number_comes_through(kernel: Kernel) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    identity = np.ones((1, 1), np.int8)
    for isa in here():
        assert np.array_equal(kernel(every, identity, identity, isa), every, equal_nan=True)
    # sums of two, over sqrt(2): rounded once, to the nearest
    pairs = np.random.default_rng(0).permutation(every[np.isfinite(every)])
    turned = kernel(pairs, identity, hadamard(2)).reshape(-1, 2)
    wide = pairs.reshape(-1, 2).astype(np.float32) * np.float32(1 / np.sqrt(2))
    with np.errstate(over="ignore"):
        assert np.array_equal(turned[:, 0], (wide[:, 0] + wide[:, 1]).astype(np.float16))
        assert np.array_equal(turned[:, 1], (wide[:, 0] - wide[:, 1]).astype(np.float16))


@pytest.mark.parametrize("shape", [(0,), (0, 96), (2, 0, 96), (3, 0)])
def test_nothing_stays_nothing(kernel: Kernel, shape: tuple[int, ...]) -> None:
    assert kernel(np.zeros(shape, np.float32), hadamard(12), hadamard(8)).shape == shape


ONE = np.ones((1, 1), np.int8)


@pytest.mark.parametrize(
    ("x", "left", "right", "says"),
    [
        ((), ONE, ONE, "x must have a rank of 1 or more"),
        ((3, 10), hadamard(12), ONE, "the last axis of x is 10, which is no multiple of 12 x 1"),
        ((6, 10), ONE, hadamard(12), "the last axis of x is 10, which is no multiple of 1 x 12"),
        ((2, 4), hadamard(64), hadamard(64), "the last axis of x is 4, which is no multiple of 64 x 64"),
        ((2, 4), np.ones((2, 4), np.int8), ONE, "left must be a square matrix"),
        ((2, 4), ONE, np.ones(4, np.int8), "right must be a square matrix"),
        ((2, 4), ONE, np.array(1, np.int8), "right must be a square matrix"),
        ((2, 4), np.ones((2, 2, 1), np.int8), ONE, "left must be a square matrix"),
        ((2, 4), np.ones((0, 0), np.int8), ONE, "left must be a square matrix, of order 1 or more"),
        ((2, 4), np.ones((0, 3), np.int8), ONE, "left must be a square matrix"),
        ((2, 4), ONE, np.array([[1, 1], [1, 0]], np.int8), "right has an entry that is neither 1 nor -1"),
        ((2, 4), np.full((4, 4), -128, np.int8), ONE, "left has an entry that is neither 1 nor -1"),
    ],
)
def test_what_it_cannot_compute_is_an_error_that_names_the_node(
    kernel: Kernel, x: tuple[int, ...], left: np.ndarray, right: np.ndarray, says: str
) -> None:
    with pytest.raises(Exception, match=f"node 'a node of mine': {says}"):
        kernel(np.ones(x, np.float32), left, right)
