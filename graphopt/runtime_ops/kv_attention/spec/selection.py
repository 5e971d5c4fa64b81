"""Which pages retrieval reads besides what is always read: scores by their summaries, and how many of the best."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

UNIT = 2.0**-24
"""Half of the distance between 1 and the next float32."""


def candidate_pages(attrs: KVAttributes, position: int) -> Integers:
    """Return the pages with a token that the query at ``position`` sees and does not read in any case, in order."""
    first = max(attrs.sinks, position - attrs.window + 1 if attrs.window else 0)
    last = position - attrs.recent
    return np.arange(first // attrs.page, last // attrs.page + 1) if first <= last else np.arange(0)


def page_scores(attrs: KVAttributes, summaries: Array, queries: Doubles) -> Singles:
    """Return how much each page promises to a group of queries that choose together.

    bounds is the largest dot product that a key within the bounds can have (Quest, Tang et al. 2024); mean is that of
    the mean key (TriForce, Sun et al. 2024). ``channels`` leaves out all but the largest channels of the queries
    (SparQ, Ribar et al. 2024).

    Args:
        attrs: of the node.
        summaries: [n, Z], of the pages.
        queries: [G, D].

    Returns:
        float32 [n].
    """
    low, high = _known(attrs, summaries, queries.shape[-1])
    used, q = used_channels(attrs, queries), queries[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        products = q[..., used] * low[:, used]
        if attrs.summary == "bounds":
            products = np.maximum(products, q[..., used] * high[:, used])
        of_head = products.sum(axis=-1).astype(np.float32)
    scores: Singles = np.where(np.isnan(of_head), np.float32(np.inf), of_head).max(axis=0)
    return scores


def used_channels(attrs: KVAttributes, queries: Doubles) -> Integers:
    """Return the channels of queries [G, D] that page scores use, in their order.

    A channel counts by the sum of |q| over the queries, float32, one query after the other; NaN counts as infinite. Of
    equal ones the lower channel is used.
    """
    channels = queries.shape[-1]
    if not 0 < attrs.channels < channels:
        return np.arange(channels)
    with np.errstate(over="ignore"):
        sums = reduce(np.add, np.abs(queries.astype(np.float32)))
    return np.sort(np.argsort(-np.where(np.isnan(sums), np.inf, sums), kind="stable")[: attrs.channels])


def chosen_pages(attrs: KVAttributes, scores: Singles) -> Integers:
    """Return which of the candidates with these scores [n] are read, the best first; of equal ones the lower."""
    order = np.argsort(-scores, kind="stable")
    if 0 < attrs.mass < 1:
        # as many as have the mass together: those before which it is not there yet
        weights = page_weights(attrs, scores)[order]
        order = order[np.cumsum(weights) - weights < attrs.mass * weights.sum()]
    return order[: attrs.budget] if attrs.budget or not attrs.mass else order


def page_weights(attrs: KVAttributes, scores: Singles) -> Doubles:
    """Return exp(scale (score - the highest score)), [n]: 1 for those of the highest score, at most 1 for others.

    NaN counts as 0: scores that are infinitely far below, with a scale of 0.
    """
    if not len(scores):
        return np.zeros(0)
    with np.errstate(invalid="ignore", over="ignore"):
        below = attrs.scale * (scores.astype(np.float64) - float(scores.max()))
        weights = np.exp(np.minimum(below, 0))
    weights = np.where(np.isnan(weights), 0.0, weights)
    return np.where(scores == scores.max(), 1.0, weights)


def is_open(attrs: KVAttributes, summaries: Array, queries: Doubles, scores: Singles) -> bool:
    """Return whether float32 may find that the pages with `mass` are one more or one less.

    Scores err by gamma(D + 8) of the sum of magnitudes, so weights by a share of e = 2 scale times that, and 4 u; sums
    of n weights by gamma(n). See :mod:`graphopt.runtime_ops.kv_attention.spec.bound`.
    """
    if not 0 < attrs.mass < 1 or not len(scores):
        return False
    channels = queries.shape[-1]
    low, high = _known(attrs, summaries, channels)
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = float((np.abs(queries) @ np.maximum(np.abs(low), np.abs(high)).T).max())
    share = 2 * abs(attrs.scale) * (channels + 8) * UNIT * magnitude + (len(scores) + 8) * UNIT
    weights = np.sort(page_weights(attrs, scores))[::-1]
    sums = np.cumsum(weights)[: attrs.budget or None]
    return not (np.abs(sums - attrs.mass * weights.sum()) > 4 * share * weights.sum()).all()


def _known(attrs: KVAttributes, summaries: Array, channels: int) -> tuple[Doubles, Doubles]:
    """Return the lowest and the highest key of each page as its summary has them, float64 [n, D]; the mean twice."""
    known = summaries.astype(np.float64)
    low = known[:, :channels]
    return low, low if attrs.summary == "mean" else known[:, channels : 2 * channels]
