"""Where tokens of images stand, along three axes."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.tasks.vision_language.positions import positions_of_images


def test_an_image_stands_in_a_grid_and_the_text_goes_on_behind_its_longer_side() -> None:
    is_image = np.array([False, True, True, True, True, True, True, False, True, False])
    positions = positions_of_images(is_image, [(1, 2, 3), (1, 1, 1)])
    # The first corner is at 1; the image has 3 columns, so the next token stands at 4.
    assert positions.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]


def test_a_text_without_images_has_the_same_position_on_all_axes() -> None:
    assert positions_of_images(np.zeros(4, bool), []).tolist() == [[0, 1, 2, 3]] * 3


def test_grids_hold_all_image_tokens() -> None:
    with pytest.raises(ValueError, match="3 image tokens do not fill"):
        positions_of_images(np.array([True, True, True, False]), [(1, 2, 2)])
