"""The part of a vision-language model that makes features of images, as one function of tensors.

What transformers does around its vision tower holds for traced tensors only in part: it cuts features apart by sizes
that are data, and drops images that are padding. Here all images are real, and features stay one behind the other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    FEATURE_INDEX,
    FEATURE_WEIGHT,
    IMAGE_FEATURES,
    IMAGE_GRID,
    INPUTS_EMBEDS,
    PIXEL_VALUES,
    TOKEN_TYPE_IDS,
)
from graphopt.errors import InputError
from graphopt.inference.recordings import has_processor
from graphopt.inference.signals import image_numbers
from graphopt.models.checkpoint import quiet, reason_of
from graphopt.models.patch_towers import pixtral_forward, siglip2_forward, tiles_forward
from graphopt.tasks.base import SAMPLE_BATCH
from graphopt.tasks.image_inputs import MASK, SHAPES, SIZES, arranges_tiles, images_of_model, two_sided_part
from graphopt.tasks.signals import random_signals
from graphopt.tasks.vision_language.vision import GRID, random_arrangement

if TYPE_CHECKING:
    from collections.abc import Callable

_IMAGES = ((480, 640), (640, 512))
"""Heights and widths in pixels of images in front of the processor."""


def vision_part(model: Any, source: str) -> tuple[Any, dict[str, Any]]:
    """Return a model whose forward makes ``image_features`` [image tokens, width], and images to trace it with.

    Args:
        model: a vision-language model of transformers.
        source: the folder of its checkpoint, or its id on the hub.

    Raises:
        InputError: nothing says how large its images are, or their size varies.
    """
    names = images_of_model(model)
    part = copy.copy(model)
    if arranges_tiles(type(model)):
        part.forward = tiles_forward(model)
        return part, {PIXEL_VALUES: _sample_tiles(model, source), **_sample_arrangement()}
    if names & {IMAGE_GRID, SIZES, SHAPES}:
        forward_of = _patches_forward if IMAGE_GRID in names else pixtral_forward if SIZES in names else siglip2_forward
        part.forward = forward_of(model)
        return part, _sample_patches(model)
    part.forward = _masked_forward(model) if MASK in names else _tiles_forward(model)
    return part, {PIXEL_VALUES: _sample_tiles(model, source)}


def _tiles_forward(model: Any) -> Callable[[Any], dict[str, Any]]:
    """Return what makes features of tiles that have no mask."""
    module = sys.modules[type(model).__module__]

    def forward(pixel_values: Any) -> dict[str, Any]:
        # LLaVA makes a list of the features of each image, which would hold for one number of images only.
        with mock.patch.object(module, "list", lambda features: features, create=True):
            features = model.get_image_features(pixel_values, return_dict=True).pooler_output
        return {IMAGE_FEATURES: features.flatten(0, -2)}

    return forward


def _masked_forward(model: Any) -> Callable[[Any], dict[str, Any]]:
    """Return what makes features of tiles whose mask hides nothing (Idefics3, SmolVLM)."""
    base = model.base_model

    def forward(pixel_values: Any) -> dict[str, Any]:
        states = base.vision_model(pixel_values=pixel_values, return_dict=True).last_hidden_state
        return {IMAGE_FEATURES: base.connector(states).flatten(0, -2)}

    return forward


def _patches_forward(model: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Return what makes features of the patches of one image, with their places computed of its grid (Qwen2-VL)."""
    torch = importlib.import_module("torch")
    tower = model.get_encoder(modality="image")
    side = tower.spatial_merge_size

    def forward(pixel_values: Any, image_grid_thw: Any) -> dict[str, Any]:
        count = pixel_values.shape[0]
        height, width = image_grid_thw[0, 1], image_grid_thw[0, 2]
        patch = torch.arange(count, dtype=torch.int64)
        # Patches come in squares that are merged to one token, row by row of squares, image after image in time.
        square, inside = patch // side**2 % (height // side * (width // side)), patch % side**2
        row = square // (width // side) * side + inside // side
        column = square % (width // side) * side + inside % side
        ends = torch.stack([torch.zeros_like(patch[0]), torch.full_like(patch[0], count)]).to(torch.int32)
        options = {
            "position_ids": torch.stack([row, column], dim=-1),
            "cu_seqlens": ends,
            "max_seqlen": count,
        }
        with contextlib.ExitStack() as stack:
            if hasattr(tower, "fullatt_block_indexes"):
                # Patches stay in their order, and a mask says which share a window.
                options |= {
                    "window_index": torch.arange(count // side**2, dtype=torch.int64),
                    "cu_window_seqlens": ends,
                    "max_window_seqlen": count,
                }
                patches = tower.window_size // side // tower.patch_size * side
                window = row // patches * (width // patches + 1) + column // patches
                _hide_other_windows(tower, window[:, None] == window[None, :], stack)
            output = tower(pixel_values, grid_thw=image_grid_thw, return_dict=True, **options)
        inner = getattr(output, "deepstack_features", None) or ()
        return {IMAGE_FEATURES: torch.cat([output.pooler_output, *inner], dim=-1)}

    return forward


def read_stacked_features(model: Any) -> None:
    """Let the decoder of a model take embeddings with features of inner layers of the tower behind them.

    transformers adds those features at places that are data; behind embeddings, other tokens have zeros there:

        before:  states[is_image] += features[n]         [image tokens, width], behind layer n
        after:   states + embeddings[..., (n + 1) width : (n + 2) width]

    Embeddings of the usual width are read as before.

    Args:
        model: a vision-language model of transformers, whose decoder is changed.
    """
    decoder = model.get_decoder()
    width, forward = model.get_input_embeddings().weight.shape[1], decoder.forward

    @functools.wraps(forward)
    def forward_stacked(*arguments: Any, **options: Any) -> Any:
        embeddings = options.get(INPUTS_EMBEDS)
        if embeddings is None or embeddings.shape[-1] == width:
            return forward(*arguments, **options)
        first, *features = embeddings.split(width, dim=-1)
        options |= {INPUTS_EMBEDS: first, "deepstack_visual_embeds": features}
        with mock.patch.object(decoder, "_deepstack_process", lambda states, _, inner: states + inner):
            return forward(*arguments, **options)

    decoder.forward = forward_stacked


def read_marks(model: Any) -> None:
    """Let the decoder of a model take embeddings with one more number, 1 for a token that sees tokens behind it too.

    transformers is told by types of tokens, an input that no other language model has:

        before:  mask = causal or blocks(token_type_ids)      [batch, length]
        after:   mask = causal or blocks(embeddings[..., width] > 1/2)

    Tokens of the past are in no block of new ones: a block is fed in one call. Embeddings of the usual width are read
    as before.

    Args:
        model: a vision-language model of transformers, which is changed.
    """
    torch = importlib.import_module("torch")
    base, width = model.base_model, model.get_input_embeddings().weight.shape[1]
    module, forward = sys.modules[type(base).__module__], base.forward
    of_prompt = two_sided_part(type(model)) == "prompt"

    @functools.wraps(forward)
    def forward_marked(*arguments: Any, **options: Any) -> Any:
        embeddings = options.get(INPUTS_EMBEDS)
        if embeddings is None or embeddings.shape[-1] == width:
            return forward(*arguments, **options)
        first, marks = embeddings.split([width, 1], dim=-1)
        past = options[ATTENTION_MASK].shape[1] - embeddings.shape[1]
        types = torch.nn.functional.pad((marks[..., 0] > 0.5).to(torch.int64), (past, 0))
        options |= {INPUTS_EMBEDS: first}
        if not of_prompt:
            return forward(*arguments, **options | {TOKEN_TYPE_IDS: types})
        # transformers makes this mask only where there are images in the same call.
        with contextlib.ExitStack() as stack:
            for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
                make = functools.partial(getattr(module, name), block_sequence_ids=types - 1)
                stack.enter_context(mock.patch.object(module, name, make))
            return forward(*arguments, **options)

    base.forward = forward_marked


def _hide_other_windows(tower: Any, is_same: Any, stack: contextlib.ExitStack) -> None:
    """Let layers with windows attend within the window alone, by a mask (Qwen2.5-VL, arXiv:2502.13923, section 2.1.1).

    transformers sorts patches by window, and attends window by window, whose number is data.

    Args:
        tower: its layers know which attend to all patches.
        is_same: whether two patches share a window, bool [patches, patches].
        stack: ends it.
    """
    functional = importlib.import_module("torch.nn.functional")
    attend = functional.scaled_dot_product_attention

    def attend_within(*tensors: Any, **options: Any) -> Any:
        return attend(*tensors, **{**options, "attn_mask": is_same})

    def forward_of(attention: Any) -> Callable[..., Any]:
        def forward(*arguments: Any, **options: Any) -> Any:
            with mock.patch.object(functional, "scaled_dot_product_attention", attend_within):
                return type(attention).forward(attention, *arguments, **options)

        return forward

    for number, block in enumerate(tower.blocks):
        if number not in tower.fullatt_block_indexes:
            stack.enter_context(mock.patch.object(block.attn, "forward", forward_of(block.attn)))


def _sample_patches(model: Any) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    config = model.config.vision_config
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    numbers = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    patches = np.random.default_rng(0).standard_normal((int(np.prod(GRID)), numbers)).astype(np.float32)
    return {PIXEL_VALUES: torch.from_numpy(patches), IMAGE_GRID: torch.tensor([GRID])}


def _sample_arrangement() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    index, weight = random_arrangement()
    return {FEATURE_INDEX: torch.from_numpy(index), FEATURE_WEIGHT: torch.from_numpy(weight)}


def _sample_tiles(model: Any, source: str) -> Any:
    """Return two random tiles of the size that the processor makes, a tensor of torch.

    Raises:
        InputError: nothing says how large tiles are, or their size varies from image to image.
    """
    torch = importlib.import_module("torch")
    shapes = _tile_shapes(model, source)
    if len(set(shapes)) > 1:
        raise InputError(
            f"the processor makes tiles of {list(shapes[0])} numbers of one image, and of {list(shapes[1])} of another",
            file=source,
            tensor=PIXEL_VALUES,
            remedy="graphopt takes vision-language models whose tiles all have one size",
        )
    return torch.from_numpy(random_signals((SAMPLE_BATCH, *shapes[0]), np.random.default_rng(0)))


def _tile_shapes(model: Any, source: str) -> list[tuple[int, ...]]:
    """Return channels, height and width of the tiles of two images of unlike size."""
    if has_processor(source):
        random = np.random.default_rng(0)
        images = [random.integers(0, 256, (*size, 3), np.uint8) for size in _IMAGES]
        with quiet():
            try:
                return [image_numbers(source, [image])[PIXEL_VALUES].shape[-3:] for image in images]
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"the processor of the checkpoint fails on a random image ({reason_of(error)})",
                    file=source,
                    remedy="is its preprocessor_config.json that of this model?",
                ) from error
    config = model.config.vision_config
    size = getattr(config, "image_size", None)
    if not size:
        raise InputError(
            f"nothing says how large the images of {type(model).__name__} are",
            file=source,
            remedy="put the preprocessor_config.json of the checkpoint there",
        )
    height, width = (size, size) if isinstance(size, int) else size
    return [(getattr(config, "num_channels", 3), height, width)]
