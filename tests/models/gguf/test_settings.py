"""Settings of GGUF files that transformers does not read: each is read, derived, or refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from graphopt.errors import InputError
from graphopt.models.gguf.checkpoint import config_of
from graphopt.quantization.gguf.file import open_gguf

_SIZES = {
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def config(architecture: str, folder: Path, *, output: bool = True, **settings: Any) -> Any:
    """Return the configuration of a file without weights; ``settings`` name keys with __ in place of dots."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    keys = {**_SIZES, **{name.replace("__", "."): value for name, value in settings.items()}}
    for name, value in keys.items():
        key = name if name.startswith("tokenizer.") else f"{architecture}.{name}"
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(key, value)
    writer.add_token_list([f"token{number}" for number in range(300)])
    if output:
        writer.add_tensor("output.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config_of(open_gguf(path), transformers)


# head_dim is 16, and hidden_size / heads too unless another width is given
@pytest.mark.parametrize(
    ("architecture", "layers", "expected"),
    [("gemma2", 26, 8), ("gemma2", 42, 8), ("gemma2", 46, 16), ("gemma3", 26, 8), ("gemma3", 62, 16)],
)
def test_queries_of_the_largest_gemmas_are_scaled_by_the_width(
    architecture: str, layers: int, expected: int, tmp_path: Path
) -> None:
    model_config = config(
        architecture, tmp_path, block_count=layers, attention__key_length=8, attention__sliding_window=16
    )
    assert (model_config.head_dim, model_config.query_pre_attn_scalar) == (8, expected)


def test_a_scale_of_queries_in_the_file_goes_first(tmp_path: Path) -> None:
    model_config = config("gemma2", tmp_path, attention__key_length=8, attention__scale=0.25)
    assert model_config.query_pre_attn_scalar == 16
    config("llama", tmp_path, attention__scale=0.25, rope__dimension_count=16)
    with pytest.raises(InputError, match=r"llama.attention.scale = 0.125 cannot be translated"):
        config("llama", tmp_path, attention__scale=0.125, rope__dimension_count=16)


def test_caps_of_logits_are_read(tmp_path: Path) -> None:
    model_config = config("gemma2", tmp_path, attn_logit_softcapping=20.0, final_logit_softcapping=0.0)
    assert (model_config.attn_logit_softcapping, model_config.final_logit_softcapping) == (20, None)
    assert config("gemma3", tmp_path, final_logit_softcapping=30.0).final_logit_softcapping == 30
    with pytest.raises(InputError, match=r"llama.final_logit_softcapping = 30.0 cannot be translated"):
        config("llama", tmp_path, final_logit_softcapping=30.0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "starcoder2", "stablelm", "phi3", "nemotron", "falcon"])
def test_the_base_of_rotary_embeddings_is_that_of_the_file(architecture: str, tmp_path: Path) -> None:
    assert config(architecture, tmp_path, rope__freq_base=5e5).rope_parameters["rope_theta"] == 5e5
    # what llama.cpp takes where the file does not say it
    assert config(architecture, tmp_path).rope_parameters["rope_theta"] == 1e4


@pytest.mark.parametrize("architecture", ["phi3", "stablelm", "nemotron"])
def test_the_rotated_part_of_a_head_is_that_of_the_file(architecture: str, tmp_path: Path) -> None:
    assert config(architecture, tmp_path, rope__dimension_count=12).rope_parameters["partial_rotary_factor"] == 0.75
    assert config(architecture, tmp_path).rope_parameters["partial_rotary_factor"] == 1


def test_a_part_of_a_head_is_refused_where_all_of_it_is_rotated(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"qwen2.rope.dimension_count = 8 cannot be translated: .* rotates all 16"):
        config("qwen2", tmp_path, rope__dimension_count=8)


