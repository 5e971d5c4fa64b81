"""A query has the same bits alone and among others, in a batch of one row and of two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from tests.native import INSTRUCTIONS, lacks, needs_library
from tests.pairwise import pairwise
from tests.runtime_ops.kv_cases import INPUTS, attributes_of, tokens_of, unit_of
from tests.runtime_ops.kv_native import Native

pytestmark = needs_library

HEADS, COLUMNS = 2, 8
# What each reads in several runs of 2048 tokens, but for the last three.
POLICIES: dict[str, dict[str, Any]] = {
    "dense": {"policies": [0]},
    "streaming": {"policies": [1], "sinks": 2100, "recent": 2300},
    "retrieval": {"policies": [2], "sinks": 5, "recent": 300, "budget": 250},
    "sparse prefill": {"policies": [3], "query_block": 32, "query_stride": 8},
    "window": {"policies": [0], "window": 2500},
    "few": {"policies": [1], "sinks": 5, "recent": 200, "compensate": 1},
    "mixed": {"policies": [0, 2], "recent": 128, "budget": 3, "summary": "mean"},
    "narrow": {"policies": [0], "window": 300},
}


def drawn_state(kv: KVAttributes, pages: int) -> dict[str, np.ndarray]:
    """A cache of two rows as if tokens had been stored: numbers of all kinds, none of them NaN."""
    random = np.random.default_rng(1)
    state = {}
    for name, tensor in kv.state(2, pages, unit_of(kv.storage)):
        shape = tuple(int(size) for size in tensor.shape)
        if tensor.dtype == np.uint8:
            state[name] = random.integers(0, 256, shape, np.uint8)
        else:
            state[name] = random.standard_normal(shape).astype(np.float32).astype(tensor.dtype)
    return state


def row_of(arrays: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    return {name: array[row : row + 1] for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("storage", "policy", "instructions", "page", "group"),
    pairwise(STORAGES, list(POLICIES), INSTRUCTIONS, (16, 128), (1, 3, 8)),
)
def test_a_query_has_the_same_bits_alone_and_among_others(
    storage: str, policy: str, instructions: str, page: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := lacks(instructions):
        pytest.skip(reason)
    monkeypatch.setenv(ISA_VARIABLE, instructions)
    kept = {"sink_pages": 1, "recent_pages": 1}
    kv = attributes_of(kv_heads=HEADS, page=page, storage=storage, **kept, **POLICIES[policy])
    # One row goes on in the middle of a run, the other with its first token; guesses begin no page.
    past = np.array([4096 + 3, 6144])
    pages = -(-(int(past.max()) + COLUMNS) // kv.page)
    state, tokens = drawn_state(kv, pages), tokens_of(kv, COLUMNS, batch=2, group=group)
    run = Native()

    def call(first: int, count: int, rows: dict[str, np.ndarray], of: dict[str, np.ndarray], past: np.ndarray) -> Any:
        part = {name: each[:, first : first + count] if each.ndim == 3 else each for name, each in rows.items()}
        feeds = {**part, "past": past + first, "new": np.full(len(past), count)}
        return run(*(feeds[name] for name in INPUTS), *of.values(), **kv.for_node())

    together = call(0, COLUMNS, tokens, state, past)[0]
    for row in range(2):
        one = {name: each[row : row + 1] if each.ndim == 3 else each for name, each in tokens.items()}
        of = row_of(state, row)
        for column in range(COLUMNS):
            y, *after = call(column, 1, one, of, past[row : row + 1])
            of = dict(zip(of, after, strict=True))
            assert np.isfinite(y).all()
            assert np.array_equal(y[0, 0], together[row, column])
