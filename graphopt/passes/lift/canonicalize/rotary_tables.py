"""Rotary embeddings (RoFormer, Su et al. 2021) that look their angles up in tables, as most exporters' do.

    cos, sin [positions, size / 2]:  RotaryEmbedding(x, positions, cos, sin)
      ->   RotaryEmbedding(x, Cos(positions * w), Sin(positions * w))                where cos, sin are that
      ->   RotaryEmbedding(x, Gather(cos, positions), Gather(sin, positions))        where they are anything else

A table has a last position; frequencies w have none. Row p holds the angle p w modulo 2 pi, in float32. What is known
of w from row p tells how often row 2p has wrapped around, which gives w twice as precisely; the last row leaves a few
float32 candidates, and each is tried. A result is used only if it reproduces every row of both tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.structure.contrib import MICROSOFT
from graphopt.analysis.structure.ports import token_port
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, replace, shared_constant

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

_POSITIONS = "position_ids"
# Cosines of equal float32 angles by two libraries: one unit in the last place of each, below 1.
_ROUNDING = 2.5e-7
_ROWS = 4096

READS_ANGLES = Rule("canonicalize.reads-angles", "a rotary embedding by tables reads angles")
TABLE_LOOKED_UP = Rule("canonicalize.table-looked-up", "a table of angles that positions look up")
TABLE_TO_FREQUENCIES = Rule(
    "canonicalize.table-to-frequencies", "a table of angles became the frequencies that it was made of"
)
POSITIONS_ADDED = Rule(
    "canonicalize.positions-added", "an input of its own: the position of each new token, padding not counted"
)
POSITIONS_SHAPE = Rule(
    "canonicalize.positions-shape", "its positions {positions} are no input [batch, length] of the graph"
)
TABLES_SHAPE = Rule("canonicalize.tables-shape", "{cos} and {sin} are no tables [positions, pairs]")
NO_TOKENS = Rule("canonicalize.no-tokens", "the graph has no input_ids or inputs_embeds [batch, length]")
BATCH_IN_ONE_ROW = Rule("canonicalize.packed-batch", "its batch is packed into one row")
SCALES = Rule("canonicalize.rotary-scales", "it scales what it turns")
HEADS_UNKNOWN = Rule("canonicalize.head-count-unknown", "the graph does not state the number of its heads")


class Angles:
    """Cosines and sines of positions, made once and shared.

    Args:
        model: the graph, in which they are put in front of everything else.
        ledger: records what became of a table.
    """

    def __init__(self, model: ir.Model, ledger: Ledger) -> None:
        self._model, self._ledger = model, ledger
        self._angles: dict[tuple[ir.Value, ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}

    def look_up(self, cos: ir.Value, sin: ir.Value, positions: ir.Value) -> tuple[ir.Value, ir.Value] | Fact:
        """Return cosines and sines [batch, length, pairs] of ``positions`` [batch, length], or why there are none.

        Args:
            cos: the table of cosines [positions, pairs].
            sin: the table of sines, alike.
            positions: an input of the graph, int64.
        """
        if positions.shape is None or len(positions.shape) != 2 or not positions.is_graph_input():
            return POSITIONS_SHAPE(positions=positions.name)
        pairs = None if cos.shape is None or len(cos.shape) != 2 or cos.shape != sin.shape else cos.shape[1]
        if not isinstance(pairs, int):
            return TABLES_SHAPE(cos=cos.name, sin=sin.name)
        key = (cos, sin, positions)
        if key not in self._angles:
            self._angles[key] = self._make(cos, sin, positions, pairs)
        return self._angles[key]

    def _make(self, cos: ir.Value, sin: ir.Value, positions: ir.Value, pairs: int) -> tuple[ir.Value, ir.Value]:
        graph = self._model.graph
        assert positions.shape is not None
        dims = [*positions.shape, pairs]
        frequencies = _frequencies(cos, sin)
        producers = [value.producer() for value in (cos, sin)]
        if frequencies is None:
            last = max((node for node in producers if node is not None), key=list(graph).index, default=None)
            before = graph[0] if last is None else list(graph)[list(graph).index(last) + 1]
            insert = Inserter(graph, before, f"{cos.name}.lookup")
            output = tuple(
                insert.op("Gather", [table, positions], dims, table.dtype, name, axis=0)
                for table, name in ((cos, "cos"), (sin, "sin"))
            )
            self._ledger.report_change(cos.name or "?", TABLE_LOOKED_UP())
            return output[0], output[1]
        insert = Inserter(graph, graph[0], f"{cos.name}.angles")
        numbers = shared_constant(graph, f"{cos.name}.frequencies", frequencies)
        wide = insert.op("Unsqueeze", [positions, insert.integers([2])], [*positions.shape, 1], ir.DataType.INT64)
        wide = insert.op("Cast", [wide], [*positions.shape, 1], ir.DataType.FLOAT, to=ir.DataType.FLOAT)
        angle = insert.op("Mul", [wide, numbers], dims, ir.DataType.FLOAT)
        cos_and_sin = (insert.op(name, [angle], dims, ir.DataType.FLOAT) for name in ("Cos", "Sin"))
        self._ledger.report_change(cos.name or "?", TABLE_TO_FREQUENCIES())
        return next(cos_and_sin), next(cos_and_sin)


def _frequencies(cos: ir.Value, sin: ir.Value) -> npt.NDArray[np.float32] | None:
    """Return w, float32 [pairs], where row p of the tables is Cos(p w) and Sin(p w) in float32, else ``None``."""
    if cos.const_value is None or sin.const_value is None or cos.dtype != ir.DataType.FLOAT != sin.dtype:
        return None
    c, s = np.asarray(cos.const_value.numpy()), np.asarray(sin.const_value.numpy())
    if c.shape != s.shape or len(c) < 2:
        return None
    w = np.arctan2(s[1], c[1], dtype=np.float64)
    row = 2
    while True:
        row = min(row, len(c) - 1)
        short = np.arctan2(s[row], c[row], dtype=np.float64) - w * row
        w = w + (short - 2 * np.pi * np.round(short / (2 * np.pi))) / row
        if row == len(c) - 1:
            break
        row *= 2
    nearest = w.astype(np.float32)
    candidates = [nearest]
    for towards in (np.float32(np.inf), np.float32(-np.inf)):
        candidates += [np.nextafter(nearest, towards), np.nextafter(np.nextafter(nearest, towards), towards)]
    frequencies = np.stack(candidates)
    sample = np.unique(np.geomspace(1, len(c) - 1, 64).astype(np.int64))
    error = _errors_of(c[sample], s[sample], sample, frequencies[:, None])
    table: npt.NDArray[np.float32] = frequencies[error.max(axis=1).argmin(axis=0), np.arange(frequencies.shape[1])]
    blocks = (np.arange(begin, min(begin + _ROWS, len(c))) for begin in range(0, len(c), _ROWS))
    return table if all((_errors_of(c[rows], s[rows], rows, table) <= _ROUNDING).all() for rows in blocks) else None


def _errors_of(
    cos: npt.NDArray[np.float32],
    sin: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    w: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Return how far rows of the tables are from those of the frequencies ``w`` [..., pairs]."""
    angles = rows.astype(np.float32)[:, None] * w
    error: npt.NDArray[np.float32] = np.maximum(np.abs(np.cos(angles) - cos), np.abs(np.sin(angles) - sin))
    return error


