"""Random weights that suit the nodes that read them: in a graph that is compiled, or in the files beside one.

Numbers repeat after :data:`PERIOD`, so drawing gigabytes is copying. They keep activations finite: gains of
norms are near 1, products of codes and scales have the deviation of a checkpoint's weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.graph.weights import Expression, WeightTensor
from graphopt.graph.weights.disk import require_space, reserve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphopt.graph.weights import Array, Region, Shape

Role = Literal["codes", "scales", "zero points", "gains", "angles", "matrix"]

PERIOD = (1 << 22) + 64
"""How many numbers are drawn before they repeat: no multiple of the sizes of rows, so rows differ."""

# As transformers begins (see random_checkpoint.py).
_DEVIATION, _GAIN_DEVIATION = 0.02, 0.1

# What the inputs of an operator are, by their index.
_ROLES: dict[str, dict[int, Role]] = {
    "Dequantize": {0: "codes", 1: "scales"},
    "DequantizeLinear": {0: "codes", 1: "scales", 2: "zero points"},
    "GatherBlockQuantized": {0: "codes", 2: "scales", 3: "zero points"},
    "GroupQueryAttention": {7: "angles", 8: "angles"},
    "MatMulNBits": {1: "codes", 2: "scales", 3: "zero points"},
    "MatMulTable": {1: "codes", 2: "scales"},
    "RMSNormalization": {1: "gains"},
    "SimplifiedLayerNormalization": {1: "gains"},
    "SkipSimplifiedLayerNormalization": {2: "gains"},
    "MatMul": {0: "matrix", 1: "matrix"},
}
# Operators that do not change numbers.
_TRANSPARENT = ("Cast", "Gather", "Identity", "Reshape", "Transpose")

# Where an operator reads the numbers that codes stand for.
_TABLES = {"Dequantize": 2, "MatMulTable": 3}


@dataclasses.dataclass(frozen=True)
class Use:
    """What a weight is to the node that reads it.

    Attributes:
        role: see :data:`Role`.
        node: the node.
    """

    role: Role
    node: ir.Node

    @property
    def levels(self) -> int | None:
        """How many values codes have, where there is a table."""
        table = self._table()
        return None if table is None else len(table)

    @property
    def deviation(self) -> float:
        """The standard deviation of what random codes stand for, before they are scaled."""
        table = self._table()
        if table is not None:
            return float(np.std(table))
        if self.node.op_type == "DequantizeLinear":
            dtype = self.node.inputs[0].dtype if self.node.inputs[0] is not None else None
            bits = 8 if dtype is None else dtype.itemsize * 8
        else:
            bits = self.node.attributes.get_int("bits", 4)
        return 2 ** float(bits) / math.sqrt(12)

    def _table(self) -> Array | None:
        index = _TABLES.get(self.node.op_type)
        value = None if index is None else self.node.inputs[index]
        return None if value is None or value.const_value is None else value.const_value.numpy().reshape(-1)


def use_of(value: ir.Value) -> Use:
    """Return the use of a weight by the first node that reads it, directly or through operators that only move numbers.

    Raises:
        InputError: no node that is known here reads it.
    """
    use = _first_use(value)
    if use is not None:
        return use
    readers = sorted({f"{reader.op_type}[{index}]" for reader, index in value.uses()})
    raise InputError(
        f"no rule says which random numbers suit a weight that {', '.join(readers) or 'no node'} reads",
        tensor=value.name,
        remedy="add one to _ROLES in tools/bench/parts/drawn_weights.py",
    )


def _first_use(value: ir.Value) -> Use | None:
    for reader, index in value.uses():
        role = _ROLES.get(reader.op_type, {}).get(index)
        if role is not None:
            return Use(role, reader)
        if reader.op_type in _TRANSPARENT and index == 0:
            further_use = _first_use(reader.outputs[0])
            if further_use is not None:
                return further_use
            if reader.op_type == "Gather":  # a table of embeddings, or its codes, which are cast later
                return Use("matrix" if value.dtype is None or value.dtype.is_floating_point() else "codes", reader)
    return None


@functools.lru_cache(maxsize=32)
def drawn_numbers(role: Role, dtype: ir.DataType, levels: int | None, deviation: float) -> Array:
    """Return :data:`PERIOD` random numbers.

    Args:
        role: what they are for.
        dtype: their type.
        levels: how many values a code has, from 0 on; ``None`` for all of the type.
        deviation: of codes that are scaled by them.
    """
    generator = np.random.default_rng([zlib.crc32(role.encode()), int(dtype)])
    if role == "zero points":
        return np.zeros(PERIOD, dtype.numpy())
    if role == "codes":
        bits = int(dtype.itemsize * 8)
        lowest = -(1 << (bits - 1)) if dtype.is_signed() else 0
        count = 1 << bits if levels is None else min(levels, 1 << bits)
        return generator.integers(lowest, lowest + count, PERIOD, np.int16).astype(dtype.numpy())
    numbers: Array
    if role == "scales":
        # Rounding makes scales that float16 holds, and passes store them so where it does.
        numbers = (generator.uniform(0.5, 1.5, PERIOD) * (_DEVIATION / deviation)).astype(np.float16)
    elif role == "angles":
        numbers = np.cos(generator.uniform(0, math.tau, PERIOD))
    else:
        mean, spread = (1.0, _GAIN_DEVIATION) if role == "gains" else (0.0, _DEVIATION)
        numbers = generator.normal(mean, spread, PERIOD)
    return numbers.astype(dtype.numpy())


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnWeight(Expression):
    """Numbers that suit what reads a weight; any process draws the same.

    Attributes:
        name: of the weight, which says where in the numbers it begins.
        role: what it is.
        kind: type of its numbers.
        dims: dimensions.
        levels: see :func:`drawn_numbers`.
        deviation: likewise.
    """

    name: str
    role: Role
    kind: ir.DataType
    dims: Shape
    levels: int | None
    deviation: float

    @property
    def dtype(self) -> ir.DataType:
        """Of the numbers."""
        return self.kind

    @property
    def shape(self) -> Shape:
        """Dimensions."""
        return self.dims

    @property
    def whole(self) -> frozenset[int]:
        """All axes but the first."""
        return frozenset(range(1, len(self.dims)))

    def evaluate(self, region: Region) -> Array:
        """Copy rows out of the repeated numbers, and cut them."""
        width, rows = math.prod(self.dims[1:]), region[0]
        numbers = drawn_numbers(self.role, self.kind, self.levels, self.deviation)
        start = (zlib.crc32(self.name.encode()) + rows.start * width) % PERIOD
        count = (rows.stop - rows.start) * width
        row_numbers = np.tile(numbers, -(-(start + count) // PERIOD))[start : start + count]
        return row_numbers.reshape(-1, *self.dims[1:])[(slice(None), *region[1:])]


def draw_weights(model: ir.Model) -> None:
    """Replace every weight that is not evaluated yet by random numbers; constants stay.

    Raises:
        InputError: it is not known what suits a weight.
    """
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, WeightTensor):
            use, name, dims = use_of(value), value.name or "", tuple(tensor.shape.numpy())
            weight = DrawnWeight(name, use.role, tensor.dtype, dims, use.levels, use.deviation)
            value.const_value = WeightTensor(weight, name)


def missing_files(file: Path) -> dict[Path, int]:
    """Return the files of weights that a model names and that are not there as large as it says, with their sizes."""
    sizes: dict[Path, int] = {}
    for _, tensor in _external(ir.load(file)):
        path = file.parent / tensor.location
        sizes[path] = max(sizes.get(path, 0), (tensor.offset or 0) + (tensor.length or 0))
    return {path: size for path, size in sizes.items() if not path.is_file() or path.stat().st_size != size}


def fill_external_data(file: Path, threads: int = 0) -> int:
    """Write the files of weights that a model names, filled with random numbers, and return their bytes.

    Codes are random bytes: of formats in files no bit is unused. Files that are there as large as the model says stay.

    Args:
        file: the model, of which only the graph is there.
        threads: that write; 0 for one on each core.

    Raises:
        InputError: it is not known what suits a weight, or the disk is too small.
    """
    sizes = missing_files(file)
    require_space(file.parent, sum(sizes.values()))
    for path, size in sizes.items():
        reserve(path, size)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        tensors = [(v, t) for v, t in _external(ir.load(file)) if file.parent / t.location in sizes]
        for job in [pool.submit(_fill, file.parent, value, tensor, use_of(value)) for value, tensor in tensors]:
            job.result()
    return sum(sizes.values())


def _external(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value, value.const_value


def _fill(folder: Path, value: ir.Value, tensor: ir.ExternalTensor, use: Use) -> None:
    """Write one tensor: whole bytes of numbers, from a place in them that its name says."""
    is_bytes = use.role == "codes"
    dtype = ir.DataType.UINT8 if is_bytes else tensor.dtype
    numbers: Any = drawn_numbers(use.role, dtype, None, use.deviation)
    if use.role == "zero points" and use.node.op_type == "MatMulNBits":
        numbers = np.full(PERIOD, 0x88, np.uint8)  # the middle of two codes
    content = memoryview(numbers.view(np.uint8))
    start = zlib.crc32((value.name or "").encode()) % PERIOD * numbers.itemsize
    with (folder / tensor.location).open("r+b", buffering=0) as stream:
        stream.seek(tensor.offset or 0)
        remaining_bytes = tensor.length or tensor.nbytes
        while remaining_bytes:
            piece = content[start : start + remaining_bytes]
            remaining_bytes -= stream.write(piece)
            start = (start + len(piece)) % len(content)
