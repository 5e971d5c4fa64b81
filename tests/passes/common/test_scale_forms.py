"""Numbers in fewer bytes: each form is found by the numbers alone and holds them to the last bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graphopt.graph.editing import Inserter
from graphopt.graph.weights import Inline, Part
from graphopt.ort.session import open_session
from graphopt.passes.common.scale_forms import (
    LevelsOfRuns,
    NarrowNumbers,
    TableIndices,
    bytes_of,
    expression_of_nodes,
    shortest_form,
    write_form,
)
from graphopt.passes.common.table_layout import TileScales
from graphopt.quantization.gguf.blocks import Ggml
from graphopt.quantization.gguf.codes import GgmlCodes
from graphopt.quantization.matrix_codes import KeptCodes
from tests import ggufs
from tests.graphs import save

RANDOM = np.random.default_rng(0)
LANES = 16


def products(low: int, high: int, span: int, *, signed: bool = False, shape: tuple[int, int] = (3, 64)) -> np.ndarray:
    """Return scales [tiles, groups, 16] as a K-quant has them: integers times a float16 number for each run."""
    tiles, groups = shape
    levels = RANDOM.integers(low, high + 1, (tiles, groups // span, span, LANES)).astype(np.float32)
    steps = RANDOM.uniform(1e-5, 1e-3, (tiles, groups // span, 1, LANES)).astype(np.float16).astype(np.float32)
    signs = RANDOM.choice([-1, 1], steps.shape) if signed else 1
    return (levels * steps * np.float32(signs)).reshape(tiles, groups, LANES)


def read(numbers: np.ndarray, folder: Path) -> tuple[object, np.ndarray, np.ndarray]:
    """Return the form of numbers, what onnxruntime computes of its nodes, and what ``widen_scales`` puts for them."""
    form = shortest_form(Inline.from_array(numbers))
    assert form is not None
    reader = ir.node("Identity", [None])
    graph = ir.Graph([], reader.outputs, nodes=[reader], opset_imports={"": 23}, name="scales")
    value = write_form(graph, Inserter(graph, reader, "scales"), "scales", form)
    reader.replace_input_with(0, value)
    reader.outputs[0].name, reader.outputs[0].type = "y", value.type
    expression = expression_of_nodes(value)
    assert expression is not None
    (computed,) = open_session(save(ir.Model(graph, ir_version=10), folder)).run(["y"], {})
    return form, computed, expression.numpy()


def equal_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    ("numbers", "kind", "share"),
    [
        (products(0, 15, 16), "uint4 under a float16 number for 16", 5 / 32),
        (products(0, 63, 8), "6 bits under a float16 number for 8", 8 / 32),
        (products(-32, 31, 16, signed=True), "6 bits under a float16 number for 16", 7 / 32),
        (products(0, 255, 8), "uint8 under a float16 number for 8", 10 / 32),
        (products(-128, 127, 16, signed=True), "int8 under a float16 number for 16", 9 / 32),
        (products(-1, 31, 8, signed=True), "6 bits under a float16 number for 8", 8 / 32),
        (products(0, 0, 8), "indices of a table of 1", 4 / 32),
        (np.exp2(RANDOM.integers(-9, 9, (3, 64, LANES))).astype(np.float32), "indices of a table of", 8 / 32),
        (RANDOM.standard_normal((3, 64, LANES)).astype(np.float16).astype(np.float32), "float16", 16 / 32),
        ((RANDOM.standard_normal((3, 64)) * 1e-7).astype(ml_dtypes.bfloat16).astype(np.float32), "bfloat16", 16 / 32),
    ],
)
def test_numbers_come_back_to_the_bit(numbers: np.ndarray, kind: str, share: float, tmp_path: Path) -> None:
    form, computed, widened = read(numbers, tmp_path)
    assert isinstance(form, NarrowNumbers | TableIndices | LevelsOfRuns)
    assert form.words.startswith(kind)
    stored = sum(Part(form, name).nbytes for name in form.parts)
    assert stored <= share * numbers.nbytes + 72  # a table of 18 numbers at most
    assert equal_bits(computed, numbers)
    assert equal_bits(widened, numbers)


def test_zeros_keep_their_sign(tmp_path: Path) -> None:
    numbers = products(-3, 3, 8)
    turned = numbers * np.float32(-1)  # zeros are -0 there
    assert np.signbit(turned[turned == 0]).all()
    numbers[:, 8:] = turned[:, 8:]
    assert equal_bits(read(numbers, tmp_path)[1], numbers)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_experts_have_tables_of_their_own(dtype: type, tmp_path: Path) -> None:
    codes = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    of_experts = np.array([1, 1.03, 0.97, 1.1], np.float32)[:, None, None, None]
    numbers: np.ndarray = (of_experts * RANDOM.choice(codes, (4, 3, 64, LANES))).astype(dtype)
    form, computed, widened = read(numbers, tmp_path)
    assert isinstance(form, TableIndices)
    assert form.tables == (2 if dtype == np.float32 else form.tables)  # two experts have 252 numbers
    assert equal_bits(computed, numbers)
    assert equal_bits(widened, numbers)


def test_numbers_without_a_shorter_form_have_none() -> None:
    numbers = RANDOM.standard_normal((3, 64, LANES)).astype(np.float32)
    assert shortest_form(Inline.from_array(numbers)) is None
    assert shortest_form(Inline.from_array(numbers.astype(np.float16))) is None
    # one number that is no product of a small integer: at the end, where no sample is taken
    almost = products(0, 255, 8, shape=(40, 64))
    almost[-1, -1, -1] *= np.float32(1 + 2**-20)
    assert shortest_form(Inline.from_array(almost)) is None


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "NVFP4", "Q4_1", "Q8_0"])
def test_scales_of_a_gguf_file_take_its_bytes(kind: str, tmp_path: Path) -> None:
    """Scales and minimums are no larger than what the file has besides codes, to the bytes of tables."""
    shape = (64, 1024)
    matrix = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    is_written = kind not in ggufs.HALVES
    stored = gguf.quantize(matrix, gguf.GGMLQuantizationType[kind]) if is_written else ggufs.random_blocks(shape, kind)
    (tmp_path / kind).write_bytes(stored.tobytes())
    kept = KeptCodes(GgmlCodes(Ggml(str(tmp_path / kind), 0, kind, shape)), np.arange(64), standard=False)
    total = 0
    for part in kept.parts:
        if part != "codes":
            tiled = TileScales(Part(kept, part), kept.parts[part][0])
            form = shortest_form(tiled)
            total += tiled.nbytes if form is None else sum(Part(form, name).nbytes for name in form.parts)
            if form is not None:
                assert dataclasses.replace(form).evaluate().keys() == form.parts.keys()
                assert bytes_of(form) < tiled.nbytes
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    besides_codes = (size - numbers * kept.format.bits // 8) * (shape[0] * shape[1] // numbers)
    assert total <= besides_codes + 1024  # a table of 256 numbers
