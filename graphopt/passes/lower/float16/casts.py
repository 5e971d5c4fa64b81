"""Casts where float16 and float32 meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import present_port
from graphopt.graph.diagnostics import Rule
from graphopt.passes.lower.float16.wide import NARROW, WIDE

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

CAST = Rule("float16.cast", "{tensor} as {to}")


class Casts:
    """A cast of each value to a type, made where it is asked for first."""

    def __init__(self, graph: ir.Graph, ledger: Ledger) -> None:
        self._graph, self._ledger = graph, ledger
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return ``value`` as ``dtype``."""
        if (value, dtype) not in self._casts:
            suffix = "float16" if dtype == NARROW else "float32"
            node = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}.{suffix}")
            output = node.outputs[0]
            output.name, output.type, output.shape = f"{node.name}.output", ir.TensorType(dtype), value.shape
            producer = value.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], node)
            else:
                self._graph.insert_after(producer, node)
            self._ledger.changed(node, CAST(tensor=value.name, to=suffix), [value])
            self._casts[value, dtype] = output
        return self._casts[value, dtype]


def keep_outputs(graph: ir.Graph, narrow: set[ir.Value], casts: Casts) -> None:
    """Let outputs have the type that they had, and caches that of the input that they come back as."""
    caches = {value.name: value.dtype for value in graph.inputs}
    for index, value in enumerate(graph.outputs):
        name = value.name or ""
        port = present_port(value)
        past = None if port is None else caches.get(port.past)
        dtype_wanted = past or (WIDE if value in narrow else value.dtype)
        if value.dtype == dtype_wanted or dtype_wanted is None:
            continue
        cast = casts.cast(value, dtype_wanted)
        value.name, cast.name = f"{name}.{'float16' if value.dtype == NARROW else 'float32'}", name
        graph.outputs[index] = cast
