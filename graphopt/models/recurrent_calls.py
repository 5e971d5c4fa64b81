"""Nodes of our operators, placed while a model of transformers is traced, and what its calls tell one another."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from graphopt.runtime_ops import DOMAIN, OPERATORS


@dataclass
class Calls:
    """What the functions of a model tell one another while it runs.

    Attributes:
        mask: 1 for a token, 0 for padding, [batch, tokens]; ``None`` where there is none.
        inputs: by the id of a tensor that a convolution reads next: the tensor, the layer of the cache, its index, and
            the number of the state in it.
        tails: index and number of states that a model convolves itself.
        recurrent_state: what the layer that is running has, as it asked for it.
    """

    mask: Any = None
    inputs: dict[int, tuple[Any, Any, int, int]] = field(default_factory=dict)
    tails: set[tuple[int, int]] = field(default_factory=set)
    recurrent_state: Any = None

    def know_tails(self) -> bool:
        """Let models have the tails that no known function convolved; return whether there were any."""
        tails = {(index, number) for _, _, index, number in self.inputs.values()}
        self.tails |= tails
        self.inputs.clear()
        return bool(tails)


def mask_new_tokens(calls: Calls, tokens: Any, attention_mask: Any) -> None:
    """Remember which of the new ``tokens`` [batch, tokens, ...] are padding.

    Args:
        calls: of this run.
        tokens: the new ones.
        attention_mask: of the new tokens, or of all, old and new; or ``None``.
    """
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    calls.mask, count = attention_mask, tokens.shape[1]
    if attention_mask is not None and not symbolic_shapes.statically_known_true(attention_mask.shape[1] == count):
        calls.mask = attention_mask[:, -count:]


def _operator(name: str, inputs: list[Any], templates: tuple[Any, Any], **attributes: Any) -> tuple[Any, Any]:
    """Return the outputs of one of our operators, which have the shapes of two tensors: a node, once it is traced."""
    torch = importlib.import_module("torch")
    outputs: tuple[Any, Any] = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        inputs,
        attributes,
        dtypes=[template.dtype for template in templates],
        shapes=[list(template.shape) for template in templates],
        version=OPERATORS[name].version,
    )
    return outputs


def convolve(calls: Calls, tokens: Any, state: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    """Return the convolution of ``tokens`` [batch, channels, tokens], and the new state."""
    x = tokens.transpose(1, 2)
    bias = weight.new_zeros(0) if bias is None else bias
    name = {None: "none", "silu": "silu", "swish": "silu"}.get(activation, "none")
    operands = [x, weight, bias, *rows_of_state(calls, x, state)]
    y, new_state = _operator("CausalConv", operands, (x, state), activation=name)
    y = y.transpose(1, 2)
    if activation is not None and name == "none":
        y = importlib.import_module("transformers.activations").ACT2FN[activation](y)
    return y, new_state


def recur(calls: Calls, inputs: list[Any], state: Any, *, delta: bool, scale: float) -> tuple[Any, Any]:
    """Return the outputs [batch, tokens, heads, V] and the new state.

    Args:
        calls: of this run.
        inputs: query, key, value, decay and beta, as the operator has them.
        state: [batch, heads, K, V], or ``None`` for zeros.
        delta: whether what the state holds already is not written again.
        scale: of the outputs.
    """
    _, key, value, _, _ = inputs
    if state is None:
        state = value.new_zeros((value.shape[0], value.shape[2], key.shape[3], value.shape[3]))
    operands = [*(tensor.float() for tensor in inputs), *rows_of_state(calls, value, state)]
    return _operator("LinearRecurrence", operands, (value, state), delta=int(delta), scale=float(scale))


def keep_tail(layer: Any, number: int, tail: Any) -> None:
    """Store the tail of a convolution in a layer of a cache, [batch, channels, tokens]."""
    layer.conv_states[number], layer.conv_kernel_size[number] = tail, tail.shape[-1]
    layer.is_conv_states_initialized[number] = layer.has_previous_state[number] = True
    layer.dtype, layer.device = tail.dtype, tail.device


def step_size(dt: Any, bias: Any, softplus: bool) -> Any:
    """Return softplus(``dt`` + ``bias``), of [batch, tokens, heads] and [heads]: how far a state moves at a token."""
    dt = dt if bias is None else dt + bias
    return importlib.import_module("torch").nn.functional.softplus(dt) if softplus else dt


def rows_of_state(calls: Calls, tokens: Any, state: Any) -> tuple[Any, Any]:
    """Return mask and state, which have as many rows as ``tokens`` [batch, tokens, ...]."""
    torch = importlib.import_module("torch")
    torch._check(state.shape[0] == tokens.shape[0])
    if calls.mask is None:
        return tokens.new_zeros((tokens.shape[0], 0), dtype=torch.int64), state
    torch._check(calls.mask.shape[0] == tokens.shape[0])
    torch._check(calls.mask.shape[1] == tokens.shape[1])
    return calls.mask.to(torch.int64), state
