"""Messages of bounded size: large arrays, and whatever else is large, lie in a shared folder under their digests."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.errors import InputError
from graphopt.graph.weights.disk import writing

ARRAY_BYTES = 1 << 12
"""Bytes of an array from which on it lies in the folder."""

LIMIT = 1 << 14
"""The most bytes of a message: one that would be larger lies in the folder too, and its digest is sent."""


@dataclass(frozen=True)
class Parcel:
    """A value on its way to another process.

    Attributes:
        content: its pickle; empty where that lies in the folder.
        digest: SHA-256 of a pickle that lies in the folder; empty where it does not.
        arrays: SHA-256 of the bytes of each array that lies in the folder.
        folder: the folder; empty where nothing lies in one.
    """

    content: bytes
    digest: str
    arrays: tuple[str, ...]
    folder: str


def wrap(value: object, folder: Path | None) -> Parcel:
    """Return the parcel of a value, and write what is large to a folder; what is there already is not written again.

    Raises:
        InputError: the disk is full, or there is no folder and the value is large.
    """
    digests: list[str] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        content = buffer.raw()
        if content.nbytes < ARRAY_BYTES or folder is None:
            return True
        digests.append(_keep(content, folder))
        return False

    content, digest = pickle.dumps(value, protocol=5, buffer_callback=is_small), ""
    if len(content) + 64 * len(digests) > LIMIT:
        if folder is None:
            raise InputError(
                f"a task of {len(content):,} bytes cannot be sent to a cluster without a folder that its workers see",
                remedy=f"name a work folder, or send less than {LIMIT:,} bytes",
            )
        content, digest = b"", _keep(memoryview(pickle.dumps((content, digests))), folder)
        digests.clear()
    return Parcel(content, digest, tuple(digests), "" if folder is None else str(folder))


def unwrap(parcel: Parcel) -> Any:
    """Return the value of a parcel; its large arrays are read-only, and mapped from the folder.

    Raises:
        InputError: a file of the folder is missing.
    """
    content, arrays = parcel.content, parcel.arrays
    if parcel.digest:
        content, arrays = pickle.loads(_bytes_of(parcel.digest, parcel.folder))
    return pickle.loads(content, buffers=[_bytes_of(digest, parcel.folder) for digest in arrays])


def _keep(content: memoryview, folder: Path) -> str:
    """Write bytes to the folder, whole or not at all, and return their digest."""
    digest = hashlib.sha256(content).hexdigest()
    file = folder / digest
    if file.is_file() and file.stat().st_size == content.nbytes:
        return digest
    folder.mkdir(exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder)
    try:
        with writing(folder, content.nbytes), os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
    return digest


def _bytes_of(digest: str, folder: str) -> Any:
    """Return the bytes of a file of the folder, mapped."""
    file = Path(folder) / digest
    try:
        return np.memmap(file, np.uint8, mode="r")
    except FileNotFoundError as error:
        raise InputError(
            "data of a task is not in the folder that all processes share",
            file=file,
            remedy="was it removed meanwhile?",
        ) from error
