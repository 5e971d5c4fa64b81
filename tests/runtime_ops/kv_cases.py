"""Calls of KVAttention: random inputs, and a cache that is fed call by call by whatever runs the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphopt.runtime_ops.kv_attention.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.reference import reference

INPUTS = ("query", "key", "value", "past", "new", "sink_logits", "sink_query")
STATE = ("keys", "values", "scales", "recent", "summaries")
Arrays = dict[str, np.ndarray]
Run = Callable[..., Sequence[np.ndarray]]
"""Takes the twelve inputs in order and the attributes by name, returns the six outputs."""


def attributes_of(**others: Any) -> KVAttributes:
    return KVAttributes(**{"kv_heads": 2, "scale": 0.25, "page": 16, **others})


def tokens_of(
    attributes: KVAttributes,
    columns: int,
    *,
    batch: int = 1,
    group: int = 2,
    head_size: int = 16,
    sink_logits: bool = False,
    sink_query: bool = False,
    seed: int = 0,
) -> Arrays:
    """Return query, key, value, sink_logits and sink_query for ``columns`` tokens."""
    random, width = np.random.default_rng(seed), attributes.kv_heads * head_size
    normal = random.standard_normal
    return {
        "query": normal((batch, columns, group * width)).astype(np.float32),
        "key": normal((batch, columns, width)).astype(np.float32),
        "value": normal((batch, columns, width)).astype(np.float32),
        "sink_logits": normal(attributes.kv_heads * group if sink_logits else 0).astype(np.float32),
        "sink_query": normal((batch, columns, group * width) if sink_query else 0).astype(np.float32),
    }


class Fed:
    """A cache, fed call by call, and what the calls returned.

    Args:
        attributes: of the operator.
        tokens: as from :func:`tokens_of`; each call takes the next columns.
        pages: P.
        run: what computes the operator.
    """

    def __init__(self, attributes: KVAttributes, tokens: Arrays, pages: int, run: Run = reference) -> None:
        self.attributes, self.tokens, self.run = attributes, tokens, run
        batch, _, width = tokens["key"].shape
        self.state = attributes.state(batch, pages, width // attributes.kv_heads).zeros()
        self.past = np.zeros(batch, np.int64)
        self.column = 0

    def call(self, columns: int, new: Sequence[int] | None = None) -> np.ndarray:
        """Run the next ``columns`` columns, of which row b has ``new[b]`` tokens, all unless told; return y."""
        these = slice(self.column, self.column + columns)
        inputs = {"past": self.past, "new": np.full(len(self.past), columns) if new is None else np.array(new)}
        for name, tensor in self.tokens.items():
            inputs[name] = tensor[:, these] if tensor.ndim == 3 else tensor
        arguments = [*(inputs[name] for name in INPUTS), *self.state.values()]
        y, *state = self.run(*arguments, **self.attributes.for_node())
        self.state = dict(zip(STATE, state, strict=True))
        self.past = self.past + inputs["new"]
        self.column += columns
        return y

    def calls(self, *columns: int) -> np.ndarray:
        """Run one call after the other and return their y, one behind the other."""
        return np.concatenate([self.call(each) for each in columns], axis=1)


def assert_same_state(one: Arrays, other: Arrays) -> None:
    for name in STATE:
        assert one[name].dtype == other[name].dtype, name
        assert np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f"), name
