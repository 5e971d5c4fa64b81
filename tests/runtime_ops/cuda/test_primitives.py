"""Each primitive of ``cuda/device.h`` and ``cuda/matrix.h`` in the host interpreter, against NumPy and the PTX ISA."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime_ops.cuda import interpreted as interpreter

# Lane, its group of four and its place in that, as the PTX ISA numbers fragments.
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
NAN_BITS = 0xFFFFFFFF

Run = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    compiler = interpreter.compiler() or pytest.skip("there is no C++ compiler")
    return interpreter.load(interpreter.build("primitives", [Path(__file__).with_name("primitives.cu")], compiler))


@pytest.fixture(scope="module")
def run(library: ctypes.CDLL) -> Run:
    def run(
        name: str, *given: np.ndarray, outputs: int = 4096, shared: int = 0, seed: int = 0, d: np.ndarray | None = None
    ) -> np.ndarray:
        inputs = [np.ascontiguousarray(array).view(np.uint32) for array in given]
        inputs += [np.zeros(256, np.uint32)] * (3 - len(inputs))
        out = aligned(np.full(outputs, 0xABABABAB, np.uint32) if d is None else d)
        library.graphopt_interpreter_seed(seed)
        kept = [aligned(array) for array in inputs]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*kept, out)]
        failure = getattr(library, f"run_{name}")(*pointers, ctypes.c_size_t(shared))
        if failure is not None:
            raise RuntimeError(failure.decode())
        return out

    return run


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    copy = memory[-memory.ctypes.data % 64 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def fragments_of_a(A: np.ndarray) -> np.ndarray:
    """Return a[lane, i, :] of A [16, k], as the ISA has it for mma.m16n8k16 (16 bits) and m16n8k32 (8 bits)."""
    pack = A.shape[1] // 8
    rows = [G + 8 * (i % 2) for i in range(4)]
    columns = [pack * T + 4 * pack * (i // 2) for i in range(4)]
    return np.stack([A[r[:, None], c[:, None] + np.arange(pack)] for r, c in zip(rows, columns, strict=True)], 1)


def fragments_of_b(B: np.ndarray) -> np.ndarray:
    pack = len(B) // 8
    rows = [pack * T + 4 * pack * i for i in range(2)]
    return np.stack([B[r[:, None] + np.arange(pack), G[:, None]] for r in rows], 1)


def place_of_d() -> tuple[np.ndarray, np.ndarray]:
    rows = np.stack([G, G, G + 8, G + 8], 1)
    columns = np.stack([2 * T, 2 * T + 1, 2 * T, 2 * T + 1], 1)
    return rows, columns


def product(run: Run, name: str, A: np.ndarray, B: np.ndarray, C: np.ndarray, seed: int = 0) -> np.ndarray:
    out = run(f"product_{name}", fragments_of_a(A), fragments_of_b(B), C[place_of_d()], outputs=128, seed=seed)
    D = np.empty_like(C)
    D[place_of_d()] = out.view(C.dtype).reshape(32, 4)
    return D


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_products_of_integers_are_exact(run: Run, name: str, dtype: type) -> None:
    random = np.random.default_rng(0)
    A, B, C = (random.integers(-9, 10, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    for seed in range(3):
        assert np.array_equal(product(run, name, A.astype(dtype), B.astype(dtype), C, seed), A @ B + C)


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 8))
@settings(max_examples=20, deadline=None)
def test_products_are_off_by_what_a_gpu_cuts(run: Run, name: str, dtype: type, seed: int, spread: int) -> None:
    random = np.random.default_rng(seed)
    A, B = (
        (random.standard_normal(s) * np.exp2(random.integers(-spread, spread + 1, s))).astype(dtype)
        for s in ((16, 16), (16, 8))
    )
    C = random.standard_normal((16, 8)).astype(np.float32)
    wide = A.astype(np.float64), B.astype(np.float64)
    sizes = np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(C)
    # Twice: nine numbers lose less than 2^-24 of the largest's power of two each, and their sum 2^-23 of itself.
    bound = 2 * (9 * 2.0**-24 + 2.0**-23) * sizes
    assert (np.abs(product(run, name, A, B, C) - (wide[0] @ wide[1] + C)) <= bound).all()


def test_products_cut_and_do_not_round(run: Run) -> None:
    A, B = np.zeros((16, 16), np.float16), np.zeros((16, 8), np.float16)
    A[:, 0], B[0] = 2.0**-12, 1.75 * 2.0**-12
    assert (product(run, "f16", A, B, np.ones((16, 8), np.float32)) == 1).all()
    assert (product(run, "f16", A, B, -np.ones((16, 8), np.float32)) > -1).all()
    A[0, 3], A[1, 3], B[3] = np.inf, np.nan, 1
    D = product(run, "f16", A, B, np.ones((16, 8), np.float32))
    assert np.isposinf(D[0]).all()
    assert np.isnan(D[1]).all()
    assert np.isfinite(D[2:]).all()


@pytest.mark.parametrize("name", ["s8", "u8s8"])
def test_products_of_bytes_are_exact_and_wrap(run: Run, name: str) -> None:
    random = np.random.default_rng(0)
    A, B = (random.integers(-128, 128, shape).astype(np.int8) for shape in ((16, 32), (32, 8)))
    A = A.view(np.uint8) if name == "u8s8" else A
    C = random.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    expected = (A.astype(np.int64) @ B.astype(np.int64) + C).astype(np.int32)
    for seed in range(3):
        assert np.array_equal(product(run, name, A, B, C, seed), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_as_fragments(run: Run, transposed: bool) -> None:
    matrices = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    name = "matrices_transposed" if transposed else "matrices"
    loaded = run(name, matrices, outputs=128, shared=512).view(np.uint16).reshape(32, 4, 2)
    for i, matrix in enumerate(matrices.transpose(0, 2, 1) if transposed else matrices):
        assert np.array_equal(loaded[:, i], np.stack([matrix[G, 2 * T], matrix[G, 2 * T + 1]], 1))


@pytest.mark.parametrize("seed", range(4))
def test_shuffles_stay_in_their_warp(run: Run, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 2**20, (2, 32)).astype(np.uint32)
    sources = random.integers(0, 32, (2, 32)).astype(np.uint32)
    out = run("shuffles", values, sources, outputs=384, seed=seed).reshape(2, 32, 6)
    for warp in range(2):
        value, source = values[warp], sources[warp]
        expected = [
            value[source],
            value[LANE ^ 5],
            4 * value[source] + 1,
            np.full(32, sum(int(v & 1) << i for i, v in enumerate(value))),
            value.reshape(4, 8).sum(1).repeat(8),
            np.full(32, value.max()),
        ]
        assert np.array_equal(out[warp], np.stack(expected, 1))


def numbers(dtype: type, random: np.random.Generator, count: int) -> np.ndarray:
    """Return finite numbers of a 16-bit type of all sizes, zeros and subnormal ones among them."""
    bits = random.integers(0, 2**16, 4 * count).astype(np.uint16)
    return bits[np.isfinite(bits.view(dtype).astype(np.float32))][:count]


@pytest.fixture(scope="module", params=[0, 1])
def arithmetic(run: Run, request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    """All of ``packed`` on 2048 triples of words; of halves for seed 0, of bfloat16 for 1."""
    random = np.random.default_rng(request.param)
    dtype = (np.float16, ml_dtypes.bfloat16)[request.param]
    a, b, c = (numbers(dtype, random, 4096).view(np.uint32) for _ in range(3))
    # Where a product is near a tie, the third number decides.
    c[:512] = c[:512] & 0x80FF80FF
    out = run("packed", a, b, c, outputs=20 * 2048).reshape(2048, 20).T
    return {"dtype": dtype, "a": a, "b": b, "c": c, "out": out}


def halves(words: np.ndarray, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint16).view(dtype)


def exactly(dtype: type, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c rounded once, from integers of any size."""
    out = np.empty(len(a), dtype)
    for i, (x, y, z) in enumerate(zip(a.astype(float), b.astype(float), c.astype(float), strict=True)):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = np.array(float(exact)).astype(dtype)
        steps = near.view(np.int16) + np.array([-1, 0, 1], np.int16)
        candidates = steps.view(dtype)
        finite = [v for v in candidates if np.isfinite(float(v))]
        best = min(finite, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint16)) & 1))
        out[i] = best if np.isfinite(float(near)) else near
    return out


