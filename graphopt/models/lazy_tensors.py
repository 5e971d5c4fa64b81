"""Tensors of torch that are expressions: transformers' own loading moves them around, and no weight is read.

Loading renames tensors, widens them, stacks experts, joins or splits projections, ties embeddings. Done on these
tensors, what ends up in the model says how each parameter is made of the files:

    cast(joined((stored(experts.0.w1), stored(experts.1.w1)), axis=0), float32)

Only operations that move or widen numbers are known here; any other one is an error, never a guess.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.graph.weights import Cast, Concat, Expression, Reshape, Slice, Transpose, stack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DTYPES = {
    "float64": ir.DataType.DOUBLE,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "int16": ir.DataType.INT16,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "bool": ir.DataType.BOOL,
}


class NotLazyError(TypeError):
    """An operation that is not known for tensors that are expressions."""


def lazy_tensors(expressions: Mapping[str, Expression]) -> dict[str, Any]:
    """Return tensors of torch, by name, that are these expressions."""
    make = _tensor_class()
    return {name: make(expression) for name, expression in expressions.items()}


def expression_of_tensor(tensor: Any) -> Expression | None:
    """Return the expression that a tensor of torch is; ``None`` for one with numbers of its own."""
    expression: Expression | None = getattr(tensor, "expression", None)
    return expression


def dtype_of(torch_dtype: Any) -> ir.DataType:
    """Return the ONNX type of a dtype of torch.

    Raises:
        NotLazyError: there is none.
    """
    name = str(torch_dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise NotLazyError(f"torch's {name} has no counterpart here")
    return _DTYPES[name]


@functools.cache
def _tensor_class() -> Callable[[Expression], Any]:
    """Return the class of these tensors; made on first use, since torch is optional."""
    torch = importlib.import_module("torch")
    dtypes = {kind: getattr(torch, name) for name, kind in _DTYPES.items()}
    operations = _operations(torch.ops.aten)

    class LazyTensor(torch.Tensor):  # type: ignore[name-defined, misc]
        """A tensor without storage. Its strides say nothing: each operation makes another expression."""

        expression: Expression

        @staticmethod
        def __new__(cls: Any, expression: Expression) -> Any:
            if expression.dtype not in dtypes:
                raise NotLazyError(f"{expression} is of a type that torch does not have")
            tensor = torch.Tensor._make_wrapper_subclass(cls, expression.shape, dtype=dtypes[expression.dtype])
            tensor.expression = expression
            return tensor

        def __init__(self, expression: Expression) -> None:
            """Do nothing: a tensor is made by ``__new__``."""

        def __repr__(self, **_: Any) -> str:
            return str(self.expression)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in operations:
                raise NotLazyError(f"{func} on a weight that is not read")
            result = operations[func](*unwrap(args), **(kwargs or {}))
            return wrap(result)

    def unwrap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(unwrap(element) for element in value)
        return value.expression if isinstance(value, LazyTensor) else value

    def wrap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [wrap(element) for element in value]
        return LazyTensor(value) if isinstance(value, Expression) else value

    return LazyTensor


def _operations(aten: Any) -> dict[Any, Callable[..., Any]]:
    """Return what each operation of torch does to expressions."""
    copies = (aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default)
    views = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
    return {
        **dict.fromkeys(copies, lambda x, **_: x),
        **dict.fromkeys(views, lambda x, dims: Reshape.to_dims(x, dims)),
        aten._to_copy.default: lambda x, dtype=None, **_: x if dtype is None else _cast(x, dtype_of(dtype)),
        aten.t.default: lambda x: _swap_axes(x, 0, 1) if len(x.shape) == 2 else x,
        aten.transpose.int: _swap_axes,
        aten.permute.default: lambda x, order: Transpose(x, tuple(axis % len(x.shape) for axis in order)),
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.dim: lambda x, axis: _select(x, axis, 0) if x.shape[axis] == 1 else x,
        aten.slice.Tensor: _slice,
        aten.select.int: _select,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split_with_sizes,
        aten.unbind.int: lambda x, axis=0: [_select(x, axis, index) for index in range(x.shape[axis])],
        aten.cat.default: lambda xs, axis=0: Concat(tuple(xs), axis % len(xs[0].shape)),
        aten.stack.default: lambda xs, axis=0: stack(xs, axis % (len(xs[0].shape) + 1)),
        aten.equal.default: lambda x, y: x.shape == y.shape and x.digest == y.digest,
    }


def _cast(x: Expression, dtype: ir.DataType) -> Expression:
    if x.dtype == dtype:
        return x
    if not (x.dtype.is_floating_point() and dtype.is_floating_point()):
        raise NotLazyError(f"a cast from {x.dtype.name} to {dtype.name}")
    return Cast(x, dtype)


def _swap_axes(x: Expression, first: int, second: int) -> Expression:
    order = list(range(len(x.shape)))
    order[first], order[second] = order[second], order[first]
    return Transpose(x, tuple(order))


def _unsqueeze(x: Expression, axis: int) -> Expression:
    index = axis % (len(x.shape) + 1)
    return Reshape.to_dims(x, (*x.shape[:index], 1, *x.shape[index:]))


def _slice(x: Expression, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Expression:
    return Slice.cut(x, {axis % len(x.shape): slice(start, end, step)})


def _select(x: Expression, axis: int, index: int) -> Expression:
    position = axis % len(x.shape)
    row = index % x.shape[position]
    return Reshape.to_dims(_slice(x, position, row, row + 1), (*x.shape[:position], *x.shape[position + 1 :]))


def _split(x: Expression, size: int, axis: int = 0) -> list[Expression]:
    return [_slice(x, axis, start, start + size) for start in range(0, x.shape[axis], size)]


def _split_with_sizes(x: Expression, sizes: tuple[int, ...], axis: int = 0) -> list[Expression]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_slice(x, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)]
