"""Small models of families that transformers knows, with random weights: for tests and tools/studies/families.py."""

from __future__ import annotations

from typing import Any

VOCABULARY, HIDDEN, POSITIONS = 300, 64, 128

_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    **_ENDS,
}
# MLP widths are 12 and 20 times a power of two, for which rotations need odd Hadamard orders.
_GROUPED_QUERIES = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 96}
# A sliding window (shorter than the tests' sequences) in one layer of two.
_SLIDING_WINDOW = {
    **_GROUPED_QUERIES,
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
_FALCON = {**_COMMON, "ffn_hidden_size": 96}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GROUPED_QUERIES, "intermediate_size": 160, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_GROUPED_QUERIES, "sliding_window": None}),
    "mistral_window": ("MistralConfig", {**_GROUPED_QUERIES, "sliding_window": 6}),
    # biases on query, key and value
    "qwen2": ("Qwen2Config", _GROUPED_QUERIES),
    # norms with gains on queries and keys, per head
    "qwen3": ("Qwen3Config", {**_GROUPED_QUERIES, "head_dim": 16}),
    # norms with a gain behind attention and MLP too, soft-capped scores and logits, scaled embedding
    "gemma2": ("Gemma2Config", _SLIDING_WINDOW),
    # norms with 1 + gain, on queries and keys too, scaled embedding
    "gemma3": ("Gemma3TextConfig", _SLIDING_WINDOW),
    # fused query-key-value and fused gate-up
    "phi3": ("Phi3Config", {**_GROUPED_QUERIES, "pad_token_id": 0}),
    # learned positions, LayerNorm, fused query-key-value stored [in, out], biases everywhere
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, **_ENDS},
    ),
    # learned positions that begin at 2, separate projections, ReLU
    "opt": ("OPTConfig", {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": HIDDEN, "pad_token_id": 1}),
    # attention and MLP in parallel on one residual, partial rotary
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "intermediate_size": 96}),
    # one head of keys and values for all queries
    "falcon": ("FalconConfig", {**_FALCON, "multi_query": True}),
    # query, key and value of each group side by side in one projection
    "falcon_new": ("FalconConfig", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    # LayerNorm with biases, partial rotary
    "stablelm": ("StableLmConfig", _GROUPED_QUERIES),
    # norms behind attention and MLP only, and over all heads of queries and keys
    "olmo2": ("Olmo2Config", _GROUPED_QUERIES),
    # multipliers on embedding, residual, scores and logits
    "granite": (
        "GraniteConfig",
        {
            **_GROUPED_QUERIES,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    # attention and MLP in parallel behind one LayerNorm, interleaved rotary, tied head
    "cohere": ("CohereConfig", {**_GROUPED_QUERIES, "logit_scale": 0.25}),
    # keys and values made of a latent that the cache holds, appended outside of Attention; two layers without experts
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
        },
    ),
    # a logit of each head that joins the softmax and has no value, biases everywhere, clipped experts
    "gpt_oss": (
        "GptOssConfig",
        {**_SLIDING_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    # four experts, two for each token
    "mixtral": (
        "MixtralConfig",
        {**_GROUPED_QUERIES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
}


_SHORT = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, **_ENDS}
_MAMBA2_PART = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    # gated delta rule, with half as many heads of queries and keys as of values; attention with a gate
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_GROUPED_QUERIES,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [0, 1],
        },
    ),
    # short convolutions between gates
    "lfm2": (
        "Lfm2Config",
        {**_GROUPED_QUERIES, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    # SSD alone
    "mamba2": (
        "Mamba2Config",
        {**_SHORT, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "pad_token_id": 0},
    ),
    # SSD in one layer, attention in the next
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_GROUPED_QUERIES,
            **_MAMBA2_PART,
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "rope",
        },
    ),
    # SSD and attention side by side in each layer
    "falcon_h1": ("FalconH1Config", {**_GROUPED_QUERIES, **_MAMBA2_PART, "mamba_d_ssm": 128, "head_dim": 16}),
    # selective scan
    "mamba": ("MambaConfig", {**_SHORT, "state_size": 16, "pad_token_id": 0}),
    # weighted means, shifts by a token; transformers halves weights of later layers than these
    "rwkv": (
        "RwkvConfig",
        {**_SHORT, "attention_hidden_size": HIDDEN, "intermediate_size": 96, "context_length": POSITIONS},
    ),
    # RG-LRU in one layer, attention in the next, whose window no padding of a test fills
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            **{key: value for key, value in _GROUPED_QUERIES.items() if key != "max_position_embeddings"},
            "lru_width": 128,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 24,
            "pad_token_id": 0,
        },
    ),
}

