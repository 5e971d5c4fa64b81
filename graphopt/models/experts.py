"""Mixtures that are spelled out expert by expert become products of sorted rows while a model is traced.

    for e in experts that some token chose: y[tokens of e] += w * f_e(x[tokens of e])
      ->   rows of x sorted by expert, one grouped product for each matrix of f, rows put back and added up

How many tokens an expert has is not known when a model is traced, so a loop over those that were chosen, or lengths
that are read from a tensor, cannot be written. Most families of transformers have the sorted form beside the loop;
these do not. The steps in front of products and behind them are those of transformers' ``grouped_mm``, so what is
known of the graphs of other mixtures holds here too.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.models.recurrent_calls import Calls


def gated_by_matrices(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``DbrxExperts``: gates, what they multiply, and the way back are a matrix each."""
    del calls

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        sizes = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
        gates, ups, downs = (weight.view(sizes) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))

        def expert(rows: Any, ends: Any) -> Any:
            gate, up = (_product(rows, weight.transpose(1, 2), ends) for weight in (gates, ups))
            return _product(self.mlp.activation_fn(gate) * up, downs, ends)

        x = hidden_states.reshape(-1, self.hidden_size)
        return _mixture(x, top_k_index, top_k_weights, self.num_experts, expert).view(hidden_states.shape)

    return forward


def with_identities(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``LongcatFlashExperts``: experts behind the last give a token back as it is.

    In the sorted form these have the weight 0 with the last expert, and tokens are added with their own weights.
    """
    del calls

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        count = self.num_routed_experts
        if self.gate_up_proj is None:
            return hidden_states * top_k_weights.sum(-1, keepdim=True)
        is_identity = top_k_index >= count
        gate_ups = self.gate_up_proj[:count].transpose(1, 2)
        downs = self.down_proj.transpose(1, 2)

        def expert(rows: Any, ends: Any) -> Any:
            gate, up = _product(rows, gate_ups, ends).chunk(2, dim=-1)
            return _product(self.act_fn(gate) * up, downs, ends)

        choices = top_k_index.clamp(max=count - 1)
        sums = _mixture(hidden_states, choices, top_k_weights * ~is_identity, count, expert)
        return sums + hidden_states * (top_k_weights * is_identity).sum(-1, keepdim=True)

    return forward


def counts_of_experts(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``JetMoeTopKGating`` that leaves the numbers of rows of experts in a tensor [experts]."""
    del calls

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any) -> tuple[Any, ...]:
        torch = importlib.import_module("torch")
        logits = self.layer(hidden_states).float()
        values, choices = logits.topk(self.top_k, dim=1)
        gates = torch.softmax(values, dim=1).type_as(hidden_states)
        order, counts = _sort(choices, self.num_experts)
        return order, order // self.top_k, gates.reshape(-1)[order], counts, logits

    return forward


def product_of_counts(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of ``JetMoeParallelExperts`` for :func:`counts_of_experts`."""
    del calls

    @functools.wraps(original)
    def forward(self: Any, inputs: Any, expert_size: Any) -> Any:
        torch = importlib.import_module("torch")
        return _product(inputs, self.weight.transpose(1, 2), torch.cumsum(expert_size, 0, dtype=torch.int32))

    return forward


def _mixture(x: Any, choices: Any, weights: Any, count: int, expert: Callable[[Any, Any], Any]) -> Any:
    """Return the weighted sum of the experts of each token, [tokens, N].

    Args:
        x: tokens, [tokens, K].
        choices: below ``count``, [tokens, top].
        weights: of the choices, [tokens, top].
        count: of experts.
        expert: given rows [tokens top, K], sorted by expert, and the ends of the experts' rows [count], gives rows.
    """
    torch = importlib.import_module("torch")
    top = choices.shape[-1]
    order, counts = _sort(choices, count)
    rows = expert(x[order // top], torch.cumsum(counts, 0, dtype=torch.int32))
    products = rows * weights.reshape(-1)[order][:, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return products[inverse].view(x.shape[0], top, -1).sum(1)


def _sort(choices: Any, count: int) -> tuple[Any, Any]:
    """Return the order of choices [tokens, top] by expert, [tokens top], and how many chose each expert, [count]."""
    torch = importlib.import_module("torch")
    experts, order = torch.sort(choices.reshape(-1))
    return order, torch.histc(experts.float(), bins=count, min=0, max=count - 1)


def _product(rows: Any, weight: Any, ends: Any) -> Any:
    """Return rows [n, K], sorted by expert, times the matrices of their experts, of [experts, K, N]."""
    torch = importlib.import_module("torch")
    importlib.import_module("transformers.integrations.moe")  # which declares the operator
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
