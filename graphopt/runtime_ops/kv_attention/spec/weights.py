"""Scores and softmax weights of the tokens that queries read, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
    from graphopt.runtime_ops.kv_attention.spec.readings import Reading

Doubles = npt.NDArray[np.float64]


def scores(attrs: KVAttributes, reading: Reading) -> Doubles:
    """Return scale q . k, softcapped, and its bias by distance, for all tokens, float64 [n, G, m].

    A key that is not finite is as 0. A token that stands for N others has log N more.
    """
    K = reading.keys.numbers
    keys = np.where(np.isfinite(K).all(axis=-1, keepdims=True), K, 0).T
    products = of_queries(attrs, reading, lambda query: query @ keys)
    logits: Doubles = products * attrs.scale
    if attrs.softcap:
        logits = attrs.softcap * np.tanh(logits / attrs.softcap)
    return logits + biases(attrs, reading) + np.log(reading.counts)


def biases(attrs: KVAttributes, reading: Reading) -> Doubles:
    """Return slope (j - p), float64 [n, G, m], or a 0 that broadcasts to it."""
    if not attrs.slopes:
        return np.zeros((1, 1, 1))
    slopes = np.reshape(attrs.slopes, (attrs.kv_heads, -1))[reading.head]
    distances = reading.positions - reading.query_positions[:, None]
    numbers: Doubles = slopes[:, None] * distances[:, None].astype(np.float64)
    return numbers


def of_queries(attrs: KVAttributes, reading: Reading, function: Callable[[Doubles], Doubles]) -> Doubles:
    """Return what is ``function`` [n, G, m] of the queries: for positions below ``sinks``, of those that ask there."""
    of_rest = function(reading.q)
    if reading.first_q is reading.q:
        return of_rest
    products: Doubles = np.where(reading.positions < attrs.sinks, function(reading.first_q), of_rest)
    return products


def softmax_weights(reading: Reading, scores: Doubles) -> Doubles:
    """Return the share of each stored token, [n, G, m]; they sum to 1, less the share of the sink logit."""
    logits = np.where(reading.is_read[:, None], scores, -np.inf)
    largest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    logit = None if reading.sink_logits is None else reading.sink_logits[:, None]
    if logit is not None:
        largest = np.maximum(largest, logit)
    largest = np.where(np.isneginf(largest), 0, largest)  # nothing is read
    weights: Doubles = np.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True) + (0 if logit is None else np.exp(logit - largest))
    return weights / np.where(total == 0, 1, total)


def dense_weights(attrs: KVAttributes, reading: Reading) -> Doubles:
    """Return the weights [n, G, m] of what is read; NaN where a query, or a key that it reads, is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        weights = softmax_weights(reading, scores(attrs, reading))
    is_bad = ~np.isfinite(reading.keys.numbers).all(axis=-1)
    reads_bad = (reading.is_read & is_bad).any(axis=-1, keepdims=True) | ~np.isfinite(weights).all(axis=-1)
    for queries in (reading.q, reading.first_q):
        reads_bad = reads_bad | ~np.isfinite(queries).all(axis=-1)
    return np.where(np.expand_dims(reads_bad, -1), np.nan, weights)
