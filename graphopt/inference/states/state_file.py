"""States of a batch in a file: safetensors of compressed bytes, with the SHA-256 of each tensor.

    pages in use -> groups of pages, each compressed by itself (:mod:`graphopt.inference.states.compression`) -> tensors

The header of safetensors is the index: a group of pages is found, checked and read without those before it. A file says
of which model, and of which layers, sizes and policies it is; a cache of another model is refused before its states are
read, and so is a file that was changed or cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from graphopt.errors import InputError
from graphopt.inference.states.compression import Bytes, Loss, Original, compress, decompress
from graphopt.inference.states.store import SavedStates
from graphopt.runtime_ops.kv_attention.spec.attributes import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from graphopt.tasks.ports import IntArray

_FORMAT = "graphopt cache 5"

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
    """What such a file says of its states; :meth:`states` reads them.

    Attributes:
        file: where it is.
        model: fingerprint of the model.
        layout: kinds, sizes and policies of the states, see :attr:`StateStore.layout`.
        tokens: tokens that each row has, int64 [batch].
        columns: columns fed so far.
        loss: what the file has lost of the states.
        prompt: what they were made of, where that was saved.
    """

    file: Path
    model: str
    layout: str
    tokens: IntArray
    columns: int
    loss: Loss
    prompt: SavedPrompt | None
    _progress: str
    _description: str
    _digests: Mapping[str, str]

    @classmethod
    def write(  # noqa: PLR0913, what a file says
        cls,
        file: Path,
        states: SavedStates,
        *,
        model: str,
        layout: str,
        tokens: IntArray,
        columns: int,
        prompt: SavedPrompt | None = None,
        loss: Loss = "none",
        original: tuple[StateFile, IntArray] | None = None,
    ) -> None:
        """Write a file, whole or not at all; arguments as the attributes.

        Of ``original``, a file that the states were restored from, each row still has so many tokens from the first on,
        int64 [batch]: groups of pages that stayed as they were are taken over from there.
        """
        content, description = _compress(states, tokens, loss, original)
        metadata = {
            "format": _FORMAT,
            "model": model,
            "layers": layout,
            "tokens": json.dumps(tokens.tolist()),
            "columns": str(columns),
            "oldest": states.progress,
            "states": description,
            "digests": json.dumps({name: _digest(tensor) for name, tensor in content.items()}),
        }
        if prompt is not None:
            metadata["prompt"] = json.dumps(prompt._asdict())
        metadata["sha256"] = _digest_of(metadata)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        os.close(handle)
        try:
            save_file(content, temporary, metadata=metadata)
            Path(temporary).replace(file)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @classmethod
    def load(cls, file: Path) -> StateFile:
        """Read what a file says of its states.

        Raises:
            InputError: the file is missing, is not a cache file, or what it says has changed since it was written.
        """
        if not file.is_file():
            raise InputError("there is no cache file here", file=file)
        with _open(file) as reader:
            metadata = reader.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise InputError("this is no graphopt cache file", file=file, remedy=f"its format must be {_FORMAT!r}")
        if metadata.pop("sha256", None) != _digest_of(metadata):
            raise _change_error(file)
        return cls(
            file=file,
            model=metadata["model"],
            layout=metadata["layers"],
            tokens=np.array(json.loads(metadata["tokens"]), np.int64),
            columns=int(metadata["columns"]),
            loss=json.loads(metadata["states"])["loss"],
            prompt=SavedPrompt(**json.loads(metadata["prompt"])) if "prompt" in metadata else None,
            _progress=metadata["oldest"],
            _description=metadata["states"],
            _digests=json.loads(metadata["digests"]),
        )

    def states(self) -> SavedStates:
        """Read the states.

        Raises:
            InputError: a tensor of the file is missing or has changed since it was written.
        """
        with self._reader() as get:
            try:
                arrays = decompress(get, self._description, self.tokens, _TYPES)
            except (SafetensorError, KeyError, ValueError, AssertionError) as error:
                raise InputError(f"the cache file cannot be read: {error}", file=self.file) from error
        return SavedStates(arrays, self._progress)

    @contextmanager
    def _reader(self) -> Iterator[Callable[[str], Bytes]]:
        """Open the file; what is yielded returns a tensor of it, and refuses one that has changed."""
        with _open(self.file) as reader:

            def get(name: str) -> Bytes:
                tensor: Bytes = reader.get_tensor(name)
                if self._digests[name] != _digest(tensor):
                    raise _change_error(self.file)
                return tensor

            yield get


def _compress(
    states: SavedStates, tokens: IntArray, loss: Loss, original: tuple[StateFile, IntArray] | None
) -> tuple[dict[str, Bytes], str]:
    if original is not None:
        file, kept_tokens = original
        try:
            with file._reader() as get:
                before = Original(get, file._description, file.tokens, kept_tokens)
                return compress(states.arrays, states.layers, tokens, loss, before)
        except (InputError, KeyError):
            pass  # the file is another one by now; the states are all here
    return compress(states.arrays, states.layers, tokens, loss)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a file of safetensors.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with safe_open(file, framework="numpy") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        raise InputError(f"the cache file cannot be read: {error}", file=file) from error


def _change_error(file: Path) -> InputError:
    return InputError("the cache file has changed since it was written", file=file, remedy="make it again")


def _digest(tensor: Bytes) -> str:
    return hashlib.sha256(tensor.data).hexdigest()


def _digest_of(metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of metadata, independent of its order in the file."""
    return hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode()).hexdigest()
