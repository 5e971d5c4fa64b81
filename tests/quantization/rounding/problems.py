"""Small rounding problems, and what methods are compared with: written from the definitions, in plain loops."""

from __future__ import annotations

import numpy as np

from graphopt.numerics.formats import TableFormat
from graphopt.quantization.rounding import QuantizedMatrix

Doubles = np.ndarray


def correlated_inputs(rows: int, tokens: int, seed: int, strength: float = 1.0) -> Doubles:
    """Return inputs [tokens, rows] that are correlated and of different sizes, as those of a model are."""
    random = np.random.default_rng(seed)
    mixture = random.standard_normal((tokens, rows)) @ (np.eye(rows) + strength * random.standard_normal((rows, rows)))
    return mixture * np.exp(random.standard_normal(rows))


def weights(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1000).standard_normal((rows, columns)).astype(np.float32)


def loss(matrix: Doubles, quantization: QuantizedMatrix, hessian: Doubles) -> float:
    """Return the squared norm of X (W - Q)."""
    error = matrix.astype(np.float64) - quantization.dequantize()
    return float(np.einsum("kn,kl,ln->", error, hessian, error))


def textbook_gptq(
    matrix: Doubles, hessian: Doubles, table: TableFormat, scales: Doubles, group: int, damping: float
) -> np.ndarray:
    """Return the codes of GPTQ as its paper's algorithm 1 has it: the inverse Hessian, one row after another."""
    W, K = matrix.astype(np.float64), len(matrix)
    H = hessian + damping * np.diagonal(hessian).mean() * np.eye(K)
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    codes = np.empty(W.shape, np.uint8)
    for k in range(K):
        codes[k] = table.encode(W[k] / scales[k // group])
        error = (W[k] - table.decode(codes[k]) * scales[k // group]) / U[k, k]
        W[k:] -= np.outer(U[k, k:], error)
    return codes
