"""Which families of transformers are known to enter: those that tests export, and those that were tried by a tool.

Nothing asks this table whether a model may enter: a family that is not here is exported like any other, and refused
only for what its graph has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FamilyGroup:
    """Families that carry the same from token to token.

    Attributes:
        kind: what mixes tokens in their layers.
        states: the ports of a layer, as in ``past_key_values.N.key``; empty where there are none.
        families: as transformers calls them (``model_type``).
    """

    kind: str
    states: tuple[str, ...]
    families: tuple[str, ...]


_ATTENTION, _RECURRENCE = ("key", "value"), ("conv_state", "recurrent_state")

FAMILY_GROUPS = (
    FamilyGroup(
        "attention",
        _ATTENTION,
        (
            "apertus", "arcee", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "ctrl",
            "cwm", "diffllama", "doge", "emu3_text_model", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2",
            "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "gpt2", "gpt_bigcode",
            "gpt_neo", "gpt_neox", "gptj", "granite", "granite_swa", "helium", "hunyuan_v1_dense",
            "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "ministral", "ministral3",
            "mistral", "mllama_text_model", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2",
            "olmo3", "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
            "stablelm", "starcoder2", "vaultgemma", "xglm",
        ),
    ),
    FamilyGroup(
        "attention and experts",
        _ATTENTION,
        (
            "afmoe", "aria_text", "cohere2_moe", "dbrx", "dots1", "ernie4_5_moe", "exaone_moe",
            "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared",
            "hunyuan_v1_moe", "jetmoe", "llama4_text", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe",
            "phimoe", "qwen2_moe", "qwen3_moe", "solar_open",
        ),
    ),
    FamilyGroup(
        "latent attention",
        _ATTENTION,
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"),
    ),
    FamilyGroup(
        "latent attention to what an indexer chooses",
        (*_ATTENTION, "indexer_key"),
        ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    ),
    FamilyGroup(
        "gated delta rule and attention",
        (*_RECURRENCE, *_ATTENTION),
        ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    ),
    FamilyGroup("delta rule gated per channel and latent attention", (*_RECURRENCE, *_ATTENTION), ("kimi_linear",)),
    FamilyGroup("lightning attention and attention", ("recurrent_state", *_ATTENTION), ("minimax",)),
    FamilyGroup("weighted means", _RECURRENCE, ("rwkv",)),
    FamilyGroup("matrix memories with a normalizer", ("recurrent_state",), ("xlstm",)),
    FamilyGroup("RG-LRU and attention", (*_RECURRENCE, *_ATTENTION), ("recurrent_gemma",)),
    FamilyGroup("SSD", _RECURRENCE, ("mamba2",)),
    FamilyGroup(
        "SSD and attention",
        (*_RECURRENCE, *_ATTENTION),
        ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
    ),
    FamilyGroup("selective scan", _RECURRENCE, ("falcon_mamba", "mamba")),
    FamilyGroup("selective scan and attention", (*_RECURRENCE, *_ATTENTION), ("jamba", "zamba")),
    FamilyGroup("short convolutions and attention", ("conv_state", *_ATTENTION), ("inkling2_text", "lfm2", "lfm2_moe")),
    FamilyGroup("convolutions of queries and keys, values of the token before", (*_RECURRENCE, *_ATTENTION), ("zaya",)),
    FamilyGroup(
        "attention to both sides",
        (),
        (
            "bert", "clip_text_model", "distilbert", "eurobert", "modernbert", "mpnet", "nomic_bert", "roberta", "t5",
        ),
    ),
)  # fmt: skip
"""Groups of families, those that are most alike beside one another."""
