"""The body of ``ai.graphopt::GatherTable``: standard ONNX operators, the same for all bits, groups and shapes.

Only the tiles of the columns that are asked for are read and unpacked, so nothing of the size of the matrix is made.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphopt.runtime_ops.dequantize_trellis.spec.op import CODES, window_value_nodes
from graphopt.runtime_ops.gather_table.spec.schema import SCHEMA
from graphopt.runtime_ops.matmul_table.spec.body import bits_of_codes, digits_of, positions_of
from graphopt.runtime_ops.matmul_table.spec.levels import number_nodes
from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.runtime_ops.matmul_table.spec.schema import overload
from graphopt.runtime_ops.operator import DOMAIN
from graphopt.runtime_ops.tape import ints, number_of


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body as a function of the given ONNX opset; its attributes are references to those of the node."""
    name = overload(**attributes)
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    ids, codes, scales, table, zero_points = inputs
    tape = ir.tape.Tape()
    rows, columns, group = (number_of(tape, name) for name in ("rows", "columns", "group"))
    # a lookup in 0, 1, 2, ...: it counts negative columns from the end, and refuses those that the last tile pads
    numbers = tape.op("Gather", [_count(tape, columns), tape.op("Reshape", [ids, ints(tape, -1)])], {"axis": 0})
    tile, lane = (tape.op(op_type, [numbers, ints(tape, TILE)]) for op_type in ("Div", "Mod"))
    own_lane = tape.op("Unsqueeze", [lane, ints(tape, 1)])

    def of_lane(whole: ir.Value, perm: list[int], lane: ir.Value) -> ir.Value:
        """Return a lane [n, 1] of the tile of each column, from the tiles with the axis of lanes moved to the front."""
        return tape.op("GatherND", [tape.op("Transpose", [whole], {"perm": perm}), lane], {"batch_dims": 1})

    own_tiles = _tiles(tape, codes, tile)
    is_digits = bool(attributes.get("base", 0))
    positions = digits_of(tape, own_tiles) if is_digits else positions_of(tape, own_tiles, maybe_none=True)
    units = tape.op("Reshape", [positions, ints(tape, 0, 0, 4, TILE, 4)])

    def indices_of(lane: ir.Value) -> ir.Value:
        """Return the codes of a lane of the tile of each column, int32 [n, K]."""
        in_order = of_lane(units, [0, 3, 1, 2, 4], lane)  # n, u, j, r, i -> n, r, u, j, i
        padded_rows = tape.op("Mul", [tape.op("Shape", [codes], {"start": 1, "end": 2}), ints(tape, TILE)])
        shape_of_codes = tape.op("Concat", [tape.op("Shape", [numbers]), padded_rows], {"axis": 0})
        codes_of_ids = tape.op("Reshape", [in_order, shape_of_codes], {"allowzero": 1})
        return tape.op("Cast", [tape.op("Slice", [codes_of_ids, ints(tape, 0), rows, ints(tape, 1)])], {"to": _INDEX})

    if attributes.get("trellis", 0):
        first = tape.op("Mul", [tile, ints(tape, TILE)])
        width = tape.op("Min", [tape.op("Sub", [columns, first]), ints(tape, TILE)])
        lanes = [tape.op("Mod", [tape.op("Add", [lane, ints(tape, count)]), width]) for count in range(CODES)]
        codes_of_window = [indices_of(tape.op("Unsqueeze", [right, ints(tape, 1)])) for right in lanes]
        values = window_value_nodes(tape, codes_of_window, table, bits_of_codes(tape, codes))
    else:
        values = tape.op("Gather", [table, indices_of(own_lane)], {"axis": 0})
    of_row = tape.op("Div", [_count(tape, rows), group])

    def for_each_row(factors: ir.Value) -> ir.Value:
        """Return scales or zero points [T, G, 16] of each column and row, float [n, K]."""
        per_group = of_lane(_tiles(tape, factors, tile), [0, 2, 1], own_lane)
        return tape.op("Gather", [tape.op("Cast", [per_group], {"to": ir.DataType.FLOAT}), of_row], {"axis": 1})

    full_zeros = tape.op("Expand", [zero_points, tape.op("Shape", [scales])])
    if attributes.get("span", 0):
        scales, full_zeros = (number_nodes(tape, part, rows, group, positions_of) for part in (scales, full_zeros))
    zeros_of_row = for_each_row(full_zeros)
    minimums = bool(attributes.get("minimums", 0))
    differences = values if minimums else tape.op("Sub", [values, zeros_of_row])
    weight = tape.op("Mul", [differences, for_each_row(scales)])
    if minimums:
        weight = tape.op("Add", [weight, zeros_of_row])
    shape = tape.op("Concat", [tape.op("Shape", [ids]), rows], {"axis": 0})
    y = tape.op("Reshape", [weight, shape], {"allowzero": 1})
    y.name = "y"
    graph = ir.Graph(inputs, [y], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, name, graph=graph, attributes=SCHEMA.parameters_for(name))


_INDEX = ir.DataType.INT32


def _count(tape: ir.tape.Tape, end: ir.Value) -> ir.Value:
    """Return 0, 1, 2, ... below ``end``."""
    return tape.op("Range", [tape.op("Squeeze", [bound]) for bound in (ints(tape, 0), end, ints(tape, 1))])


def _tiles(tape: ir.tape.Tape, tensor: ir.Value, tile: ir.Value) -> ir.Value:
    return tape.op("Gather", [tensor, tile], {"axis": 0})
