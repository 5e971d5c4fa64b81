"""The factors of a Hessian that error feedback multiplies by: H + damping = (U + I) D (U + I)^T, U strictly upper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

Doubles = npt.NDArray[np.float64]

Panel = TypeVar("Panel")

# Rows that LAPACK factors, in one thread.
_PANEL = 128

MOST_DAMPING = 1.0
"""The share of its mean that is added to a diagonal at most."""


def factor(hessian: npt.NDArray[Any], damping: float, order: npt.NDArray[np.intp]) -> tuple[Doubles, Doubles]:
    """Return U + I, float64 [rows, rows], and D, float64 [rows], of a damped Hessian whose rows are put in ``order``.

    With damping d the condition number is at most 1 + rows / d, since no eigenvalue exceeds the sum of all; so for the
    usual 0.01 and thousands of rows the factorization cannot fail in float64. Where it does, d grows tenfold, up to 1.
    The Hessian's scale does not matter: D is relative to the mean of the diagonal.

    Args:
        hessian: X^T X, [rows, rows].
        damping: what is added to the diagonal, as a share of its mean. A Hessian of zeros becomes the unit matrix.
        order: which row comes first, and so on.

    Raises:
        InputError: the Hessian is not finite, or not X^T X of any X.
    """
    # Reversed, R^T R becomes a product of an upper factor with a lower one. In memory by columns: that is how rows are
    # corrected.
    count = len(hessian)
    columns, squares = np.zeros((count, count)), np.empty(count)

    def divide(panel: Doubles) -> None:
        roots, stop = np.diagonal(panel)[::-1], panel.shape[1]
        rows = slice(stop - len(panel), stop)
        squares[rows] = roots**2
        np.divide(panel[::-1, ::-1], roots[:, None], out=columns[rows, :stop])

    factor_panels(hessian, damping, order[::-1], _PANEL, divide)
    return columns.T, squares


def factor_panels(
    hessian: npt.NDArray[Any],
    damping: float,
    order: npt.NDArray[np.intp],
    size: int,
    keep: Callable[[Doubles], Panel],
) -> list[Panel]:
    """Return R, upper, for H / mean + damping = R^T R, as panels of rows from the diagonal on, by threads.

    Each panel's own block is factored by LAPACK, the rest by products (Golub and Van Loan, Matrix Computations, 4th
    edition, section 4.2.6). It is the same for any number of threads, where LAPACK computes in one.

    Args:
        hessian: H = X^T X, [rows, rows].
        damping: what is added to the diagonal, as a share of its mean; grows tenfold up to 1 where it is too small. A
            Hessian of zeros becomes the unit matrix.
        order: which row comes first, and so on.
        size: rows of a panel.
        keep: returns what is kept of a panel, float64 [up to size, rows from its first on]. It is not changed after.

    Raises:
        InputError: the Hessian is not finite, or not X^T X of any X.
    """
    mean = float(check_diagonal(hessian).mean())
    damping = damping if mean else 1.0
    while True:
        try:
            return _try_to_factor(hessian, mean or 1.0, damping, order, size, keep)
        except np.linalg.LinAlgError as error:
            if not np.isfinite(hessian).all() or damping >= MOST_DAMPING:
                raise refuse_factor(hessian, damping) from error
            damping = min(10 * damping, MOST_DAMPING)


def _try_to_factor(
    hessian: npt.NDArray[Any],
    mean: float,
    damping: float,
    order: npt.NDArray[np.intp],
    size: int,
    keep: Callable[[Doubles], Panel],
) -> list[Panel]:
    count = len(hessian)
    starts = range(0, count, size)
    panels: list[Doubles | None] = [None] * len(starts)
    buffers: list[Doubles] = []

    def copy_rows(number: int) -> None:
        start = starts[number]
        rows = hessian[order[start : start + size]]
        panel = np.ascontiguousarray(rows[:, order[start:]], np.float64)
        panel /= mean
        panel.reshape(-1)[:: panel.shape[1] + 1] += damping
        panels[number] = panel

    run_in_threads(copy_rows, range(len(starts)))
    kept_panels: list[Panel] = []
    for number, start in enumerate(starts):
        panel, panels[number] = panels[number], None
        assert panel is not None
        width = len(panel)
        lower = np.linalg.cholesky(panel[:, :width])
        panel[:, width:] = np.linalg.inv(lower) @ panel[:, width:]
        panel[:, :width] = lower.T

        def subtract(later: int, panel: Doubles = panel, start: int = start) -> None:
            column, target = starts[later] - start, panels[later]
            assert target is not None
            buffer = buffers.pop() if buffers else np.empty(size * count)
            product = buffer[: target.size].reshape(target.shape)
            np.matmul(panel[:, column : column + len(target)].T, panel[:, column:], out=product)
            target -= product
            buffers.append(buffer)

        run_in_threads(subtract, range(number + 1, len(starts)))
        kept_panels.append(keep(panel))
    return kept_panels


def key_feedback(moments: npt.NDArray[Any], damping: float = 0.1) -> npt.NDArray[np.float16]:
    """Return what an error of each channel of a key is made up for by the channels behind it, for queries like some.

    A score is off by q e, e being the error of a key, so errors cost e H e^T with H the second moment of the queries
    that read a KV head. Let H + damping = (U + I) D (U + I)^T. A key whose channels are rounded one by one, channel i
    behind x_i + sum over c < i of (x_c - rounded_c) U[c, i], has the least such error of all that look at channels in
    this order (LDLQ, QuIP, Chee et al. 2023, theorem 6). With errors of what each channel has become, not of what it
    was, that is x_i - sum over c < i of error_c F[c, i], F = (U + I)^-1 - I (GPTQ, Frantar et al. 2023, algorithm 1).

    Args:
        moments: H of each KV head, [Hk, D, D].
        damping: as for :func:`factor`; more than for weights, as other texts have other queries (docs/caches.md).

    Returns:
        F of each KV head, [Hk, D, D], strictly upper.

    Raises:
        InputError: as for :func:`factor`.
    """
    order = np.arange(moments.shape[-1])
    uppers = np.stack([factor(moment, damping, order)[0] for moment in moments])
    return np.triu(np.linalg.inv(uppers), 1).astype(np.float16)


def whitening(moments: npt.NDArray[Any], power: float = 0.4, damping: float = 0.01) -> Doubles:
    """Return symmetric matrices that make keys vary more alike in all directions, float64 [Hk, D, D].

    B = (C + damping)^(-power / 2), C the second moment of keys: power 1 makes them white. On rotated heads a step of a
    code is as long as the mean square of k B asks for, and with feedback (:func:`key_feedback`) scores err by the
    geometric mean of the eigenvalues of B^-1 H B^-1. The product of both is least where keys are white, if other texts
    have the same moments and steps are short (reverse water filling, Cover and Thomas, section 10.3.3). They do not
    and are not, so the power goes a part of the way. The mean square of keys stays.

    Args:
        moments: C of each KV head, [Hk, D, D].
        power: from 0, which leaves keys as they are, to 1.
        damping: what is added to each diagonal, as a share of its mean. Moments of zeros give the unit matrix.

    Raises:
        InputError: moments are not finite.
    """
    for moment in moments:
        check_diagonal(moment)
    means = np.trace(moments, axis1=-2, axis2=-1)[:, np.newaxis, np.newaxis].astype(np.float64) / moments.shape[-1]
    unit = np.eye(moments.shape[-1])
    shares = np.where(means > 0, moments / np.where(means > 0, means, 1), unit)
    values, vectors = np.linalg.eigh(shares + damping * unit)
    # rounding makes the least eigenvalue of a singular matrix negative, not smaller than the damping
    factors = np.maximum(values, damping / 2) ** (-power / 2)
    sizes = np.sqrt(values.sum(-1) / (values * factors**2).sum(-1))
    matrices: Doubles = (vectors * (factors * sizes[:, np.newaxis])[:, np.newaxis]) @ vectors.swapaxes(-1, -2)
    return matrices


def moments_by_head(moments: npt.NDArray[Any], heads: int, size: int) -> Doubles:
    """Return second moments of the queries of each KV head, or of keys, float64 [Hk, D, D].

    Args:
        moments: of all heads side by side, [Hq D, Hq D], the query heads of a KV head next to one another.
        heads: Hk.
        size: D.
    """
    group = len(moments) // (heads * size)
    blocks = moments.reshape(heads, group, size, heads, group, size)
    head, member = np.arange(heads)[:, np.newaxis], np.arange(group)
    # indices apart from one another: their axes come first
    by_query_head: Doubles = blocks[head, member, :, head, member].astype(np.float64)
    return np.asarray(by_query_head.mean(axis=1))


def check_diagonal(hessian: npt.NDArray[Any]) -> Doubles:
    """Return the diagonal of a Hessian, float64 [rows].

    Raises:
        InputError: it is not finite.
    """
    diagonal = np.diagonal(hessian).astype(np.float64)
    if not np.isfinite(diagonal).all():
        bad = int(np.argmin(np.isfinite(diagonal)))
        raise InputError(
            f"the statistics of a weight's inputs are NaN or infinite, the first at input {bad}",
            shape=hessian.shape,
            remedy="the model computes such numbers on this text: calibrate on another, or round to nearest",
        )
    return diagonal


def refuse_factor(hessian: npt.NDArray[Any], damping: float) -> InputError:
    """Return the error of a Hessian that cannot be factored with as much damping as is allowed."""
    return InputError(
        f"the statistics of a weight's inputs cannot be factored, with a damping of {damping:g}",
        shape=hessian.shape,
        remedy="they are not those of any inputs: remove the folder that holds them and calibrate again",
    )


def wiener_filter(matrix: npt.NDArray[Any], hessian: npt.NDArray[Any], noise: float) -> npt.NDArray[np.float32]:
    """Return (H + v)^-1 H W, the weight of least squared error for inputs with errors of mean square v.

    Args:
        matrix: W, [rows, columns].
        hessian: H = X^T X, [rows, rows], up to a factor.
        noise: v, as a share of the mean of H's diagonal. A Hessian of zeros leaves W.
    """
    mean = float(np.diagonal(hessian).mean(dtype=np.float64))
    if not mean:
        return np.asarray(matrix, np.float32)
    noisy = hessian.astype(np.float64)
    noisy /= mean
    noisy.reshape(-1)[:: len(noisy) + 1] += noise
    # H W = (H + v) W - v W, and W itself keeps its precision.
    change = noise * np.linalg.solve(noisy, matrix.astype(np.float64))
    return np.asarray(matrix - change, np.float32)