# Methods of transformers that its exporter cannot write.
SUBSTITUTED_MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    # three matrices of an expert, stored one below the other for all experts; a loop over experts that were chosen
    "dbrx": (
        "DbrxConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "n_layers": 1,
            "n_heads": 4,
            "max_seq_len": POSITIONS,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
            **_ENDS,
        },
    ),
    # four residual streams, embeddings for each layer, sparse gates; the last layer reuses keys and values
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_SLIDING_WINDOW,
            "layer_types": ["full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "intermediate_size": [96] * 2,
            "activation_sparsity_pattern": [0.95, 0.0],
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "pad_token_id": 0,
        },
    ),
    # heads of another number and size in layers that see all tokens, whose keys are their values too; embeddings for
    # each layer; the last one reuses keys and values
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_SLIDING_WINDOW,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "pad_token_id": 0,
        },
    ),
    # rotary pairs as complex numbers in one layer, where attention ends with chunks; experts in the other
    "llama4": (
        "Llama4TextConfig",
        {
            **_GROUPED_QUERIES,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "pad_token_id": 0,
        },
    ),
    # a trained indexer, whose choice of tokens the second layer shares. With few of its heads a token may have none
    # with a score above 0, and of equal scores torch takes any.
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_head_dim": 32,
            "index_n_heads": 32,
            "index_topk": 6,
            "indexer_types": ["full", "shared"],
            "mlp_layer_types": ["dense", "sparse"],
            "pad_token_id": 0,
        },
    ),
}


_ENCODER = {key: value for key, value in _COMMON.items() if key not in _ENDS} | {"intermediate_size": 96}

_SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    # norms on the residual itself, learned positions, token types, a pooler
    "bert": ("BertConfig", _ENCODER),
    "distilbert": (
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": HIDDEN,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 96,
            "max_position_embeddings": POSITIONS,
        },
    ),
    # positions counted from the tokens that are not padding
    "roberta": ("RobertaConfig", _ENCODER),
    # a learned bias for each distance
    "mpnet": ("MPNetConfig", _ENCODER),
    # rotary positions, norms behind
    "nomic_bert": ("NomicBertConfig", {**_ENCODER, **_SPECIAL}),
    # rotary positions, grouped heads, RMS norms: a decoder's parts without its mask
    "eurobert": ("EuroBertConfig", {**_ENCODER, **_SPECIAL, "num_key_value_heads": 2, "mask_token_id": 1}),
}

# The class of transformers with the head, the configuration, and its settings.
HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert_classes": (
        "BertForSequenceClassification",
        "BertConfig",
        {**_ENCODER, "id2label": {0: "bad", 1: "neutral", 2: "good"}},
    ),
    # one class; rotary positions, a window on both sides in one layer of two, norms in front, gated MLP
    "modernbert_reranker": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**_ENCODER, **_SPECIAL, "local_attention": 8, "global_attn_every_n_layers": 2, "num_labels": 1},
    ),
    "roberta_tokens": (
        "RobertaForTokenClassification",
        "RobertaConfig",
        {**_ENCODER, "id2label": {number: f"B-{number}" for number in range(5)}, "max_position_embeddings": 130},
    ),
    # a decoder: the last token that is not padding has the classes
    "llama_classes": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**_GROUPED_QUERIES, "pad_token_id": 0, "id2label": {0: "bad", 1: "good"}},
    ),
    "distilbert_answers": (
        "DistilBertForQuestionAnswering",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": HIDDEN,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 96,
            "max_position_embeddings": POSITIONS,
        },
    ),
}