@pytest.mark.parametrize("operation", ["fma", "multiply", "add"])
def test_pairs_are_rounded_once(arithmetic: dict, operation: str) -> None:
    dtype, which = arithmetic["dtype"], ["fma", "multiply", "add"].index(operation)
    a, b, c = (halves(arithmetic[name], dtype) for name in "abc")
    got = halves(arithmetic["out"][which + 3 * (dtype is not np.float16)], dtype)
    zero = np.zeros_like(a)
    with np.errstate(over="ignore"):
        if operation == "fma":
            expected = exactly(dtype, a, b, c)
        else:
            expected = exactly(dtype, a, b, zero) if operation == "multiply" else exactly(dtype, a, zero + 1, b)
    assert np.array_equal(got, expected)
    if operation == "multiply":
        assert np.array_equal(np.signbit(got), np.signbit(a) ^ np.signbit(b))


def test_words_are_converted_moved_and_multiplied(arithmetic: dict) -> None:
    a, b, c, out = (arithmetic[name] for name in ("a", "b", "c", "out"))
    x, y, z = (words.view(np.float32) for words in (a, b, c))
    with np.errstate(over="ignore", invalid="ignore"):
        for row, dtype in ((6, np.float16), (7, ml_dtypes.bfloat16)):
            pair = halves(out[row], dtype).reshape(-1, 2)
            for got, wide in ((pair[:, 0], x), (pair[:, 1], y)):
                assert np.array_equal(got.astype(np.float32), wide.astype(dtype).astype(np.float32), equal_nan=True)
        fused = x.astype(np.float64) * y + z  # in double, so compared where that is exact
        got = out[14].copy().view(np.float32)
        assert (np.abs(got - fused) <= 2.0**-24 * np.abs(fused) + 2.0**-149)[np.isfinite(got)].all()
    low, high = np.ascontiguousarray(out[8:10]).view(np.float32)
    assert np.array_equal(low, halves(a, np.float16)[::2].astype(np.float32), equal_nan=True)
    assert np.array_equal(high, halves(a, ml_dtypes.bfloat16)[1::2].astype(np.float32), equal_nan=True)
    assert np.array_equal(out[10], (a & b) | c)
    assert np.array_equal(out[17], by_table(0x1B, a, b, c))
    wide = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    assert np.array_equal(out[12], (wide >> (c % 32).astype(np.uint64)).astype(np.uint32))
    signed = [words.view(np.int8).reshape(-1, 4).astype(np.int64) for words in (a, b)]
    assert np.array_equal(out[13].view(np.int32), ((signed[0] * signed[1]).sum(1) + c.view(np.int32)).astype(np.int32))
    for i in range(4):
        digit = c >> np.uint32(4 * i) & 15
        byte = (wide >> (8 * (digit & 7)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        expected = np.where(digit & 8, np.where(byte & 128, 255, 0), byte)
        assert np.array_equal(out[11] >> np.uint32(8 * i) & 255, expected)


def by_table(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for bit in np.arange(32, dtype=np.uint32):
        index = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        out |= (np.uint32(table) >> index & 1) << bit
    return out


def test_exponentials_and_integers(run: Run) -> None:
    x = np.concatenate([np.linspace(-160, 130, 2040), [np.inf, -np.inf, 0, 0.5, 1.5, 2.5, -3e9, 3e9]])
    x = x.astype(np.float32)
    out = run("packed", x, np.zeros(2048, np.uint32), np.zeros(2048, np.uint32), outputs=20 * 2048).reshape(-1, 20)
    got, rounded = out[:, 15].copy().view(np.float32), out[:, 16].copy().view(np.int32)
    with np.errstate(over="ignore"):
        expected = np.exp2(x.astype(np.float64))
        expected[expected < 2.0**-126] = 0
        expected = expected.astype(np.float32)
    normal = np.isfinite(expected) & (expected > 0)
    assert (np.abs(got[normal] / expected[normal] - 1) <= 2 * 2.0**-23).all()
    assert np.array_equal(got[expected == 0], expected[expected == 0])
    assert np.array_equal(rounded, np.clip(np.rint(x.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int64))


@pytest.mark.parametrize("seed", range(3))
def test_copies_land_at_the_wait_that_covers_them(run: Run, seed: int) -> None:
    a, b = (np.arange(256, dtype=np.uint32) + start for start in (1000, 5000))
    at_once, uncovered, covered, zeros, later = (
        run("copies", a, b, outputs=160, shared=1536, seed=seed).reshape(32, 5).T
    )
    assert (at_once == NAN_BITS).all()
    assert (uncovered == NAN_BITS).all()
    assert np.array_equal(covered, 1000 + 4 * LANE)
    assert (zeros == 0).all()
    assert (later == NAN_BITS).all()


def test_a_race_shows_in_the_order_of_fibers_and_a_barrier_ends_it(run: Run) -> None:
    values = np.arange(128, dtype=np.uint32) * 3
    expected = np.roll(values, -77) + np.arange(3, dtype=np.uint32)[:, None]
    results = {run("race", values, outputs=384, shared=512, seed=seed).tobytes() for seed in range(4)}
    assert len(results) == 4
    for seed in range(4):
        assert np.array_equal(run("exchange", values, outputs=384, shared=512, seed=seed).reshape(3, 128), expected)
    # Unwritten memory reads as NaN.
    assert any(
        (np.frombuffer(result, np.uint32) >= NAN_BITS - 2).any() or b"\xff\xff\xff\xff" in result for result in results
    )


def test_blocks_run_in_an_order_that_is_drawn(run: Run) -> None:
    orders = [run("order", d=np.zeros(101, np.uint32), seed=seed) for seed in range(4)]
    for order in orders:
        assert np.array_equal(np.sort(order[:100]), np.arange(100))
        assert order[100] == 100
    assert np.array_equal(orders[0][:100], np.arange(100))
    assert len({order.tobytes() for order in orders}) == 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "few_lanes",
            r"block \(0, 0, 0\): thread 0 waits at ballot for ever; 31 threads wait somewhere, 1 h",
        ),
        (
            "two_places",
            r"thread \d+: it came to (ballot|sync_warp) while others of its warp wait at (b|s)",
        ),
        ("no_barrier", r"thread 32 waits at sync_block for ever; 32 threads wait somewhere, 32 have returned"),
        ("not_aligned", r"thread \d+: 16 bytes at no multiple of that"),
        ("beyond", r"wrote behind its 512 bytes of shared memory"),
        ("copy_beyond", r"16 bytes that are not in the block's 512 of shared memory"),
        ("wrong_space", r"16 bytes that must be in global memory are in shared memory"),
        ("odd_threads", "a block must have a multiple of 32 threads, at most 1024"),
        ("no_threads", "a block must have a multiple of 32 threads"),
        ("no_blocks", "a grid must have blocks"),
    ],
)
def test_what_a_gpu_takes_amiss_ends_the_launch(run: Run, name: str, says: str) -> None:
    if name == "beyond" and os.environ.get("GRAPHOPT_SANITIZE"):
        pytest.skip("the sanitizer ends the process there")
    for seed in range(3):
        with pytest.raises(RuntimeError, match=says):
            run(name, shared=512, seed=seed)
        run("nothing", shared=512, seed=seed)  # the next launch is none the worse


def test_too_much_shared_memory_is_an_error(run: Run) -> None:
    run("nothing", shared=163 * 1024)
    with pytest.raises(RuntimeError, match="at most 163 KiB of shared memory"):
        run("nothing", shared=163 * 1024 + 1)
