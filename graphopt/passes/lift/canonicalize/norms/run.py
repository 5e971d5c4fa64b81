"""Regions run on their own in onnxruntime: in float64, to see what they mean, and in their own types."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.passes.lift.canonicalize.norms.region import Region, constants

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import TracebackType

    from graphopt.ort.runner import Runner

NOT_RUN = Rule("canonicalize.norm-not-run", "onnxruntime cannot run it on its own ({error})")
RESHAPES = Rule("canonicalize.norm-reshapes", "{before} come out as {after}")

Rows = npt.NDArray[Any]

_X = "x"


@dataclass(frozen=True)
class _Part:
    """A region as a model: constants of more than one number are inputs, so that equal structures are one model."""

    model: ir.Model
    key: Hashable
    constant_inputs: dict[str, ir.Value]


class Regions:
    """Opens one session for all regions of the same structure; closes them at the end of a ``with`` block.

    Args:
        runner: opens them.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sessions: dict[Hashable, Any] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Regions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def run(self, region: Region, rows: Rows, *, wide: bool) -> Rows | Fact:
        """Return what ``region`` makes of each of the rows [rows, n], or why it cannot be run.

        Args:
            region: what to run.
            rows: what to feed, as rows of one tensor: what mixes them shows.
            wide: compute in float64, whatever the types are.
        """
        part = _part(region, wide=wide)
        if part.key not in self._sessions:
            try:
                # Without graph optimizations: onnxruntime 1.31 fuses to a norm even where the mean has lost its axis.
                self._sessions[part.key] = self._open.enter_context(
                    self._runner.open_model(part.model, rewritten=False)
                )
            except Exception as error:  # whatever onnxruntime raises: what cannot be run is left alone
                self._sessions[part.key] = NOT_RUN(error=str(error).splitlines()[0])
        session = self._sessions[part.key]
        if isinstance(session, Fact):
            return session
        dtype = np.dtype(np.float64) if wide else (region.x.dtype or ir.DataType.FLOAT).numpy()
        shape = _shape(region.x, len(rows))
        count = math.prod(shape[:-1])
        feeds = {name: _array(value, wide=wide) for name, value in part.constant_inputs.items()}
        results = []
        for start in range(0, len(rows), count):
            batch = np.resize(rows[start : start + count], (count, shape[-1]))
            try:
                y = session.run(None, {_X: batch.reshape(shape).astype(dtype), **feeds})[0]
            except Exception as error:  # as above
                return NOT_RUN(error=str(error).splitlines()[0])
            if y.shape != shape:
                return RESHAPES(before=list(shape), after=list(y.shape))
            results.append(y.reshape(count, shape[-1])[: len(rows) - start])
        return np.concatenate(results)


def _shape(x: ir.Value, rows: int) -> tuple[int, ...]:
    """Return a shape that ``x`` can have, with room for ``rows`` rows where one of its axes has no size of its own.

    Other such axes get 2, so that what goes on along them shows.
    """
    assert x.shape is not None
    *leading, width = x.shape
    free = [axis for axis, dim in enumerate(leading) if not isinstance(dim, int)]
    dims = [dim if isinstance(dim, int) else 2 for dim in leading]
    if free:
        dims[free[0]] = 1
        dims[free[0]] = max(2, -(-rows // math.prod(dims)))
    assert isinstance(width, int)
    return (*dims, width)


def _part(region: Region, *, wide: bool) -> _Part:
    """Return ``region`` as a model with the input ``x`` [.., n] and an input for each constant of several numbers."""
    double = ir.DataType.DOUBLE
    x = ir.val(_X, double if wide else region.x.dtype or ir.DataType.FLOAT, [None] * len(region.x.shape or ()))
    values: dict[ir.Value, ir.Value] = {region.x: x}
    references: dict[ir.Value, Hashable] = {region.x: _X}
    inputs, initializers, feeds, nodes = [x], [], {}, []
    for number, constant in enumerate(constants(region)):
        assert constant.const_value is not None
        array, name = _array(constant, wide=wide), f"c{number}"
        dtype = ir.DataType.from_numpy(array.dtype)
        if array.size > 1 and dtype.is_floating_point():
            values[constant], feeds[name] = ir.val(name, dtype, array.shape), constant
            inputs.append(values[constant])
            references[constant] = (name, dtype, array.shape)
        else:
            values[constant] = ir.val(name, const_value=ir.tensor(array, name=name))
            initializers.append(values[constant])
            references[constant] = (name, dtype, array.shape, array.tobytes())
    key: list[Hashable] = [wide, len(region.x.shape or ()), region.x.dtype]
    for number, node in enumerate(region.nodes):
        attributes = dict(node.attributes)
        if node.op_type == "Cast" and wide:
            attributes["to"] = ir.AttrInt64("to", double)
        outputs = ir.node(node.op_type, [None if v is None else values[v] for v in node.inputs], attributes)
        outputs.outputs[0].name = f"v{number}"
        values[node.outputs[0]], references[node.outputs[0]] = outputs.outputs[0], number
        nodes.append(outputs)
        attribute_key = tuple(sorted((name, str(attribute.value)) for name, attribute in attributes.items()))
        key.append((node.op_type, attribute_key, tuple(None if v is None else references[v] for v in node.inputs)))
    y = values[region.y]
    y.dtype = double if wide else region.x.dtype or ir.DataType.FLOAT
    graph = ir.Graph(
        inputs,
        [y],
        nodes=nodes,
        initializers=initializers,
        opset_imports=region.nodes[0].graph.opset_imports if region.nodes[0].graph else {"": 23},
        name="part",
    )
    return _Part(ir.Model(graph, ir_version=10), (*key, references[region.y]), feeds)


def _array(constant: ir.Value, *, wide: bool) -> Rows:
    assert constant.const_value is not None
    array = np.asarray(constant.const_value.numpy())
    floats = constant.const_value.dtype.is_floating_point()
    return array.astype(np.float64) if wide and floats else array
