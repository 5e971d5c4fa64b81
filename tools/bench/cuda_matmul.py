"""Products with packed weights on a GPU: formats and rows of x, beside cuBLAS with float16 weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphopt.formats import FORMATS
from graphopt.runtime_ops.matmul_table.spec.activations import MODES
from graphopt.runtime_ops.matmul_table.spec.packing import pack
from tests.runtime_ops.cuda import products
from tests.runtime_ops.cuda.interface import check
from tools.bench.cuda_case import Case, copies_past_l2, stream_of

SHAPES = ((8192, 8192), (8192, 28672), (28672, 8192))
"""K and N of the matrices of a large model."""

ROWS = (1, 8, 16, 256, 4096)
FORMATS_OF_FLOATS = ("fp6-e3m2", "fp6-e2m3", "int4", "int8", "nf4")
GROUP = 128


def cases(
    library: ctypes.CDLL,
    torch: Any,
    device: str = "cuda",
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: Sequence[int] = ROWS,
) -> Iterator[Case]:
    """Yield a case for each matrix, format and number of rows: x in float16, or rounded to int8 group by group."""
    for shape in shapes:
        for count in rows:
            for name in FORMATS_OF_FLOATS:
                yield _case(library, torch, device, count, shape, name, "float32")
            yield _case(library, torch, device, count, shape, "int4", "int8")
            yield _case(library, torch, device, count, shape, "int8", "int8")


def _case(
    library: ctypes.CDLL, torch: Any, device: str, count: int, shape: tuple[int, int], name: str, activations: str
) -> Case:
    rows, columns = shape
    table = np.array(FORMATS[name].table, np.float32)
    random, interface = np.random.default_rng(), products.Products(library)
    codes = random.integers(0, len(table), (rows, columns)).astype(np.uint8)
    given = {"codes": pack(codes, FORMATS[name].bits), "table": table, "rows": rows, "columns": columns}
    mode = MODES.index(activations)
    codec, packed = interface.pack(given, interface.operands(np.float16, mode))
    tiles, groups = -(-columns // 16), -(-rows // GROUP)
    moved = len(packed) + 2 * 16 * tiles * groups + 2 * count * (rows + columns)
    copies = copies_past_l2(torch, device, moved)
    weights = [torch.from_numpy(packed).to(device) for _ in range(copies)]
    scales = torch.rand(tiles, groups, 16, device=device, dtype=torch.float16) / 64 + 1 / 64
    x = [torch.randn(count, rows, device=device, dtype=torch.float16) for _ in range(copies)]
    y = [torch.empty(count, columns, device=device, dtype=torch.float16) for _ in range(copies)]
    calls = [
        products.MatMul(
            x=x[i].data_ptr(),
            y=y[i].data_ptr(),
            m=count,
            rows=rows,
            columns=columns,
            group=GROUP,
            x_type=10,
            scale_type=10,
            activations=mode,
            clip=1.0,
            packed=weights[i].data_ptr(),
            scales=scales.data_ptr(),
            codec=codec,
        )
        for i in range(copies)
    ]
    size = library.graphopt_cuda_matmul_table_scratch(ctypes.byref(calls[0]))
    scratch = torch.empty(size + 1, device=device, dtype=torch.uint8)
    for call in calls:
        call.scratch = scratch.data_ptr()
    values = torch.from_numpy(table[codes]).to(device)
    of_columns = scales.transpose(0, 1).reshape(groups, -1)[:, :columns].float()
    dense = values * of_columns.repeat_interleave(GROUP, 0)[:rows]
    halves = [dense.to(torch.float16) for _ in range(2)]

    def run(copy: int, _kept: object = (weights, scales, scratch)) -> None:
        check(library.graphopt_cuda_matmul_table(ctypes.byref(calls[copy]), stream_of(torch, device)))

    def error(copy: int) -> float:
        expected = x[copy].double() @ dense.double()
        return float((y[copy].double() - expected).norm() / expected.norm())

    def poison(copy: int) -> None:
        y[copy].fill_(float("nan"))

    # y, and a table that float16 cannot represent, are off by half a unit in the last place; a rounded x by half a step
    # of 1/127 of the largest in its group, at most 5 times the root of its mean square.
    allowed = 2**-10 if activations == "float32" else 5 / 127 / 2
    of_x = "float16" if activations == "float32" else activations
    title = f"MatMulTable {name}, x in {of_x}, {count} rows, {rows} x {columns}"
    rivals = {"cuBLAS float16": lambda copy: torch.matmul(x[copy], halves[copy % 2], out=y[copy])}
    return Case(title, moved, copies, poison, run, error, allowed, rivals)
