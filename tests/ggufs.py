"""Small GGUF files of Llamas, written with llama.cpp's own package, and the transformers models that they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.cached_folders import cached_folder
from tests.families import POSITIONS, VOCABULARY, randomize
from tools.bench.parts.gguf_file import NAMES

# Rows of 256 numbers, the super-blocks of Q6_K; 64 per head.
WIDTH, HEADS, CACHES, LAYERS = 256, 4, 2, 2
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"

MIXED_TYPES = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "F16",
    "attn_output": "BF16",
    "ffn_gate": "Q6_K",
    "ffn_up": "Q4_1",
    "ffn_down": "Q8_0",
}
"""A type for each matrix, by its name in GGUF; norms and what is not named are float32."""

Decode = Callable[[np.ndarray, str], np.ndarray]


def llama(layers: int = LAYERS) -> Any:
    """Return a random Llama of transformers with tied embeddings."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=CACHES,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    randomize(model)
    return model


def write_llama(
    model: Any,
    path: Path,
    kinds: dict[str, str],
    *,
    architecture: str = "llama",
    tokenizer: Path | None = None,
    change: Callable[[Any], None] = lambda writer: None,
) -> None:
    """Write a Llama as llama.cpp's converter does, and give ``model`` the numbers that the file then stands for.

    Args:
        model: from :func:`llama`; its weights become those of the file, decoded by transformers' own code.
        path: the file.
        kinds: the type of each matrix by its name in GGUF without layer; what is absent is float32.
        architecture: what the file calls itself.
        tokenizer: a folder with a byte-level BPE ``tokenizer.json``.
        change: adds to the file, or changes it, before it is written.
    """
    import torch

    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, model.config)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            layer, short = ("", module)
            if module.startswith("model.layers."):
                _, _, number, short = module.split(".", 3)
                layer = f"blk.{number}."
            short = NAMES[short]
            heads = {"attn_q": HEADS, "attn_k": CACHES}.get(short)
            array = parameter.numpy()
            data, values = encode(array if heads is None else _pair_rows(array, heads), kinds.get(short, "F32"))
            kind = gguf.GGMLQuantizationType[kinds.get(short, "F32")]
            writer.add_tensor(f"{layer}{short}.weight", data, raw_dtype=kind)
            parameter.copy_(torch.tensor(values if heads is None else _halves(values, heads)))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def export_llama(tokenizer: Path) -> Path:
    """Return a folder with ``llama.gguf``, of one layer and the types in :data:`MIXED`, and its export ``artifact``.

    Treat both as read-only.

    Args:
        tokenizer: as for :func:`write_llama`.
    """
    from tests.checkpoints import EXPORTS

    def make(folder: Path) -> None:
        from graphopt.models.export import export

        folder.mkdir()
        write_llama(llama(1), folder / "llama.gguf", MIXED_TYPES, tokenizer=tokenizer)
        export(folder / "llama.gguf", folder / "artifact")

    return cached_folder(
        "gguf", (*EXPORTS, "tests/ggufs.py", "graphopt/quantization/gguf/*.py", "graphopt/models/gguf/*.py"), make
    )


def encode(array: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of this type about ``array``, and what they mean by code that is not the package gguf's."""
    if kind in ("F32", "F16"):
        data = array.astype({"F32": np.float32, "F16": np.float16}[kind])
        return data, data.astype(np.float32)
    data = random_blocks(array.shape, kind) if kind in HALVES else gguf.quantize(array, gguf.GGMLQuantizationType[kind])
    return data, decoded_by_transformers(data, kind)


HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "NVFP4": (),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "IQ1_M": (),
}
"""Types that the package gguf does not write, and where their blocks have float16 numbers."""


def random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return blocks of random codes and sub-scales, whose float16 scales make numbers of about 1/16."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(size).integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), np.uint8)
    for offset in HALVES[kind]:
        scale = np.random.default_rng(offset).uniform(1e-5, 3e-5, blocks.shape[:-1]).astype(np.float16)
        blocks[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    if kind == "IQ1_M":  # the scale lies in the highest bits of four words: about 2^-14
        blocks[..., 49::2] &= 0x0F
        blocks[..., 53] |= 0x50
    if kind == "NVFP4":
        blocks[..., :4] &= 0x3F  # scales below 2, none of them negative
    return blocks.reshape(*shape[:-1], -1)


def decoded_by_transformers(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Decode rows of blocks with transformers' own code, which shares nothing with the package gguf."""
    import torch
    from transformers.integrations.gguf.dequant import dequantize

    if kind == "BF16":
        bits = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    if kind in ("Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"):  # which transformers does not know
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    flat = torch.from_numpy(np.array(blocks).reshape(-1))
    return dequantize(flat, int(gguf.GGMLQuantizationType[kind])).numpy().reshape(*blocks.shape[:-1], -1)


def _pair_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of queries or keys as llama.cpp's ``convert_hf_to_gguf.py`` does (``permute``)."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    rows = np.arange(array.shape[0])
    back = np.argsort(_pair_rows(rows[:, None], heads)[:, 0])
    return array[back]


def _write_config(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: Any, folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT)
