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
            "cohere", "falcon", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt2", "gpt_neox", "granite",
            "llama", "mistral", "olmo2", "opt", "phi3", "qwen2", "qwen3", "stablelm",
        ),
    ),
    FamilyGroup("attention and experts", _ATTENTION, ("dbrx", "gpt_oss", "llama4_text", "mixtral", "qwen2_moe")),
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
        "gated delta rule and attention", (*_RECURRENCE, *_ATTENTION), ("olmo_hybrid", "qwen3_5_text", "qwen3_next")
    ),
    FamilyGroup("lightning attention and attention", ("recurrent_state", *_ATTENTION), ("minimax",)),
    FamilyGroup("weighted means", _RECURRENCE, ("rwkv",)),
    FamilyGroup("RG-LRU and attention", (*_RECURRENCE, *_ATTENTION), ("recurrent_gemma",)),
    FamilyGroup("SSD", _RECURRENCE, ("mamba2",)),
    FamilyGroup("SSD and attention", (*_RECURRENCE, *_ATTENTION), ("falcon_h1", "granitemoehybrid")),
    FamilyGroup("selective scan", _RECURRENCE, ("mamba",)),
    FamilyGroup("short convolutions and attention", ("conv_state", *_ATTENTION), ("lfm2",)),
    FamilyGroup(
        "attention to both sides",
        (),
        (
            "bert", "clip_text_model", "distilbert", "eurobert", "modernbert", "mpnet", "nomic_bert", "roberta", "t5",
        ),
    ),
)  # fmt: skip
"""Groups of families, those that are most alike beside one another."""
