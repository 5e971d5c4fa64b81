"""RecurrentGemma while it is traced: its blocks keep states in attributes; here they lie in the cache.

    x -> Conv1d -> RG-LRU       ->     x -> CausalConv -> gates -> LinearRecurrence (K = V = 1, a head per channel)

    a_t = exp(-8 softplus(w) r_t)
    h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x_t            De et al. 2024 (Griffin), equations 3 and 4

The first token of a text has no square root, as in transformers. There the state is also set to zeros at each position
0, for texts that are packed in one row: here a text begins with zeros anyway, and packed texts are not told apart, as
the convolution of transformers does not tell them apart either. Padding, which that convolution reads, is not read.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from graphopt.models.recurrent_calls import Calls, convolve, keep_tail, mask_new_tokens, recur

if TYPE_CHECKING:
    from collections.abc import Callable

_DECAY = -8.0


def with_cache(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``RecurrentGemmaForCausalLM`` that takes a cache for all its layers, and returns it.

    Args:
        calls: of this run.
        original: that of transformers.
    """

    @functools.wraps(original)
    def forward(
        self: Any, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        if past_key_values is None:
            past_key_values = importlib.import_module("transformers").DynamicCache(config=self.config)
        for index, layer in enumerate(self.model.layers):
            layer.temporal_block.layer_idx = index
        mask_new_tokens(calls, input_ids, attention_mask)
        output = original(self, input_ids, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)
        outputs = importlib.import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutputWithPast(logits=output.logits, past_key_values=past_key_values)

    return forward


def with_cached_states(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``RecurrentGemmaRecurrentBlock`` whose states are in its layer of the cache."""

    @functools.wraps(original)
    def forward(self: Any, input_states: Any, position_ids: Any, past_key_values: Any, **_: Any) -> tuple[Any, None]:
        layer = past_key_values.layers[self.layer_idx]
        gate = self.act_fn(self.linear_y(input_states))
        x = self.linear_x(input_states).transpose(1, 2)
        tail = (
            layer.conv_states[0] if layer.has_previous_state[0] else x.new_zeros((*x.shape[:2], self.conv1d_width - 1))
        )
        state = layer.recurrent_states[0] if layer.has_previous_state[0] else None
        x, tail = convolve(calls, x, tail, self.conv_1d.weight[:, 0], self.conv_1d.bias, None)
        y, state = _rg_lru(calls, self.rg_lru, x.transpose(1, 2), position_ids, state)
        keep_tail(layer, 0, tail)
        layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = state, True
        return self.linear_out(y * gate), None

    return forward


def _rg_lru(calls: Calls, unit: Any, x: Any, position_ids: Any, state: Any) -> tuple[Any, Any]:
    """Return outputs [batch, tokens, channels] of a ``RecurrentGemmaRglru``, and its state [batch, channels, 1, 1]."""
    torch = importlib.import_module("torch")
    blocks = x.unflatten(2, (unit.num_attention_heads, unit.block_width)).unsqueeze(3)

    def gate(weight: Any, bias: Any) -> Any:
        return torch.sigmoid(((blocks @ weight).squeeze(3) + bias).flatten(2))

    log_decay = (
        _DECAY
        * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        * torch.nn.functional.softplus(unit.recurrent_param)
    )
    is_first = (position_ids == 0)[..., None]
    factor = torch.where(is_first, torch.ones_like(log_decay), torch.sqrt(1 - torch.exp(2 * log_decay)))
    value = x * gate(unit.input_gate_weight, unit.input_gate_bias) * factor
    unit_key = x.new_ones((*x.shape[:2], 1, 1))
    operands = [unit_key, unit_key, value[..., None], log_decay[..., None], x.new_zeros((*x.shape, 0))]
    output, state = recur(calls, operands, state, delta=False, scale=1.0)
    return output[..., 0], state
