"""Towers without sizes in their graphs, against transformers' own of images whose sizes are data."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.analysis.structure.ports import IMAGE_FEATURES, PIXEL_VALUES
from graphopt.models.patch_towers import pixtral_forward, siglip2_forward, tiles_forward
from graphopt.tasks.image_inputs import MASK, SHAPES, SIZES
from graphopt.tasks.vision_language.patches import patches_of
from graphopt.tasks.vision_language.tiles import Tiling, arrange_all
from tests.vision_language import SIDE, make_vision_language_model

# Two layers in float32, in another order of sums: seen 2e-6 on features of up to 4.
FLOAT32 = 2e-5


@pytest.mark.parametrize("family", ["mistral3", "lfm2_vl"])
def test_patches_of_an_image_of_any_size_become_its_features(family: str) -> None:
    import torch

    model, random = make_vision_language_model(family), np.random.default_rng(0)
    if family == "mistral3":
        pixels = random.standard_normal((2, 3, 48, 40)).astype(np.float32)
        numbers = {PIXEL_VALUES: pixels, SIZES: np.array([[48, 32], [24, 40]])}
    else:
        # Finer and coarser than the 6 x 6 places of the table, and as fine.
        shapes = np.array([[8, 12], [4, 6], [6, 6]])
        mask = (np.arange(96) < shapes.prod(-1)[:, None]).astype(np.int64)
        numbers = {PIXEL_VALUES: random.standard_normal((3, 96, 48)).astype(np.float32), SHAPES: shapes, MASK: mask}
    patches, grids = patches_of(numbers, 3 * 4**2)
    forward = (pixtral_forward if family == "mistral3" else siglip2_forward)(model)
    with torch.no_grad():
        tensors = {name: torch.from_numpy(array) for name, array in numbers.items()}
        expected = model.get_image_features(**tensors, return_dict=True).pooler_output
        for part, grid, features in zip(patches, grids, expected, strict=True):
            result = forward(torch.from_numpy(np.ascontiguousarray(part)), torch.from_numpy(grid[None]))[IMAGE_FEATURES]
            np.testing.assert_allclose(result, features, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_features_of_tiles_are_arranged_by_the_size_of_the_image(family: str) -> None:
    import torch

    model = make_vision_language_model(family)
    tiling = Tiling.of_config(model.config)
    # Wide, high, a square, and one whose grid LLaVA-OneVision makes smaller.
    sizes = [(50, 64), (100, 31), (64, 64), (90, 60)]
    counts = [tiling.tiles(size) for size in sizes]
    pixels = torch.from_numpy(np.random.default_rng(0).standard_normal((4, max(counts), 3, SIDE, SIDE))).float()
    index, weight, lengths = arrange_all(tiling, sizes)
    with torch.no_grad():
        expected = model.get_image_features(pixels, torch.tensor(sizes), return_dict=True).pooler_output
        tiles = torch.cat([image[:count] for image, count in zip(pixels, counts, strict=True)])
        result = tiles_forward(model)(tiles, torch.from_numpy(index), torch.from_numpy(weight))[IMAGE_FEATURES]
    assert (index.shape[1] == 4) == (family == "llava_onevision")
    for features, part in zip(expected, torch.split(result, lengths), strict=True):
        np.testing.assert_allclose(part, features, rtol=0, atol=FLOAT32)