# Encoders of texts that are no model of their own family's kind; as for HEADS.
TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # a learned bias for each distance that all layers share, norms without mean in front, no factor on scores
    "t5_encoder": (
        "T5EncoderModel",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
    ),
    # causal, with the embedding of a text as an output
    "clip_text": (
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        {**_COMMON, **_SPECIAL, "intermediate_size": 96, "projection_dim": 32},
    ),
    # a decoder that embeds: the state of its last token
    "qwen3_embedder": ("Qwen3Model", "Qwen3Config", {**_GROUPED_QUERIES, "head_dim": 16, "pad_token_id": 0}),
}


_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}

# Encoder-decoders; as for HEADS.
SEQ2SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", {**TOWERS["t5_encoder"][2], "eos_token_id": 3}),
    # learned positions, norms behind, a bias on the logits; a text begins with the token that ends one
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**_SEQ2SEQ, "max_position_embeddings": POSITIONS, "decoder_start_token_id": 3},
    ),
    # positions that are computed, a text begins with padding
    "marian": (
        "MarianMTModel",
        "MarianConfig",
        {**_SEQ2SEQ, "max_position_embeddings": POSITIONS, "decoder_start_token_id": 0},
    ),
    # a recording behind two convolutions, norms in front
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_SEQ2SEQ,
            "encoder_attention_heads": 2,  # of 1500 positions, whose scores are most of the time
            "max_source_positions": 1500,
            "max_target_positions": 64,
            "num_mel_bins": 16,
            "decoder_start_token_id": 2,
        },
    ),
}

# How their texts are made, as it stands in a checkpoint's generation_config.json.
_GENERATION: dict[str, dict[str, Any]] = {
    "bart": {"forced_bos_token_id": 2},
    "marian": {"bad_words_ids": [[0]]},
    "whisper": {
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [7],
        "lang_to_id": {"<|en|>": 10, "<|de|>": 11, "<|fr|>": 12},
        "task_to_id": {"transcribe": 13, "translate": 14},
        "no_timestamps_token_id": 15,
        "is_multilingual": True,
    },
}


def make_model(family: str, layers: int | None = None) -> Any:
    """Return the random-weight transformers model of a family of this module.

    Args:
        family: its name.
        layers: how many layers it has; by default two. The types of two layers are repeated.
    """
    import torch
    import transformers

    heads, without_head = HEADS | TOWERS | SEQ2SEQ, FAMILIES | RECURRENT | SUBSTITUTED_MODULES | ENCODERS
    head, config_class, settings = heads[family] if family in heads else ("", *without_head[family])
    if layers is not None:
        names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
        counts = {name: layers for name in names if name in settings}
        types = {"layer_types": (settings["layer_types"] * layers)[:layers]} if "layer_types" in settings else {}
        settings = {**settings, **counts, **types}
    torch.manual_seed(0)
    auto = transformers.AutoModel if family in ENCODERS else transformers.AutoModelForCausalLM
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, head)(config) if head else auto.from_config(config)
    for name, value in _GENERATION.get(family, {}).items():
        setattr(model.generation_config, name, value)
    randomize(model)
    return model


def randomize(model: Any) -> None:
    """Draw weights that leave nothing to chance: logits of order 1, no norm gain that is 1 and no bias that is 0."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # One over the root of the width keeps what passes through at the size it had.
                parameter.normal_(std=HIDDEN**-0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.uniform_(0.5, 1.5)
