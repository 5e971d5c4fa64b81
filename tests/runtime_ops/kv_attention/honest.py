from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.kv_cases import INPUTS, any_calls, feedback_of


@st.composite
def honest(draw: st.DrawFn) -> Case:
    calls = any_calls(most=1, tokens=12, groups=(1, 2), head_sizes=(16,), has_feedback=True)
    attributes, tokens, _, new = draw(calls.filter(lambda drawn: sum(drawn[2]) > 0))
    batch = len(new[0])
    state = attributes.state(batch, 4, tokens["key"].shape[2] // attributes.kv_heads).zeros()
    given = {**tokens, "past": np.zeros(batch, np.int64), "new": np.array(new[0], np.int64)}
    inputs = {name: given[name] for name in INPUTS} | state
    inputs |= feedback_of(attributes, tokens["key"].shape[2] // attributes.kv_heads)
    return Case("KVAttention", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes.for_node())
