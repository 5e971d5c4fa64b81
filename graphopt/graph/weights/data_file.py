"""A model, and its weights in a file or several: they are evaluated by many workers, each into its place there."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights.disk import require_space, reserve, writing
from graphopt.graph.weights.evaluator import OnTensor, cost_of, grouped, run_tasks
from graphopt.graph.weights.expression import Array, Expression
from graphopt.graph.weights.leaves import Stored, write_array
from graphopt.graph.weights.store import with_parts_in_memory
from graphopt.graph.weights.tensor import WeightTensor, expression_of, source_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator
    from concurrent.futures import Executor

INLINE = 256
"""Tensors of at most so many bytes stand in the model file itself: onnxruntime wants constants of shapes there."""

# A file of weights, and the offset of a tensor in it.
_Place = tuple[Path, int]
# For each expression its place, or None for one that is returned instead.
_Task = list[tuple[Expression, _Place | None]]


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

    What two initializers share, a tensor or a place in a file, is written once: both then name the same bytes.

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
    found = [value for graph in model.graphs() for value in graph.initializers.values()]
    before = {value: value.const_value for value in found if value.const_value is not None}
    large = [value for value, tensor in before.items() if tensor.nbytes > INLINE and tensor.dtype != ir.DataType.STRING]
    if not weights:
        large = [value for value, tensor in before.items() if isinstance(tensor, WeightTensor)]
    file = file.absolute() if in_place else file
    base = Path(file.anchor) if in_place else file.parent
    there = _places_of({value: before[value] for value in large}, base) if in_place else {}
    first: dict[Hashable, ir.Value] = {}
    same = {value: first.setdefault(source_of(before[value]), value) for value in large}
    written = [value for value in large if same[value] is value and value not in there]
    sizes = [before[value].nbytes for value in written]
    numbered = _places(sizes, part_size)
    places = {
        value: (file.parent / part_name(data, part), offset)
        for value, (part, offset) in zip(written, numbered, strict=True)
    }
    if weights:
        require_space(file.parent, sum(sizes))
        for part in range(max((part for part, _ in numbered), default=0) + 1):
            here = (size for size, (of, _) in zip(sizes, numbered, strict=True) if of == part)
            reserve(file.parent / part_name(data, part), sum(here))
    try:
        once = {v: tensor for v, tensor in before.items() if v not in there and same.get(v, v) is v}
        small = _write_tensors(once, places, executor, on_tensor) if weights else {}
        for value, array in small.items():
            value.const_value = ir.Tensor(array, dtype=before[value].dtype, name=before[value].name)
        for value in large:
            tensor, (place, offset) = before[value], there.get(value) or places[same[value]]
            shape, name = ir.Shape(tensor.shape.numpy()), tensor.name or ""
            location = place.relative_to(base).as_posix()
            value.const_value = ir.ExternalTensor(
                location, offset, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir=base
            )
        with writing(file.parent):
            ir.save(model, file)
    finally:
        for value, tensor in before.items():
            value.const_value = tensor


def _places_of(tensors: dict[ir.Value, ir.TensorProtocol], root: Path) -> dict[ir.Value, _Place]:
    """Return where the tensors lie that lie in files below ``root``."""
    places = {}
    for value, tensor in tensors.items():
        stored = expression_of(tensor) if isinstance(tensor, (WeightTensor, ir.ExternalTensor)) else None
        if isinstance(stored, Stored) and Path(stored.path).anchor == str(root):
            places[value] = (Path(stored.path), stored.offset)
    return places


def _places(sizes: Iterable[int], part_size: int | None) -> list[tuple[int, int]]:
    """Return in which file each tensor lies, and where in it."""
    places, part, end = [], 0, 0
    for size in sizes:
        if part_size is not None and end and end + size > part_size:
            part, end = part + 1, 0
        places.append((part, end))
        end += size
    return places


def _write_tensors(
    tensors: dict[ir.Value, ir.TensorProtocol],
    places: dict[ir.Value, _Place],
    executor: Executor | None,
    on_tensor: OnTensor | None,
) -> dict[ir.Value, Array]:
    """Write tensors to their places, and return the arrays of those that have none and are not in memory."""
    done, elsewhere = 0, []
    for value, tensor in tensors.items():
        if isinstance(tensor, (WeightTensor, ir.ExternalTensor)):
            elsewhere.append(value)
        elif value in places:
            # What is in memory is not sent to another process only to be written.
            with _at(places[value]) as stream:
                stream.write(tensor.tobytes())
            done = _count(done, value, places, on_tensor)
    expressions = [expression_of(tensors[value]) for value in elsewhere]
    groups = grouped(expressions)
    tasks: list[_Task] = [
        [(expressions[number], places.get(elsewhere[number])) for number in group] for group in groups
    ]
    sizes = [cost_of([expressions[number] for number in group]) for group in groups]
    small: dict[ir.Value, Array] = {}
    for index, arrays in run_tasks(executor, _write, tasks, sizes):
        for number, array in zip(groups[index], arrays, strict=True):
            if array is not None:
                small[elsewhere[number]] = array
            done = _count(done, elsewhere[number], places, on_tensor)
    return small


@contextlib.contextmanager
def _at(place: _Place) -> Iterator[BinaryIO]:
    file, offset = place
    with writing(file.parent), file.open("r+b") as stream:
        stream.seek(offset)
        yield stream


def _count(done: int, value: ir.Value, places: dict[ir.Value, _Place], on_tensor: OnTensor | None) -> int:
    done += value in places
    if value in places and on_tensor is not None:
        on_tensor(done, len(places))
    return done


def _write(task: _Task) -> list[Array | None]:
    evaluated, small = with_parts_in_memory([expression for expression, _ in task]), []
    for expression, (_, place) in zip(evaluated, task, strict=True):
        array = expression.numpy()
        small.append(np.array(array) if place is None else None)
        if place is not None:
            with _at(place) as stream:
                write_array(array, expression.dtype, stream)
    return small
