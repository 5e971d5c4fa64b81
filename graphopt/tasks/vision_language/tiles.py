"""Images that are cut into tiles: which features of tiles are an image's, in which order (AnyRes, LLaVA-NeXT).

An image is one small tile, and a grid of tiles of the resolution that fits it best:

    features of the small tile, then each row of the grid's features that shows no padding, with a newline behind

A grid with many features is made smaller, each feature of four neighbours (LLaVA-OneVision, arXiv:2408.03326).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from graphopt.tasks.ports import Array, IntArray

NEWLINE = -1
"""The row of the newline: the last one."""

# From this ratio of sides on, transformers makes a grid smaller.
_SHRINKS = 1.1


@dataclass(frozen=True)
class Tiling:
    """How images become tiles.

    Attributes:
        resolutions: heights and widths in pixels that an image may be resized to.
        tile: height and width of a tile in pixels.
        side: features of a tile along each side.
        tile_limit: of how many tiles features remain, at most; ``None`` for all.
    """

    resolutions: Sequence[Sequence[int]]
    tile: int
    side: int
    tile_limit: int | None

    @classmethod
    def of_config(cls, config: Any) -> Tiling:
        """Read it from a configuration of transformers."""
        tile, ratio = config.vision_config.image_size, getattr(config, "vision_aspect_ratio", None)
        limit = None if ratio is None else int(ratio.removeprefix("anyres_max_"))
        return cls(config.image_grid_pinpoints, tile, tile // config.vision_config.patch_size, limit)

    def tiles(self, size: Sequence[int]) -> int:
        """Return how many tiles an image of this height and width becomes, the small one too."""
        rows, columns = self._grid(size)
        return rows * columns + 1

    def arrange(self, size: Sequence[int] | None, first: int = 0) -> tuple[IntArray, Array]:
        """Return which rows of features are mixed to each feature of an image, and by which weights.

        Args:
            size: height and width of the image; ``None`` for one that is a small tile alone.
            first: the number of its first tile among all.

        Returns:
            int64 and float32 [image tokens, terms]; the row :data:`NEWLINE` stands for the newline.
        """
        count = self.side**2
        small = np.arange(count)[:, None] + first * count
        newline = np.full((1, 1), NEWLINE)
        if size is None:
            rows = np.concatenate([small, newline])
            return rows, np.ones(rows.shape, np.float32)
        height, width = self._grid(size)
        tiles = (first + 1 + np.arange(height * width)).reshape(height, width, 1, 1) * count
        grid = tiles + np.arange(count).reshape(self.side, self.side)
        grid = self._without_padding(grid.transpose(0, 2, 1, 3).reshape(height * self.side, -1), size)
        rows, weights = self._shrink(grid)
        newlines = np.full((len(rows), 1, rows.shape[-1]), NEWLINE)
        first_only = np.broadcast_to(np.eye(1, rows.shape[-1]), newlines.shape)
        rows, weights = np.concatenate([rows, newlines], axis=1), np.concatenate([weights, first_only], axis=1)
        terms = rows.shape[-1]
        small = np.repeat(small, terms, axis=-1)
        rows = np.concatenate([small, rows.reshape(-1, terms)])
        weights = np.concatenate([np.broadcast_to(np.eye(1, terms), small.shape), weights.reshape(-1, terms)])
        return rows, weights.astype(np.float32)

    def _grid(self, size: Sequence[int]) -> tuple[int, int]:
        """Return rows and columns of tiles."""
        choose = importlib.import_module("transformers.image_processing_utils").select_best_resolution
        height, width = choose([int(pixels) for pixels in size], self.resolutions)
        return math.ceil(height / self.tile), math.ceil(width / self.tile)

    def _without_padding(self, grid: IntArray, size: Sequence[int]) -> IntArray:
        """Return the part of a grid that shows the image, which was padded to the resolution on two sides."""
        (rows, columns), (height, width) = grid.shape, (int(pixels) for pixels in size)
        # transformers rounds so, too.
        if width / height > columns / rows:
            margin = (rows - int(round(height * (columns / width), 7))) // 2
            return grid[margin : rows - margin]
        margin = (columns - int(round(width * (rows / height), 7))) // 2
        return grid[:, margin : columns - margin]

    def _shrink(self, grid: IntArray) -> tuple[IntArray, Array]:
        """Return rows and weights [rows, columns, terms] of a grid, made smaller where it has too many features."""
        rows, columns = grid.shape
        ratio = 0.0 if self.tile_limit is None else math.sqrt(rows * columns / (self.tile_limit * self.side**2))
        if ratio <= _SHRINKS:
            return grid[..., None], np.ones((*grid.shape, 1))
        (row_before, row_behind, row_share), (column_before, column_behind, column_share) = (
            _neighbours(n, int(n // ratio)) for n in (rows, columns)
        )
        corners = [(row, column) for row in (row_before, row_behind) for column in (column_before, column_behind)]
        shares = [(row, column) for row in (1 - row_share, row_share) for column in (1 - column_share, column_share)]
        neighbours = np.stack([grid[np.ix_(row, column)] for row, column in corners], axis=-1)
        return neighbours, np.stack([row[:, None] * column for row, column in shares], axis=-1)


def _neighbours(count: int, smaller: int) -> tuple[IntArray, IntArray, npt.NDArray[np.float64]]:
    """Return the two of ``count`` places that each of ``smaller`` lies between, and the share of the second."""
    position = np.maximum((np.arange(smaller) + 0.5) * count / smaller - 0.5, 0)
    before = np.floor(position).astype(np.int64)
    return before, np.minimum(before + 1, count - 1), position - before


def arrange_all(tiling: Tiling, sizes: Sequence[Sequence[int] | None]) -> tuple[IntArray, Array, list[int]]:
    """Return rows and weights [image tokens, terms] of several images, and how many features each has."""
    first, parts = 0, []
    for size in sizes:
        parts.append(tiling.arrange(size, first))
        first += 1 if size is None else tiling.tiles(size)
    terms = max(rows.shape[1] for rows, _ in parts)
    # A term more has the weight 0.
    rows_and_weights = [[np.pad(array, ((0, 0), (0, terms - array.shape[1]))) for array in part] for part in parts]
    rows, weights = (np.concatenate(arrays) for arrays in zip(*rows_and_weights, strict=True))
    return rows, weights, [len(rows) for rows, _ in parts]
