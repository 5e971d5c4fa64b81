"""Weights of a graph as lazy tensors: own one, rewrite one, make one.

A rewrite composes a function onto the tensor and evaluates nothing; the bytes are read, mapped and written one weight
at a time when the model is saved, so a model larger than memory goes through in a few times that of its largest tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.errors import InputError

Weight = npt.NDArray[Any]

# Numbers in a block; in float64 it and a few temporaries stay near the processor's last cache.
_BLOCK = 1 << 20


class MappedTensor(ir.ExternalTensor):
    """A tensor on disk that is mapped into memory for as long as somebody holds its array, and no longer.

    ``onnx_ir`` keeps each file mapped once a tensor was read: reading all weights of a model one by one then ends with
    the whole model in resident memory.
    """

    def numpy(self) -> Weight:
        """Return the array, read-only; the mapping ends when the array does."""
        array = super().numpy()
        self._array = self.raw = None
        return array

    def tobytes(self) -> bytes:
        """Return a copy of the stored bytes."""
        stored = super().tobytes()
        self._array = self.raw = None
        return stored

    def __array__(self, dtype: Any = None) -> Weight:
        return self.numpy().__array__(dtype)


def map_on_demand(model: ir.Model) -> None:
    """Let every weight on disk be mapped only while it is read."""
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and not isinstance(tensor, MappedTensor):
            value.const_value = MappedTensor(
                tensor.location,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
                base_dir=tensor.base_dir,
            )


def weight_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return the initializer that is input ``index`` of ``node``, or ``None`` where it is computed or absent."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return value if value is not None and value.is_initializer() and value.const_value is not None else None


def own(node: ir.Node, index: int) -> ir.Value:
    """Return input ``index`` of ``node`` as an initializer that nobody else uses, copied (lazily) if it was shared.

    Exporters give equal constants one initializer, and tied models share embedding and head: a pass that edits a
    weight owns it first.
    """
    value = weight_of(node, index)
    if value is None or node.graph is None:
        raise ValueError(f"input {index} of {node.name} is no initializer")
    if len(value.uses()) == 1 and not value.is_graph_output():
        return value
    copy = new_weight(node.graph, f"{value.name}.{node.name}", value.const_value)
    copy.metadata_props.update(value.metadata_props)
    node.replace_input_with(index, copy)
    return copy


def new_weight(graph: ir.Graph, name: str, tensor: ir.TensorProtocol | None) -> ir.Value:
    """Register ``tensor`` as a new initializer of ``graph`` under ``name``, made unique if it is taken."""
    assert tensor is not None
    unique, number = name, 1
    while unique in graph.initializers:
        unique, number = f"{name}.{number}", number + 1
    value = ir.val(unique, const_value=tensor)
    graph.initializers[unique] = value
    return value


def lazy(
    function: Callable[[], Weight], dtype: ir.DataType, shape: tuple[int, ...], name: str | None = None
) -> ir.LazyTensor:
    """Return a tensor that calls ``function`` each time it is read; the result must have ``dtype`` and ``shape``."""

    def evaluate() -> ir.TensorProtocol:
        array = function()
        if array.shape != shape:
            raise ValueError(f"weight {name} came out as {array.shape}, promised as {shape}")
        return ir.Tensor(np.ascontiguousarray(array.astype(dtype.numpy(), copy=False)), dtype=dtype, name=name)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)


def rewrite(weight: ir.Value, function: Callable[[Weight], Weight], axis: int = 0) -> None:
    """Replace the tensor of ``weight`` by ``function`` of it, evaluated in float64 and kept in its own dtype and shape.

    Args:
        weight: an initializer that its reader owns, see :func:`own`.
        function: maps a float64 array to one of the same shape. It is called on blocks, which hold all of ``axis`` and
            a part of the other axes, so it may mix what lies along ``axis`` only.
        axis: the axis that stays whole.
    """
    rewrite_in_steps(weight, [(function, axis)])


def rewrite_in_steps(weight: ir.Value, steps: Sequence[tuple[Callable[[Weight], Weight], int]]) -> None:
    """Replace the tensor of ``weight`` by one function of it after another, rounded to its dtype once, at the end.

    Args:
        weight: an initializer that its reader owns, see :func:`own`.
        steps: functions with the axis that each needs whole, as for :func:`rewrite`. Where the axes differ, the tensor
            is held in float64 between the steps.
    """
    source = weight.const_value
    assert source is not None
    shape = tuple(source.shape.numpy())
    several = len({axis % len(shape) for _, axis in steps}) > 1

    def evaluate() -> Weight:
        old = source.numpy()
        if several:
            work = old.astype(np.float64)
            for function, axis in steps:
                for block in blocks_of(shape, axis):
                    work[block] = function(work[block])
            return work.astype(old.dtype)
        new = np.empty(shape, old.dtype)
        for block in blocks_of(shape, steps[0][1]):
            part = np.asarray(old[block], np.float64)
            for function, _ in steps:
                part = function(part)
            new[block] = part
        return new

    weight.const_value = lazy(evaluate, source.dtype, shape, weight.name)


def along(
    function: Callable[[Weight], Weight], axis: int, starts: Sequence[int], width: int
) -> Callable[[Weight], Weight]:
    """Return what applies ``function`` to the pieces ``start .. start + width`` of ``axis``, and keeps the rest."""

    def apply(array: Weight) -> Weight:
        if tuple(starts) == (0,) and array.shape[axis] == width:
            return function(array)
        new = array.copy()
        for start in starts:
            piece = [slice(None)] * array.ndim
            piece[axis] = slice(start, start + width)
            new[tuple(piece)] = function(array[tuple(piece)])
        return new

    return apply


def blocks_of(shape: tuple[int, ...], axis: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut an array of ``shape`` across its largest axis but ``axis``, a few megabytes each."""
    others = [other for other in range(len(shape)) if other != axis % len(shape)]
    if not others:
        yield (slice(None),)
        return
    cut = max(others, key=lambda other: shape[other])
    step = max(1, _BLOCK * shape[cut] // max(1, math.prod(shape)))
    for start in range(0, shape[cut], step):
        yield tuple(slice(start, start + step) if other == cut else slice(None) for other in range(len(shape)))


def check_finite(model: ir.Model, file: str | Path | None = None) -> None:
    """Read every floating-point weight once and refuse NaN and infinity.

    Args:
        model: the model.
        file: where it came from, for the message.

    Raises:
        InputError: a weight is not finite; names the tensor, its shape and the first bad index.
    """
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 16:
            continue
        # A mask constant may be -inf on purpose; a weight has at least one axis of some width.
        if tensor.size < 2:
            continue
        array = np.asarray(tensor.numpy(), dtype=np.float32 if tensor.dtype.bitwidth == 16 else None)
        finite = np.isfinite(array)
        if not finite.all():
            first = np.unravel_index(int(np.argmin(finite)), array.shape)
            raise InputError(
                f"weight has {int((~finite).sum())} value(s) that are NaN or infinite, "
                f"the first at index {[int(i) for i in first]}",
                file=file,
                tensor=name,
                shape=array.shape,
                remedy="the checkpoint is damaged or was converted with overflow; export it again",
            )
