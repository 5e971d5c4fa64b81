"""One choice for each matrix or cache, of least loss within a number of bytes: an integer program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence


def solve(
    losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], room: float, *, gap: float = 1e-4
) -> list[int]:
    """Return the choices of least losses, one for each matrix or cache, with a sum of sizes of at most ``room``.

    Args:
        losses: what each choice for each of them costs.
        sizes: its bytes, the same shape.
        room: bytes.
        gap: by what share of it the sum may be more than the least.

    Raises:
        InputError: even the smallest choices take more.
        MissingDependencyError: scipy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import block_diag
    except ImportError as error:
        raise MissingDependencyError(
            f"the search needs scipy ({error})", remedy='pip install "graphopt[search]"'
        ) from error
    smallest = sum(min(row) for row in sizes)
    if smallest > room:
        raise InputError(
            f"the smallest choices take {smallest:,} bytes, and there is room for {room:,}",
            remedy="give more bytes, or smaller formats or storages to choose from",
        )
    cost = np.concatenate([np.asarray(row, float) for row in losses])
    weight = np.concatenate([np.asarray(row, float) for row in sizes])
    one_each = LinearConstraint(block_diag([np.ones((1, len(row))) for row in losses]), 1, 1)
    # Both are scaled to about 1: the solver's tolerances are absolute.
    solution = milp(
        cost / (cost.max() or 1.0),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=[one_each, LinearConstraint(weight[None] / max(room, 1), -np.inf, 1)],
        options={"mip_rel_gap": gap},
    )
    if solution.x is None:
        raise InputError(f"the integer program was not solved: {solution.message}")
    ends = np.cumsum([len(row) for row in losses])
    return [int(part.argmax()) for part in np.split(solution.x, ends[:-1])]