def test_gemma3_scales_the_positions_of_whole_attention_alone(tmp_path: Path) -> None:
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    rope = config("gemma3", tmp_path, rope__freq_base=2e6, **scaling).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 2e6, "factor": 8}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert config("gemma3", tmp_path).rope_parameters["full_attention"]["rope_theta"] == 1e6
    rope = config("gemma3", tmp_path, rope__freq_base_swa=2e4).rope_parameters
    assert rope["sliding_attention"]["rope_theta"] == 2e4
    with pytest.raises(InputError, match=r"llama.rope.freq_base_swa"):
        config("llama", tmp_path, rope__freq_base_swa=2e4)


def test_windows_are_those_of_the_file(tmp_path: Path) -> None:
    assert config("phi3", tmp_path, attention__sliding_window=7).sliding_window == 7
    assert config("phi3", tmp_path).sliding_window is None
    assert config("gemma2", tmp_path, attention__sliding_window=7).sliding_window == 7
    for architecture in ("llama", "qwen2"):
        with pytest.raises(InputError, match=rf"{architecture}.attention.sliding_window = 7 cannot be translated"):
            config(architecture, tmp_path, attention__sliding_window=7)
    kinds = [True] * 5 + [False]
    config("gemma3", tmp_path, block_count=6, attention__sliding_window_pattern=kinds)
    with pytest.raises(InputError, match=r"gemma3.attention.sliding_window_pattern = \[False, True, True, True\], ..."):
        config("gemma3", tmp_path, block_count=6, attention__sliding_window_pattern=kinds[::-1])


def test_the_epsilon_of_norms_is_that_of_the_file(tmp_path: Path) -> None:
    for architecture, name in (
        ("falcon", "layer_norm_epsilon"),
        ("nemotron", "norm_eps"),
        ("stablelm", "layer_norm_eps"),
    ):
        model_config = config(architecture, tmp_path, attention__layer_norm_epsilon=0.25)
        assert getattr(model_config, name) == 0.25


@pytest.mark.parametrize("architecture", ["llama", "falcon", "gemma2"])
def test_embeddings_are_tied_where_the_file_has_no_head(architecture: str, tmp_path: Path) -> None:
    assert config(architecture, tmp_path, output=False).tie_word_embeddings
    assert not config(architecture, tmp_path).tie_word_embeddings


def test_the_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    ends = {"tokenizer__ggml__eos_token_id": 1, "tokenizer__ggml__eot_token_id": 107}
    assert config("gemma2", tmp_path, **ends).eos_token_id == [1, 107]
    assert config("gemma2", tmp_path, tokenizer__ggml__eos_token_id=1).eos_token_id == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"logit_scale": 0.5},
        {"residual_scale": 0.5},
        {"embedding_scale": 12.0},
        {"attention__clamp_kqv": 8.0},
        {"attention__value_length": 8},
        {"rope__scaling__attn_factor": 1.5},
        {"rope__dimension_sections": [4, 4, 4, 4]},
        {"expert_gating_func": 2},
        {"a_key_of_tomorrow": 3},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_that_nobody_knows_is_refused_by_name(setting: dict[str, Any], tmp_path: Path) -> None:
    key = f"qwen3moe.{next(iter(setting)).replace('__', '.')} = "
    with pytest.raises(InputError, match=key) as caught:
        config("qwen3moe", tmp_path, **setting)
    assert "export the original checkpoint" in str(caught.value)
    neutral = {name: [] if isinstance(value, list) else type(value)(0) for name, value in setting.items()}
    if neutral != {"rope__dimension_sections": []}:  # a GGUF file holds no empty array
        config("qwen3moe", tmp_path, **neutral)


def test_settings_of_no_effect_are_left_out(tmp_path: Path) -> None:
    config("llama", tmp_path, attention__causal=True, rope__scaling__finetuned=True, tensor_data_layout="Meta AI")
    config("llama", tmp_path, attention__key_length=16, attention__value_length=16, pooling_type=3)


@pytest.mark.parametrize("architecture", ["gemma4", "gpt-oss"])
def test_architectures_that_nobody_checked_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"graphopt does not know how a GGUF file describes {architecture}"):
        config(architecture, tmp_path)
