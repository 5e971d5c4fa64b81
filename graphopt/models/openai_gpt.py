"""The first GPT while it is traced: transformers' model reads a whole text each time; here keys and values are cached.

    h = LayerNorm(x + attention(x)),  x' = LayerNorm(h + mlp(h))        Radford et al. 2018, sections 3.1 and 4.1

The weights are those of a decoder like GPT-2 with norms behind each half. A score of a later token, which is -10000 in
transformers, is left out: its exponential is 0 in float32.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.models.recurrent_calls import Calls


def with_cache(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``OpenAIGPTLMHeadModel`` that takes a cache for all its layers, and returns it.

    Args:
        calls: of this run; the model has no recurrences.
        original: that of transformers.
    """
    del calls

    def forward(
        self: Any,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        model, torch = self.transformer, importlib.import_module("torch")
        if past_key_values is None:
            past_key_values = importlib.import_module("transformers").DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length()
            position_ids = torch.arange(past, past + input_ids.shape[1])[None]
        hidden = model.tokens_embed(input_ids) + model.positions_embed(position_ids)
        mask = _mask(self.config, hidden, attention_mask, past_key_values, position_ids)
        for index, block in enumerate(model.h):
            attention = _attend(block.attn, hidden, mask, functools.partial(past_key_values.update, layer_idx=index))
            hidden = block.ln_1(hidden + attention)
            hidden = block.ln_2(hidden + block.mlp(hidden))
        outputs = importlib.import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden), past_key_values=past_key_values)

    functools.update_wrapper(forward, original)
    forward.__signature__ = inspect.signature(forward, follow_wrapped=False)  # type: ignore[attr-defined]
    return forward


def _mask(config: Any, hidden: Any, attention_mask: Any, cache: Any, position_ids: Any) -> Any:
    """Return which tokens each new one sees, as models have it whose attention is one operator."""
    config = copy.copy(config)
    config._attn_implementation = "sdpa"
    create_causal_mask = importlib.import_module("transformers.masking_utils").create_causal_mask
    return create_causal_mask(config, hidden, attention_mask, cache, position_ids)


def _attend(part: Any, x: Any, mask: Any, update: Callable[..., tuple[Any, Any]]) -> Any:
    """Return what ``Attention`` makes of [batch, tokens, width], with a layer of a cache, which ``update`` fills."""
    functional = importlib.import_module("torch").nn.functional
    query, key, value = (
        tensor.unflatten(2, (part.n_head, -1)).transpose(1, 2)
        for tensor in part.c_attn(x).split(part.split_size, dim=2)
    )
    key, value = update(key, value)
    # Without a mask all tokens are new and none is padding, or one is new and sees all.
    is_causal = mask is None and query.shape[2] > 1
    y = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
    return part.c_proj(y.transpose(1, 2).flatten(2))
