"""Inputs that were given: an ``.npz`` file, a folder of them, or a folder of ``.npy`` files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from graphopt.tasks.ports import Array, Port

_FORMS = (
    "give an .npz file with an array for each input, a folder of such files, or a folder of .npy files named as the "
    "inputs, or, for a graph of one input, one sample each"
)


def read_samples(path: Path, ports: Sequence[Port]) -> list[dict[str, Array]]:
    """Read the inputs of one or more calls.

    An array with one axis more than its input holds a sample in each of its rows, and so does one whose first axis is
    longer than the size that the graph states for it. Arrays of one sample beside them serve all.

    Args:
        path: an ``.npz`` file, or a folder.
        ports: the inputs of the graph.

    Raises:
        InputError: a file cannot be read, lacks an input, or an array does not fit its input: names file, input, shape.
    """
    if path.is_file():
        return list(_samples_of(_read_archive(path), path, ports))
    if not path.is_dir():
        raise InputError("there are no inputs here", file=path, remedy=_FORMS)
    archives, arrays = sorted(path.glob("*.npz")), sorted(path.glob("*.npy"))
    if archives:
        return [sample for file in archives for sample in _samples_of(_read_archive(file), file, ports)]
    if not arrays:
        raise InputError("the folder holds no .npz and no .npy file", file=path, remedy=_FORMS)
    by_name = {file.stem: file for file in arrays}
    if all(port.name in by_name for port in ports):
        return list(_samples_of({port.name: _read_array(by_name[port.name]) for port in ports}, path, ports))
    if len(ports) > 1:
        missing = next(port.name for port in ports if port.name not in by_name)
        raise InputError("the folder has no .npy file for an input", file=path, tensor=missing, remedy=_FORMS)
    return [sample for file in arrays for sample in _samples_of({ports[0].name: _read_array(file)}, file, ports)]


def _read_archive(file: Path) -> dict[str, Array]:
    if file.suffix == ".npy":
        raise InputError("the file holds one array without a name", file=file, remedy=_FORMS)
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged archive raises whatever zipfile and NumPy raise
        raise InputError(f"the inputs cannot be read ({error})", file=file, remedy=_FORMS) from error


def _read_array(file: Path) -> Array:
    try:
        array: Array = np.load(file, allow_pickle=False)
    except Exception as error:  # as above
        raise InputError(f"the array cannot be read ({error})", file=file) from error
    return array


def _samples_of(arrays: Mapping[str, Array], file: Path, ports: Sequence[Port]) -> Iterator[dict[str, Array]]:
    """Yield the samples that some arrays hold.

    Raises:
        InputError: an input is missing, an array does not fit, or arrays hold different numbers of samples.
    """
    rows = {port.name: _rows_of(arrays, port, file) for port in ports}
    counts = {name: len(values) for name, values in rows.items()}
    count = max(counts.values(), default=1)
    odd = next((name for name, value in counts.items() if value not in (1, count)), None)
    if odd is not None:
        raise InputError(
            f"it holds {counts[odd]} samples, and another input {count}", file=file, tensor=odd, remedy=_FORMS
        )
    for number in range(count):
        yield {name: values[number if len(values) > 1 else 0] for name, values in rows.items()}


def _rows_of(arrays: Mapping[str, Array], port: Port, file: Path) -> list[Array]:
    if port.name not in arrays:
        names = ", ".join(arrays) or "nothing"
        raise InputError(f"the inputs lack one of the graph; there is {names}", file=file, tensor=port.name)
    array = arrays[port.name]
    rank, first = len(port.shape), next(iter(_sizes_of(port)), None)
    if array.ndim == rank + 1:
        parts = list(array)
    elif array.ndim == rank and first and len(array) > first and len(array) % first == 0:
        parts = list(array.reshape(-1, first, *array.shape[1:]))
    else:
        parts = [array]
    return [_fitting(part, port, file) for part in parts]


def _sizes_of(port: Port) -> list[int | None]:
    """Return the sizes of an input, ``None`` where one varies, which some exporters write as -1."""
    return [None if size is None or size < 0 else size for size in port.shape]


def _fitting(array: Array, port: Port, file: Path) -> Array:
    """Return ``array`` in the type of its input.

    Raises:
        InputError: the shape is another one, or numbers would be lost.
    """
    sizes = zip(array.shape, _sizes_of(port), strict=False)
    if array.ndim != len(port.shape) or any(size not in (None, length) for length, size in sizes):
        shape = ", ".join("?" if size is None else str(size) for size in _sizes_of(port))
        raise InputError(f"the graph takes the shape [{shape}]", file=file, tensor=port.name, shape=list(array.shape))
    if port.dtype is None or array.dtype == port.dtype:
        return np.ascontiguousarray(array)
    cast: Any = array.astype(port.dtype)
    if np.dtype(port.dtype).kind in "iub" and not np.array_equal(cast, array):
        raise InputError(
            f"numbers of the type {array.dtype} do not fit into the input's {port.dtype}", file=file, tensor=port.name
        )
    return np.ascontiguousarray(cast)
