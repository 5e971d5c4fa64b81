"""How much of its attention a head keeps under a policy: the share of the softmax on the tokens that it still reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.append import Integers, append
from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.readings import read_mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.compile.calibration.tap import Heads, Singles

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PolicyShare:
    """What a policy keeps of one KV head.

    Attributes:
        mass: share of attention on the tokens that are read, float64 [n, G].
        read_share: share of the visible tokens that are read, float64 [n].
    """

    mass: Doubles
    read_share: Doubles


def policy_shares(
    heads: Heads, query_positions: Integers, policies: Mapping[str, KVAttributes]
) -> list[dict[str, PolicyShare]]:
    """Return what each policy keeps, for each KV head, by the operator's own reference.

    Summaries of pages are those of the whole sequence. In decoding the newest page is not full yet; that matters only
    to a policy that always reads fewer tokens than a page has.

    Args:
        heads: what the layer multiplied.
        query_positions: positions whose queries are measured, [n].
        policies: attributes of the operator, in floats and with the layer's own number of heads, scale and window.
    """
    of_pages = {name: summaries(attrs, heads.keys) for name, attrs in policies.items()}
    positions, shares_by_head = np.arange(heads.keys.shape[1]), []
    for head in range(len(heads.keys)):
        weights, visible = attention(heads, head, query_positions)
        queries, of_head = heads.queries[head, query_positions].astype(np.float64), {}
        for name, attrs in policies.items():
            is_read = read_mask(attrs, head, of_pages[name], queries, query_positions, positions)
            mass = (weights * is_read[:, None]).sum(axis=-1) / weights.sum(axis=-1)
            of_head[name] = PolicyShare(np.minimum(mass, 1), is_read.sum(axis=-1) / visible.sum(axis=-1))
        shares_by_head.append(of_head)
    return shares_by_head


def attention(heads: Heads, head: int, query_positions: Integers) -> tuple[Doubles, npt.NDArray[np.bool_]]:
    """Return the attention of a KV head's queries at ``query_positions`` with nothing left out, and what they see.

    Returns:
        float64 [n, G, m] and bool [n, m], m the tokens of the sequence. Rows sum to 1, less what a sink logit takes.
    """
    attrs, keys = replace(heads.tapped_layer.layer.attributes, policies=(DENSE,)), heads.keys[head].astype(np.float64)
    positions, q = np.arange(len(keys)), heads.queries[head, query_positions].astype(np.float64)
    visible = read_mask(attrs, head, np.zeros((attrs.kv_heads, 0, 0), np.float32), q, query_positions, positions)
    scores = attrs.scale * (q @ keys.T)
    if attrs.softcap:
        scores = attrs.softcap * np.tanh(scores / attrs.softcap)
    if attrs.slopes:
        slopes = np.reshape(attrs.slopes, (attrs.kv_heads, -1))[head]
        scores = scores + slopes[:, None] * (positions - query_positions[:, None])[:, None]
    scores = np.where(visible[:, None], scores, -np.inf)
    largest, group = scores.max(axis=-1, keepdims=True), q.shape[1]
    sinks = heads.tapped_layer.sink_logits
    logit = np.full((group, 1), -np.inf) if sinks is None else sinks.reshape(-1, group, 1)[head].astype(np.float64)
    largest = np.maximum(largest, logit)
    weights = np.exp(scores - largest)
    return weights / (weights.sum(axis=-1, keepdims=True) + np.exp(logit - largest)), visible


def summaries(attrs: KVAttributes, keys: Singles) -> Singles:
    """Return what the operator keeps of each page of keys [Hk, m, D]: float32 [Hk, pages, Z]."""
    kv_heads, tokens, size = keys.shape
    if not attrs.retrieves:
        return np.zeros((kv_heads, 0, 0), np.float32)
    state = attrs.state(1, -(-tokens // attrs.page), size).zeros()
    rows = np.ascontiguousarray(keys.transpose(1, 0, 2))[None]
    after = append(attrs, state, rows, rows, np.zeros(1, np.int64), np.full(1, tokens))
    page_summaries: Singles = after["summaries"][0]
    return page_summaries
