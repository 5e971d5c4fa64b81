"""Codes of vectors of a GGUF file mean the file's numbers to the last bit, in the file's bytes."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest

from graphopt.quantization.entry_codes import KeptEntries
from graphopt.quantization.gguf.blocks import Ggml
from graphopt.quantization.gguf.codes import GgmlCodes
from graphopt.quantization.gguf.entries import GgmlEntries, has_entries
from graphopt.quantization.matrix_codes import StackedCodes
from graphopt.runtime_ops.dequantize_codebook.spec.op import reference
from tests import ggufs

KINDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
SHAPE = (35, 512)
ORDER = np.array([*range(34, -1, -1), 3, 3], np.int64)


def tensor_of(kind: str, folder: Path) -> Ggml:
    data, values = ggufs.encode(np.zeros(SHAPE, np.float32), kind)
    # transformers and gguf, which share no code, agree on what random bytes mean
    assert np.array_equal(values, gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    path = folder / kind
    path.write_bytes(data.tobytes())
    return Ggml(str(path), 0, kind, SHAPE)


def matrix_of_parts(entries: KeptEntries) -> np.ndarray:
    """Return the matrix that the parts mean by the operator's definition, float32 [rows of the file, width]."""
    parts = entries.evaluate()
    assert {name: (ir.DataType.from_numpy(part.dtype), part.shape) for name, part in parts.items()} == entries.parts
    return reference(
        *parts.values(), **entries.codebook.operands, **entries.codebook.attributes(*entries.matrix_shape)
    ).T


@pytest.mark.parametrize("kind", KINDS)
def test_codes_mean_the_same_bits(kind: str, tmp_path: Path) -> None:
    tensor = tensor_of(kind, tmp_path)
    entries = KeptEntries(GgmlEntries(tensor), ORDER)
    assert np.array_equal(matrix_of_parts(entries), tensor.numpy()[ORDER])
    copy = pickle.loads(pickle.dumps(entries))
    assert copy.digest == entries.digest
    assert np.array_equal(matrix_of_parts(copy), tensor.numpy()[ORDER])


@pytest.mark.parametrize("kind", KINDS)
def test_they_take_the_bytes_of_the_file(kind: str, tmp_path: Path) -> None:
    tensor = tensor_of(kind, tmp_path)
    entries = KeptEntries(GgmlEntries(tensor), np.arange(32))  # whole tiles of columns
    byte_count = sum(part.nbytes for part in entries.evaluate().values())
    assert byte_count == tensor.stored_bytes()[:32].nbytes


def test_stacks_and_several_tensors_are_one_matrix_of_rows(tmp_path: Path) -> None:
    tensor = tensor_of("IQ2_XXS", tmp_path)
    experts = GgmlEntries(dataclasses.replace(tensor, dims=(5, 7, 512)))
    stack = StackedCodes((experts, GgmlEntries(tensor)))
    rows = np.array([0, 69, 34, 35], np.int64)
    matrix = np.concatenate([tensor.numpy(), tensor.numpy()])
    assert np.array_equal(matrix_of_parts(KeptEntries(stack, rows)), matrix[rows])


def test_other_types_have_no_codes_of_vectors(tmp_path: Path) -> None:
    assert not has_entries(Ggml("", 0, "IQ4_XS", SHAPE))
    assert not has_entries(Ggml("", 0, "IQ2_S", (512,)))
    with pytest.raises(ValueError, match="no codes of vectors"):
        GgmlEntries(Ggml("x", 0, "Q4_0", SHAPE))
    data = gguf.quantize(np.zeros(SHAPE, np.float32), gguf.GGMLQuantizationType.Q4_0)
    (tmp_path / "Q4_0").write_bytes(data.tobytes())
    with pytest.raises(ValueError, match="no codes of vectors"):
        KeptEntries(GgmlCodes(Ggml(str(tmp_path / "Q4_0"), 0, "Q4_0", SHAPE)), ORDER)
