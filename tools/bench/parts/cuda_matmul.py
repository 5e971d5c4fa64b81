"""Products with packed weights on a GPU: formats and rows of x, beside cuBLAS with weights in float16 and float8."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from graphopt.numerics.formats import FORMATS
from graphopt.runtime_ops.matmul_table.spec.activations import MODES
from graphopt.runtime_ops.matmul_table.spec.packing import pack
from tests.runtime_ops.cuda import products
from tests.runtime_ops.cuda.interface import check
from tools.bench.parts.cuda_case import Case, CaseFilter, all_cases, copies_past_l2, stream_of

SHAPES = ((8192, 8192), (8192, 28672), (28672, 8192), (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""K and N of the matrices of a large model, and of a layer of 8 billion parameters."""

ROWS = (1, 8, 16, 128, 256, 1024, 4096)
KINDS = (
    *((name, "float32") for name in ("t2", "t3", "t4", "int4", "fp6-e2m3", "fp6-e3m2", "nf4", "int8")),
    ("t3", "int8"),
    ("int4", "int8"),
    ("int8", "int8"),
)
"""Formats of weights, and what x is rounded to; ``float32`` leaves it in float16."""

GROUP = 128

TABLE_BYTES = 1024
"""Bytes of the table, which follows packed codes."""

DRAWN_COLUMNS = 512
"""Columns whose codes are drawn; further ones repeat them in memory of their own, as packing takes seconds."""


def cases(
    library: ctypes.CDLL,
    torch: Any,
    device: str = "cuda",
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: Sequence[int] = ROWS,
    is_selected: CaseFilter = all_cases,
) -> Iterator[Case]:
    """Yield a case for each matrix, format and number of rows: x in float16, or rounded to int8 group by group."""
    for shape in shapes:
        for name, activations in KINDS:
            counts = [count for count in rows if is_selected(_title(name, activations, count, shape))]
            if counts:
                weights = Weights(library, torch, device, shape, name, activations)
                yield from (weights.case(count) for count in counts)


def _title(name: str, activations: str, count: int, shape: tuple[int, int]) -> str:
    x_type = "float16" if activations == "float32" else activations
    return f"MatMulTable {name}, x in {x_type}, {count} rows, {shape[0]} x {shape[1]}"


class Weights:
    """A matrix of random codes with random scales, packed for the kernels, and as float16 for others."""

    def __init__(
        self, library: ctypes.CDLL, torch: Any, device: str, shape: tuple[int, int], name: str, activations: str
    ) -> None:
        self.library, self.torch, self.device = library, torch, device
        self.name, self.activations = name, activations
        self.rows, self.columns = shape
        self.mode = MODES.index(activations)
        format = FORMATS[name]
        columns = min(self.columns, DRAWN_COLUMNS)
        if self.columns % columns:
            raise ValueError(f"{self.columns} columns are no multiple of {columns}")
        column_codes = torch.randint(0, 2**format.bits, (self.rows, columns), dtype=torch.uint8).numpy()
        (table,) = format.operands.values()
        weights: dict[str, Any] = {
            "codes": pack(column_codes, format.bits),
            "table": table,
            "trellis": int(table.ndim == 2),
        }
        weights |= {"rows": self.rows, "columns": columns}
        interface = products.Products(library)
        self.codec, packed_columns = interface.pack(weights, interface.operands(np.float16, self.mode))
        codes, table_bytes = packed_columns[:-TABLE_BYTES], packed_columns[-TABLE_BYTES:]
        packed_bytes = np.concatenate([np.tile(codes, self.columns // columns), table_bytes])
        tiles, groups = -(-self.columns // 16), -(-self.rows // GROUP)
        self.bytes = len(packed_bytes) + 2 * 16 * tiles * groups
        copies = copies_past_l2(torch, device, self.bytes)
        self.packed_copies = [torch.from_numpy(packed_bytes).to(device) for _ in range(copies)]
        self.scales = torch.rand(tiles, groups, 16, device=device, dtype=torch.float16) / 64 + 1 / 64
        column_scales = self.scales.transpose(0, 1).reshape(groups, -1)[:, : self.columns].float()
        values = (
            torch.from_numpy(format.decode(column_codes).astype(np.float32))
            .to(device)
            .repeat(1, self.columns // columns)
        )
        self.dense = values * column_scales.repeat_interleave(GROUP, 0)[: self.rows]
        self.halves = [self.dense.to(torch.float16) for _ in range(2)]

    def case(self, count: int) -> Case:
        """Return the product of ``count`` rows of x."""
        torch, device, copies = self.torch, self.device, len(self.packed_copies)
        x = [torch.randn(count, self.rows, device=device, dtype=torch.float16) for _ in range(copies)]
        y = [torch.empty(count, self.columns, device=device, dtype=torch.float16) for _ in range(copies)]
        calls = [self._call(*tensors) for tensors in zip(x, y, self.packed_copies, strict=True)]
        size = self.library.graphopt_cuda_matmul_table_scratch(ctypes.byref(calls[0]))
        scratch = torch.empty(size + 1, device=device, dtype=torch.uint8)
        for call in calls:
            call.scratch = scratch.data_ptr()

        def run(copy: int, _scratch: object = scratch) -> None:
            check(self.library.graphopt_cuda_matmul_table(ctypes.byref(calls[copy]), stream_of(torch, device)))

        def error(copy: int) -> float:
            reference = x[copy].double() @ self.dense.double()
            return float((y[copy].double() - reference).norm() / reference.norm())

        def poison(copy: int) -> None:
            y[copy].fill_(float("nan"))

        # y, and a table that float16 cannot represent, are off by half a unit in the last place; a rounded x by half a
        # step of 1/127 of the largest in its group, at most 5 times the root of its mean square.
        tolerance = 2**-10 if self.activations == "float32" else 5 / 127 / 2
        title = _title(self.name, self.activations, count, (self.rows, self.columns))
        rivals = {"cuBLAS float16": lambda copy: torch.matmul(x[copy], self.halves[copy % 2], out=y[copy])}
        if device == "cuda":
            rivals["cuBLAS float8"] = _float8(torch, self.dense, x)
        bytes_moved = self.bytes + 2 * count * (self.rows + self.columns)
        return Case(title, bytes_moved, copies, poison, run, error, tolerance, rivals)

    def _call(self, x: Any, y: Any, weights: Any) -> products.MatMul:
        return products.MatMul(
            x=x.data_ptr(),
            y=y.data_ptr(),
            m=len(x),
            rows=self.rows,
            columns=self.columns,
            group=GROUP,
            x_type=10,
            scale_type=10,
            activations=self.mode,
            clip=1.0,
            packed=weights.data_ptr(),
            scales=self.scales.data_ptr(),
            largest_scale=1 / 32,
            codec=self.codec,
        )


def _float8(torch: Any, dense: Any, x: Sequence[Any]) -> Callable[[int], Any]:
    """Return torch's product of float8 with one scale each, of rows of x that are rounded before; y in bfloat16."""
    unit_scale = torch.ones((), device=dense.device)
    # cuBLAS reads weights of float8 by columns
    weights = [dense.T.contiguous().to(torch.float8_e4m3fn) for _ in range(2)]
    x_float8 = [tensor.to(torch.float8_e4m3fn) for tensor in x]
    return lambda copy: torch._scaled_mm(
        x_float8[copy], weights[copy % 2].T, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16
    )
