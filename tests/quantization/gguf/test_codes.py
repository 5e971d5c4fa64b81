from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest

from graphopt.graph.weights import Part
from graphopt.quantization.gguf.blocks import Ggml
from graphopt.quantization.gguf.codes import GgmlCodes, has_codes
from graphopt.quantization.matrix_codes import KeptCodes, StackedCodes
from graphopt.runtime_ops.dequantize.spec.op import reference
from tests import ggufs

SHAPE = (6, 512)
EXACT = ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
WITH_MINIMUMS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
ORDER = np.array([5, 0, 0, 3], np.int64)


def tensor_of(kind: str, folder: Path) -> Ggml:
    array = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    array[2:4, 32:96] = 0  # groups without a step
    data, values = ggufs.encode(array, kind)
    assert np.array_equal(values, gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    path = folder / kind
    path.write_bytes(b"ahead" + data.tobytes())
    return Ggml(str(path), 5, kind, SHAPE)


def matrix_of_parts(codes: KeptCodes) -> np.ndarray:
    """Return the matrix that the parts mean by the operators' own definitions, float32 [rows, width]."""
    parts = codes.evaluate()
    assert {name: (ir.DataType.from_numpy(part.dtype), part.shape) for name, part in parts.items()} == codes.parts
    if codes.is_standard:
        axis = int(codes.looked_up)
        scales = np.repeat(parts["scales"].astype(np.float32), codes.group, axis)
        numbers = parts["codes"].astype(np.float32) * scales
        return numbers if codes.looked_up else numbers.T
    minimums = "minimums" in parts
    zeros = parts["minimums"] if minimums else parts.get("zero_points", np.zeros((1, 1), np.float32))
    table = codes.format.values.astype(np.float32)
    return reference(parts["codes"], parts["scales"], table, zeros, codes.group, minimums).T


@pytest.mark.parametrize("kind", [*EXACT, *WITH_MINIMUMS])
@pytest.mark.parametrize("looked_up", [False, True])
def test_codes_mean_the_same_bits(kind: str, looked_up: bool, tmp_path: Path) -> None:
    tensor = tensor_of(kind, tmp_path)
    if looked_up and kind in WITH_MINIMUMS:
        with pytest.raises(ValueError, match="no codes that can be kept"):
            KeptCodes(GgmlCodes(tensor), ORDER, looked_up=looked_up)
        return
    for standard in (True, False):
        codes = KeptCodes(GgmlCodes(tensor), ORDER, looked_up=looked_up, standard=standard)
        assert np.array_equal(matrix_of_parts(codes), tensor.numpy()[ORDER])


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1", "IQ4_NL", "TQ2_0"])
def test_codes_of_one_level_take_the_bytes_of_the_file(kind: str, tmp_path: Path) -> None:
    codes = KeptCodes(GgmlCodes(tensor_of(kind, tmp_path)), ORDER)
    bits = {"codes": codes.format.bits, **dict.fromkeys(("scales", "minimums"), 32 if codes.is_standard else 16)}
    byte_count = sum(bits[name] * np.prod(shape) // 8 for name, (_, shape) in codes.parts.items())
    of_file = codes.source.source.stored_bytes()[ORDER].nbytes
    # the standard form has scales of 4 bytes, which lower packs into 2
    assert byte_count - of_file == (2 * np.prod(codes.parts["scales"][1]) if codes.is_standard else 0)
    if codes.is_standard:
        own_form = KeptCodes(codes.source, ORDER, standard=False)
        assert own_form.parts["scales"][0] == ir.DataType.FLOAT16


@pytest.mark.parametrize("kind", WITH_MINIMUMS)
def test_minimums_as_zero_points_err_by_rounding_of_float32(kind: str, tmp_path: Path) -> None:
    tensor = tensor_of(kind, tmp_path)
    result, expected = matrix_of_parts(KeptCodes(GgmlCodes(tensor), ORDER, as_zero_points=True)), tensor.numpy()[ORDER]
    groups = np.abs(expected).reshape(len(ORDER), -1, 32).max(-1, keepdims=True)
    # |m| and the span of codes times step are at most twice the largest number of a group. Three roundings: of the zero
    # point, of the difference and of the product, 2^-24 each.
    assert (np.abs(result - expected).reshape(len(ORDER), -1, 32) <= 2 * 3 * 2.0**-24 * groups).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "MXFP4"])
def test_stacked_matrices_and_stacked_tensors_are_one_matrix_of_rows(kind: str, tmp_path: Path) -> None:
    tensor = tensor_of(kind, tmp_path)
    expected = tensor.numpy()
    experts = GgmlCodes(dataclasses.replace(tensor, dims=(3, 2, 512)))
    assert experts.shape == SHAPE
    stack = StackedCodes((experts, GgmlCodes(tensor)))
    assert stack.shape == (12, 512)
    rows = np.array([11, 0, 6, 6, 5], np.int64)
    matrix = np.concatenate([expected, expected])
    assert np.array_equal(matrix_of_parts(KeptCodes(stack, rows)), matrix[rows])
    assert np.array_equal(stack.evaluate((slice(4, 9), slice(32, 64))), matrix[4:9, 32:64])
    assert np.array_equal(matrix_of_parts(KeptCodes(pickle.loads(pickle.dumps(stack)), rows)), matrix[rows])


def test_tensors_of_two_codings_are_not_stacked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not of one coding"):
        StackedCodes(tuple(GgmlCodes(tensor_of(kind, tmp_path)) for kind in ("Q4_0", "Q5_0")))


def test_types_that_no_format_says_have_no_codes(tmp_path: Path) -> None:
    assert not has_codes(Ggml("", 0, "F16", SHAPE))
    assert not has_codes(Ggml("", 0, "BF16", SHAPE))
    assert not has_codes(Ggml("", 0, "Q8_0", (512,)))
    with pytest.raises(ValueError, match="no codes that can be kept"):
        GgmlCodes(Ggml("x", 0, "F16", SHAPE))
    with pytest.raises(ValueError, match="no codes that can be kept"):
        KeptCodes(GgmlCodes(tensor_of("Q4_1", tmp_path)), ORDER, looked_up=True)


def test_codes_are_data_that_travels(tmp_path: Path) -> None:
    source_codes = KeptCodes(GgmlCodes(tensor_of("Q6_K", tmp_path)), ORDER)
    copy = pickle.loads(pickle.dumps(source_codes))
    assert copy.digest == source_codes.digest
    assert KeptCodes(source_codes.source, ORDER[::-1].copy()).digest != source_codes.digest
    codes = Part(copy, "codes")
    assert (codes.dtype, codes.shape) == (ir.DataType.UINT8, (512, 4))
    assert np.array_equal(codes.numpy(), source_codes.evaluate()["codes"])


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    tensor = tensor_of("Q8_0", tmp_path)
    content = bytearray(Path(tensor.path).read_bytes())
    content[5:7] = np.array(np.nan, np.float16).tobytes()
    Path(tensor.path).write_bytes(content)
    with pytest.raises(ValueError, match="beyond its codes"):
        KeptCodes(GgmlCodes(tensor), ORDER).evaluate()
