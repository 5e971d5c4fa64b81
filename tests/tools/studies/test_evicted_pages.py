"""Evictions that a study compares at equal bytes: how many tokens those hold, and how a decoder is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import graphopt
from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.inference.decoding.decoder import Decoder
from tests.runtime_ops.kv_cases import attributes_of
from tools.bench.parts.options import is_selected
from tools.studies.caches.evicted_pages import KINDS, PAGE, bytes_of, eviction, read_pages, tokens_in
from tools.studies.caches.prompt import RECENT, SINKS

TOKENS = 4000


def layers(storage: str, values: str = "") -> list[PagedLayer]:
    slots = {"sink_pages": 1, "recent_pages": 1} if storage.startswith("int") else {}
    attributes = attributes_of(page=PAGE, storage=storage, value_storage=values, **slots)
    return [PagedLayer(number, 64, attributes) for number in range(2)]


def test_fewer_bits_leave_room_for_more_tokens() -> None:
    limit = bytes_of(layers("float16"), TOKENS) // 2
    counts = {}
    for storage, values in (("float16", ""), ("int8", ""), ("int8", "int6"), ("int8", "int4")):
        pages = layers(storage, values)
        counts[storage, values] = count = tokens_in(pages, limit, TOKENS)
        assert count % PAGE == 0
        assert bytes_of(pages, count) <= limit < bytes_of(pages, count + 1)
    assert counts["float16", ""] == 31 * PAGE  # half of 63 pages, which have nothing beside them
    assert counts["int8", "int4"] > counts["int8", "int6"] > counts["int8", ""] > counts["float16", ""]
    assert tokens_in(layers("int4"), 2 * limit, TOKENS) == TOKENS
    assert tokens_in(layers("int4"), 0, TOKENS) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_evict_keep_the_first_and_the_newest(kind: str) -> None:
    keys, values = np.random.default_rng(0).standard_normal((2, 1, TOKENS, 16)).astype(np.float32)
    (stay,) = eviction(kind, 512).tokens_that_stay(keys, values)
    assert (len(stay), stay[SINKS - 1], stay[-RECENT]) == (512, SINKS - 1, TOKENS - RECENT)
    newest = [*range(SINKS), *range(TOKENS - 512 + SINKS, TOKENS)]
    assert (stay.tolist() == newest) == (kind == "streaming")


def test_ways_are_asked_for_by_name() -> None:
    assert is_selected("int4, keydiff", ())
    assert is_selected("int4, keydiff", ["float*", "int4, *"])
    assert not is_selected("int4 keys, int3 values, keydiff", ["int4, *"])


def test_a_text_is_read_page_by_page(llama_artifact: Path) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 300, PAGE + 40))
    session = graphopt.load(llama_artifact)
    pieces = [*read_pages(Decoder(session, 1), ids)]
    assert [len(piece) for piece in pieces] == [PAGE, 40]
    whole = torch.log_softmax(torch.from_numpy(np.array(Decoder(session, 1).step(ids[None].numpy())[0])), -1)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-4)  # sums of float32 in other orders
