"""What ``ai.graphopt::KVAttention`` means, in NumPy: written from the definition, to be read and not to be fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.spec.readings import Reading, readings
from graphopt.runtime_ops.kv_attention.spec.weights import scores, softmax_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]


def reference(*inputs: Array, **attributes: Any) -> tuple[Array, ...]:
    """Return what the operator means.

    The state is rounded in float32 as the operator says, page scores are exact and then rounded to float32, and
    everything behind them is float64. No input is changed.

    Args:
        inputs: all of the node, see :mod:`graphopt.runtime_ops.kv_attention.spec.op`.
        attributes: of the node.

    Returns:
        y float64 [B, S, Hq D] and the state after the call: keys, values, scales, recent, summaries.

    Raises:
        ValueError: an attribute, a shape, a type or a number of tokens does not fit; nothing is computed then.
    """
    attrs = KVAttributes(**attributes)
    state, all_readings = readings(attrs, inputs)
    return (for_each(attend, attrs, inputs, all_readings), *state.values())


def for_each(
    function: Callable[[KVAttributes, Reading], Doubles],
    attrs: KVAttributes,
    inputs: tuple[Array, ...],
    all_readings: Iterable[Reading],
) -> Doubles:
    """Return what is ``function`` [n, G, D] of each reading, in the shape of `query`; 0 for columns without a token."""
    query, key = inputs[:2]
    width = attrs.value_channels(key.shape[2] // attrs.kv_heads)
    y = np.zeros((*key.shape[:2], attrs.kv_heads, query.shape[2] // key.shape[2], width))
    for reading in all_readings:
        y[reading.row, reading.columns, reading.head] = function(attrs, reading)
    return y.reshape(*query.shape[:2], y.shape[2] * y.shape[3] * width)


def attend(attrs: KVAttributes, reading: Reading) -> Doubles:
    """Return the softmax over what is read times its values, float64 [n, G, D].

    Where a key that is read is not finite all channels are NaN, where a value is not, its channel is.
    """
    K, V = reading.keys.numbers, reading.values.numbers
    bad = ~np.isfinite(K).all(axis=-1, keepdims=True) | ~np.isfinite(V)
    with np.errstate(invalid="ignore", over="ignore"):
        y = softmax_weights(reading, scores(attrs, reading)) @ np.where(bad, 0, V)
    if not bad.any():
        return y
    reads = reading.is_read.astype(np.int64) @ bad
    return np.where(reads[:, None] > 0, np.nan, y)
