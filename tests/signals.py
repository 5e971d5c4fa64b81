"""Small models of images and recordings with random weights, and folders of checkpoints of them with a processor."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

SIDE, CLASSES, RATE = 32, 5, 16000
LETTERS = ("<pad>", "<s>", "</s>", "<unk>", "|", *"etaoinshrdlu")

_TRANSFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 8,
}
_CLASSES = {"num_labels": CLASSES}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
_SPEECH = {
    **{key: value for key, value in _TRANSFORMER.items() if key not in ("image_size", "patch_size")},
    "num_hidden_layers": 1,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": len(LETTERS),
    "pad_token_id": 0,
    "classifier_proj_size": 16,
    "num_labels": CLASSES,
}
_SPECTROGRAM = {
    **{key: value for key, value in _TRANSFORMER.items() if key != "image_size"},
    "max_length": 64,
    "num_mel_bins": 16,
    "frequency_stride": 8,
    "time_stride": 8,
    "num_labels": CLASSES,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", _TRANSFORMER | _CLASSES),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", _RESNET | _CLASSES),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 1.0, **_CLASSES},
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": SIDE,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            **_CLASSES,
        },
    ),
    "dinov2": ("Dinov2Model", "Dinov2Config", _TRANSFORMER | {"mlp_ratio": 2}),
    "clip_vision": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", _TRANSFORMER | {"projection_dim": 16}),
    "sam_vision": (
        "SamVisionModel",
        "SamVisionConfig",
        {
            **{key: value for key, value in _TRANSFORMER.items() if key != "intermediate_size"},
            "output_channels": 16,
            "window_size": 3,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
        },
    ),
    "detr": (
        "DetrForObjectDetection",
        "DetrConfig",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 6,
            **_CLASSES,
        },
    ),
    "yolos": (
        "YolosForObjectDetection",
        "YolosConfig",
        _TRANSFORMER | {"image_size": [SIDE, SIDE], "num_detection_tokens": 6, **_CLASSES},
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            **_CLASSES,
        },
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _SPEECH),
    "hubert": ("HubertModel", "HubertConfig", _SPEECH),
    "wav2vec2_classes": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _SPEECH),
    "ast": ("ASTForAudioClassification", "ASTConfig", _SPECTROGRAM),
}
"""Class, configuration and its settings of each family."""

_SQUARE = {"size": {"height": SIDE, "width": SIDE}}
_PROCESSORS = {
    "clip_vision": ("CLIPImageProcessor", {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE["size"]}),
    "dinov2": ("BitImageProcessor", {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE["size"]}),
    "resnet": ("ConvNextImageProcessor", {"size": {"shortest_edge": SIDE}, "crop_pct": 0.875}),
    "convnext": ("ConvNextImageProcessor", {"size": {"shortest_edge": SIDE}, "crop_pct": 0.875}),
    "sam_vision": ("SamImageProcessor", {"size": {"longest_edge": SIDE}, "pad_size": _SQUARE["size"]}),
    "detr": ("DetrImageProcessor", {"size": {"shortest_edge": 48, "longest_edge": 80}}),
    "yolos": ("YolosImageProcessor", _SQUARE | {"do_pad": False}),
    "segformer": ("SegformerImageProcessor", _SQUARE),
}


def make_signal_model(family: str) -> Any:
    """Return a model of random weights that is ready to run."""
    import torch
    import transformers

    model_class, config_class, settings = FAMILIES[family]
    torch.manual_seed(0)
    if family == "detr":
        backbone = transformers.ResNetConfig(**_RESNET, out_features=["stage2"])
        settings = settings | {"backbone_config": backbone}
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("running_mean", "layer_norm.bias")):
                tensor.normal_(std=0.2)
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point() and tensor.dim() > 1:
                tensor.add_(torch.randn_like(tensor) * tensor[0].numel() ** -0.5)
    return model


def write_signal_checkpoint(family: str, folder: Path) -> None:
    """Write the Hugging Face folder of a family, with its processor, and letters where it has some."""
    import transformers

    make_signal_model(family).save_pretrained(folder)
    if family == "ast":
        transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=64).save_pretrained(folder)
    elif "wav2vec2" in family or family == "hubert":
        transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
        (folder / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(LETTERS)}))
        transformers.Wav2Vec2CTCTokenizer(folder / "vocab.json").save_pretrained(folder)
    else:
        name, settings = _PROCESSORS.get(family, ("ViTImageProcessor", _SQUARE))
        settings = {"image_processor_type": name, **settings}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def write_image(file: Path, seed: int = 0, size: tuple[int, int] = (60, 40)) -> Path:
    """Write a PNG of coloured waves, width and height as ``size`` says."""
    from PIL import Image

    from graphopt.tasks.signals import random_signals

    waves = random_signals((1, 3, size[1], size[0]), np.random.default_rng(seed))[0].transpose(1, 2, 0)
    Image.fromarray(np.clip(128 + 60 * waves, 0, 255).astype(np.uint8)).save(file)
    return file


def write_recording(file: Path, seed: int = 0, samples: int = 6000) -> Path:
    """Write a WAV file of waves and noise."""
    from graphopt.tasks.signals import random_signals

    waves = random_signals((1, samples), np.random.default_rng(seed))[0]
    with wave.open(str(file), "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(RATE)
        stream.writeframes(np.clip(6000 * waves, -32768, 32767).astype("<i2").tobytes())
    return file
