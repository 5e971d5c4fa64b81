"""A GGUF file, opened and checked: its metadata, and its tensors as expressions."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError
from graphopt.quantization.gguf.blocks import Ggml, import_gguf, is_decodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from graphopt.graph.weights import Expression

MAGIC = b"GGUF"
_VERSIONS = (2, 3)


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds.

    Attributes:
        path: the file.
        metadata: its keys and values; arrays of strings, such as the vocabulary, are left out.
        tensors: its tensors by name, none of them read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: Mapping[str, Expression]

    @property
    def architecture(self) -> str:
        """What kind of model it is, as llama.cpp calls it."""
        return str(self.metadata["general.architecture"])

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture, such as ``rope.freq_base``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and check that all of it can be read.

    Raises:
        InputError: it is not a GGUF file, it is truncated, one part of several, big-endian or of another version, or
            the type of a tensor is unknown.
        MissingDependencyError: the package ``gguf`` is not installed.
    """
    _check_head(path)
    gguf = import_gguf()
    try:
        with read_once():
            reader = gguf.GGUFReader(path)
    except Exception as error:
        raise InputError(
            f"the file cannot be read as GGUF ({type(error).__name__}: {error})",
            file=path,
            remedy="is it truncated? Else it may hold types that this version of the package gguf does not know",
        ) from error
    metadata = {name: field.contents() for name, field in reader.fields.items() if not _is_strings(gguf, field)}
    if "general.architecture" not in metadata:
        raise InputError("the file does not say of which architecture it is", file=path)
    if metadata.get("split.count", 0) > 1:
        raise InputError(
            f"the file is one of {metadata['split.count']} parts of a model",
            file=path,
            remedy="join them with llama.cpp's `llama-gguf-split --merge`",
        )
    tensors = {}
    for tensor in reader.tensors:
        kind, dims = tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape.tolist()))
        if not is_decodable(kind):
            raise InputError(
                f"tensors of type {kind} cannot be decoded",
                file=path,
                tensor=tensor.name,
                shape=dims,
                remedy="the package gguf has no decoder for it; give a file of another type",
            )
        tensors[str(tensor.name)] = Ggml(str(path.absolute()), int(tensor.data_offset), kind, dims)
    return GgufFile(path, metadata, tensors)


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Within it, the package ``gguf`` reads a file once and names the tensors of an architecture once.

    transformers opens the file for the configuration, opens it again for the tokenizer, and asks for the names once for
    each module of the model. A vocabulary of 49,152 tokens takes four seconds to read.

    Raises:
        MissingDependencyError: the package ``gguf`` is not installed.
    """
    gguf = import_gguf()
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    if hasattr(names, "cache_info"):
        yield
        return
    reader_of_path = functools.cache(_reader_of(gguf))
    gguf.GGUFReader = lambda path: reader_of_path(os.path.realpath(path))
    gguf.get_tensor_name_map = functools.cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _check_head(path: Path) -> None:
    with path.open("rb") as stream:
        head = stream.read(24)
    if head[:4] != MAGIC:
        raise InputError("the file does not begin as a GGUF file does", file=path, remedy="is it a GGUF file?")
    if len(head) < 24:
        raise InputError("the file is truncated", file=path, remedy="fetch it again")
    version = int.from_bytes(head[4:8], "little")
    if version & 0xFFFF == 0:
        raise InputError("the file is big-endian", file=path, remedy="convert it with `gguf-convert-endian`")
    if version not in _VERSIONS:
        raise InputError(
            f"the file is GGUF version {version}, and versions {_VERSIONS[0]} and {_VERSIONS[1]} can be read",
            file=path,
            remedy="convert it again with a current llama.cpp",
        )


def _reader_of(gguf: Any) -> Any:
    """Return the package's reader with the file as a plain array: slices of a ``memmap`` take four times as long."""

    def give(reader: Any) -> Any:
        return reader.__dict__["mapped"]

    def take(reader: Any, array: Any) -> None:
        reader.__dict__["mapped"] = array.view(np.ndarray)

    return type("Reader", (gguf.GGUFReader,), {"data": property(give, take)})


def _is_strings(gguf: Any, field: Any) -> bool:
    kinds = gguf.GGUFValueType
    return list(field.types) == [kinds.ARRAY, kinds.STRING]
