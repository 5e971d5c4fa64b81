from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from graphopt.errors import InputError
from graphopt.graph.weights.safetensors_files import INDEX, SINGLE, tensors_of_folder

TENSORS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "gain": np.array([1.5, -2.0, 3.0], ml_dtypes.bfloat16),
    "half": np.ones((2, 2), np.float16),
    "ids": np.arange(5),
    "flags": np.array([True, False]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


def test_tensors_are_those_that_were_saved(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    tensors = tensors_of_folder(tmp_path)
    assert tensors is not None
    assert tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert tensors[name].dtype.numpy() == array.dtype
        assert np.array_equal(tensors[name].numpy(), array), name


def test_several_files(tmp_path: Path) -> None:
    halves = [dict(list(TENSORS.items())[:3]), dict(list(TENSORS.items())[3:])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"{number}.safetensors")
    files = {name: f"{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    tensors = tensors_of_folder(tmp_path)
    assert tensors is not None
    assert {name: tensor.numpy().tolist() for name, tensor in tensors.items()} == {
        name: array.tolist() for name, array in TENSORS.items()
    }
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(InputError, match=r"a file of the checkpoint is missing.*1\.safetensors"):
        tensors_of_folder(tmp_path)


def test_weights_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert tensors_of_folder(tmp_path) is None


@pytest.mark.parametrize("size", [0, 7, 12, -1])
def test_truncated(size: int, tmp_path: Path) -> None:
    file = tmp_path / SINGLE
    save_file(TENSORS, file)
    content = file.read_bytes()
    file.write_bytes(content[:size])
    with pytest.raises(InputError, match="truncated or damaged"):
        tensors_of_folder(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]},
        {"dtype": "F32"},
        7,
    ],
)
def test_damaged_header(entry: object, tmp_path: Path) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(InputError, match=r"truncated or damaged.*tensor=w"):
        tensors_of_folder(tmp_path)


@pytest.mark.parametrize("header", [b"{", b"[1]", b'"x"'])
def test_header_that_is_none(header: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match="its header"):
        tensors_of_folder(tmp_path)
