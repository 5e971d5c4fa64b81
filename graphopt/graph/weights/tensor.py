"""A tensor of the graph that is an expression, and the expression of any tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights.leaves import Inline, MappedTensor, StoredBytes

if TYPE_CHECKING:
    from collections.abc import Hashable

    from graphopt.graph.weights.expression import Expression


class WeightTensor(ir.LazyTensor):
    """A tensor that is evaluated each time it is read.

    Attributes:
        expression: what it is.
    """

    def __init__(self, expression: Expression, name: str | None = None) -> None:
        super().__init__(self._evaluate_tensor, expression.dtype, ir.Shape(expression.shape), name=name)
        self.expression = expression

    def _evaluate_tensor(self) -> ir.TensorProtocol:
        return tensor_in_memory(self.expression, self.name)


def tensor_in_memory(expression: Expression, name: str | None = None) -> ir.Tensor[Any]:
    """Evaluate an expression into a tensor of the ONNX IR."""
    return ir.Tensor(np.ascontiguousarray(expression.numpy()), dtype=expression.dtype, name=name)


def expression_of(tensor: ir.TensorProtocol | None) -> Expression:
    """Return the expression of any numeric tensor; only what is in memory is copied, and only by reference.

    Raises:
        ValueError: there is no tensor.
    """
    if tensor is None:
        raise ValueError("an initializer without a tensor has no expression")
    if isinstance(tensor, WeightTensor):
        return tensor.expression
    if isinstance(tensor, MappedTensor) and tensor.expression is not None:
        return tensor.expression
    if isinstance(tensor, ir.ExternalTensor):
        return StoredBytes(
            str(Path(tensor.path).absolute()), tensor.offset or 0, tensor.dtype, tuple(tensor.shape.numpy())
        )
    return Inline(tensor.numpy(), tensor.dtype)


def source_of(tensor: ir.TensorProtocol) -> Hashable:
    """Return a key that two tensors share only if they are the same bytes: of one place in a file, or one expression.

    Nothing is read for it, so equal bytes that were made apart have different keys.
    """
    if isinstance(tensor, WeightTensor):
        expression = tensor.expression
        if not isinstance(expression, StoredBytes):
            return expression
        return (expression.path, expression.offset, expression.nbytes)
    if isinstance(tensor, ir.ExternalTensor):
        return (str(Path(tensor.path).absolute()), tensor.offset or 0, tensor.nbytes)
    return id(tensor)


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
