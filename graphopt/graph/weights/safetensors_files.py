"""The tensors of a checkpoint in safetensors files, as expressions: headers are parsed, and no weight is read."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.graph.weights.leaves import StoredBytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from graphopt.graph.weights.expression import Expression

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Names of https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs
_TYPES = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "I16": ir.DataType.INT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "U16": ir.DataType.UINT16,
    "U32": ir.DataType.UINT32,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "F8_E5M2": ir.DataType.FLOAT8E5M2,
    "F8_E8M0": ir.DataType.FLOAT8E8M0,
    "BOOL": ir.DataType.BOOL,
}


def tensors_of_folder(folder: Path) -> dict[str, Expression] | None:
    """Return the tensors of a Hugging Face folder by name; ``None`` if its weights are in files of another kind.

    Raises:
        InputError: a file is missing, truncated or damaged.
    """
    if (folder / SINGLE).is_file():
        return dict(tensors_of_file(folder / SINGLE))
    if not (folder / INDEX).is_file():
        return None
    return tensors_of_files([folder / name for name in _shards(folder / INDEX)])


def tensors_of_files(files: list[Path]) -> dict[str, Expression]:
    """Return the tensors of several files by name.

    Raises:
        InputError: a file is missing, truncated or damaged.
    """
    return {name: tensor for file in files for name, tensor in tensors_of_file(file)}


def tensors_of_file(file: Path) -> Iterator[tuple[str, Expression]]:
    """Yield name and expression of each tensor in one file.

    Raises:
        InputError: the file is missing, truncated or damaged, or holds a type that has no counterpart in ONNX.
    """
    header, start = _header(file)
    end = file.stat().st_size
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, dims = _TYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
            first, last = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damage(file, f"its header says {entry} of this tensor", name) from error
        if last - first != math.prod(dims) * kind.bitwidth // 8 or first < 0:
            raise _damage(file, f"{last - first} bytes are not a {kind.name} tensor", name, dims)
        if start + last > end:
            raise _damage(file, f"it ends at byte {end}, within this tensor", name, dims)
        yield name, StoredBytes(str(file.absolute()), start + first, kind, dims)


def _header(file: Path) -> tuple[Mapping[str, Any], int]:
    """Return what the header of a file says, and where its tensors begin."""
    if not file.is_file():
        raise InputError("a file of the checkpoint is missing", file=file, remedy="download or copy it again")
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= file.stat().st_size - 8:
            raise _damage(file, "its header is cut off")
        try:
            header = json.loads(stream.read(size))
        except ValueError as error:
            raise _damage(file, f"its header cannot be read ({error})") from error
    if not isinstance(header, dict):
        raise _damage(file, "its header is no table of tensors")
    return header, 8 + size


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damage(index, f"it does not say which file holds which tensor ({error!r})") from error


def _damage(file: Path, problem: str, tensor: str | None = None, shape: tuple[int, ...] | None = None) -> InputError:
    return InputError(
        f"the file is truncated or damaged: {problem}",
        file=file,
        tensor=tensor,
        shape=shape,
        remedy="download or copy it again",
    )
