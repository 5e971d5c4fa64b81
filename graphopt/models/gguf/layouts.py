"""What llama.cpp's converter did to the weights of an architecture, undone; names are those of the GGUF file.

Each function takes a tensor as the file holds it and gives it as transformers has it. The rules are those of
``transformers.modeling_gguf_pytorch_utils.TENSOR_PROCESSORS``, written as expressions: nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from graphopt.graph.weights import Concat, Expression, Inline, Reshape, Sum, Transpose


class FileTensor(NamedTuple):
    """A tensor as the file holds it.

    Attributes:
        name: its name in the file.
        expression: its numbers.
        config: the configuration of the model in transformers.
    """

    name: str
    expression: Expression
    config: Any


Layout = Callable[[FileTensor], Expression]


def _as_it_is(tensor: FileTensor) -> Expression:
    return tensor.expression


def _llama(tensor: FileTensor) -> Expression:
    """Rotary pairs (2i, 2i + 1), as llama.cpp rotates them, go back to (i, i + d/2): [h, d/2, 2] -> [h, 2, d/2]."""
    matrix, config = tensor.expression, tensor.config
    counts = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    heads = next((count for part, count in counts.items() if part in tensor.name), None)
    if heads is None:
        return matrix
    rows, *columns = matrix.shape
    pairs = Reshape.to_dims(matrix, (heads, rows // heads // 2, 2, *columns))
    halves = Transpose(pairs, (0, 2, 1, *range(3, len(pairs.shape))))
    return Reshape.to_dims(halves, matrix.shape)


def _subtract_one(tensor: FileTensor) -> Expression:
    """The gain of a norm is stored as 1 + w."""
    gain = tensor.expression
    return Sum(gain, Inline.from_array(np.full(gain.shape, -1, np.float32))) if "norm.weight" in tensor.name else gain


def _gpt2(tensor: FileTensor) -> Expression:
    """GPT-2 keeps matrices as [in, out]."""
    names = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")
    return Transpose(tensor.expression, (1, 0)) if tensor.name.endswith(names) else tensor.expression


def _bloom(tensor: FileTensor) -> Expression:
    """Query, key and value go back side by side, head by head: [3, h, d] -> [h, 3, d]."""
    matrix, heads = tensor.expression, tensor.config.n_head
    if "attn_qkv" not in tensor.name:
        return matrix
    rows, *columns = matrix.shape
    split = Reshape.to_dims(matrix, (3, heads, rows // 3 // heads, *columns))
    return Reshape.to_dims(Transpose(split, (1, 0, *range(2, len(split.shape)))), matrix.shape)


def _shared_gate(tensor: FileTensor) -> Expression:
    """The gate of the shared expert is a matrix of one row."""
    gate = tensor.expression
    is_row = "ffn_gate_inp_shexp" in tensor.name and len(gate.shape) == 1
    return Reshape.to_dims(gate, (1, *gate.shape)) if is_row else gate


LAYOUTS: dict[str, Layout] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "nemotron": _subtract_one,
    "gemma2": _subtract_one,
    "gemma3": _subtract_one,
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
    gates = [expression for name, expression in parts.items() if "ffn_gate_exps" in name]
    ups = [expression for name, expression in parts.items() if "ffn_up_exps" in name]
    if len(gates) != 1 or len(ups) != 1 or len(parts) != 2:
        raise ValueError(f"these cannot be one weight: {', '.join(parts)}")
    return Concat((gates[0], ups[0]), 1)


def layout_of(architecture: str) -> Layout | None:
    """Return how the weights of this architecture are laid out, or ``None`` where only transformers knows."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    return LAYOUTS.get(architecture, None if architecture in TENSOR_PROCESSORS else _as_it_is)
