"""``ai.graphopt::DequantizeCodebook``, version 1: the matrix that codes of vectors stand for.

An entry is d neighbouring weights, d = 1, 2, 4, 8 or 16: of one column where axis is 0, of one row where it is 1.

Inputs, all of them required:
    codes: uint8 [T, B, 2 bits], T = ceil(N / 16), B = ceil(K / d): one code for each entry, of bits = index_bits +
        second_bits + sign_bits + log2(S) bits, 1 to 32; see :mod:`.packing`.
    scales: float or float16 [T, ceil(K / span), 16]; finite.
    levels: uint8 [T, ceil(K / group), 2 level_bits], 16 numbers of level_bits bits as codes lie; where level_bits is 0,
        one number that is not read.
    level_table: float [2, 2^level_bits], finite: what scales are multiplied by, and what is added in front of them.
    books: float [E, d], finite: the entries of the first book, 2^index_bits of them, and behind them those of the
        second, 2^second_bits where second_bits is not 0.
    shifts: float [S], finite, S = 1 or 2.

Attributes, all integers:
    rows, columns: K and N.
    axis: 0 or 1, along which an entry lies.
    index_bits: 1 to 16; second_bits: 0 to 16, 0 for one book; sign_bits: 0, d - 1 or d.
    level_bits: 0 to 8.
    group: rows that share a level, a multiple of d or K at least; span: rows that share a scale, likewise.

Output:
    W: float [K, N], in float32 arithmetic. A code is, from its lowest bit up, the index i, the second index j, signs s
    and the place z of a shift. Its d numbers v are, with g = k div group, l the level of row and column::

        v[c] = (books[i, c] + books[2^index_bits + j, c]) (-1)^s[c] + shifts[z]
        W[k, n] = (v + level_table[1, l]) (level_table[0, l] scales[n div 16, k div span, n mod 16])

    The second book counts where second_bits is not 0. Where sign_bits is 0 no number changes its sign; where it is
    d - 1 the last one does where an odd number of the others do.

These are the codes of llama.cpp's IQ1, IQ2 and IQ3 types, of QuIP#'s E8P (Tseng et al. 2024, section 4) and of learned
books (VPTQ, Liu et al. 2024; GPTVQ, van Baalen et al. 2024). It has no kernel: the step ``lower`` makes one product,
``MatMulCodebook``, of it and the ``MatMul`` behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.dequantize_codebook.spec.body import matrix_body
from graphopt.runtime_ops.dequantize_codebook.spec.packing import LANES, join_bits, to_matrix
from graphopt.runtime_ops.dequantize_codebook.spec.schema import SCHEMA, overload
from graphopt.runtime_ops.operator import Operator

Floats = npt.NDArray[np.floating[Any]]
Bytes = npt.NDArray[np.uint8]

SIZES = (1, 2, 4, 8, 16)
"""Numbers that an entry may have."""


def reference(
    codes: Bytes,
    scales: Floats,
    levels: Bytes,
    level_table: Floats,
    books: Floats,
    shifts: Floats,
    *,
    rows: int,
    columns: int,
    axis: int,
    index_bits: int,
    second_bits: int,
    sign_bits: int,
    level_bits: int,
    group: int,
    span: int,
) -> npt.NDArray[np.float32]:
    """Return what the operator means, float32 [K, N].

    Raises:
        ValueError: shapes and attributes do not fit one another.
    """
    overload(axis=axis, index_bits=index_bits, second_bits=second_bits, sign_bits=sign_bits, level_bits=level_bits)
    size, shift_bits = books.shape[-1], len(shifts) - 1
    tiles, bits = -(-columns // LANES), index_bits + second_bits + sign_bits + shift_bits
    if size not in SIZES or shift_bits not in (0, 1) or sign_bits not in (0, size - 1, size) or bits > 32:
        raise ValueError(f"entries of {size} numbers with {sign_bits} signs and {shift_bits + 1} shifts are none")
    if any(rows_of % size and rows_of < rows for rows_of in (group, span)):
        raise ValueError(f"groups of {group} and spans of {span} rows are no multiples of {size}")
    shapes = {
        "books": (books.shape, (2**index_bits + (2**second_bits if second_bits else 0), size)),
        "shifts": (shifts.shape, (shift_bits + 1,)),
        "codes": (codes.shape, (tiles, -(-rows // size), 2 * bits)),
        "scales": (scales.shape, (tiles, -(-rows // span), LANES)),
        "levels": (levels.shape, (tiles, -(-rows // group), 2 * level_bits) if level_bits else levels.shape),
        "level_table": (level_table.shape, (2, 2**level_bits)),
    }
    for name, (shape, fitting) in shapes.items():
        if shape != fitting:
            raise ValueError(f"{name} must be {list(fitting)}, and is {list(shape)}")
    entries = join_bits(codes)

    def field(first: int, width: int) -> npt.NDArray[np.int64]:
        return ((entries >> np.uint32(first)) & np.uint32(2**width - 1)).astype(np.int64)

    table = books.astype(np.float32)
    values = table[field(0, index_bits)]
    if second_bits:
        values = values + table[2**index_bits + field(index_bits, second_bits)]
    if sign_bits:
        signs = field(index_bits + second_bits, sign_bits)[..., None] >> np.arange(sign_bits) & 1
        if sign_bits < size:
            signs = np.concatenate([signs, signs.sum(-1, keepdims=True) & 1], -1)
        values = np.where(signs == 1, -values, values)
    values = values + shifts.astype(np.float32)[field(bits - shift_bits, shift_bits)][..., None]
    matrix = to_matrix(values, axis, rows, columns)
    of_row = np.arange(rows) // group
    level_of_group = join_bits(levels) if level_bits else np.zeros((tiles, -(-rows // group), LANES), np.uint32)
    pairs = level_table.astype(np.float32)[:, level_of_group]
    factors, offsets = (_columns(part, columns)[of_row] for part in pairs)
    steps = _columns(scales.astype(np.float32), columns)[np.arange(rows) // span]
    return np.asarray((matrix + offsets) * (factors * steps), np.float32)


def _columns(tensor: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """Return [T, G, 16] as [G, N]."""
    return tensor.transpose(1, 0, 2).reshape(tensor.shape[1], -1)[:, :columns]


DEQUANTIZE_CODEBOOK = Operator(SCHEMA, matrix_body, reference, overload)
