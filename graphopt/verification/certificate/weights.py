"""Weights of the two graphs compared: bit by bit, or as W' = M_in^T W M_out up to rounding.

A fused matrix is checked with random vectors (Freivalds): W' r against M_in^T (W (M_out r)), all in float64, in one
pass over each weight, blockwise, with no product of large matrices. If W' is what float64 gives, rounded once to a
stored type of unit roundoff u, then in row i the two sides differ by at most

    b_i = u / (1 - u) sum_j |W'_ij| |r_j| + s sum_j |r_j| + 4 (m + n + 64) 2^-53 |W| |r|

with s half the smallest number of the type and |W| the norm of W [m, n], of row i alone where M_in is none. The last
term is room for the float64 arithmetic of both sides. r is Gaussian, scaled to length sqrt(n): uniform on that sphere,
which bounds b_i by the same B_i for every r. A row i that is off by a vector e passes if |e . r| <= b_i, which has
probability at most sqrt(2 / pi) B_i / |e|, since for n > 2 a coordinate on the sphere has its largest density, at most
that of a Gaussian, at 0. Several vectors multiply their probabilities. Faults below B_i may go unseen: they are no
larger than sqrt(n) times what rounding may do to the length of the row.

Vectors are compared entry by entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphopt.verification.certificate.coordinates import Tag
    from graphopt.verification.certificate.rotations import Doubles, Rotations

Result = TypeVar("Result")
Array = npt.NDArray[Any]

# Numbers that are compared at a time: in float64 they stay in a core's own cache, and BLAS uses no threads for them.
_BLOCK = 1 << 16
_MISS_PROBABILITY = 1e-6
# Unit roundoff and half the smallest number of each type that a weight may be stored in.
_ROUNDING = {
    ir.DataType.DOUBLE: (2.0**-53, 0.0),
    ir.DataType.FLOAT: (2.0**-24, 2.0**-150),
    ir.DataType.FLOAT16: (2.0**-11, 2.0**-25),
    ir.DataType.BFLOAT16: (2.0**-8, 2.0**-134),
}


@dataclass(frozen=True)
class Comparison:
    """How far a fused weight is from its original times its maps.

    Attributes:
        ratio: the largest deviation divided by its bound; at most 1 where rounding explains all. May be infinite.
        row: the row, or entry of a vector, where it is.
        visible: a row off by more than this share of its own length passes with probability below 1e-6.
    """

    ratio: float
    row: int
    visible: float


def rounding_is_known(tensor: ir.TensorProtocol) -> bool:
    """Return whether a fused weight of this type can be compared."""
    return tensor.dtype in _ROUNDING


def apply_to_array(tensor: ir.TensorProtocol, function: Callable[[Array], Result]) -> Result:
    """Return ``function`` of the array, which it must not keep; a file that was not open before is closed again."""
    is_to_close = isinstance(tensor, ir.ExternalTensor) and tensor.raw is None
    result = function(tensor.numpy())
    if is_to_close:
        assert isinstance(tensor, ir.ExternalTensor)
        tensor.release()
    return result


def is_same(before: ir.TensorProtocol, after: ir.TensorProtocol) -> bool:
    """Return whether type, shape and every bit agree."""
    if before is after:
        return True
    if before.dtype != after.dtype or list(before.shape) != list(after.shape):
        return False
    if before.dtype == ir.DataType.STRING:
        return bool(np.array_equal(before.numpy(), after.numpy()))
    if isinstance(before, ir.ExternalTensor) and isinstance(after, ir.ExternalTensor):
        locations = [(str(t.path), t.offset or 0) for t in (before, after)]
        if locations[0] == locations[1]:
            return True
    return apply_to_array(before, lambda a: apply_to_array(after, lambda b: _same_bits(a, b)))


# NaN and infinity are not warned of here: they come out as an infinite ratio.
@np.errstate(all="ignore")
def compare_matrix(
    before: ir.TensorProtocol,
    after: ir.TensorProtocol,
    maps: tuple[Tag, Tag],
    rotations: Rotations,
    vectors: Doubles,
) -> Comparison:
    """Compare ``after`` with M_in^T ``before`` M_out.

    Args:
        before: the original W, [..., n]; all axes but the last are taken as rows, m of them.
        after: the fused weight, of the same type and shape.
        maps: labels of the rows [m] and of the columns [n].
        rotations: what the labels mean.
        vectors: Gaussian, [n, k].
    """
    rows, columns = maps
    m, n = prod(before.shape.numpy()[:-1]), len(vectors)
    r = vectors * (np.sqrt(n) / np.linalg.norm(vectors, axis=0))
    mapped_vectors = r if columns is None else columns.apply(r, rotations, inverse=True)
    products_before, lengths = apply_to_array(before, lambda w: _products(w, mapped_vectors))[::2]
    products_after, sums, new_lengths = apply_to_array(after, lambda w: _products(w, r))
    if rows is not None:
        products_before = rows.apply(products_before, rotations)
        lengths = np.full(m, np.linalg.norm(lengths))
    u, smallest = _ROUNDING[after.dtype]
    arithmetic = 4 * (m + n + 64) * 2.0**-53 * lengths * np.sqrt(n)
    bound = u / (1 - u) * sums + smallest * np.abs(r).sum(0) + arithmetic[:, None]
    longest = (u / (1 - u) * new_lengths + smallest * np.sqrt(n)) * np.sqrt(n) + arithmetic
    miss = np.sqrt(2 / np.pi) * _MISS_PROBABILITY ** (-1 / r.shape[1])
    visible = np.divide(longest * miss, new_lengths, out=np.zeros(m), where=new_lengths > 0)
    return _comparison(np.abs(products_after - products_before), bound, float(visible.max(initial=0.0)))


@np.errstate(all="ignore")
def compare_entries(before: ir.TensorProtocol, after: ir.TensorProtocol, map_: Tag, rotations: Rotations) -> Comparison:
    """Compare each entry of ``after`` with that of ``before`` in other coordinates; the labels have their shape."""
    old, new = (apply_to_array(t, lambda a: a.astype(np.float64).reshape(-1, 1)) for t in (before, after))
    products_before = old if map_ is None else map_.apply(old, rotations)
    u, smallest = _ROUNDING[after.dtype]
    arithmetic = 4 * (len(old) + 64) * 2.0**-53 * np.linalg.norm(old)
    bound = u / (1 - u) * np.abs(new) + smallest + arithmetic
    return _comparison(np.abs(new - products_before), bound, 0.0)


def _comparison(error: Doubles, bound: Doubles, visible: float) -> Comparison:
    ratio = np.where(error == 0, 0.0, error / bound).max(axis=1, initial=0.0)
    ratio = np.where(np.isfinite(ratio), ratio, np.inf)
    return Comparison(float(ratio.max(initial=0.0)), int(ratio.argmax()) if len(ratio) else 0, visible)


@np.errstate(all="ignore")
def _products(weight: Array, vectors: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Return W r and |W| |r|, both [m, k], and the lengths of the rows [m]."""
    matrix = weight.reshape(-1, len(vectors))
    product, sums, lengths = np.empty((len(matrix), vectors.shape[1])), np.empty((len(matrix), vectors.shape[1])), []
    for start, block in _blocks(matrix):
        rows = slice(start, start + len(block))
        block = block.astype(np.float64)
        product[rows] = block @ vectors
        lengths.append(np.linalg.norm(block, axis=1))
        sums[rows] = np.abs(block, out=block) @ np.abs(vectors)
    return product, sums, np.concatenate(lengths) if lengths else np.empty(0)


def _blocks(matrix: Array) -> Iterator[tuple[int, Array]]:
    step = max(1, _BLOCK // max(1, prod(matrix.shape[1:])))
    for start in range(0, len(matrix), step):
        yield start, matrix[start : start + step]


def _same_bits(before: Array, after: Array) -> bool:
    pairs = zip(_blocks(np.atleast_1d(before)), _blocks(np.atleast_1d(after)), strict=True)
    return all(np.array_equal(_bits(a), _bits(b)) for (_, a), (_, b) in pairs)


def _bits(block: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)
