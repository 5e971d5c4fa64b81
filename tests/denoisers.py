"""Small denoisers of diffusers with random weights, and folders of checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_UNET = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
}
_TRANSFORMER = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8}
_UNET_OF_TEXT = {
    **_UNET,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
}

DENOISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet": (
        "UNet2DModel",
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
    ),
    "unet_of_text": ("UNet2DConditionModel", _UNET_OF_TEXT),
    "sdxl": (
        "UNet2DConditionModel",
        {
            **_UNET_OF_TEXT,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 24,
        },
    ),
    "dit": ("DiTTransformer2DModel", {**_TRANSFORMER, "norm_num_groups": 8, "num_embeds_ada_norm": 1000}),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            **_TRANSFORMER,
            "norm_num_groups": 8,
            "cross_attention_dim": 64,
            "caption_channels": 32,
            "use_additional_conditions": False,
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **_TRANSFORMER,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "pooled_projection_dim": 48,
            "pos_embed_max_size": 16,
            "in_channels": 4,
            "out_channels": 4,
        },
    ),
}


def write_denoiser(name: str, folder: Path) -> Path:
    """Write the checkpoint of a denoiser, seed 0; weights that start at zero are drawn too, or nothing would show."""
    import diffusers
    import torch

    kind, options = DENOISERS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    model.save_pretrained(folder)
    return folder
