"""Models that are run to compare products: sessions through files, values inside made outputs, products cut out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.ort.session import open_session
from graphopt.ort.snapshots import Snapshots
from graphopt.runtime_ops import declare

if TYPE_CHECKING:
    from pathlib import Path

Open = Callable[[ir.Model, Mapping[str, str]], Any]
"""Opens a model with session entries."""


@contextlib.contextmanager
def sessions(folder: Path) -> Iterator[Open]:
    """Give a function that opens models through files in ``folder``, which stay until the block ends."""
    snapshots = Snapshots(folder)
    with contextlib.ExitStack() as stack:
        yield lambda model, entries: open_session(
            stack.enter_context(snapshots.write(model)), entries=entries, in_place=True
        )


def expose_values(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """Return a copy of a model whose outputs are the values of some names."""
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    values |= {value.name: value for value in copy.graph.inputs}
    copy.graph.outputs.clear()
    for name in dict.fromkeys(names):
        value = values[name]
        value.dtype = value.dtype or ir.DataType.FLOAT
        copy.graph.outputs.append(value)
    return copy


def cut_out(model: ir.Model, products: Sequence[tuple[str, str]]) -> ir.Model:
    """Return some products alone, with the nodes that round their inputs or make their matrices.

    Args:
        model: what they are a part of.
        products: of each the names of its input and of its output.
    """
    inputs, outputs = zip(*products, strict=True)
    graph = ir.convenience.extract(model.graph, list(dict.fromkeys(inputs)), list(outputs))
    for value in graph.inputs:
        value.shape = None if value.shape is None else ir.Shape([None] * value.shape.rank())
    for value in (*graph.inputs, *graph.outputs):
        value.dtype = value.dtype or ir.DataType.FLOAT
    for value in graph.outputs:
        value.shape = None
    result = ir.Model(graph, ir_version=model.ir_version)
    declare(result)
    return result


def names_of(session: Any) -> list[str]:
    """Return the names of what a session computes."""
    return [output.name for output in session.get_outputs()]
