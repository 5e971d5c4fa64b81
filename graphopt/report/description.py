"""Weights and stages as a trace has them: format, group, shape; what a pass left behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.cost import format_of, is_weight, parameters_in
from graphopt.graph.weights import source_of
from graphopt.report.trace import Stage, Weight
from graphopt.runtime_ops import Coordinates, signature_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from graphopt.artifact.manifest import Manifest
    from graphopt.graph.diagnostics import PassReport


def stage_of(report: PassReport, manifest: Manifest) -> Stage:
    """Return what one run of a pass left behind."""
    return Stage(
        name=report.name,
        run=report.run,
        effect=report.effect,
        seconds=report.seconds,
        changed=len(report.changes),
        left=len(report.skips),
        removed=len(report.removed),
        checks=[check.model_copy(update={"findings": []}) for check in manifest.checks_of(report)],
    )


def weight_of(value: ir.Value) -> Weight:
    """Return what a trace says of a tensor that the file stores."""
    tensor = value.const_value
    assert tensor is not None
    kind = is_weight(value, tensor)
    return Weight(
        name=value.name or "",
        format=format_of(value, tensor) if kind else "scales" if tensor.dtype.is_floating_point() else "constant",
        group=group_of(value) if kind else None,
        shape=[int(size) for size in tensor.shape.numpy()],
        parameters=parameters_in(value, tensor) if kind else 0,
        bytes=tensor.nbytes,
    )


def weights_of(values: Sequence[ir.Value]) -> list[Weight]:
    """Return what a trace says of tensors; of those that are the same bytes, the first is the one that counts."""
    first: dict[Hashable, int] = {}
    weights = []
    for index, value in enumerate(values):
        assert value.const_value is not None
        original = first.setdefault(source_of(value.const_value), index)
        weights.append(weight_of(value).model_copy(update={"same_as": None if original == index else original}))
    return weights


def is_here(value: ir.Value) -> bool:
    """Return whether the numbers of a constant can be read."""
    tensor = value.const_value
    return not isinstance(tensor, ir.ExternalTensor) or Path(tensor.path).is_file()


def group_of(value: ir.Value) -> int | None:
    """Return how many numbers share a scale; ``None`` where that is not known."""
    for use in value.uses():
        signature = signature_of(use.node)
        if signature is not None and signature.coordinates in (Coordinates.DECODES, Coordinates.MULTIPLIES):
            sizes = (use.node.attributes.get_int(name, 0) for name in ("block_size", "group"))
            return next((size for size in sizes if size), None)
    return None


def stored_as(value: ir.Value) -> str:
    """Return in what a constant is stored, and its shape: ``int4 by 64 [576, 192]``; small ones are written out.

    Args:
        value: an initializer, or what is computed of nothing but initializers.
    """
    maker, initializers = value.producer(), list(_initializers(value))
    weights = [
        weight for weight in initializers if weight.const_value is not None and is_weight(weight, weight.const_value)
    ]
    initializer = next(iter(weights or initializers), None)
    if initializer is None or initializer.const_value is None:
        return "a constant" if maker is None else maker.op_type
    tensor = initializer.const_value
    if maker is None and tensor.size <= _LARGEST and not isinstance(tensor, ir.StringTensor):
        return str(tensor.numpy().tolist())
    group = group_of(initializer)
    form = format_of(initializer, tensor) + ("" if group is None else f" by {group}")
    return f"{form} {[int(size) for size in tensor.shape.numpy()]}"


def _initializers(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the initializers that a constant is computed of, the nearest first."""
    waiting = [value]
    while waiting:
        operand = waiting.pop(0)
        producer = operand.producer()
        waiting += [] if producer is None else [v for v in producer.inputs if v is not None]
        if operand.is_initializer() and operand.const_value is not None:
            yield operand


_LARGEST = 8
"""Numbers of the largest constant that is written out."""
