"""Where tokens stand where a position has three axes: time, height and width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from graphopt.tasks.ports import IntArray


def positions_of_images(is_image: npt.NDArray[np.bool_], grids: Sequence[tuple[int, int, int]]) -> IntArray:
    """Return the positions of a prompt with images, int64 [3, length] (M-RoPE, Wang et al. 2024, section 2.1).

    A token of text stands one behind the token before it, on all axes. The tokens of an image stand in a grid whose
    first corner is where the next token would stand; the text goes on behind its longer side.

    Args:
        is_image: which tokens are of images, [length].
        grids: tokens in time, height and width of each image, in order.

    Raises:
        ValueError: there are more or fewer image tokens than the grids have.
    """
    if int(is_image.sum()) != sum(int(np.prod(grid)) for grid in grids):
        raise ValueError(f"{int(is_image.sum())} image tokens do not fill the grids {list(grids)}")
    positions = np.zeros((3, len(is_image)), np.int64)
    waiting, column, first = list(grids), 0, 0
    while column < len(is_image):
        if not is_image[column]:
            positions[:, column] = first
            column, first = column + 1, first + 1
            continue
        grid = waiting.pop(0)
        count = int(np.prod(grid))
        positions[:, column : column + count] = first + np.indices(grid).reshape(3, -1)
        column, first = column + count, first + max(grid[1:])
    return positions
