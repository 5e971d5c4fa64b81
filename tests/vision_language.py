"""Small vision-language models with random weights, and folders of checkpoints of them with a processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.inference.images import ImageDecoder
from graphopt.util.stdlib_text import held_out_text

if TYPE_CHECKING:
    from graphopt.inference.images import ImagePrompt, VisionLanguageSession

COUNT = 10
"""Tokens of a text."""
SIDE, PATCH, VOCABULARY, POSITIONS = 32, 8, 320, 512
IMAGE, IMAGES_BEGIN, IMAGES_END, VIDEO = "<image>", "<begin>", "<end>", "<video>"
END_OF_TEXT = "<|endoftext|>"
IMAGE_ID = 300

_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": PATCH,
}
NAMES = {
    "llava": "Llava",
    "idefics3": "Idefics3",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_vl": "Qwen2VL",
    "qwen3_vl": "Qwen3VL",
    "internvl": "InternVL",
    "gemma3": "Gemma3",
    "paligemma": "PaliGemma",
    "mistral3": "Mistral3",
    "lfm2_vl": "Lfm2Vl",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
}
"""What the classes of each family begin with."""

_UNTIED_HEAD = {"tie_word_embeddings": False}
_RESOLUTIONS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
_GEMMA = {
    **_TEXT,
    **_UNTIED_HEAD,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
}
_LAYERS = ["sliding_attention", "full_attention"]
_IDS = {"image_token_id": IMAGE_ID}
_PATCHES = {"depth": 2, "num_heads": 4, "patch_size": 4}
_AXES: dict[str, Any] = {
    "text_config": {
        **_TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
    },
    "vision_start_token_id": IMAGE_ID + 1,
    "vision_end_token_id": IMAGE_ID + 2,
    "video_token_id": IMAGE_ID + 3,
}


def _config(family: str) -> tuple[Any, Any]:
    import transformers

    sections: dict[str, Any] = {
        "llava": {
            "vision_config": {"model_type": "clip_vision_model", **_TOWER},
            # Two, of whose texts none has a token that ends texts, which transformers is told to avoid.
            "text_config": {"model_type": "llama", **_TEXT, "num_hidden_layers": 2},
            "image_token_index": IMAGE_ID,
        },
        "idefics3": {
            "vision_config": {**_TOWER, "num_hidden_layers": 1, "patch_size": 4},
            "text_config": {"model_type": "llama", **_TEXT},
            "scale_factor": 2,
        },
        "internvl": {
            "vision_config": {**_TOWER, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH], "use_qk_norm": True},
            "text_config": {"model_type": "qwen2", **_TEXT},
        },
        "gemma3": {
            # The first layer has a window, which is shorter than a prompt with an image.
            "vision_config": {**_TOWER, "vision_use_head": False},
            "text_config": {**_GEMMA, "layer_types": _LAYERS},
            "mm_tokens_per_image": 4,
            **_UNTIED_HEAD,
            "image_token_index": IMAGE_ID,
        },
        "mistral3": {
            "vision_config": {**_TOWER, "patch_size": 4},
            "text_config": {"model_type": "mistral", **_TEXT, **_UNTIED_HEAD, "head_dim": 16, "sliding_window": None},
            "spatial_merge_size": 2,
            **_UNTIED_HEAD,
            "image_token_index": IMAGE_ID,
        },
        "lfm2_vl": {
            "vision_config": {**_TOWER, "patch_size": 4, "num_patches": 36},
            "text_config": {
                **_TEXT,
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
                "block_auto_adjust_ff_dim": False,
            },
            "projector_hidden_size": 64,
        },
        "llava_next": {
            "vision_config": {"model_type": "clip_vision_model", **_TOWER},
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "image_grid_pinpoints": _RESOLUTIONS,
            "image_token_index": IMAGE_ID,
        },
        "llava_onevision": {
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False},
            "text_config": {"model_type": "qwen2", **_TEXT},
            "image_grid_pinpoints": [*_RESOLUTIONS, [96, 64]],
            "vision_aspect_ratio": "anyres_max_2",
            "image_token_index": IMAGE_ID,
        },
        "paligemma": {
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False},
            "text_config": {"model_type": "gemma2", **_GEMMA, "layer_types": _LAYERS},
            "projection_dim": 64,
            **_UNTIED_HEAD,
            "image_token_index": IMAGE_ID,
        },
        "qwen2_vl": {
            "vision_config": {**_PATCHES, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            **_AXES,
        },
        "qwen2_5_vl": {
            # Windows of 2 x 2 tokens in the first layer.
            "vision_config": {
                **_PATCHES,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_AXES,
        },
        "qwen3_vl": {
            # The decoder reads features of the first layer of the tower, too.
            "vision_config": {
                **_PATCHES,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            **_AXES,
            "text_config": {
                **_AXES["text_config"],
                "head_dim": 16,
                "rope_parameters": {**_AXES["text_config"]["rope_parameters"], "mrope_interleaved": True},
            },
        },
    }
    config = getattr(transformers, f"{NAMES[family]}Config")(**sections[family], **_IDS)
    return config, getattr(transformers, f"{NAMES[family]}ForConditionalGeneration")


def make_vision_language_model(family: str) -> Any:
    """Return a model of random weights that is ready to run, larger than transformers draws them: texts vary."""
    import torch

    config, model_class = _config(family)
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(std=tensor[0].numel() ** -0.5)
        embedding = model.get_input_embeddings()
        embedding.weight.normal_(std=1 / float(getattr(embedding, "embed_scale", 1)))
    return model


def write_vision_language_checkpoint(family: str, folder: Path) -> None:
    """Write the Hugging Face folder of a family, with its processor, on Pillow, and its tokenizer."""
    import transformers

    make_vision_language_model(family).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    processors: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "llava": (
            "CLIPImageProcessorPil",
            {"size": {"shortest_edge": SIDE}, "crop_size": size},
            {
                "image_token": IMAGE,
                "patch_size": PATCH,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
        ),
        "idefics3": (
            "Idefics3ImageProcessorPil",
            {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
            {"image_seq_len": 16},
        ),
        "internvl": (
            "GotOcr2ImageProcessorPil",
            {"size": size, "crop_to_patches": True, "max_patches": 2},
            {"image_seq_length": 4},
        ),
        "gemma3": ("Gemma3ImageProcessorPil", {"size": size}, {"image_seq_length": 4}),
        "paligemma": ("SiglipImageProcessorPil", {"size": size, "image_seq_length": 16}, {}),
        "mistral3": (
            "PixtralImageProcessorPil",
            {"patch_size": 4, "size": {"longest_edge": 64}},
            {"patch_size": 4, "spatial_merge_size": 2, "image_token": IMAGE}
            | {"image_break_token": IMAGES_BEGIN, "image_end_token": IMAGES_END},
        ),
        "llava_next": (
            "LlavaNextImageProcessorPil",
            {"image_grid_pinpoints": _RESOLUTIONS, "size": {"shortest_edge": SIDE}, "crop_size": size},
            {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        "llava_onevision": (
            "LlavaOnevisionImageProcessorPil",
            {"image_grid_pinpoints": [*_RESOLUTIONS, [96, 64]], "size": size},
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
        ),
        "qwen2_vl": (
            "Qwen2VLImageProcessorPil",
            {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1600}},
            {},
        ),
    }
    processors["qwen2_5_vl"] = processors["qwen3_vl"] = processors["qwen2_vl"]
    if family not in processors:
        return  # its processor needs torchvision
    name, options, settings = processors[family]
    getattr(transformers, name)(**options).save_pretrained(folder)
    settings["processor_class"] = f"{'Pixtral' if family == 'mistral3' else NAMES[family]}Processor"
    (folder / "processor_config.json").write_text(json.dumps(settings))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=IMAGE_ID,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([held_out_text()[:20_000]], trainer)
    tokenizer.add_special_tokens([IMAGE, IMAGES_BEGIN, IMAGES_END, VIDEO])
    names = {"image_token": IMAGE, "video_token": VIDEO, "context_image_token": IMAGE}
    names |= dict.fromkeys(("start_image_token", "vision_start_token", "boi_token"), IMAGES_BEGIN)
    names |= dict.fromkeys(("end_image_token", "vision_end_token", "eoi_token"), IMAGES_END)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=POSITIONS,
        extra_special_tokens=names,
    )
    assert fast.convert_tokens_to_ids(IMAGE) == IMAGE_ID
    return fast


def open_images(files: list[Path]) -> list[Any]:
    from PIL import Image

    return [Image.open(file).convert("RGB") for file in files]


def placeholder(family: str) -> str:
    if family.startswith("qwen"):
        return f"<begin>{IMAGE}<end>"
    return "<begin>" if family == "gemma3" else IMAGE


def prompts_of(family: str, session: VisionLanguageSession, pictures: list[Path]) -> list[tuple[ImagePrompt, Any]]:
    """Return prompts with one and with two images, and what the processor made of each for transformers."""
    if family == "lfm2_vl":
        return [_prompt_of_patches(session)]
    marker = placeholder(family)
    texts = {f"import {marker} os": pictures[:1], f"{marker} and {marker} def": pictures}
    return [
        (
            session.prompt(text, open_images(files)),
            session.processor(text=[text], images=open_images(files), return_tensors="pt"),
        )
        for text, files in texts.items()
    ]


def greedy(session: VisionLanguageSession, prompt: ImagePrompt) -> tuple[list[int], np.ndarray]:
    """Return the likeliest tokens behind a prompt, and the logits that each was chosen by."""
    decoder, ids, logits = ImageDecoder(session.decoder, [prompt], session.image_token), prompt.tokens, []
    tokens: list[int] = []
    while len(tokens) < COUNT:
        *_, (_, piece) = decoder.feed(np.array([ids], np.int64))
        logits.append(piece[0, -1].copy())
        tokens.append(int(logits[-1].argmax()))
        ids = tokens[-1:]
    return tokens, np.array(logits)


def _prompt_of_patches(session: VisionLanguageSession) -> tuple[ImagePrompt, Any]:
    """Return a prompt with two images of random patches, where there is no processor without torchvision."""
    import torch

    shapes, side = np.array([[8, 12], [4, 6]]), 2
    counts = shapes.prod(-1)
    numbers = {
        "pixel_values": np.random.default_rng(0).standard_normal((2, counts.max(), 3 * 4**2)).astype(np.float32),
        "spatial_shapes": shapes,
        "pixel_attention_mask": (np.arange(counts.max()) < counts[:, None]).astype(np.int64),
    }
    first, second = ([IMAGE_ID] * (count // side**2) for count in counts.tolist())
    tokens = np.array([5, *first, 6, 7, *second, 8])
    prompt = session.prompt_of_numbers(tokens, numbers)
    arrays = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64), **numbers}
    return prompt, {name: torch.from_numpy(array) for name, array in arrays.items()}


def transformers_text(model: Any, numbers: Any) -> tuple[list[int], np.ndarray]:
    """Return the likeliest tokens that transformers writes, and the logits [tokens, vocabulary] of each."""
    output = model.generate(
        **{name: array for name, array in numbers.items() if name != "labels"},
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, -COUNT:].tolist(), np.concatenate(output.logits)
