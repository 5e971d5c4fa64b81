"""Methods that transformers' exporter cannot write: what stands in their place computes the same."""

from __future__ import annotations

import functools
import importlib
import inspect
import statistics
import unittest.mock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.models.recurrent_calls import Calls


def minimum_as_node(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` of an indexer that chooses min(its top k, tokens) also where there are more than k.

    ``min`` of Python asks at once which is less, and a graph traced with few tokens would hold for up to k of them.
    """
    del calls

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        minimum = importlib.import_module("torch").sym_min
        with unittest.mock.patch.dict(inspect.unwrap(original).__globals__, min=minimum):
            return original(*args, **kwargs)

    return forward


def gaussian_top(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Gemma3nTextMLP._gaussian_topk``: relu(x - mean - q std), where q is a number and no node.

    q is the quantile of a normal distribution at the layer's ``activation_sparsity``; ONNX has no inverse of erf.
    """
    del calls

    @functools.wraps(original)
    def gaussian_topk(self: Any, inputs: Any) -> Any:
        torch = importlib.import_module("torch")
        quantile = statistics.NormalDist().inv_cdf(self.activation_sparsity)
        mean = inputs.mean(dim=-1, keepdim=True)
        deviation = (inputs - mean).square().mean(dim=-1, keepdim=True).sqrt()
        return torch.nn.functional.relu(inputs - (mean + deviation * quantile))

    return gaussian_topk


def angles(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Llama4TextRotaryEmbedding.forward`` with cosines and sines [batch, tokens, 2, size / 2], not complex."""
    del calls

    @functools.wraps(original)
    def forward(self: Any, x: Any, position_ids: Any) -> Any:
        torch = importlib.import_module("torch")
        angle = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        return torch.stack((angle.cos(), angle.sin()), dim=2) * self.attention_scaling

    return forward


def tempered_by_positions(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` of a layer of Llama 4 whose temperature of attention grows with the positions of tokens.

    Transformers counts the columns of the cache, padding too: a query at position p of a layer without rotary embedding
    is multiplied by log(1 + floor((p + 1) / floor_scale)) attn_scale + 1 (Nakanishi, arXiv:2501.19399). Without padding
    both are the same.
    """
    del calls

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        attention = self.self_attn
        if attention.use_rope or not attention.attn_temperature_tuning:
            return original(self, hidden_states, *args, **kwargs)
        ratio = (kwargs["position_ids"].float() + 1.0) / attention.floor_scale
        temperature = (ratio.floor().log1p() * attention.attn_scale + 1.0)[..., None].to(hidden_states.dtype)
        hook = attention.q_proj.register_forward_hook(lambda _module, _inputs, queries: queries * temperature)
        attention.attn_temperature_tuning = False
        try:
            return original(self, hidden_states, *args, **kwargs)
        finally:
            hook.remove()
            attention.attn_temperature_tuning = True

    return forward


def rotate_pairs(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``apply_rotary_emb`` of Llama 4 for :func:`angles`: complex products are ``RotaryEmbedding``."""
    del calls

    @functools.wraps(original)
    def apply_rotary_emb(xq: Any, xk: Any, freqs_cis: Any) -> tuple[Any, Any]:
        rotary = importlib.import_module("torch").onnx.ops.rotary_embedding
        cos, sin = freqs_cis.unbind(2)

        def rotate(x: Any) -> Any:  # [batch, tokens, heads, size]
            return rotary(x.transpose(1, 2), cos, sin, interleaved=True).transpose(1, 2)

        return rotate(xq), rotate(xk)

    return apply_rotary_emb


def grouped_queries(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``FalconAttention.forward`` that says where query heads share heads of keys and values.

    torch repeats one head of keys for all queries by itself; the exporter wants to be told (``enable_gqa``).
    """
    del calls

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        functional = importlib.import_module("torch").nn.functional
        attend = functional.scaled_dot_product_attention

        def attend_in_groups(query: Any, key: Any, value: Any, **options: Any) -> Any:
            return attend(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **options)

        with unittest.mock.patch.object(functional, "scaled_dot_product_attention", attend_in_groups):
            return original(*args, **kwargs)

    return forward
