"""What the study of caches emulates is what the operator and llama.cpp's blocks do to numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphopt.numerics.formats.trellis import T2
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.paged_attention.spec.op import reference
from tests.runtime_ops.kv_cases import Fed
from tests.runtime_ops.paged_attention.honest import pools
from tools.studies.cache_quality import row
from tools.studies.caches.attention import _attend
from tools.studies.caches.feedback import FeedbackBlocks, FeedbackMethod, FeedbackTrellis, KeyBasis, feedback_methods
from tools.studies.caches.methods import of_pages
from tools.studies.caches.rounding import Residuals, Tail, blocks_of_32, rotation
from tools.studies.caches.spectral import Statistics

TOKENS, CHANNELS, GROUP = 230, 32, 3


@pytest.mark.parametrize(
    ("bits", "options"),
    [(8, {}), (4, {}), (3, {"clip": 0.9}), (2, {"clip": 0.7, "factors": True}), (8, {"value_bits": 6})],
    ids=["int8", "int4", "int3", "int2", "int8-int6"],
)
def test_emulated_pages_are_those_of_the_operator(bits: int, options: dict[str, Any]) -> None:
    random = np.random.default_rng(bits)
    query, key, value = (random.standard_normal((1, TOKENS, n * CHANNELS)).astype(np.float32) for n in (GROUP, 1, 1))
    attributes = KVAttributes(
        1, 0.3, page=32, storage=f"int{bits}", sink_pages=1, recent_pages=1, clip=options.get("clip", 1)
    )
    of_values = f"int{options.get('value_bits', bits)}"
    attributes = replace(attributes, token_factors=int("factors" in options), value_storage=of_values)
    empty = np.zeros(0, np.float32)
    tokens = {"query": query, "key": key, "value": value, "sink_logits": empty, "sink_query": empty}
    cache = Fed(attributes, tokens, 8)
    cache.call(TOKENS - 1)
    expected = cache.call(1)[0, 0].reshape(GROUP, CHANNELS)

    tail = Tail(page=32, first=1, newest=1)
    method = of_pages(bits, rotates=False, tail=tail, **options)
    k, v = torch.from_numpy(key), torch.from_numpy(value)
    arrays = method.apply(k, v)
    last = torch.from_numpy(query[0, -1:].reshape(1, GROUP, CHANNELS)).transpose(0, 1) * 0.3
    numbers = [array[0] for array in (*arrays, k, v)]
    result = _attend(last, numbers, torch.tensor([TOKENS - 1]), tail)[:, 0]
    # sums of 230 products in float32 by two programs; squares of shares are rounded to 2^-14 in the operator only
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3 if "factors" in options else 1e-5)


@pytest.mark.parametrize("residuals", [0, 1])
def test_emulated_blocks_are_those_of_the_operator(residuals: int) -> None:
    random, basis, tokens = np.random.default_rng(residuals), rotation(CHANNELS).numpy(), 45
    query, key, value = (random.standard_normal((tokens, n * CHANNELS)).astype(np.float32) for n in (GROUP, 1, 1))
    # rounded once, as the study does: what a code leaves may lie between two others but for the last bit
    wide_basis = basis.astype(np.float64)
    of_tokens = (
        query.reshape(tokens, GROUP, CHANNELS) @ wide_basis,
        key[np.newaxis] @ wide_basis,
        value[np.newaxis] @ basis,
    )
    inputs = [x.astype(np.float32).reshape(tokens, -1) for x in of_tokens]
    weights = np.triu(random.uniform(-0.3, 0.3, (1, CHANNELS, CHANNELS)), 1).astype(np.float16)
    empty = np.zeros(0, np.float32)
    lengths = [np.array(numbers, np.int32) for numbers in ([0, tokens], [0], [[0, 1, 2]])]
    states = pools(np.zeros((2, 3, 1, 16, CHANNELS)), "int4").values()
    attributes: dict[str, Any] = {"kv_heads": 1, "window": 0, "scale": 0.3, "softcap": 0.0, "storage": "int4"}
    y, *_ = reference(*inputs, *lengths, empty, *states, weights, **attributes, key_feedback=1, residuals=residuals)
    expected = y.reshape(tokens, GROUP, CHANNELS).swapaxes(0, 1) @ basis.T

    bases = [KeyBasis(wide_basis[np.newaxis], wide_basis.T[np.newaxis], weights.astype(np.float32))]
    tail = Residuals(16) if residuals else None
    k, v = torch.from_numpy(key[None]), torch.from_numpy(value[None])
    numbers = [x[0] for x in (*FeedbackBlocks("blocks", bases, 4, tail).apply(k, v), k, v)[:4]]
    queries = torch.from_numpy(query.reshape(tokens, GROUP, CHANNELS).swapaxes(0, 1) * np.float32(0.3))
    # sums of 45 products in float32 by two programs
    np.testing.assert_allclose(_attend(queries, numbers, torch.arange(tokens), tail), expected, rtol=0, atol=1e-5)


def test_scales_of_halves_that_err_least_err_less() -> None:
    random, basis = np.random.default_rng(0), np.eye(CHANNELS)[np.newaxis]
    k = torch.from_numpy(random.standard_normal((2, TOKENS, CHANNELS)).astype(np.float32))
    bases = [KeyBasis(basis, basis, np.zeros((2, CHANNELS, CHANNELS), np.float32))]
    errors = {}
    for parts, shares in ((1, (1.0,)), (1, (1.0, 0.9)), (2, (1.0,)), (2, (1.0, 0.9))):
        keys, _ = FeedbackBlocks("blocks", bases, 4, parts=parts, shares=shares).apply(k, k)
        errors[parts, len(shares)] = float((keys - k).square().mean())
        # float16 rounds a scale up by 2^-10 at most
        step = 2 * k.abs().amax(-1, keepdim=True) / 15
        assert len(shares) > 1 or ((keys - k).abs() <= 0.501 * step).all()
    # numbers of a normal distribution: half as many reach less far, and their ends are few
    assert errors[2, 2] < errors[2, 1] < errors[1, 1]
    assert errors[2, 2] < errors[1, 2] < errors[1, 1]


def test_first_tokens_keep_second_codes() -> None:
    tokens, positions = torch.arange(40)[None], torch.tensor([[39]])
    is_first_code = Residuals(16, first=4).are_rounded(tokens, positions)[0]
    # 8 tokens of the last block, all of them with second codes
    assert (~is_first_code).nonzero().ravel().tolist() == [0, 1, 2, 3, *range(32, 40)]


@pytest.mark.parametrize("bits", [4, 2])
def test_emulated_feedback_is_that_of_the_operator(bits: int) -> None:
    random, basis = np.random.default_rng(bits), rotation(CHANNELS).numpy()
    query, key, value = (random.standard_normal((1, TOKENS, n * CHANNELS)).astype(np.float32) for n in (GROUP, 1, 1))
    # what it shows to the operator is rotated, as a graph is
    inputs = [(x.reshape(1, TOKENS, -1, CHANNELS) @ basis).reshape(x.shape) for x in (query, key, value)]
    clip, factors = (0.9, 1) if bits == 2 else (1.0, 0)
    attributes = KVAttributes(1, 0.3, page=32, storage=f"int{bits}", sink_pages=1, recent_pages=1, clip=clip)
    attributes = replace(attributes, token_factors=factors, key_feedback=1)
    empty = np.zeros(0, np.float32)
    names = ("query", "key", "value", "sink_logits", "sink_query")
    cache = Fed(attributes, dict(zip(names, [*inputs, empty, empty], strict=True)), 8)
    cache.call(TOKENS - 1)
    expected = cache.call(1)[0, 0].reshape(GROUP, CHANNELS) @ basis.T

    tail = Tail(page=32, first=1, newest=1)
    wide_basis = basis.astype(np.float64)[np.newaxis]
    bases = [KeyBasis(wide_basis, wide_basis.swapaxes(-1, -2), cache.feedback["feedback"].astype(np.float32))]
    method = FeedbackMethod("feedback", bases, bits, bits, tail)
    k, v = torch.from_numpy(key), torch.from_numpy(value)
    last = torch.from_numpy(query[0, -1:].reshape(1, GROUP, CHANNELS)).transpose(0, 1) * 0.3
    numbers = [x[0] for x in (*method.apply(k, v), k, v)]
    # sums of 230 products in float32 by two programs
    output = _attend(last, numbers, torch.tensor([TOKENS - 1]), tail)[:, 0]
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5)


def test_feedback_takes_the_error_off_scores() -> None:
    random = np.random.default_rng(0)
    queries, keys = (random.standard_normal((2, 256, 64)) @ random.standard_normal((64, 64)) / 8 for _ in range(2))
    values = torch.from_numpy(keys.astype(np.float32))
    moments, of_keys = (torch.from_numpy((np.swapaxes(x, 1, 2) @ x / 256).astype(np.float32)) for x in (queries, keys))
    tail, errors = Tail(first=0, newest=0), {}
    statistics = Statistics(of_keys, of_keys, moments, of_keys, moments)
    methods = {method.name: method for method in feedback_methods([statistics], tail)}
    stem = "int4 keys, int4 values, rotated"
    method = methods[f"feedback, {stem}"]
    assert isinstance(method, FeedbackMethod)
    bases = [replace(method.bases[0], feedback=np.zeros((2, 64, 64), np.float32))]
    variants = {
        "feedback": method,
        "alone": replace(method, bases=bases),
        "whitened": methods[f"feedback, whitened, {stem}"],
        "blocks": methods["feedback, blocks, int4, rotated"],
        "whitened blocks": methods["feedback, whitened, blocks, int4, rotated"],
    }
    for name, method in variants.items():
        new_keys, _ = method.apply(values, values)
        errors[name] = np.square(queries @ np.swapaxes(new_keys.numpy() - keys, 1, 2)).mean()
    # the mean of eigenvalues of these moments is about e times their geometric mean
    assert errors["feedback"] < 0.6 * errors["alone"]
    # and so it is with keys, of which whitening goes a part of the way
    assert errors["whitened"] < 0.85 * errors["feedback"]
    assert errors["whitened blocks"] < 0.85 * errors["blocks"]


def test_trellises_of_least_error_make_numbers_smaller() -> None:
    random, unit = np.random.default_rng(0), np.eye(64)[np.newaxis]
    basis = KeyBasis(unit, unit, np.zeros((1, 64, 64), np.float32))
    x = torch.from_numpy(random.standard_normal((1, 4096, 64)).astype(np.float32))
    for keeps_size, low, high in ((True, 0.995, 1.005), (False, 0.89, 0.93)):
        method = FeedbackTrellis("t2", [basis], T2, keeps_size, Tail())
        keys, values = method.apply(x, x)
        for result in (keys, values):
            # 0.0907 is what t2 errs by at its best scale (docs/formats.md), and least squares leave 1 less that
            assert low < float((x * result).mean() / x.square().mean()) < high
            assert float((x - result).square().mean()) < (0.115 if keeps_size else 0.105)


@pytest.mark.parametrize(("kind", "levels"), [("q8_0", 127), ("q5_0", 16), ("q4_0", 8)])
def test_blocks_of_llama_err_by_their_steps(kind: str, levels: int) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32))
    error = (blocks_of_32(x, kind) - x).abs().reshape(3, 5, 2, 32)
    largest = x.reshape(3, 5, 2, 32).abs().amax(-1, keepdim=True)
    # half a step, or a whole one at the end that has no code, and a step rounded to 11 bits
    assert (error <= largest * ((0.5 if kind == "q8_0" else 1) / levels + 2**-10)).all()
    assert error.mean() > largest.mean() / levels / 8


def test_a_cache_that_changes_nothing_costs_nothing() -> None:
    logits = torch.log_softmax(torch.arange(12.0).reshape(3, 4), -1)
    figures = row("floats", "emulated", 32, logits, logits, torch.tensor([0, 3, 3]), 0.0)
    assert (figures.kl_mean, figures.same) == (0, 1)
    assert figures.perplexity == pytest.approx(1 / float(torch.softmax(torch.arange(4.0), -1)[3]))
