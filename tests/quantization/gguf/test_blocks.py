from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.quantization.gguf.blocks import Ggml, block_of, is_decodable
from graphopt.quantization.gguf.file import open_gguf
from tests import ggufs

# Those that transformers decodes too, by code of its own.
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
SHAPE = (3, 5, 512)


def write(folder: Path, kind: str, ahead: int = 7) -> tuple[Ggml, np.ndarray]:
    """Write a file with one tensor at an odd place; return its expression and what it means by other code."""
    array = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    data, expected = ggufs.encode(array, kind)
    path = folder / f"{kind}-{ahead}"
    path.write_bytes(bytes(ahead) + data.tobytes())
    return Ggml(str(path), ahead, kind, SHAPE), expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_decoded_exactly(kind: str, tmp_path: Path) -> None:
    tensor, expected = write(tmp_path, kind)
    assert np.array_equal(tensor.numpy(), expected)
    assert np.abs(expected).max() > 0.01
    assert tensor.numpy().dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_region_has_the_same_bits(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("region")
    tensor, expected = write(folder, kind)
    region = []
    for size in SHAPE:
        start = data.draw(st.integers(0, size))
        region.append(slice(start, data.draw(st.integers(start, size))))
    assert np.array_equal(tensor.evaluate(tuple(region)), expected[tuple(region)])


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    tensor, _ = write(tmp_path, "Q4_1", ahead=7)
    elsewhere, _ = write(tmp_path, "Q4_1", ahead=100)
    assert tensor.digest == elsewhere.digest
    assert tensor.digest != dataclasses.replace(tensor, dims=(15, 512)).digest
    content = bytearray(Path(elsewhere.path).read_bytes())
    content[-1] ^= 1
    Path(elsewhere.path).write_bytes(content)
    assert dataclasses.replace(elsewhere).digest != tensor.digest


def test_it_travels_to_other_processes(tmp_path: Path) -> None:
    tensor, expected = write(tmp_path, "Q6_K")
    copy = pickle.loads(pickle.dumps(tensor))
    assert copy.digest == tensor.digest
    assert np.array_equal(copy.numpy(), expected)
    assert str(copy) == "ggml(Q6_K-7, 7, Q6_K[3, 5, 512])"


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    tensor = Ggml(str(tmp_path / "absent"), 0, "Q4_0", (2, 32))
    assert tensor.nbytes == 256
    with pytest.raises(FileNotFoundError):
        tensor.numpy()


def test_blocks_are_of_the_size_that_ggml_says() -> None:
    assert block_of("Q4_1") == (32, 20)
    assert block_of("F16") == (1, 2)
    assert is_decodable("IQ4_XS")
    assert not is_decodable("I8")


def test_tensors_of_a_file_are_those_that_its_own_reader_decodes(tmp_path: Path) -> None:
    ggufs.write_llama(ggufs.llama(), tmp_path / "llama.gguf", ggufs.MIXED_TYPES)
    tensors = open_gguf(tmp_path / "llama.gguf").tensors
    reader = gguf.GGUFReader(tmp_path / "llama.gguf")
    assert [entry.name for entry in reader.tensors] == list(tensors)
    for entry in reader.tensors:
        assert np.array_equal(tensors[entry.name].numpy(), gguf.dequantize(entry.data, entry.tensor_type)), entry.name
