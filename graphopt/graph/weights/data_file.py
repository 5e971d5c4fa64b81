"""A model, and its weights in a file or several: they are evaluated by many workers, each at its offset there."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights.disk import require_space, reserve, writing
from graphopt.graph.weights.evaluator import OnTensor, cost_of, group_expressions, run_tasks
from graphopt.graph.weights.expression import Array, Expression
from graphopt.graph.weights.leaves import StoredBytes, write_array
from graphopt.graph.weights.store import with_parts_in_memory
from graphopt.graph.weights.tensor import WeightTensor, expression_of, source_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator
    from concurrent.futures import Executor

INLINE = 256
"""Tensors of at most so many bytes stand in the model file itself: onnxruntime wants constants of shapes there."""


class _Location(NamedTuple):
    """Where a tensor lies: a file of weights, and the offset in it, in bytes."""

    file: Path
    offset: int


# For each expression its location, or None for one that is returned instead.
_Task = list[tuple[Expression, _Location | None]]


def part_name(data: str, part: int) -> str:
    """Return the name of a file of weights: ``data`` itself, then ``data.1``, ``data.2`` and so on."""
    return f"{data}.{part}" if part else data


def is_part(name: str, data: str) -> bool:
    """Return whether ``name`` is one that :func:`part_name` gives."""
    return name == data or re.fullmatch(re.escape(data) + r"\.[1-9]\d*", name, re.ASCII) is not None


def save_model(
    model: ir.Model,
    file: Path,
    data: str,
    *,
    executor: Executor | None = None,
    on_tensor: OnTensor | None = None,
    weights: bool = True,
    part_size: int | None = None,
    in_place: bool = False,
) -> None:
    """Write a model to ``file`` and its weights, in the order of the graph and without gaps, to ``data`` beside it.

    What two initializers share, a tensor or bytes of a file, is written once: both then name the same bytes.

    The model stays as it is. Weights are evaluated one by one in each worker, so each holds its largest, not their sum.

    Args:
        model: the model.
        file: the ``.onnx`` file.
        data: the name of the file of weights.
        executor: what evaluates weights and copies what is stored; ``None`` for this process.
        on_tensor: called with how many tensors are written, of how many.
        weights: whether to write the weights. Without them only constants that are in memory are written; the model
            says of every other one where in ``data`` it would be.
        part_size: the most bytes in a file of weights; what does not fit goes on in ``data.1``, ``data.2`` and so on. A
            tensor that is larger has a file of its own. ``None`` for one file.
        in_place: leave weights that lie in files where they are. The model names all files from the root of the disk
            on, and can be opened with that as the folder of its external data only.

    Raises:
        InputError: the disk is too small.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    tensors = {value: value.const_value for value in values if value.const_value is not None}
    external = {value: tensor for value, tensor in tensors.items() if _is_external(tensor, weights)}
    file = file.absolute() if in_place else file
    root = Path(file.anchor) if in_place else file.parent
    originals = _originals(external)
    existing = _locations_below(root, external) if in_place else {}
    sizes = {value: external[value].nbytes for value in dict.fromkeys(originals.values()) if value not in existing}
    locations = _new_locations(sizes, file.parent, data, part_size)
    arrays: dict[ir.Value, Array] = {}
    if weights:
        _reserve_files(file.parent / data, sizes, locations)
        to_write = {v: tensor for v, tensor in tensors.items() if v not in existing and originals.get(v, v) is v}
        arrays = _write_tensors(to_write, locations, executor, on_tensor)
    locations |= existing
    stand_ins: dict[ir.Value, ir.TensorProtocol] = {
        value: ir.Tensor(array, dtype=tensors[value].dtype, name=tensors[value].name) for value, array in arrays.items()
    }
    for value, tensor in external.items():
        location = locations[value if value in locations else originals[value]]
        stand_ins[value] = _external_tensor(tensor, location, root)
    with _substitution(stand_ins), writing(file.parent):
        ir.save(model, file)


def _originals(tensors: dict[ir.Value, ir.TensorProtocol]) -> dict[ir.Value, ir.Value]:
    """Return for each value the first that has the same bytes."""
    first: dict[Hashable, ir.Value] = {}
    return {value: first.setdefault(source_of(tensor), value) for value, tensor in tensors.items()}


