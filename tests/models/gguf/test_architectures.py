"""GGUF files of other architectures: each must load as the model that it was written from, or be refused by name.

Files are written by the inverse of transformers' own tables of keys and names, and of the layouts that
``test_layouts.py`` holds against transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils as theirs

from graphopt.errors import InputError
from graphopt.graph.weights import Inline
from graphopt.models.gguf.checkpoint import load_gguf
from graphopt.models.gguf.layouts import FileTensor, layout_of
from tests.families import randomize

_COMMON = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EXPERTS = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16}
# as llama.cpp computes, whatever a checkpoint says
_EXPERTS["norm_topk_prob"] = True
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 16, "tie_word_embeddings": False}),
    "phi3": ("Phi3Config", _SIZES),
    "gemma2": ("Gemma2Config", {**_SIZES, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    ),
    "gpt2": ("GPT2Config", {**_COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "starcoder2": ("Starcoder2Config", {**_SIZES, "vocab_size": 49152, "sliding_window": None}),
    "stablelm": ("StableLmConfig", _SIZES),
    "nemotron": ("NemotronConfig", _SIZES),
    "bloom": ("BloomConfig", {**_COMMON, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        {**_COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True},
    ),
    "qwen3moe": ("Qwen3MoeConfig", _EXPERTS),
}


def write(architecture: str, path: Path) -> Any:
    """Write a random model of an architecture, and return it."""
    config_class, settings = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model)
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, architecture, config)
    layout = layout_of(architecture)
    assert layout is not None
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(config=config.to_dict())
    names = theirs.get_gguf_hf_weights_map(model, processor)
    state, pointers = model.state_dict(), set()
    for name, target in names.items():
        pointer = (state[target].data_ptr(), "ffn_up_exps" in name)
        if pointer in pointers:  # tied
            continue
        pointers.add(pointer)
        array = state[target].numpy()
        if "_exps" in name:
            halves = np.split(array, 2, axis=1)
            array = halves[0] if "gate" in name else halves[1] if "up" in name else array
            name = f"{name}.weight"
        writer.add_tensor(name, np.ascontiguousarray(_inverse_of_layout(layout, name, array, config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_keys(writer: Any, architecture: str, config: Any) -> None:
    mapping = theirs.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    model_type = {"qwen3moe": "qwen3_moe"}.get(architecture, architecture)
    for key, name in mapping[model_type].items():
        value = getattr(config, name, None) if name else None
        if name == "rope_theta":
            rope = config.rope_parameters
            value = rope.get("rope_theta") or rope["full_attention"]["rope_theta"]
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    for key, name in (("attention.key_length", "head_dim"), ("expert_feed_forward_length", "moe_intermediate_size")):
        if f"{architecture}.{key}" not in writer.kv_data[0] and getattr(config, name, None):
            writer.add_uint32(f"{architecture}.{key}", getattr(config, name))
    rotary_share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    if rotary_share is not None:
        writer.add_rope_dimension_count(int(rotary_share * config.hidden_size // config.num_attention_heads))
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    # transformers counts these where the keys do not say how many there are
    writer.add_token_list([f"token{number}" for number in range(config.vocab_size)])


def _inverse_of_layout(layout: Any, name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Return what the layout makes ``array`` of: layouts move numbers, or add one to all of them."""
    is_transposed = layout(FileTensor(name, Inline.from_array(array), config)).shape != array.shape
    shape = array.shape[::-1] if is_transposed else array.shape
    positions = np.arange(array.size, dtype=np.float64).reshape(shape)
    new_positions = layout(FileTensor(name, Inline.from_array(positions), config)).numpy()
    offset = float(new_positions.min() - positions.min())
    before = np.empty(array.size, np.float32)
    before[(new_positions - offset).astype(np.int64).reshape(-1)] = array.reshape(-1) - np.float32(offset)
    return before.reshape(shape)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_loads_as_the_model_that_it_was_written_from(architecture: str, tmp_path: Path) -> None:
    expected = write(architecture, tmp_path / "model.gguf")
    model, weights = load_gguf(tmp_path / "model.gguf")
    assert type(model) is type(expected)
    ids = torch.arange(20)[None] * 7 % 300
    with torch.no_grad():
        expected_logits, logits = expected(ids).logits, model(ids).logits
    # gains of 1 + w lose a bit or two of w; all else has the same bits
    assert float((logits - expected_logits).abs().max() / expected_logits.abs().max()) < 1e-5
    assert weights


def test_a_falcon_with_groups_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_class, settings = ARCHITECTURES["falcon"]
    grouped_settings = {**settings, "num_kv_heads": 2, "new_decoder_architecture": True}
    monkeypatch.setitem(ARCHITECTURES, "falcon", (config_class, grouped_settings))
    write("falcon", tmp_path / "model.gguf")
    # transformers takes every falcon for one with a single head of keys and values
    with pytest.raises(InputError, match="has no place|does not fit|lacks"):
        load_gguf(tmp_path / "model.gguf")
