from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.hostile import Case, Tensor

# (H, Hk, K, V): matrices, some ragged; a vector for each channel (Mamba); a number for each channel (RG-LRU)
SHAPES = [(2, 1, 16, 16), (4, 2, 32, 48), (2, 2, 5, 21), (3, 1, 64, 70), (2, 1, 128, 128), (35, 1, 16, 1), (6, 3, 7, 3)]
SHAPES += [(40, 1, 1, 1), (9, 9, 1, 1), (20, 5, 1, 1), (1, 1, 24, 1), (1, 1, 1, 16), (0, 1, 4, 4), (2, 2, 3, 0)]


@st.composite
def honest(
    draw: st.DrawFn,
    types: tuple[type, ...] = (np.float32, np.float32, np.float16),
    lengths: tuple[int, ...] = (0, 1, 1, 2, 3, 9, 20),
) -> Case:
    """Rows of any number of tokens, by each rule, with and without decay, beta and padding; keys of length 1."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, tokens = draw(st.integers(0, 2)), draw(st.sampled_from(lengths))
    heads, key_heads, channels, width = draw(st.sampled_from(SHAPES))
    decays = draw(st.sampled_from([0, 1, channels, channels]))
    dtype, normal = draw(st.sampled_from(types)), random.standard_normal
    key = normal((batch, tokens, key_heads, channels))
    fed = {
        "query": normal(key.shape).astype(dtype),
        "key": (key / np.linalg.norm(key, axis=-1, keepdims=True)).astype(dtype),
        "value": normal((batch, tokens, heads, width)).astype(dtype),
        "decay": -(normal((batch, tokens, heads, decays)) ** 2).astype(dtype) * dtype(draw(st.sampled_from([0.1, 20]))),
        "beta": random.uniform(0, 1, (batch, tokens, heads, draw(st.integers(0, 1)))).astype(dtype),
        "mask": random.integers(0, 2, (batch, tokens if draw(st.booleans()) else 0)),
        "state": normal((batch, heads, channels, width)).astype(np.float32),
    }
    attributes = {"delta": draw(st.integers(0, 1)), "scale": draw(st.sampled_from([0.25, 1.0]))}
    return Case("LinearRecurrence", {name: Tensor(array, "fed") for name, array in fed.items()}, attributes)
