"""What rounding lost, as a product of two thin matrices: a branch in float16 beside the codes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.quantization.rounding.expressions import MatrixRounding
from graphopt.quantization.rounding.single_thread import one_thread

if TYPE_CHECKING:
    from graphopt.graph.weights import Array, Expression, Shape

Doubles = npt.NDArray[np.float64]
Halves = npt.NDArray[np.float16]

# Steps of the subspace iteration, and vectors that it has besides those asked for. Singular values of a rounding error
# lie close together, so the last directions are only about the strongest, and lose little to the strongest.
_STEPS, _SPARE = 6, 8
_DAMPING = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankRounding(MatrixRounding):
    """What :class:`MatrixRounding` makes, and ``left`` [rows, rank] and ``right`` [rank, columns] of the branch.

    Attributes:
        rank: directions of the branch.
        inputs: X^T X of the product's inputs, [rows, rows].
    """

    rank: int = 0
    inputs: Expression | None = None

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Beside those of :class:`MatrixRounding` two matrices in float16."""
        rows, columns = self.source.shape
        half = ir.DataType.FLOAT16
        return super().parts | {"left": (half, (rows, self.rank)), "right": (half, (self.rank, columns))}

    def evaluate(self) -> dict[str, Array]:
        """Round the matrix, and find the branch for what was lost."""
        assert self.inputs is not None
        matrix, matrix_codes = self.round()
        error = matrix.astype(np.float64) - matrix_codes.dequantize()
        thin, right = low_rank(error, self.inputs.numpy(), self.rank)
        return self.tensors(matrix_codes) | {"left": thin, "right": right}


def low_rank(error: Doubles, hessian: npt.NDArray[Any], rank: int) -> tuple[Halves, Halves]:
    """Return A [rows, rank] and B [rank, columns] that make the squared norm of X (E - A B) small, in float16.

    With H + d = L L^T that norm is the one of L^T E - L^T A B, which is least for the strongest singular vectors U of
    L^T E: A = L^-T U, B = U^T L^T E (LQER, Zhang et al. 2024, takes the diagonal of H for H; QERA, Zhang et al. 2025,
    theorem 1, all of it, as here). Each direction is scaled so that its largest numbers in A and in B are equal, where
    float16 has room for both.

    Args:
        error: E, what the weight is more than its codes say, [rows, columns].
        hessian: H = X^T X, [rows, rows], up to a factor.
        rank: columns of A; what is more than the error has is 0.

    Raises:
        InputError: H is not finite, or not X^T X of any X.
    """
    from scipy.linalg import solve_triangular

    diagonal = np.diagonal(hessian).astype(np.float64)
    mean = float(diagonal.mean())
    H = hessian.astype(np.float64) / (mean or 1.0)
    H.reshape(-1)[:: len(H) + 1] += _DAMPING if mean else 1.0
    with one_thread():
        try:
            lower = np.linalg.cholesky(H)
        except np.linalg.LinAlgError as error_:
            raise InputError(
                "the statistics of a weight's inputs cannot be factored",
                shape=hessian.shape,
                remedy="remove the folder that holds them and calibrate again",
            ) from error_
        weighted_error = lower.T @ error
        U = _strongest(weighted_error, min(rank, *error.shape))
        A, B = solve_triangular(lower.T, U), U.T @ weighted_error
    return _balance(A, B, rank)


def _strongest(matrix: Doubles, rank: int) -> Doubles:
    """Return about the strongest left singular vectors, orthonormal [rows, rank]."""
    width = min(rank + _SPARE, *matrix.shape)
    U, _ = np.linalg.qr(matrix @ np.random.default_rng(0).standard_normal((matrix.shape[1], width)))
    for _ in range(_STEPS):
        U, _ = np.linalg.qr(matrix @ (matrix.T @ U))
    inside = U.T @ matrix
    _, turn = np.linalg.eigh(inside @ inside.T)
    return np.asarray(U @ turn[:, ::-1][:, :rank])


def _balance(tall_matrix: Doubles, wide_matrix: Doubles, rank: int) -> tuple[Halves, Halves]:
    heights, widths = np.abs(tall_matrix).max(0, initial=0.0), np.abs(wide_matrix).max(1, initial=0.0)
    half = np.finfo(np.float16)
    # A direction that float16 has no numbers for is 0 on both sides.
    fits = np.sqrt(heights) * np.sqrt(widths) > float(half.smallest_subnormal)
    factor = np.sqrt(np.divide(widths, heights, out=np.ones_like(widths), where=fits))
    halves = np.zeros((len(tall_matrix), rank), np.float16), np.zeros((rank, wide_matrix.shape[1]), np.float16)
    limit = float(half.max)
    halves[0][:, : tall_matrix.shape[1]] = np.clip(tall_matrix * (factor * fits), -limit, limit)
    halves[1][: len(wide_matrix)] = np.clip(wide_matrix * (fits / factor)[:, None], -limit, limit)
    return halves
