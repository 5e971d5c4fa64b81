"""Scales in two levels: found by the numbers alone, and held to the last bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from graphopt.graph.weights import Inline, Part
from graphopt.passes.common.scale_levels import PackedLevels, UnpackedLevels, packed_levels
from graphopt.passes.common.table_layout import TileScales
from graphopt.quantization.gguf.blocks import Ggml
from graphopt.quantization.gguf.codes import GgmlCodes
from graphopt.quantization.matrix_codes import KeptCodes
from tests import ggufs

RANDOM = np.random.default_rng(0)
LANES = 16


def products(low: int, high: int, span: int, *, signed: bool = False, shape: tuple[int, int] = (3, 64)) -> np.ndarray:
    """Return scales [tiles, groups, 16] as a K-quant has them: integers times a float16 number for each run."""
    tiles, groups = shape
    levels = RANDOM.integers(low, high + 1, (tiles, groups // span, span, LANES)).astype(np.float32)
    steps = RANDOM.uniform(1e-5, 1e-3, (tiles, groups // span, 1, LANES)).astype(np.float16).astype(np.float32)
    signs = RANDOM.choice([-1, 1], steps.shape) if signed else 1
    return (levels * steps * np.float32(signs)).reshape(tiles, groups, LANES)


def there_and_back(numbers: np.ndarray) -> tuple[PackedLevels, np.ndarray]:
    """Return the form of numbers, and what the step `widen_scales` makes of it."""
    levels = packed_levels([Inline.from_array(numbers)])
    assert levels is not None
    (form,) = levels
    packed = Inline.from_array(form.evaluate()["packed"])
    assert packed.shape == form.parts["packed"][1]
    return form, UnpackedLevels(packed, numbers.shape[-2], form.span, form.low).numpy()


@pytest.mark.parametrize(
    ("numbers", "bits", "low", "span"),
    [
        (products(0, 15, 16), 4, 0, 16),
        (products(0, 63, 8), 6, 0, 8),
        (products(-32, 31, 16, signed=True), 6, -32, 16),
        (products(0, 255, 8), 8, 0, 8),
        (products(-128, 127, 16, signed=True), 8, -128, 16),
        (products(-1, 31, 8, signed=True), 6, -32, 8),
    ],
)
def test_numbers_come_back_to_the_bit(numbers: np.ndarray, bits: int, low: int, span: int) -> None:
    form, back = there_and_back(numbers)
    assert (form.bits, form.low, form.span) == (bits, low, span)
    assert Part(form, "packed").nbytes == numbers.size * bits // 8 + numbers.size // span * 2
    assert back.tobytes() == numbers.tobytes()


def test_zeros_keep_their_sign() -> None:
    numbers = products(-3, 3, 8)
    turned = numbers * np.float32(-1)  # zeros are -0 there
    assert np.signbit(turned[turned == 0]).all()
    numbers[:, 8:] = turned[:, 8:]
    assert there_and_back(numbers)[1].tobytes() == numbers.tobytes()


def test_scales_and_minimums_have_one_form() -> None:
    sources = [Inline.from_array(products(*ends, 8)) for ends in ((0, 63), (-8, 7), (-128, 127))]
    for pair, bits, low in ((sources[:2], 8, -8), (sources[1:], 8, -128)):
        forms = packed_levels(pair)
        assert forms is not None
        assert {form.bits for form in forms} == {bits}
        assert {form.low for form in forms} == {low}


def test_numbers_that_are_no_levels_have_none() -> None:
    assert packed_levels([Inline.from_array(RANDOM.standard_normal((3, 64, LANES)).astype(np.float32))]) is None
    # one number that is no product of a small integer: at the end, where no sample is taken
    almost = products(0, 255, 8, shape=(40, 64))
    almost[-1, -1, -1] *= np.float32(1 + 2**-20)
    assert packed_levels([Inline.from_array(almost)]) is None


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_scales_of_a_gguf_file_take_its_bytes(kind: str, tmp_path: Path) -> None:
    shape = (64, 4096)
    matrix = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    is_written = kind not in ggufs.HALVES
    blocks = gguf.quantize(matrix, gguf.GGMLQuantizationType[kind]) if is_written else ggufs.random_blocks(shape, kind)
    (tmp_path / kind).write_bytes(blocks.tobytes())
    kept = KeptCodes(GgmlCodes(Ggml(str(tmp_path / kind), 0, kind, shape)), np.arange(64), standard=False)
    tiled = [TileScales(Part(kept, part), kept.parts[part][0]) for part in kept.parts if part != "codes"]
    forms = packed_levels(tiled)
    assert forms is not None
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    of_file = (size - numbers * kept.format.bits // 8) * (shape[0] * shape[1] // numbers)
    assert sum(Part(form, "packed").nbytes for form in forms) == of_file
