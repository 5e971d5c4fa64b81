"""Images of any size as patches, one behind the other, with the grid of each: what a vision graph of them reads."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from graphopt.analysis.structure.ports import IMAGE_GRID, PIXEL_VALUES
from graphopt.tasks.image_inputs import MASK, SHAPES, SIZES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from graphopt.tasks.ports import Array, IntArray


def patches_of(numbers: Mapping[str, Array], size: int) -> tuple[list[Array], IntArray]:
    """Return the patches [patches, ``size``] of each image that a processor read, and grids int64 [images, 3].

    Args:
        numbers: ``pixel_values`` of all patches with ``image_grid_thw`` (Qwen2-VL); [images, patches, ``size``] with
            ``spatial_shapes`` [images, 2] in patches, padded behind (SigLIP 2); or [images, channels, height, width]
            with ``image_sizes`` [images, 2] in pixels, padded below and at the right (Pixtral).
        size: numbers of a patch; those of Pixtral are channels, then rows, then columns.

    Raises:
        KeyError: sizes of the images are not among ``numbers``.
    """
    pixels = numbers[PIXEL_VALUES]
    if IMAGE_GRID in numbers:
        grids = np.asarray(numbers[IMAGE_GRID], np.int64)
        return np.split(pixels, np.cumsum(grids.prod(-1))[:-1]), grids
    if SHAPES in numbers:
        shapes = np.asarray(numbers[SHAPES], np.int64)
        parts = [image[: shape.prod()] for image, shape in zip(pixels, shapes, strict=True)]
    else:
        channels = pixels.shape[-3]
        side = isqrt(size // channels)
        shapes = np.asarray(numbers[SIZES], np.int64).reshape(-1, 2) // side
        parts = []
        for image, (rows, columns) in zip(pixels.reshape(-1, *pixels.shape[-3:]), shapes.tolist(), strict=True):
            squares = image[:, : rows * side, : columns * side].reshape(channels, rows, side, columns, side)
            parts.append(squares.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1))
    return parts, np.insert(shapes, 0, 1, axis=-1)


def numbers_of(patches: Array, grids: IntArray, channels: int, form: Collection[str]) -> dict[str, Array]:
    """Return what a model of transformers is fed of patches: the inverse of :func:`patches_of`.

    Args:
        patches: of all images, [patches, numbers].
        grids: [images, 3].
        channels: of an image.
        form: what the model reads beside ``pixel_values``.
    """
    if IMAGE_GRID in form:
        return {PIXEL_VALUES: patches, IMAGE_GRID: grids}
    parts, shapes = np.split(patches, np.cumsum(grids.prod(-1))[:-1]), grids[:, 1:]
    if SHAPES in form:
        counts = shapes.prod(-1)
        pixels = np.zeros((len(parts), counts.max(), patches.shape[1]), patches.dtype)
        for image, part in zip(pixels, parts, strict=True):
            image[: len(part)] = part
        is_real = np.arange(counts.max()) < counts[:, None]
        return {PIXEL_VALUES: pixels, SHAPES: shapes, MASK: is_real.astype(np.int64)}
    side = isqrt(patches.shape[1] // channels)
    sizes = shapes * side
    pixels = np.zeros((len(parts), channels, *sizes.max(axis=0)), patches.dtype)
    for image, part, (rows, columns) in zip(pixels, parts, shapes.tolist(), strict=True):
        squares = part.reshape(rows, columns, channels, side, side).transpose(2, 0, 3, 1, 4)
        image[:, : rows * side, : columns * side] = squares.reshape(channels, rows * side, columns * side)
    return {PIXEL_VALUES: pixels, SIZES: sizes}
