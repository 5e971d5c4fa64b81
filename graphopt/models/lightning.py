"""MiniMax while it is traced: lightning attention becomes one node, and its state lies in the cache.

    S_t = exp(-slope_h) S_(t-1) + k_t v_t^T,   o_t = S_t^T q_t        ->   LinearRecurrence, a constant decay per head

Qin et al. 2024 (Lightning Attention-2), equation 5. transformers computes it in blocks for a text, and token by token
behind a state, both with as many steps as there are tokens when it is traced.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from graphopt.models.recurrent_calls import Calls, mask_new_tokens, recur

if TYPE_CHECKING:
    from collections.abc import Callable


def with_cache(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``MiniMaxForCausalLM`` that begins with a cache which has a layer for each of its own.

    Args:
        calls: of this run.
        original: that of transformers, whose own class of caches lists states beside the layers.
    """
    del calls

    @functools.wraps(original)
    def forward(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is None:
            past_key_values = _cache_class()(config=self.config)
        return original(self, *args, past_key_values=past_key_values, **kwargs)

    return forward


def plain_cache(calls: Calls, original: Any) -> Any:
    """Return what stands for ``MiniMaxCache`` where the model asks for the class of a cache."""
    del calls, original
    return _cache_class()


def _cache_class() -> Any:
    return importlib.import_module("transformers").DynamicCache


def with_cached_state(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``MiniMaxLightningAttention``, of one recurrence whose state is in the cache."""

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Any,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Any, None]:
        del position_embeddings
        torch = importlib.import_module("torch")
        mask_new_tokens(calls, hidden_states, attention_mask)
        heads = (self.num_attention_heads, 3 * self.head_dim)
        qkv = self.act_fn(self.qkv_proj(hidden_states)).unflatten(2, heads)
        query, key, value = qkv.split(self.head_dim, dim=3)
        decay = (-self.slope_rate.reshape(1, 1, -1, 1)).expand(*qkv.shape[:3], 1)
        state = past_key_values.get_recurrent_state(self.layer_idx)
        operands = [query, key, value, decay, value.new_zeros((*qkv.shape[:3], 0))]
        output, state = recur(calls, operands, state, delta=False, scale=1.0)
        past_key_values.update_recurrent_state(state, self.layer_idx)
        output = self.norm(output.flatten(2))
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output), None

    return forward
