"""``ai.graphopt::LinearRecurrence``, version 1: a state for each head, that decays, is written and is read.

B rows, T new tokens, H heads, Hk key heads (Hk divides H: head h has the queries and keys of key head h div (H / Hk)),
K numbers of a key, V of a value.

Inputs, all required:
    query, key: float or float16 [B, T, Hk, K].
    value: the type of query, [B, T, H, V].
    decay: the type of query, [B, T, H, D], the logarithm of what the state is multiplied by: D = 1 for each head, D = K
        for each channel of its keys, D = 0 for none.
    beta: the type of query, [B, T, H, 1], how much of a token is written, or [B, T, H, 0] for all.
    mask: int64 [B, T]: a token where it is 0 is padding; [B, 0] where no token is.
    state: float [B, H, K, V]; zeros at first.

Attributes:
    delta: int: 0 adds, 1 writes what the state does not hold yet (the delta rule).
    scale: float, of outputs.

Outputs:
    output: the type of query, the shape of value.
    new_state: float, the shape of state.

For each row and head, token after token, S = state::

    S = diag(exp(decay)) S
    S = S + beta k v^T                       delta = 0
    S = S + beta k (v - S^T k)^T             delta = 1
    output = scale S^T q

Padding neither reads nor touches the state, and its output is 0. All is computed in float32, whatever the type.

It is linear attention (Katharopoulos et al. 2020, equations 18 to 20), with a decay per head RetNet and Mamba-2's SSD
(Dao and Gu 2024, section 3; k = B, q = C, v = dt x, decay = dt A), with one per channel GLA (Yang et al. 2023, equation
3), with V = 1 and a head for each channel Mamba's selective scan (Gu and Dao 2023, equation 2a), with K = V = 1 the
RG-LRU of Griffin (De et al. 2024, equation 4). The delta rule is DeltaNet (Schlag et al. 2021; Yang et al. 2024a), with
a decay per head Gated DeltaNet (Yang et al. 2024b, equation 10), with one per channel Kimi Delta Attention (2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.linear_recurrence.spec.body import function, overload
from graphopt.runtime_ops.linear_recurrence.spec.schema import SCHEMA
from graphopt.runtime_ops.operator import Operator

if TYPE_CHECKING:
    from collections.abc import Mapping

Floats = npt.NDArray[np.floating[Any]]


def reference(
    query: Floats,
    key: Floats,
    value: Floats,
    decay: Floats,
    beta: Floats,
    mask: npt.NDArray[np.int64],
    state: npt.NDArray[np.float32],
    delta: int,
    scale: float,
) -> tuple[Floats, npt.NDArray[np.float32]]:
    """Return what the operator means, in float64 and then rounded to the type of ``query``, and of ``state``.

    Raises:
        ValueError: the shapes do not fit one another, or ``delta`` is neither 0 nor 1.
    """
    _check({"query": query, "key": key, "value": value, "decay": decay, "beta": beta, "mask": mask, "state": state})
    if delta not in (0, 1):
        raise ValueError(f"delta must be 0 or 1, and is {delta}")
    heads, per_key = value.shape[2], value.shape[2] // max(query.shape[2], 1)
    query, key = (np.repeat(tensor, per_key, axis=2).astype(np.float64) for tensor in (query, key))
    output, S = np.zeros(value.shape), state.astype(np.float64)
    with np.errstate(all="ignore"):  # overflow, infinity and NaN are allowed
        for row, token, head in np.ndindex(value.shape[0], value.shape[1], heads):
            if mask.size and not mask[row, token]:
                continue
            q, k, v, b, g = (tensor[row, token, head].astype(np.float64) for tensor in (query, key, value, beta, decay))
            decayed_S = S[row, head] * (np.exp(g)[:, None] if g.size else 1)
            difference = (v - decayed_S.T @ k if delta else v) * (b if b.size else 1)
            S[row, head] = decayed_S + np.outer(k, difference)
            output[row, token, head] = scale * (S[row, head].T @ q)
        return output.astype(value.dtype), S.astype(np.float32)


def _check(tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Check the shapes of the inputs.

    Raises:
        ValueError: as :func:`reference`.
    """
    query, value = tensors["query"].shape, tensors["value"].shape
    if len(query) != 4 or len(value) != 4 or query[:2] != value[:2] or not query[3]:
        raise ValueError(f"query must be [B, T, Hk, K], value [B, T, H, V]; they are {query} and {value}")
    batch, tokens, heads, width = value
    if heads % query[2] if query[2] else heads:
        raise ValueError(f"{heads} heads of values do not share {query[2]} heads of keys")
    choices: dict[str, list[tuple[int, ...]]] = {
        "key": [query],
        "decay": [(batch, tokens, heads, size) for size in (0, 1, query[3])],
        "beta": [(batch, tokens, heads, size) for size in (0, 1)],
        "mask": [(batch, tokens), (batch, 0)],
        "state": [(batch, heads, query[3], width)],
    }
    for name, shapes in choices.items():
        shape = tensors[name].shape
        if shape not in shapes:
            raise ValueError(f"{name} must be {' or '.join(str(choice) for choice in shapes)}, and is {shape}")


LINEAR_RECURRENCE = Operator(SCHEMA, function, reference, overload)
