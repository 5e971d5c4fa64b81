"""How a class of transformers makes features of images: by the parameters of its ``get_image_features``."""

from __future__ import annotations

import inspect
from typing import Any

from graphopt.analysis.structure.ports import IMAGE_GRID, PIXEL_VALUES

MASK = "pixel_attention_mask"

# Which layers of the tower are read is a setting, and no input.
_SETTINGS = {"self", "vision_feature_layer", "vision_feature_select_strategy", "kwargs", "return_dict"}


def images_of_class(model_class: Any) -> frozenset[str] | None:
    """Return what a model makes features of images of, or ``None`` where graphopt makes no graph of it.

    That is tiles of a fixed size alone; tiles with a mask that hides nothing of them; or patches of an image of any
    size with its grid. Where sizes of images decide which features remain, as in LLaVA-NeXT, it is none of these; nor
    where attention looks both ways among the tokens of an image, which ``token_type_ids`` tell (Gemma 3, PaliGemma).

    Args:
        model_class: a class of transformers, or ``None``.
    """
    make_features = getattr(model_class, "get_image_features", None)
    if make_features is None or "token_type_ids" in inspect.signature(model_class.forward).parameters:
        return None
    names = set(inspect.signature(make_features).parameters) - _SETTINGS
    return frozenset(names) if names in ({PIXEL_VALUES}, {PIXEL_VALUES, MASK}, {PIXEL_VALUES, IMAGE_GRID}) else None


def stacked_features_of(config: Any) -> int:
    """Return how many features of inner layers of the tower stand behind those of its last one.

    Each is added to what leaves one of the first layers of the decoder, at the places of image tokens (DeepStack,
    arXiv:2406.04334, section 3; Qwen3-VL). So embeddings are 1 + that many times as wide as the decoder.

    Args:
        config: of a vision-language model of transformers.
    """
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())
