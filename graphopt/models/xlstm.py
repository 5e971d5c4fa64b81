"""xLSTM while it is traced: its matrix memory and its normalizer become one recurrence, and their states a cache.

    C_t = f_t C_(t-1) + i_t k_t v_t^T
    n_t = f_t n_(t-1) + i_t k_t             ->   LinearRecurrence, values [v_t, 1, 0 ..], beta i_t, decay log f_t
    h_t = C_t^T q_t / max(|n_t q_t|, 1)          f_t = sigmoid(f'_t), i_t = exp(i'_t)

Beck et al. 2024 (xLSTM), equations 19 to 27. transformers divides C and n by the largest input gate so far, which it
keeps as a third state; here they are numbers of float32 as they are, which hold sums of gates as i' is capped: at 15
in published models. It also adds 1e-6 to the denominator in those units, which is left out: a norm of each head comes
next, and takes any factor off again. Padding, which transformers reads, is not read.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError
from graphopt.models.recurrent_calls import Calls, mask_new_tokens, recur

if TYPE_CHECKING:
    from collections.abc import Callable

_LINE = 16
"""Numbers that kernels take at once. Rows of values are whole lines: one number more takes longer than a line does."""

_LARGEST_CAP = 60.0
"""Of input gates: exp(60) is 1e26, and 1e12 times of it are a number of float32."""


def with_cache(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``xLSTMForCausalLM`` whose states are a cache with a layer for each of its own.

    Args:
        calls: of this run.
        original: that of transformers.

    Raises:
        InputError: by the forward: its input gates may be larger than states of float32 hold.
    """
    caches = importlib.import_module("transformers.cache_utils")

    def forward(self: Any, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **_: Any) -> Any:
        model, config = self.backbone, self.config
        if config.gate_soft_cap > _LARGEST_CAP:
            raise InputError(
                f"input gates of this xLSTM go up to exp({config.gate_soft_cap:g}), which float32 does not hold",
                remedy=f"graphopt takes a gate_soft_cap of up to {_LARGEST_CAP:g}",
            )
        if past_key_values is None:
            past_key_values = caches.DynamicCache()
            past_key_values.layers = [caches.LinearAttentionLayer() for _ in model.blocks]
        mask_new_tokens(calls, input_ids, attention_mask)
        hidden = model.embeddings(input_ids)
        for index, block in enumerate(model.blocks):
            hidden = hidden + _mix_tokens(calls, block.mlstm_layer, block.norm_mlstm(hidden), past_key_values, index)
            hidden = hidden + block.ffn(block.norm_ffn(hidden))
        logits = _cap(self.lm_head(model.out_norm(hidden)), config.output_logit_soft_cap)
        outputs = importlib.import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    functools.update_wrapper(forward, original)
    forward.__signature__ = inspect.signature(forward, follow_wrapped=False)  # type: ignore[attr-defined]
    return forward


def _mix_tokens(calls: Calls, part: Any, x: Any, cache: Any, layer: int) -> Any:
    """Return what ``xLSTMLayer`` makes of [batch, tokens, width], with the state of a layer of a cache."""
    torch = importlib.import_module("torch")
    config, heads = part.config, part.config.num_heads
    if config.weight_mode == "single":
        query, key, value, gate = part.q(x), part.k(x), part.v(x), part.ogate_preact(x)
        entry, decay = part.igate_preact(x), part.fgate_preact(x)
    else:
        sizes = [part.qk_dim, part.qk_dim, part.v_dim, part.v_dim]
        query, key, value, gate = part.qkv_opreact(x).split(sizes, dim=2)
        entry, decay = part.ifgate_preact(x).split(heads, dim=2)
    entry, decay = (_cap(gates, config.gate_soft_cap)[..., None] for gates in (entry, decay))
    query, key, value = (tensor.unflatten(2, (heads, -1)) for tensor in (query, key, value))
    width = value.shape[3]
    unit = torch.eye(1, _LINE - width % _LINE).expand(*value.shape[:3], -1)
    log_decay = -torch.nn.functional.softplus(-decay)
    operands = [query, key, torch.cat((value, unit), dim=3), log_decay, entry.exp()]
    sums, state = recur(calls, operands, cache.get_recurrent_state(layer), delta=False, scale=query.shape[3] ** -0.5)
    cache.update_recurrent_state(state, layer)
    numerator, denominator = sums[..., :width], sums[..., width : width + 1]
    hidden = part.multihead_norm(numerator / denominator.abs().clamp(min=1.0))
    return part.out_proj(torch.sigmoid(gate) * hidden)


def _cap(x: Any, cap: float) -> Any:
    return cap * importlib.import_module("torch").tanh(x / cap)
