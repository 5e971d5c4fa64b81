"""What a cache and a file of today must still mean: states and results, frozen in ``vectors/`` beside the operator.

Queries, keys and values are quarters, so that scores of pages are exact, ties among them; keys and values times a
factor where a storage would not round them else. Never regenerate this file: a change that it does not survive is a
new version of the operator.
"""

from __future__ import annotations

import base64
import json
import zlib
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from tests.native import needs_library
from tests.runtime_ops.kv_attention.bound import bound
from tests.runtime_ops.kv_cases import Arrays, Body, Fed, Run, unit_of
from tests.runtime_ops.kv_native import Native

FILES = (
    "version1.json",
    "version1_selection.json",
    "version1_bits.json",
    "version1_clip.json",
    "version1_factors.json",
    "version1_blocks.json",
    "version1_pairs.json",
    "version1_one_bit.json",
)


def load() -> list[dict[str, Any]]:
    folder = files("graphopt.runtime_ops").joinpath("kv_attention", "vectors")
    return [case for name in FILES for case in json.loads(folder.joinpath(name).read_text())]


def quarters(columns: int, width: int, factors: tuple[int, int, int], modulus: int) -> np.ndarray:
    """Return float32 [1, columns, width]."""
    s, i = np.arange(columns)[:, None], np.arange(width)[None]
    numbers = (factors[0] * s + factors[1] * i + factors[2] * s * i) % modulus - modulus // 2
    return (numbers / 4).astype(np.float32)[None]


def tokens_of(attributes: KVAttributes, columns: int, group: int, sinks: bool, factor: float) -> Arrays:
    width = attributes.kv_heads * unit_of(attributes.storage)
    return {
        "query": quarters(columns, group * width, (5, 3, 1), 17),
        "key": quarters(columns, width, (13, 7, 2), 31) * np.float32(factor),
        "value": quarters(columns, width, (11, 5, 3), 37) * np.float32(factor),
        "sink_logits": quarters(1, attributes.kv_heads * group, (0, 3, 0), 7)[0, 0]
        if sinks
        else np.zeros(0, np.float32),
        "sink_query": quarters(columns, group * width, (3, 7, 1), 19) if sinks else np.zeros(0, np.float32),
    }


def fed(frozen: dict[str, Any], run: Any = reference) -> Fed:
    attributes = KVAttributes(**frozen["attributes"])
    tokens = tokens_of(attributes, sum(frozen["calls"]), frozen["group"], frozen["sinks"], frozen.get("factor", 1.0))
    return Fed(attributes, tokens, frozen["pages"], run)


def state_of(frozen: dict[str, Any], like: Arrays) -> Arrays:
    return {
        name: np.frombuffer(zlib.decompress(base64.b64decode(frozen["state"][name])), tensor.dtype).reshape(
            tensor.shape
        )
        for name, tensor in like.items()
    }


BODY, KERNEL = Body(), Native()


@pytest.mark.parametrize("frozen", load(), ids=lambda frozen: frozen.get("name", frozen["attributes"]["storage"]))
@pytest.mark.parametrize(
    "run", [reference, BODY, pytest.param(KERNEL, marks=needs_library)], ids=["reference", "body", "kernel"]
)
def test_kv_attention(frozen: dict[str, Any], run: Run) -> None:
    y = np.array(frozen["y"])[None]
    cache, limits = fed(frozen, run), np.full(1, 1e-9)
    for columns in frozen["calls"][:-1]:
        cache.call(columns)
    if run is not reference:
        end = slice(cache.column, cache.column + frozen["calls"][-1])
        inputs = {name: each[:, end] if each.ndim == 3 else each for name, each in cache.tokens.items()}
        numbers = (cache.past, np.array([frozen["calls"][-1]]))
        order = [inputs["query"], inputs["key"], inputs["value"], *numbers]
        order += [inputs["sink_logits"], inputs["sink_query"], *cache.state.values()]
        limits = bound(*order, **cache.attributes.for_node())
    assert (np.abs(cache.call(frozen["calls"][-1]) - y) <= limits).all()
    for name, tensor in state_of(frozen, cache.state).items():
        # the last bits of a running mean are free
        is_mean = cache.attributes.summary == "mean" or cache.attributes.compensate
        slack = 1e-6 if name == "summaries" and is_mean else 0
        stored, wanted = (each.astype(np.float64) for each in (cache.state[name], tensor))
        assert np.abs(stored - wanted).max(initial=0) <= slack, name


def test_every_storage_is_there() -> None:
    assert {frozen["attributes"]["storage"] for frozen in load()} == set(STORAGES)
