"""Weights that are NaN or infinite are refused before any work is done on them; on the way each gets its digest."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.graph.weights.evaluator import run_tasks
from graphopt.graph.weights.expression import blocks
from graphopt.graph.weights.leaves import StoredBytes
from graphopt.graph.weights.tensor import WeightTensor, expression_of

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from graphopt.graph.weights.expression import Expression


def check_finite(model: ir.Model, file: str | Path | None = None, executor: Executor | None = None) -> None:
    """Read every weight once: refuse NaN and infinity, and remember the digest of what is stored.

    Args:
        model: the model.
        file: where it came from, for the message.
        executor: what reads; ``None`` for this process.

    Raises:
        InputError: a weight is not finite; names the tensor, its shape and the first bad index.
    """
    # What a graph within the graph has is not looked at for NaN; functions have no initializers.
    tensors = {v: v.const_value for v in model.graph.initializers.values() if v.const_value is not None}
    lazy = [value for value, tensor in tensors.items() if isinstance(tensor, (ir.ExternalTensor, WeightTensor))]
    expressions = [expression_of(tensors[value]) for value in lazy]
    faults: dict[ir.Value, str | None] = {}
    for number, (digest, fault) in run_tasks(executor, _inspect, expressions, [e.nbytes for e in expressions]):
        value, expression = lazy[number], expressions[number]
        faults[value] = fault
        if isinstance(expression, StoredBytes):
            source = dataclasses.replace(expression, known_digest=digest)
            value.const_value = source.tensor(tensors[value].name)
    for value, tensor in tensors.items():
        _refuse(faults[value] if value in faults else _fault(expression_of(tensor)), value.name, tensor, file)


def _refuse(fault: str | None, name: str | None, tensor: ir.TensorProtocol, file: str | Path | None) -> None:
    if fault is not None:
        raise InputError(
            fault,
            file=file,
            tensor=name,
            shape=tensor.shape.numpy(),
            remedy="the checkpoint is damaged or was converted with overflow; export it again",
        )


def _inspect(expression: Expression) -> tuple[str, str | None]:
    return expression.digest, _fault(expression)


def _fault(expression: Expression) -> str | None:
    """Return what is not finite in a weight, or ``None``."""
    dtype = expression.dtype
    # A mask constant may be -inf on purpose; a weight has at least one axis of some width.
    if not dtype.is_floating_point() or dtype.bitwidth < 16 or np.prod(expression.shape) < 2:
        return None
    count, indices = 0, []
    for region in blocks(expression.shape, expression.whole):
        array = np.asarray(expression.evaluate(region), dtype=np.float32 if dtype.bitwidth == 16 else None)
        finite = np.isfinite(array)
        if not finite.all():
            count += int((~finite).sum())
            index = np.unravel_index(int(np.argmin(finite)), array.shape)
            indices.append([int(i) + axis.start for i, axis in zip(index, region, strict=True)])
    if not count:
        return None
    return f"weight has {count} value(s) that are NaN or infinite, the first at index {min(indices)}"