@contextlib.contextmanager
def _substitution(tensors: dict[ir.Value, ir.TensorProtocol]) -> Iterator[None]:
    """Let values have other tensors while the block runs."""
    before = {value: value.const_value for value in tensors}
    try:
        for value, tensor in tensors.items():
            value.const_value = tensor
        yield
    finally:
        for value, original in before.items():
            value.const_value = original


def _is_external(tensor: ir.TensorProtocol, weights: bool) -> bool:
    if not weights:
        return isinstance(tensor, WeightTensor)
    return tensor.nbytes > INLINE and tensor.dtype != ir.DataType.STRING


def _external_tensor(tensor: ir.TensorProtocol, location: _Location, root: Path) -> ir.ExternalTensor:
    path, shape = location.file.relative_to(root).as_posix(), ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(
        path, location.offset, tensor.nbytes, tensor.dtype, shape=shape, name=tensor.name or "", base_dir=root
    )


def _locations_below(root: Path, tensors: dict[ir.Value, ir.TensorProtocol]) -> dict[ir.Value, _Location]:
    """Return where the tensors lie that lie in files below ``root``."""
    locations = {}
    for value, tensor in tensors.items():
        source = expression_of(tensor) if isinstance(tensor, (WeightTensor, ir.ExternalTensor)) else None
        if isinstance(source, StoredBytes) and Path(source.path).anchor == str(root):
            locations[value] = _Location(Path(source.path), source.offset)
    return locations


def _new_locations(
    sizes: dict[ir.Value, int], folder: Path, data: str, part_size: int | None
) -> dict[ir.Value, _Location]:
    """Return where each tensor goes: one behind the other, in a new file where ``part_size`` is reached."""
    locations, part, end = {}, 0, 0
    for value, size in sizes.items():
        if part_size is not None and end and end + size > part_size:
            part, end = part + 1, 0
        locations[value] = _Location(folder / part_name(data, part), end)
        end += size
    return locations


def _reserve_files(first: Path, sizes: dict[ir.Value, int], locations: dict[ir.Value, _Location]) -> None:
    require_space(first.parent, sum(sizes.values()))
    totals = {first: 0}  # the first file is there even where no tensor is written
    for value, location in locations.items():
        totals[location.file] = totals.get(location.file, 0) + sizes[value]
    for file, size in totals.items():
        reserve(file, size)


def _write_tensors(
    tensors: dict[ir.Value, ir.TensorProtocol],
    locations: dict[ir.Value, _Location],
    executor: Executor | None,
    on_tensor: OnTensor | None,
) -> dict[ir.Value, Array]:
    """Write tensors to their locations, and return the arrays of those that have none and are not in memory."""
    count = 0

    def report(value: ir.Value) -> None:
        nonlocal count
        count += value in locations
        if value in locations and on_tensor is not None:
            on_tensor(count, len(locations))

    lazy = [value for value, tensor in tensors.items() if isinstance(tensor, (WeightTensor, ir.ExternalTensor))]
    # What is in memory is not sent to another process only to be written.
    for value in locations.keys() - set(lazy):
        with _open_at(locations[value]) as stream:
            stream.write(tensors[value].tobytes())
        report(value)
    expressions = [expression_of(tensors[value]) for value in lazy]
    groups = group_expressions(expressions)
    tasks: list[_Task] = [[(expressions[number], locations.get(lazy[number])) for number in group] for group in groups]
    sizes = [cost_of([expressions[number] for number in group]) for group in groups]
    small: dict[ir.Value, Array] = {}
    for index, arrays in run_tasks(executor, _write, tasks, sizes):
        for number, array in zip(groups[index], arrays, strict=True):
            if array is not None:
                small[lazy[number]] = array
            report(lazy[number])
    return small


@contextlib.contextmanager
def _open_at(location: _Location) -> Iterator[BinaryIO]:
    with writing(location.file.parent), location.file.open("r+b") as stream:
        stream.seek(location.offset)
        yield stream


def _write(task: _Task) -> list[Array | None]:
    """Write what has a location; return an array for each expression that has none."""
    expressions, small = with_parts_in_memory([expression for expression, _ in task]), []
    for expression, (_, location) in zip(expressions, task, strict=True):
        array = expression.numpy()
        small.append(np.array(array) if location is None else None)
        if location is not None:
            with _open_at(location) as stream:
                write_array(array, expression.dtype, stream)
    return small
