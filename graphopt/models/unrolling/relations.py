"""How each constant of an exported graph is made of the parameters of the model: found in a skeleton, and checked.

The exporter computes with constants: it transposes a matrix, adds 1 to a gain. In a skeleton every parameter has a
place in memory of its own, so a tensor that lies there is a view of that parameter, and its strides say which:

    strides (1, 576) within model.layers.0.mlp.up_proj.weight [1536, 576]  ->  transposed(parameter, (1, 0))

A tensor that was computed or looked up is found by its numbers, which in a skeleton are random, from the parameter that
the exporter says it was folded from. What is not found is an error.
"""

from __future__ import annotations

import ast
import bisect
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Exponential, Expression, Inline, Reshape, Scale, Slice, Sum, Transpose
from graphopt.graph.weights.expression import whole_region
from graphopt.models.checkpoint_tensors import Parameter, stored_tensors
from graphopt.models.lazy_tensors import dtype_of
from graphopt.models.unrolling.refusals import FOLDED_WEIGHT, NotUnderstoodError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where onnxscript's constant folding says which values a constant was computed from.
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"


class Relations:
    """What the constants of a graph that was exported from a skeleton are made of.

    Args:
        skeleton: the model, see :func:`graphopt.models.unrolling.skeleton.make_skeleton`.
    """

    def __init__(self, skeleton: Any) -> None:
        self._arrays: dict[str, Array] = {}
        self._leaves: dict[str, Parameter] = {}
        starts = []
        addresses: set[int] = set()
        for name, tensor in stored_tensors(skeleton):
            self._arrays[name] = tensor.detach().numpy()
            self._leaves[name] = Parameter(name, dtype_of(tensor.dtype), tuple(tensor.shape))
            if tensor.data_ptr() not in addresses and tensor.numel():
                addresses.add(tensor.data_ptr())
                starts.append((tensor.data_ptr(), name))
        self._starts = sorted(starts)

    def expression_of(self, value: ir.Value) -> Expression:
        """Return what an initializer is: an expression over :class:`Parameter`, or the constant that it is.

        Raises:
            NotUnderstoodError: it was computed from parameters in a way that is not known here.
        """
        tensor = value.const_value
        assert tensor is not None
        if tensor.dtype == ir.DataType.STRING or tensor.size == 0:
            return Inline(tensor.numpy(), tensor.dtype)
        array = tensor.numpy()
        name = self._owner(array)
        if name is not None:
            return self._view(value, array, name)
        origins = value.metadata_props.get(_FOLDED_FROM)
        parents = [name for name in (ast.literal_eval(origins) if origins else ()) if name in self._arrays]
        if not parents:
            return Inline(array, tensor.dtype)
        return self._recompute(value, array, parents)

    def _owner(self, array: Array) -> str | None:
        """Return the parameter that an array lies in."""
        address = _address(array)
        number = bisect.bisect_right(self._starts, (address, "\U0010ffff")) - 1
        if number < 0:
            return None
        start, name = self._starts[number]
        return name if address < start + self._arrays[name].nbytes else None

    def _view(self, value: ir.Value, array: Array, name: str) -> Expression:
        for view in _views(self._leaves[name], array, _address(array) - _address(self._arrays[name])):
            inline = view.replacing({self._leaves[name]: Inline(self._arrays[name], self._leaves[name].kind)})
            result = inline.evaluate(whole_region(view.shape))
            if _address(result) == _address(array) and result.shape == array.shape and _steps(result) == _steps(array):
                return view
        raise NotUnderstoodError(FOLDED_WEIGHT(weight=value.name, parameters=[name]))

    def _recompute(self, value: ir.Value, array: Array, parents: list[str]) -> Expression:
        """Return rows of a parameter, ``parameter + c`` or ``parameter * c``, or ``-exp(parameter)``: these numbers."""
        for name in parents:
            parameter, leaf = self._arrays[name], self._leaves[name]
            rows = _copied_rows(leaf, parameter, array)
            if rows is not None:
                return rows
            if len(parents) > 1 or parameter.shape != array.shape or parameter.dtype != array.dtype:
                continue
            # Random numbers between 1 and 2: the median leaves out what rounding does to a few.
            wide = parameter.astype(np.float64)
            for constant in _decimals_near(float(np.median(array - wide))):
                offset = np.full(array.shape, constant, array.dtype)
                if np.array_equal(parameter + offset, array):
                    return Sum(leaf, Inline(offset, leaf.kind))
            for constant in _decimals_near(float(np.median(array / wide))) if array.ndim else ():
                factors = np.full(array.shape[:1], constant, array.dtype)
                if np.array_equal(parameter * array.dtype.type(constant), array):
                    return Scale(leaf, Inline(factors, leaf.kind), 0)
            # The decay of a recurrence. Exponentials of two libraries differ in the last bit.
            if np.allclose(-np.exp(wide), array, rtol=4 * float(np.finfo(array.dtype).eps), atol=0):
                return Exponential(leaf, -1.0)
        raise NotUnderstoodError(FOLDED_WEIGHT(weight=value.name, parameters=list(parents)))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _steps(array: Array) -> list[int]:
    """Return the strides of the axes that have more than one coordinate: others say nothing."""
    return [step for step, size in zip(array.strides, array.shape, strict=True) if size > 1]


