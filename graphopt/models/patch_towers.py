"""Towers that read patches of one image of any size: what transformers computes of an image whose size is data.

Places of patches are computed of the grid, and features of neighbours are gathered, so that no size is in the graph.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any
from unittest import mock

from graphopt.analysis.structure.ports import IMAGE_FEATURES

if TYPE_CHECKING:
    from collections.abc import Callable


def pixtral_forward(model: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Return what makes features of the patches of one image by a tower with rotary places (Pixtral, Mistral 3).

    Its convolution has no overlap, so it is a product with patches.
    """
    torch = importlib.import_module("torch")
    tower, base, config = model.get_encoder(modality="image"), model.base_model, model.config
    projector = getattr(base, "multi_modal_projector", None) or base.vision_projection
    merger, side = getattr(projector, "patch_merger", None), getattr(config, "spatial_merge_size", 1)
    layers = getattr(config, "vision_feature_layer", -1)

    def forward(pixel_values: Any, image_grid_thw: Any) -> dict[str, Any]:
        width = image_grid_thw[0, 2]
        patch = torch.arange(pixel_values.shape[0], dtype=torch.int64)
        states = tower.ln_pre(torch.nn.functional.linear(pixel_values, tower.patch_conv.weight.flatten(1))[None])
        positions = torch.stack([patch // width, patch % width], dim=-1)
        angles = tower.patch_positional_embedding(states, positions)
        hidden = [states]
        for layer in tower.transformer.layers:
            hidden.append(layer(hidden[-1], None, position_embeddings=angles))
        layer_states = [hidden[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        features = torch.cat(layer_states, dim=-1)[0]
        if merger is None:
            return {IMAGE_FEATURES: projector(features)}

        def merge(patches: Any, image_sizes: Any) -> Any:
            del image_sizes
            return merger.merging_layer(_squares(patches, width, side).transpose(1, 2).flatten(1))

        with mock.patch.object(merger, "forward", merge):
            return {IMAGE_FEATURES: projector(features, None)}

    return forward


def siglip2_forward(model: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Return what makes features of the patches of one image by a tower whose places are stretched (LFM2-VL)."""
    torch = importlib.import_module("torch")
    tower, projector = model.get_encoder(modality="image"), model.base_model.multi_modal_projector
    embed = tower.embeddings

    def forward(pixel_values: Any, image_grid_thw: Any) -> dict[str, Any]:
        height, width = image_grid_thw[0, 1], image_grid_thw[0, 2]
        patch = torch.arange(pixel_values.shape[0], dtype=torch.int64)
        sides = [
            _interpolation(position, size, embed.position_embedding_size)
            for position, size in ((patch // width, height), (patch % width, width))
        ]
        pairs = (sides[0][:, :, None] * sides[1][:, None, :]).flatten(1)
        states = embed.patch_embedding(pixel_values) + pairs @ embed.position_embedding.weight
        encoder = tower.encoder(inputs_embeds=states[None], attention_mask=None)
        features = tower.post_layernorm(encoder.last_hidden_state)[0]

        def unshuffle(features: Any) -> Any:
            return _squares(features, width, projector.factor).flatten(1)

        with mock.patch.object(projector, "pixel_unshuffle", unshuffle):
            return {IMAGE_FEATURES: projector(features)}

    return forward


def _interpolation(positions: Any, size: Any, count: int) -> Any:
    """Return the shares [positions, ``count``] of the rows of a table in what it is at each, resized to ``size``.

    That is linear interpolation with antialiasing, as torch resizes: a triangle that is as wide as a step where the
    table becomes smaller.
    """
    torch = importlib.import_module("torch")
    step = count / size.to(torch.float32)
    centre = (positions.to(torch.float32) + 0.5) * step
    distance = (torch.arange(count, dtype=torch.float32) + 0.5 - centre[:, None]).abs()
    shares = torch.relu(1 - distance / torch.clamp(step, min=1))
    return shares / shares.sum(dim=-1, keepdim=True)


def _squares(features: Any, width: Any, side: int) -> Any:
    """Return features [patches, numbers] as squares [squares, side * side, numbers], row by row in each.

    Args:
        features: of the patches of an image, row by row.
        width: patches in a row of the image.
        side: patches in a row of a square.
    """
    torch = importlib.import_module("torch")
    square = torch.arange(features.shape[0] // side**2, dtype=torch.int64)
    inside = torch.arange(side**2, dtype=torch.int64)
    row = (square // (width // side) * side)[:, None] + inside // side
    column = (square % (width // side) * side)[:, None] + inside % side
    return features[row * width + column]


def tiles_forward(model: Any) -> Callable[[Any, Any, Any], dict[str, Any]]:
    """Return what makes features of tiles, and mixes rows of these and of the newline (LLaVA-NeXT, LLaVA-OneVision).

    before:  torch cuts padding off a grid of features, whose size is data
    after:   image_features[i] = sum over j of feature_weight[i, j] * rows[feature_index[i, j]]
    """
    torch = importlib.import_module("torch")
    base = model.base_model
    module = inspect.getmodule(type(base))

    def forward(pixel_values: Any, feature_index: Any, feature_weight: Any) -> dict[str, Any]:
        def pack(features: Any, *arguments: Any, image_newline: Any, **options: Any) -> Any:
            del arguments, options
            rows = torch.cat([features[0].flatten(0, 1), image_newline[None]])
            return (rows[feature_index] * feature_weight[..., None]).sum(dim=1), None

        # All tiles are those of one image, whose size nothing asks for.
        with (
            mock.patch.object(module, "image_size_to_num_patches", lambda **_: pixel_values.shape[0]),
            mock.patch.object(base, "pack_image_features", pack),
        ):
            features = base.get_image_features(pixel_values, [None], return_dict=True)
        return {IMAGE_FEATURES: features.pooler_output}

    return forward
