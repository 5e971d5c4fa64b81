from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from graphopt.runtime_ops.round_activations.spec.op import MODES
from tests.runtime_ops.cases import batches
from tests.runtime_ops.hostile import Case, Tensor


@st.composite
def honest(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*draw(batches()), draw(st.integers(1, 40)))
    x = random.standard_normal(shape).astype(draw(st.sampled_from([np.float32, np.float16])))
    attributes = {"activations": draw(st.sampled_from(MODES)), "group": draw(st.sampled_from([0, 16])), "clip": 0.75}
    return Case("RoundActivations", {"x": Tensor(x, "fed")}, attributes)
