"""How a class of transformers makes features of images: by the parameters of its ``get_image_features``."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Literal

from graphopt.analysis.structure.ports import IMAGE_GRID, PIXEL_VALUES

MASK = "pixel_attention_mask"

SIZES, SHAPES = "image_sizes", "spatial_shapes"
"""Sizes of images in pixels, and in patches."""

_TYPES = "token_type_ids"

# Which layers of the tower are read is a setting, and no input.
_SETTINGS = {"self", "vision_feature_layer", "vision_feature_select_strategy", "kwargs", "return_dict"}
_SETTINGS |= {"batch_num_images", "vision_aspect_ratio"}

_FORMS = ({PIXEL_VALUES}, *({PIXEL_VALUES, *names} for names in ((MASK,), (IMAGE_GRID,), (SIZES,), (MASK, SHAPES))))
_PIXTRAL = "pixtral"


def images_of_class(model_class: Any) -> frozenset[str] | None:
    """Return what a model makes features of images of, or ``None`` where graphopt makes no graph of it.

    That is tiles of a fixed size alone; tiles with a mask that hides nothing of them; patches of an image of any size
    with its grid, or with their number along both sides; or images with their sizes, be they of tiles or not. Where
    types of tokens say something else than which of them see one another (Gemma 3n), it is none of these.

    Args:
        model_class: a class of transformers, or ``None``.
    """
    make_features = getattr(model_class, "get_image_features", None)
    if make_features is None:
        return None
    if _TYPES in inspect.signature(model_class.forward).parameters and not two_sided_part(model_class):
        return None
    names = set(inspect.signature(make_features).parameters) - _SETTINGS
    return frozenset(names) if names in _FORMS else None


def images_of_model(model: Any) -> frozenset[str]:
    """Return what a model makes features of images of; LLaVA reads sizes where its tower is Pixtral's."""
    names = images_of_class(type(model))
    assert names is not None
    return names | {SIZES} if model.config.vision_config.model_type == _PIXTRAL else names


def arranges_tiles(model_class: Any) -> bool:
    """Return whether an image is cut into tiles, and features of these are put in order by its size (LLaVA-NeXT)."""
    return SIZES in (images_of_class(model_class) or ()) and hasattr(model_class, "pack_image_features")


def two_sided_part(model_class: Any) -> Literal["image", "prompt", ""]:
    """Return which tokens also see those behind them: of each image (Gemma 3), of a prompt (PaliGemma), or none.

    A class says it by masks of its own that it makes of types of tokens: of several blocks, or of one in front.
    """
    make_masks = getattr(model_class, "create_masks_for_generate", None)
    if make_masks is None or _TYPES not in inspect.signature(make_masks).parameters:
        return ""
    return "image" if hasattr(sys.modules[model_class.__module__], "get_block_sequence_ids_for_mask") else "prompt"


def stacked_features_of(config: Any) -> int:
    """Return how many features of inner layers of the tower stand behind those of its last one.

    Each is added to what leaves one of the first layers of the decoder, at the places of image tokens (DeepStack,
    arXiv:2406.04334, section 3; Qwen3-VL). So embeddings are 1 + that many times as wide as the decoder.

    Args:
        config: of a vision-language model of transformers.
    """
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())
