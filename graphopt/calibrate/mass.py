"""How much of its attention a head keeps under a policy: the share of the softmax on the tokens that it still reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graphopt.calibrate.tap import Heads, Singles
from graphopt.runtime_ops.kv_attention.append import Integers, append
from graphopt.runtime_ops.kv_attention.attributes import DENSE, KVAttributes
from graphopt.runtime_ops.kv_attention.reference import scores, softmax_weights
from graphopt.runtime_ops.kv_attention.stored import Reading, Stored, read_mask

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kept:
    """What a policy keeps of one KV head.

    Attributes:
        mass: share of attention on the tokens that are read, float64 [n, G].
        read: share of the visible tokens that are read, float64 [n].
    """

    mass: Doubles
    read: Doubles


def kept(heads: Heads, asked: Integers, policies: Mapping[str, KVAttributes]) -> list[dict[str, Kept]]:
    """Return what each policy keeps, for each KV head, by the operator's own reference.

    Summaries of pages are those of the whole sequence. In decoding the newest page is not full yet; that matters only
    to a policy that always reads fewer tokens than a page has.

    Args:
        heads: what the layer multiplied.
        asked: positions whose queries are measured, [n].
        policies: attributes of the operator, in floats and with the layer's own number of heads, scale and window.
    """
    of_pages = {name: summaries(attrs, heads.keys) for name, attrs in policies.items()}
    positions, found = np.arange(heads.keys.shape[1]), []
    for head in range(len(heads.keys)):
        weights, visible = attention(heads, head, asked)
        queries, of_head = heads.queries[head, asked].astype(np.float64), {}
        for name, attrs in policies.items():
            is_read = read_mask(attrs, head, of_pages[name], queries, asked, positions)
            mass = (weights * is_read[:, None]).sum(axis=-1) / weights.sum(axis=-1)
            of_head[name] = Kept(np.minimum(mass, 1), is_read.sum(axis=-1) / visible.sum(axis=-1))
        found.append(of_head)
    return found


def attention(heads: Heads, head: int, asked: Integers) -> tuple[Doubles, npt.NDArray[np.bool_]]:
    """Return the attention of a KV head's queries at ``asked`` with nothing left out, and what they see.

    Returns:
        float64 [n, G, m] and bool [n, m], m the tokens of the sequence. Rows sum to 1, less what a sink logit takes.
    """
    layer, keys = heads.tapped.layer, heads.keys[head].astype(np.float64)
    attrs = replace(layer.attributes, policies=(DENSE,), sinks=0)
    positions, q = np.arange(len(keys)), heads.queries[head, asked].astype(np.float64)
    visible = read_mask(attrs, head, np.zeros((attrs.kv_heads, 0, 0)), q, asked, positions)
    nothing, group = np.zeros((1, 1)), q.shape[1]
    stored, logits = Stored(keys, nothing, nothing), heads.tapped.sink_logits
    of_group = None if logits is None else logits[head * group : (head + 1) * group].astype(np.float64)
    reading = Reading(
        row=0,
        columns=slice(0, len(asked)),
        head=head,
        q=q,
        first_q=q,
        keys=stored,
        values=stored,
        positions=positions,
        is_read=visible,
        sink_logits=of_group,
    )
    return softmax_weights(reading, scores(attrs, reading)), visible


def summaries(attrs: KVAttributes, keys: Singles) -> Singles:
    """Return what the operator keeps of each page of keys [Hk, m, D]: float32 [Hk, pages, Z]."""
    kv_heads, tokens, size = keys.shape
    if not attrs.retrieves:
        return np.zeros((kv_heads, 0, 0), np.float32)
    state = attrs.state(1, -(-tokens // attrs.page), size).zeros()
    rows = np.ascontiguousarray(keys.transpose(1, 0, 2))[None]
    after = append(attrs, state, rows, rows, np.zeros(1, np.int64), np.full(1, tokens))
    made: Singles = after["summaries"][0]
    return made
