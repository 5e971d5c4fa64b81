"""A Llama checkpoint as a GGUF file; with a tokenizer for llama-server, llama-bench does not ask for one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.bench.parts.engine import optional

Array = npt.NDArray[Any]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Parts of a Llama in transformers, and what llama.cpp calls them."""

_ROTARY_HEADS = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}


def in_pairs(rows: Array, heads: int) -> Array:
    """Return the rows of queries or keys, [heads x d, columns], such that i and i + d/2 of a head are neighbours."""
    pairs = rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).reshape(rows.shape)


def write_gguf(checkpoint: Path, file: Path, *, tokenizer: bool = False) -> None:
    """Write ``checkpoint`` in float16, norms in float32.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head's queries and keys where transformers rotates
    (i, i + d/2), so rows of both are written in its order.

    Args:
        checkpoint: the Hugging Face folder.
        file: where to write.
        tokenizer: whether to write the tokens of its ``tokenizer.json`` too.

    Raises:
        UnavailableError: gguf or safetensors is not installed.
    """
    gguf = optional("gguf")
    safetensors = optional("safetensors.numpy", package="safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    _write_shape(writer, config)
    if tokenizer:
        _write_tokenizer(writer, checkpoint)
    else:
        writer.add_tokenizer_model("no_vocab")
    for name, array in safetensors.load_file(checkpoint / "model.safetensors").items():
        heads = next((config[key] for part, key in _ROTARY_HEADS.items() if part in name), None)
        array = array if heads is None else in_pairs(array, heads)
        writer.add_tensor(_name(name), array if array.ndim > 1 else array.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rotary = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rotary.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: Any, checkpoint: Path) -> None:
    """Write the byte-level tokens of ``tokenizer.json``, which must be as many as the model has."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = dict(tokenizer["model"]["vocab"]) | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(tokens, key=tokens.__getitem__))
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _name(name: str) -> str:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match is not None:
        return f"blk.{match[1]}.{NAMES[match[2]]}.weight"
    return f"{NAMES[name.removesuffix('.weight')]}.weight"
