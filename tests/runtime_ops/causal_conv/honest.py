from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn, types: tuple[type, ...] = (np.float32, np.float32, np.float16)) -> Case:
    """Rows of any number of tokens and channels, with and without bias, padding and activation."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, tokens = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 1, 2, 3, 9, 40]))
    channels, taps = draw(st.sampled_from([0, 1, 5, 16, 48, 70, 130])), draw(st.sampled_from([1, 2, 4, 4, 7]))
    dtype = draw(st.sampled_from(types))
    mask = random.integers(0, 2, (batch, tokens if draw(st.booleans()) else 0))
    shapes = {
        "x": (batch, tokens, channels),
        "weight": (channels, taps),
        "bias": (channels if draw(st.booleans()) else 0,),
        "mask": mask.shape,
        "state": (batch, channels, taps - 1),
    }
    inputs = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    fed = {name: Tensor(array, "fed") for name, array in (inputs | {"mask": mask}).items()}
    return Case("CausalConv", fed, {"activation": draw(st.sampled_from(["none", "silu"]))})