def _copied_rows(leaf: Parameter, parameter: Array, array: Array) -> Expression | None:
    """Return the rows of a table that were looked up one after the other, such as positions that never change."""
    width = parameter.shape[-1] if parameter.ndim == 2 else 0
    if not width or array.ndim < 2 or array.shape[-1] != width or array.dtype != parameter.dtype:
        return None
    rows = array.reshape(-1, width)
    # A row of a small table stands there once: its numbers are random. Those of a large one are all zeros.
    starts = np.flatnonzero((parameter == rows[0]).all(axis=1))
    if len(starts) != 1 or not np.array_equal(parameter[starts[0] : starts[0] + len(rows)], rows):
        return None
    return Reshape.to_dims(Slice.cut(leaf, {0: slice(int(starts[0]), int(starts[0]) + len(rows))}), array.shape)


def _decimals_near(number: float) -> list[float]:
    """Return a number and the short decimals near it, from which rounding may have moved it."""
    return [round(number, digits) for digits in (0, 1, 2, 3, 4, 5, 6)] + [number]


def _views(leaf: Parameter, array: Array, offset: int) -> Iterator[Expression]:
    """Yield the views of a parameter that might have the shape and the strides of ``array``."""
    size = leaf.kind.bitwidth // 8
    strides = [size * int(np.prod(leaf.dims[axis + 1 :])) for axis in range(len(leaf.dims))]
    if array.size == np.prod(leaf.dims):
        if array.shape == leaf.dims:
            yield leaf
        yield Reshape(leaf, array.shape)
    # Which axis of the parameter each axis of the view runs along, axes of one coordinate aside.
    wide = [axis for axis, size_of_axis in enumerate(array.shape) if size_of_axis > 1]
    order = [strides.index(array.strides[axis]) for axis in wide if array.strides[axis] in strides]
    if len(order) != len(wide) or len(set(order)) != len(order):
        return
    starts = [offset // step % size_of_axis for step, size_of_axis in zip(strides, leaf.dims, strict=True)]
    counts = dict(zip(order, (array.shape[axis] for axis in wide), strict=True))
    pieces = {axis: slice(start, start + counts.get(axis, 1)) for axis, start in enumerate(starts)}
    view: Expression = leaf
    if any(counts.get(axis, 1) != size_of_axis for axis, size_of_axis in enumerate(leaf.dims)):
        view = Slice.cut(view, pieces)
    order += [axis for axis in range(len(leaf.dims)) if axis not in order]
    if order != sorted(order):
        view = Transpose(view, tuple(order))
    yield view if view.shape == array.shape else Reshape.to_dims(view, array.shape)
