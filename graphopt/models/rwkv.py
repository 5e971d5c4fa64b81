"""RWKV-4 while it is traced: shifts by a token become convolutions, weighted means become recurrences.

    shifted_t = x_(t-1)                                     ->  CausalConv with the taps 1, 0
    S_t = exp(-w) S_(t-1) + exp(k_t) [v_t, 1]               ->  LinearRecurrence (K = 1, V = 2, a head per channel)
    [a_t, b_t] = S_(t-1) + exp(u + k_t) [v_t, 1],  wkv = a_t / b_t

Peng et al. 2023, equation 16. S_(t-1) is the output of the recurrence shifted by a token. transformers scales the sums
by the largest k so far; here they are numbers of float32 as they are, which hold exp(60), and k and u + k are cut to
[-60, 60]. Halving of every sixth layer, which float16 needs, is left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from graphopt.models.recurrent_calls import Calls, convolve, keep_tail, mask_new_tokens, recur

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGEST = 60.0
_STATES = 3
"""Tails of a layer: of the inputs of both halves, and of the sums."""


def with_cache(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``RwkvForCausalLM`` whose states are a cache with a layer for each of its own.

    Args:
        calls: of this run.
        original: that of transformers.
    """
    caches = importlib.import_module("transformers.cache_utils")

    def forward(self: Any, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **_: Any) -> Any:
        model = self.rwkv
        if past_key_values is None:
            past_key_values = caches.DynamicCache()
            past_key_values.layers = [caches.LinearAttentionLayer(number_of_states=_STATES) for _ in model.blocks]
        mask_new_tokens(calls, input_ids, attention_mask)
        hidden = model.embeddings(input_ids)
        for block, layer in zip(model.blocks, past_key_values.layers, strict=True):
            hidden = block.pre_ln(hidden) if block.layer_id == 0 else hidden
            hidden = hidden + _mix_tokens(calls, block.attention, block.ln1(hidden), layer)
            hidden = hidden + _mix_channels(calls, block.feed_forward, block.ln2(hidden), layer)
        outputs = importlib.import_module("transformers.modeling_outputs")
        logits = self.head(model.ln_out(hidden))
        return outputs.CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    functools.update_wrapper(forward, original)
    forward.__signature__ = inspect.signature(forward, follow_wrapped=False)  # type: ignore[attr-defined]
    return forward


def _mix_tokens(calls: Calls, part: Any, x: Any, layer: Any) -> Any:
    """Return what ``RwkvSelfAttention`` makes of [batch, tokens, width]."""
    torch = importlib.import_module("torch")
    previous = _shift(calls, x, layer, 0)
    names = ("key", "value", "receptance")
    key, value, receptance = (
        getattr(part, name)(_mix(x, previous, getattr(part, f"time_mix_{name}"))) for name in names
    )
    terms = torch.stack((value, torch.ones_like(value)), dim=3)
    decay = (-torch.exp(part.time_decay)).reshape(1, 1, -1, 1).expand(*key.shape, 1)
    unit_key = key.new_ones((*key.shape[:2], 1, 1))
    operands = [unit_key, unit_key, terms * _exp(key)[..., None], decay, key.new_zeros((*key.shape, 0))]
    state = layer.recurrent_states[0] if layer.is_recurrent_states_initialized[0] else None
    sums, layer.recurrent_states[0] = recur(calls, operands, state, delta=False, scale=1.0)
    layer.is_recurrent_states_initialized[0] = True
    before = _shift(calls, sums.flatten(2), layer, 2).unflatten(2, (key.shape[2], 2))
    numerator, denominator = (before + terms * _exp(key + part.time_first)[..., None]).unbind(3)
    return part.output(torch.sigmoid(receptance) * (numerator / denominator))


def _mix_channels(calls: Calls, part: Any, x: Any, layer: Any) -> Any:
    """Return what ``RwkvFeedForward`` makes of [batch, tokens, width]."""
    torch = importlib.import_module("torch")
    previous = _shift(calls, x, layer, 1)
    key = torch.square(torch.relu(part.key(_mix(x, previous, part.time_mix_key))))
    return torch.sigmoid(part.receptance(_mix(x, previous, part.time_mix_receptance))) * part.value(key)


def _mix(x: Any, previous: Any, share: Any) -> Any:
    return x * share + previous * (1 - share)


def _exp(x: Any) -> Any:
    return x.clamp(-_LARGEST, _LARGEST).exp()


def _shift(calls: Calls, x: Any, layer: Any, number: int) -> Any:
    """Return [batch, tokens, channels] of the tokens before, behind a state of the layer."""
    torch = importlib.import_module("torch")
    channels = x.shape[2]
    state = layer.conv_states[number] if layer.has_previous_state[number] else x.new_zeros((x.shape[0], channels, 1))
    taps = torch.tensor([[1.0, 0.0]]).repeat(channels, 1)
    previous, state = convolve(calls, x.transpose(1, 2), state, taps, None, None)
    keep_tail(layer, number, state)
    return previous.transpose(1, 2)
