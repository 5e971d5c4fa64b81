"""Hadamard on a GPU: rows of the widths of models, beside a copy and a product with the whole matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np

from graphopt.numerics.rotations import factors, hadamard
from graphopt.numerics.rotations.hadamard import halves
from tests.runtime_ops.cuda import interface
from tools.bench.parts.cuda_case import Case, CaseFilter, all_cases, copies_past_l2, stream_of

WIDTHS = (4096, 8192, 14336, 18944, 28672)
ROWS = (1, 16, 4096)


def cases(
    library: ctypes.CDLL,
    torch: Any,
    device: str = "cuda",
    *,
    widths: Sequence[int] = WIDTHS,
    rows: Sequence[int] = ROWS,
    is_selected: CaseFilter = all_cases,
) -> Iterator[Case]:
    """Yield a case for each width and number of rows, float16."""
    for width in widths:
        for count in rows:
            if is_selected(_title(count, width)):
                yield _case(library, torch, device, count, width)


def _title(rows: int, width: int) -> str:
    return f"Hadamard {rows} x {width}"


def _case(library: ctypes.CDLL, torch: Any, device: str, rows: int, width: int) -> Case:
    pair = [_product(part) for part in halves(factors(width))]
    descriptors, buffers = zip(*(interface.factor(library, matrix) for matrix in pair), strict=True)
    bytes_of_one = 2 * 2 * rows * width
    copies = copies_past_l2(torch, device, bytes_of_one)
    x = [torch.randn(rows, width, device=device, dtype=torch.float16) for _ in range(copies)]
    y = [torch.empty_like(tensor) for tensor in x]
    left_matrix, right_matrix = (torch.tensor(matrix, device=device, dtype=torch.float64) for matrix in pair)
    full_matrix = (torch.kron(left_matrix, right_matrix) / width**0.5).to(torch.float16) if width <= 8192 else None

    def run(copy: int, _buffers: object = buffers) -> None:
        call = interface.Hadamard(x[copy].data_ptr(), y[copy].data_ptr(), rows, 10, *descriptors)
        interface.check(library.graphopt_cuda_hadamard(ctypes.byref(call), stream_of(torch, device)))

    def error(copy: int) -> float:
        runs = x[copy].double().reshape(rows, len(left_matrix), len(right_matrix))
        reference = (left_matrix.T @ runs @ right_matrix / width**0.5).reshape(rows, width)
        return float((y[copy].double() - reference).norm() / reference.norm())

    def poison(copy: int) -> None:
        y[copy].fill_(float("nan"))

    rivals = {"torch copy": lambda copy: y[copy].copy_(x[copy])}
    if full_matrix is not None:
        rivals["torch matmul"] = lambda copy: torch.matmul(x[copy], full_matrix, out=y[copy])
    # Half a unit in the last place, and numbers cut to 16 bits before a core.
    return Case(_title(rows, width), bytes_of_one, copies, poison, run, error, 2**-11 + 2**-14, rivals)


def _product(orders: tuple[int, ...]) -> Any:
    return reduce(np.kron, (hadamard(order) for order in orders), np.ones((1, 1), np.int8))
