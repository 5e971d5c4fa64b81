"""The token that replaces those that a streaming head dropped, with their mean key and mean value.

With N tokens dropped, all of them with the mean key k and the mean value v, a softmax over everything would give them
exp(s) for each, N exp(s) = exp(s + log N) together: so one token with the score s + log N (RazorAttention, Tang et al.
2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

UNIT = 2.0**-24
"""Half of the distance between 1 and the next float32."""


@dataclass(frozen=True)
class StandIns:
    """Tokens that stand for those that streaming dropped, one for each page up to which a query dropped them.

    Attributes:
        positions: int64 [m], of the last token that each stands for.
        keys, values: float64 [m, D], means.
        key_errors, value_errors: float64 [m, D], by how much float32 may have another mean after this call.
        counts: float64 [m], N.
        is_read: bool [n, m].
    """

    positions: Integers
    keys: Doubles
    values: Doubles
    key_errors: Doubles
    value_errors: Doubles
    counts: Doubles
    is_read: Mask


def stand_ins(
    attrs: KVAttributes, summaries: Array, before: Array, tokens: Array, query_positions: Integers
) -> StandIns:
    """Return the tokens that replace those that queries of a streaming head dropped.

    A query at position p whose newest tokens begin at w = p - recent + 1 has dropped the tokens from ``sinks`` up to
    the page of w; those in that page in front of w are left out.

    Args:
        attrs: of the node.
        summaries: float32 [P, Z], of a head after the call.
        before: the same before the call.
        tokens: float32 [c, 2 D], keys and values of the call, not those below the sinks.
        query_positions: int64 [n], positions of the queries.
    """
    ends = np.maximum(query_positions - attrs.recent + 1, 0) // attrs.page
    ends = np.where(ends * attrs.page > attrs.sinks, ends, 0)
    distinct = np.unique(ends[ends > 0])
    physical_pages = attrs.physical_page(distinct - 1, len(summaries))
    channels = tokens.shape[-1] // 2
    means = summaries[physical_pages, -2 * channels :].astype(np.float64)
    # A mean moves by (x - mean) / count with each token: 3 roundings, of at most 5 u max|x| together, and what was
    # wrong before weighs less. A sum of c tokens and of the old mean, divided, errs by (c + 3) u max|x|.
    with np.errstate(invalid="ignore"):
        magnitudes = np.abs(np.concatenate([means, tokens, before[:, -2 * channels :]], dtype=np.float64))
        largest = np.where(np.isfinite(magnitudes), magnitudes, 0).max(axis=0, initial=0)
    errors = np.broadcast_to(8 * (len(tokens) + 1) * UNIT * largest, means.shape)
    return StandIns(
        positions=distinct * attrs.page - 1,
        keys=means[:, :channels],
        values=means[:, channels:],
        key_errors=errors[:, :channels],
        value_errors=errors[:, channels:],
        counts=(distinct * attrs.page - attrs.sinks).astype(np.float64),
        is_read=ends[:, None] == distinct,
    )
