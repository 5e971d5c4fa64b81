"""States of a batch in a file: safetensors, with the SHA-256 of the content.

Only pages that are in use are written. A file says of which model, and of which layers, sizes and policies it is; a
cache of another model is refused, and so is a file that was changed or cut off. States of bfloat16 and float8 are
written as the unsigned integers of their bits, as not every reader of safetensors knows these types; the file says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from graphopt.errors import InputError
from graphopt.inference.states.store import SavedStates
from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.inference.states.store import Array
    from graphopt.tasks.ports import IntArray

_FORMAT = "graphopt cache 1"

_TYPES = {dtype.name: dtype for dtype in FLOATS.values()}


class SavedPrompt(NamedTuple):
    """The prompt that states were made of.

    Attributes:
        text: what the model read.
        tokens: its tokens.
        system: what a chat with it is told first; ``None`` where the text is no beginning of a chat.
    """

    text: str
    tokens: list[int]
    system: str | None = None


@dataclass(frozen=True)
class StateFile:
    """The content of such a file.

    Attributes:
        model: fingerprint of the model.
        layout: kinds, sizes and policies of the states, see :attr:`StateStore.layout`.
        tokens: tokens that each row has, int64 [batch].
        columns: columns fed so far.
        states: the states.
        prompt: what they were made of, where that was saved.
    """

    model: str
    layout: str
    tokens: IntArray
    columns: int
    states: SavedStates
    prompt: SavedPrompt | None = None

    def write(self, file: Path) -> None:
        """Write the file, whole or not at all."""
        metadata = {
            "format": _FORMAT,
            "model": self.model,
            "layers": self.layout,
            "tokens": json.dumps(self.tokens.tolist()),
            "columns": str(self.columns),
            "oldest": self.states.progress,
        }
        if self.prompt is not None:
            metadata["prompt"] = json.dumps(self.prompt._asdict())
        states = {name: np.ascontiguousarray(array) for name, array in self.states.arrays.items()}
        types = {name: array.dtype.name for name, array in states.items() if array.dtype.kind == "V"}
        if types:
            metadata["types"] = json.dumps(types)
            states |= {name: states[name].view(f"u{states[name].itemsize}") for name in types}
        metadata["sha256"] = _digest(metadata, states)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        os.close(handle)
        try:
            save_file(states, temporary, metadata=metadata)
            Path(temporary).replace(file)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @classmethod
    def load(cls, file: Path) -> StateFile:
        """Read a file.

        Raises:
            InputError: the file is missing, is not a cache file, or its content has changed since it was written.
        """
        if not file.is_file():
            raise InputError("there is no cache file here", file=file)
        try:
            with safe_open(file, framework="numpy") as reader:
                metadata = reader.metadata() or {}
                arrays = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118, it is no dict
        except (SafetensorError, OSError) as error:
            raise InputError(f"the cache file cannot be read: {error}", file=file) from error
        if metadata.get("format") != _FORMAT:
            raise InputError("this is no graphopt cache file", file=file, remedy=f"its format must be {_FORMAT!r}")
        if metadata.pop("sha256", None) != _digest(metadata, arrays):
            raise InputError("the cache file has changed since it was written", file=file, remedy="make it again")
        types = json.loads(metadata.get("types", "{}"))
        arrays |= {name: arrays[name].view(_TYPES[type_name]) for name, type_name in types.items()}
        tokens = np.array(json.loads(metadata["tokens"]), np.int64)
        states = SavedStates(arrays, metadata["oldest"])
        prompt = SavedPrompt(**json.loads(metadata["prompt"])) if "prompt" in metadata else None
        return cls(metadata["model"], metadata["layers"], tokens, int(metadata["columns"]), states, prompt)


def _digest(metadata: Mapping[str, str], states: Mapping[str, Array]) -> str:
    """Return the SHA-256 of metadata and tensors, independent of their order in the file."""
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, array in sorted(states.items()):
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
