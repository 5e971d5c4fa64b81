"""``ai.graphopt::CausalConv``, version 1: a causal convolution of each channel by itself, with a state.

B rows, T new tokens, C channels, L taps (L >= 1).

Inputs, all required:
    x: float or float16 [B, T, C], the new tokens.
    weight: the type of x, [C, L]; the last tap is for the token itself, the one before it for the token before.
    bias: the type of x, [C], or [0] for none.
    mask: int64 [B, T]: a token where it is 0 is padding; [B, 0] where no token is.
    state: the type of x, [B, C, L - 1]: the last L - 1 tokens of each row, the newest last; zeros at first.

Attribute:
    activation: string: none, or silu for y sigmoid(y).

Outputs:
    y: the type and the shape of x. Let z be a row's state and then its tokens that are no padding. For the n-th token::

        y[b, t, c] = activation(bias[c] + sum_j weight[c, j] z[n + j, c])        j = 0 .. L - 1, n = 0, 1, ...

        and y is 0 where a token is padding: it neither reads nor touches the state.
    new_state: the type and the shape of state, the last L - 1 of z.

It is the short convolution of H3 (Fu et al. 2022, section 3), Mamba (Gu and Dao 2023, section 3.4) and Gated DeltaNet
(Yang et al. 2024, section 3.4), without the copies that a graph of ``Concat``, ``Conv`` and ``Slice`` makes. What is
summed up is float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.causal_conv.spec.body import function
from graphopt.runtime_ops.causal_conv.spec.schema import SCHEMA
from graphopt.runtime_ops.operator import Operator

Floats = npt.NDArray[np.floating[Any]]

ACTIVATIONS = ("none", "silu")


def reference(
    x: Floats, weight: Floats, bias: Floats, mask: npt.NDArray[np.int64], state: Floats, activation: str
) -> tuple[Floats, Floats]:
    """Return what the operator means, in float64 and then rounded to the type of ``x``.

    Raises:
        ValueError: the shapes do not fit one another, or there is no such activation.
    """
    batch, tokens, channels = x.shape
    if weight.ndim != 2 or len(weight) != channels or not weight.shape[1]:
        raise ValueError(f"weight must be [{channels}, L] with an L of at least 1, and is {list(weight.shape)}")
    taps = weight.shape[1]
    if bias.shape not in ((channels,), (0,)):
        raise ValueError(f"bias must be [{channels}] or [0], and is {list(bias.shape)}")
    if mask.shape not in ((batch, tokens), (batch, 0)):
        raise ValueError(f"mask must be [{batch}, {tokens}] or [{batch}, 0], and is {list(mask.shape)}")
    if state.shape != (batch, channels, taps - 1):
        raise ValueError(f"state must be {[batch, channels, taps - 1]}, and is {list(state.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, and is {activation!r}")
    y, new_state = np.zeros(x.shape), np.zeros(state.shape)
    with np.errstate(all="ignore"):  # overflow, infinity and NaN are allowed
        for row in range(batch):
            is_read = mask[row] != 0 if mask.size else np.ones(tokens, bool)
            sequence = np.concatenate([state[row].T, x[row, is_read]]).astype(np.float64)
            count = len(sequence) - (taps - 1)
            sums = np.zeros((count, channels))
            for tap in range(taps):
                sums += weight[:, tap].astype(np.float64) * sequence[tap : tap + count]
            if bias.size:
                sums += bias.astype(np.float64)
            y[row, is_read] = sums / (1 + np.exp(-sums)) if activation == "silu" else sums
            new_state[row] = sequence[count:].T
        return y.astype(x.dtype), new_state.astype(x.dtype)


CAUSAL_CONV = Operator(SCHEMA, function, reference)
