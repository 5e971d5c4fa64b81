"""What llama.cpp's converter did to the weights of an architecture, undone; names are those of the GGUF file.

Each function takes a tensor as the file holds it and gives it as transformers has it. The rules are those of
``transformers.modeling_gguf_pytorch_utils.TENSOR_PROCESSORS``, written as expressions: nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphopt.graph.weights import Concat, Expression, Inline, Reshape, Sum, Transpose

Layout = Callable[[str, Expression, Any], Expression]


def _as_it_is(name: str, of: Expression, config: Any) -> Expression:
    return of


def _llama(name: str, of: Expression, config: Any) -> Expression:
    """Rotary pairs (2i, 2i + 1), as llama.cpp rotates them, go back to (i, i + d/2): [h, d/2, 2] -> [h, 2, d/2]."""
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    found = next((count for part, count in heads.items() if part in name), None)
    if found is None:
        return of
    rows, *columns = of.shape
    pairs = Reshape.to_dims(of, (found, rows // found // 2, 2, *columns))
    turned = Transpose(pairs, (0, 2, 1, *range(3, len(pairs.shape))))
    return Reshape.to_dims(turned, of.shape)


def _one_less(name: str, of: Expression, config: Any) -> Expression:
    """The gain of a norm is stored as 1 + w."""
    if "norm.weight" not in name:
        return of
    return Sum(of, Inline.from_array(np.full(of.shape, -1, np.float32)))


def _gpt2(name: str, of: Expression, config: Any) -> Expression:
    """GPT-2 keeps matrices as [in, out]."""
    turned = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")
    return Transpose(of, (1, 0)) if name.endswith(turned) else of


def _bloom(name: str, of: Expression, config: Any) -> Expression:
    """Query, key and value go back side by side, head by head: [3, h, d] -> [h, 3, d]."""
    if "attn_qkv" not in name:
        return of
    rows, *columns = of.shape
    heads = config.n_head
    split = Reshape.to_dims(of, (3, heads, rows // 3 // heads, *columns))
    return Reshape.to_dims(Transpose(split, (1, 0, *range(2, len(split.shape)))), of.shape)


def _shared_gate(name: str, of: Expression, config: Any) -> Expression:
    """The gate of the shared expert is a matrix of one row."""
    return Reshape.to_dims(of, (1, *of.shape)) if "ffn_gate_inp_shexp" in name and len(of.shape) == 1 else of


LAYOUTS: dict[str, Layout] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "nemotron": _one_less,
    "gemma2": _one_less,
    "gemma3": _one_less,
    "qwen2moe": _shared_gate,
    "qwen3moe": _shared_gate,
    "minimax-m2": _as_it_is,
}
"""By architecture of the file; any other that transformers reads without a processor stays as it is."""


def joined_experts(parts: dict[str, Expression]) -> Expression:
    """Return gate and up matrices of all experts, [experts, rows, columns] each, as one with gates first.

    Args:
        parts: the tensors of the file by name; one of them has ``gate`` in its name, the other ``up``.

    Raises:
        ValueError: these are not a gate and an up matrix.
    """
    gates = [each for name, each in parts.items() if "ffn_gate_exps" in name]
    ups = [each for name, each in parts.items() if "ffn_up_exps" in name]
    if len(gates) != 1 or len(ups) != 1 or len(parts) != 2:
        raise ValueError(f"these cannot be one weight: {', '.join(parts)}")
    return Concat((gates[0], ups[0]), 1)


def layout_of(architecture: str) -> Layout | None:
    """Return how the weights of this architecture are laid out, or ``None`` where only transformers knows."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    return LAYOUTS.get(architecture, None if architecture in TENSOR_PROCESSORS else _as_it_is)


__all__ = ["LAYOUTS", "Layout", "joined_experts", "layout_of"]