def position_ids(model: ir.Model, ledger: Ledger) -> ir.Value | Fact:
    """Return the input ``position_ids`` [batch, length] of the graph, made unless it is there, or why it cannot be."""
    graph = model.graph
    inputs_by_name = {value.name: value for value in graph.inputs}
    if _POSITIONS in inputs_by_name:
        return inputs_by_name[_POSITIONS]
    tokens = token_port(graph)
    if tokens is None or tokens.shape is None or len(tokens.shape) < 2:
        return NO_TOKENS()
    output = ir.val(_POSITIONS, ir.DataType.INT64, ir.Shape(list(tokens.shape)[:2]))
    graph.inputs.insert(
        1 + max(list(inputs_by_name).index(name) for name in (tokens.name, "attention_mask") if name in inputs_by_name),
        output,
    )
    ledger.report_change(_POSITIONS, POSITIONS_ADDED())
    return output


def lift_rotary_tables(model: ir.Model, angles: Angles, ledger: Ledger) -> None:
    """Lift every ``RotaryEmbedding`` that reads tables: onnxruntime's own, and the standard one with positions."""
    for node in list(model.graph):
        is_contrib = node.domain == MICROSOFT
        if node.op_type != "RotaryEmbedding" or (not is_contrib and (node.domain or len(node.inputs) < 4)):
            continue
        x, first, second, third = node.inputs[:4]
        positions, cos, sin = (first, second, third) if is_contrib else (third, first, second)
        if x is None or positions is None or cos is None or sin is None:
            continue
        dims = None if x.shape is None else list(x.shape)
        heads = node.attributes.get_int("num_heads", 0) or (dims[1] if dims is not None and len(dims) == 4 else 0)
        reason = _why_not(node, dims, cos, heads)
        table = reason or angles.look_up(cos, sin, positions)
        if isinstance(table, Fact):
            ledger.skipped(node, table)
            continue
        attributes: dict[str, Any] = {
            "interleaved": node.attributes.get_int("interleaved", 0),
            "num_heads": heads or _heads_of(dims, cos),
            "rotary_embedding_dim": node.attributes.get_int("rotary_embedding_dim", 0),
        }
        output = ir.node("RotaryEmbedding", [x, *table], attributes, name=node.name)
        replace(node, output)
        ledger.changed(output, READS_ANGLES(), [node, cos])


def _why_not(node: ir.Node, dims: list[int | ir.SymbolicDim] | None, cos: ir.Value, heads: object) -> Fact | None:
    if node.attributes.get_int("is_packed_batching", 0):
        return BATCH_IN_ONE_ROW()
    if node.attributes.get_float("scale", 1.0) != 1.0:
        return SCALES()
    if dims is None or (not heads and not isinstance(_heads_of(dims, cos), int)):
        return HEADS_UNKNOWN()
    return None


def _heads_of(dims: list[int | ir.SymbolicDim] | None, cos: ir.Value) -> int | None:
    """Return how many heads [batch, length, heads x size] has where all of a head is turned."""
    pairs = None if cos.shape is None else cos.shape[-1]
    width = None if dims is None else dims[-1]
    return width // (2 * pairs) if isinstance(width, int) and isinstance(pairs, int) and pairs else None
