"""Images as patches, and back."""

from __future__ import annotations

import numpy as np

from graphopt.analysis.structure.ports import IMAGE_GRID, PIXEL_VALUES
from graphopt.tasks.image_inputs import MASK, SHAPES, SIZES
from graphopt.tasks.vision_language.patches import numbers_of, patches_of


def test_pixels_become_patches_row_by_row_and_come_back() -> None:
    pixels = np.arange(2 * 3 * 8 * 12, dtype=np.float32).reshape(2, 3, 8, 12)
    pixels[1, :, :, 4:] = 0
    patches, grids = patches_of({PIXEL_VALUES: pixels, SIZES: np.array([[8, 12], [8, 4]])}, 3 * 4**2)
    assert grids.tolist() == [[1, 2, 3], [1, 2, 1]]
    np.testing.assert_array_equal(patches[0][1], pixels[0, :, :4, 4:8].reshape(-1))
    back = numbers_of(np.concatenate(patches), grids, 3, {PIXEL_VALUES, SIZES})
    np.testing.assert_array_equal(back[PIXEL_VALUES], pixels)
    assert back[SIZES].tolist() == [[8, 12], [8, 4]]


def test_padded_patches_lose_their_padding_and_get_it_back() -> None:
    pixels, shapes = np.ones((2, 6, 5), np.float32), np.array([[2, 3], [1, 2]])
    pixels[1, 2:] = 0
    patches, grids = patches_of({PIXEL_VALUES: pixels, SHAPES: shapes}, 5)
    assert [len(part) for part in patches] == [6, 2]
    back = numbers_of(np.concatenate(patches), grids, 3, {PIXEL_VALUES, SHAPES, MASK})
    np.testing.assert_array_equal(back[PIXEL_VALUES], pixels)
    assert back[MASK].sum(axis=-1).tolist() == [6, 2]
    # What comes with its grid stays as it is.
    whole = numbers_of(np.concatenate(patches), grids, 3, {PIXEL_VALUES, IMAGE_GRID})
    assert [len(part) for part in patches_of(whole, 5)[0]] == [6, 2]
