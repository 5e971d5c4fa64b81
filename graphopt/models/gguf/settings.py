"""What a configuration must say that transformers does not read of a GGUF file: read, derived, or refused by name.

transformers reads the keys of its table ``GGUF_CONFIG_MAPPING`` and leaves the rest of a configuration at its defaults,
which are those of one checkpoint. Here every key of the file's architecture is either read by transformers, read here,
known to change nothing, or an error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError
from graphopt.models.gguf.rope import rope_parameters

if TYPE_CHECKING:
    from graphopt.quantization.gguf.file import GgufFile

UNKNOWN = ("gemma4", "gpt-oss", "gpt_oss")
"""Architectures that transformers maps, but with settings and layouts that nobody has checked here."""

# A key of the file, and what transformers may call it; the first name that a configuration has is meant.
_FIELDS = {
    "attention.key_length": ("head_dim",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
}
# Read by transformers or below wherever they mean something; or of no effect on what a model computes.
_READ_ELSEWHERE = {
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "pooling_type",
    "tensor_data_layout",
}
# What else a file may say, with the one value of it that changes nothing; 0 is another for all of them.
_NEUTRAL = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "expert_gating_func": 1,
    "expert_weights_scale": 1.0,
}
# llama.cpp tells this size of Gemma by its layers: it scales queries by hidden_size / heads, the others by head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# What llama.cpp takes where a file does not say it.
_FREQUENCY_BASE = 10000.0


def complete(config: Any, file: GgufFile) -> None:
    """Set in the configuration that transformers made of a file what it left out.

    Raises:
        InputError: the file says something that neither transformers nor this function understands.
    """
    if file.architecture in UNKNOWN:
        raise InputError(
            f"graphopt does not know how a GGUF file describes {file.architecture}",
            file=file.path,
            remedy="export the original checkpoint",
        )
    fields = config.to_dict()
    for key, names in _FIELDS.items():
        name = next((field for field in names if field in fields), None)
        if file.value(key) is not None and name is not None:
            # a cap of 0 is none
            setattr(config, name, (file.value(key) or None) if "softcapping" in name else file.value(key))
    # transformers ties falcon and bloom always, and would keep one of two tensors
    config.tie_word_embeddings = "output.weight" not in file.tensors
    _set_attention(config, file)
    if getattr(config, "rope_parameters", None):
        _set_rotary(config, file)
    _set_ends(config, file)
    _refuse_others(config, file)


def _head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _set_attention(config: Any, file: GgufFile) -> None:
    """Set windows and the scale of queries."""
    window = file.value("attention.sliding_window")
    if window and getattr(config, "use_sliding_window", None) is not None:
        raise _refusal(file, "attention.sliding_window", "which layers have the window is not said")
    if window and not hasattr(config, "sliding_window"):
        raise _refusal(file, "attention.sliding_window", f"{type(config).__name__} has no windows")
    if hasattr(config, "sliding_window") and (window is not None or config.model_type == "mistral"):
        config.sliding_window = window or None
    scale = file.value("attention.scale")
    if hasattr(config, "query_pre_attn_scalar"):
        by_width = config.num_hidden_layers == _SCALED_BY_WIDTH.get(file.architecture)
        scalar = config.hidden_size // config.num_attention_heads if by_width else _head_dim(config)
        config.query_pre_attn_scalar = round(scale**-2) if scale else scalar
    elif scale and not math.isclose(scale, _head_dim(config) ** -0.5, rel_tol=1e-5):
        raise _refusal(file, "attention.scale", f"it is not 1 / sqrt({_head_dim(config)}), and nothing else is known")


def _set_rotary(config: Any, file: GgufFile) -> None:
    """Set base, scaling and width of rotary embeddings."""
    parameters = config.rope_parameters
    is_layered = "full_attention" in parameters
    whole = dict(parameters["full_attention"] if is_layered else parameters)
    whole["rope_theta"] = file.value("rope.freq_base", whole["rope_theta"] if is_layered else _FREQUENCY_BASE)
    whole |= rope_parameters(file)
    width, head_dim = file.value("rope.dimension_count"), _head_dim(config)
    if "partial_rotary_factor" in whole:
        whole["partial_rotary_factor"] = (head_dim if width is None else width) / head_dim
    elif width not in (None, head_dim) and getattr(config, "rotary_dim", None) != width:
        raise _refusal(
            file, "rope.dimension_count", f"{type(config).__name__} rotates all {head_dim} numbers of a head"
        )
    local = file.value("rope.freq_base_swa")
    if not is_layered and local not in (None, whole["rope_theta"]):
        raise _refusal(file, "rope.freq_base_swa", f"{type(config).__name__} has one base for all layers")
    if not is_layered:
        config.rope_parameters = whole
        return
    sliding = dict(parameters["sliding_attention"])
    config.rope_parameters = {
        **parameters,
        "full_attention": whole,
        "sliding_attention": sliding if local is None else {**sliding, "rope_theta": local},
    }


def _set_ends(config: Any, file: GgufFile) -> None:
    """Let a turn's end be an end of the text too, as it is for llama.cpp."""
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = list(dict.fromkeys(end for end in ends if end is not None))
    if len(tokens) > 1 and not isinstance(config.eos_token_id, list):
        config.eos_token_id = tokens


def _refuse_others(config: Any, file: GgufFile) -> None:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    key_length, layers = file.value("attention.key_length"), getattr(config, "layer_types", None) or []
    neutral = {
        **_NEUTRAL,
        "attention.key_length": _head_dim(config),
        "attention.value_length": key_length or _head_dim(config),
        "attention.max_alibi_bias": 8.0 if config.model_type == "bloom" else 0.0,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in layers],
        "rope.freq_base_swa": file.value("rope.freq_base_swa") if getattr(config, "rope_parameters", None) else 0,
        "attention.scale": file.value("attention.scale"),
    }
    mapping: Any = GGUF_CONFIG_MAPPING[config.model_type.removesuffix("_text")]
    readable = {key for key, name in mapping.items() if name is not None}
    fields = config.to_dict()
    readable |= {key for key, names in _FIELDS.items() if any(name in fields for name in names)}
    prefix = f"{file.architecture}."
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in _READ_ELSEWHERE | readable and value and neutral.get(name) != value:
            raise _refusal(
                file, name, f"neither transformers nor graphopt knows what it does to {type(config).__name__}"
            )


def _refusal(file: GgufFile, key: str, reason: str) -> InputError:
    value = file.value(key)
    text = f"{value[:4]}, ..." if isinstance(value, list) and len(value) > 4 else value
    return InputError(
        f"the setting {file.architecture}.{key} = {text} cannot be translated: {reason}",
        file=file.path,
        remedy="export the original checkpoint",
    )
