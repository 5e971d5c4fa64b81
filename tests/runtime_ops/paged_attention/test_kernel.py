"""The kernel against the definition, and against files of strangers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings

from graphopt.ort.session import array_of, ort_value, run
from graphopt.runtime_ops import DOMAIN, OPERATORS, library_path
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.spec.layout import pack_keys, pack_values
from graphopt.runtime_ops.paged_attention.spec.layout import STORAGES
from graphopt.runtime_ops.paged_attention.spec.op import reference
from tests.native import INSTRUCTIONS, needs_library, skip_without
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.paged_attention.honest import choices, honest, latents, pools
from tests.runtime_ops.paged_attention.test_op import (
    CHOICES,
    LATENT,
    LIES,
    SIZES,
    arrays,
    latent_requests,
    requests,
    spoil,
)
from tests.runtime_ops.test_registry import node_of

pytestmark = needs_library

FLOAT32, FLOAT16 = 2e-5, 4e-3
"""Of y: sums of up to 50 products of normal numbers in float32; the last bit of float16 is 1e-3 of numbers up to 4."""


QUERIES = {"query": 4, "key": 2, "value": 2}
"""Heads of what is fed."""


def kernel_session(case: Case, threads: int = 2) -> onnxruntime.InferenceSession:
    """Open a model of one node, which graphopt's kernel takes."""
    node = node_of(case)
    outputs = list(node.outputs)
    for name, value in zip(OPERATORS[case.operator].schema.output_names, outputs, strict=True):
        value.name = f"made_{name}"
    graph = ir.Graph(list(node.inputs), outputs, nodes=[node], opset_imports={"": 23, DOMAIN: 1}, name="one")
    model = ir.Model(graph, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library_path()))
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])


def by_kernel(case: Case, threads: int = 2) -> list[np.ndarray]:
    return list(run(kernel_session(case, threads), None, {name: tensor.values for name, tensor in case.inputs.items()}))


@pytest.mark.parametrize("isa", INSTRUCTIONS)
def test_the_kernel_is_the_reference(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa)

    @given(honest())
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def agree(case: Case) -> None:
        y, *after = reference(*arrays(case), **case.attributes)
        found, *stored = by_kernel(case)
        for expected, made in zip(after, stored, strict=True):
            np.testing.assert_array_equal(expected, made)
        limit = FLOAT16 if found.dtype == np.float16 else FLOAT32
        np.testing.assert_allclose(found.astype(np.float64), y, atol=limit)

    agree()


def case_of(inputs: dict[str, np.ndarray], **attributes: Any) -> Case:
    return Case(
        "PagedAttention", {name: Tensor(array, "fed") for name, array in inputs.items()}, {**SIZES, **attributes}
    )


def random_case(
    new: list[int], past: list[int], table: np.ndarray, size: int, storage: str = "float32", **attributes: Any
) -> Case:
    """Requests of 2 KV heads and 4 query heads over blocks of 16 tokens."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    inputs = {
        "query": normal(sum(new), 4 * size),
        "key": normal(sum(new), 2 * size),
        "value": normal(sum(new), 2 * size),
        "starts": np.cumsum([0, *new]).astype(np.int32),
        "past": np.array(past, np.int32),
        "block_table": table.astype(np.int32),
        "sink_logits": normal(4),
        **pools(normal(2, int(table.max()) + 1, 2, 16, size), storage),
    }
    return case_of(inputs, scale=size**-0.5, storage=storage, **attributes)


@pytest.mark.parametrize(
    ("size", "chunks", "storage"),
    [
        *((size, chunks, storage) for size, chunks in [(64, 0), (192, 0), (256, 0), (64, 1)] for storage in STORAGES),
        *((512, 0, storage) for storage in STORAGES if STORAGES[storage].levels is None),
    ],
)
def test_larger_heads_over_many_blocks(size: int, chunks: int, storage: str) -> None:
    new, past = [1, 70, 1, 3], [200, 0, 37, 5]
    order = iter(np.random.default_rng(0).permutation(40))
    table = np.full((4, 16), -1)
    for row in range(4):
        for column in range(-(-(past[row] + new[row]) // 16)):
            table[row, column] = next(order)
    case = random_case(new, past, table, size, storage, window=50, chunks=chunks)
    y, *after = reference(*arrays(case), **case.attributes)
    found, *stored = by_kernel(case)
    for expected, made in zip(after, stored, strict=True):
        np.testing.assert_array_equal(expected, made)
    np.testing.assert_allclose(found, y, atol=FLOAT32)


@pytest.mark.parametrize("storage", ["float32", "int6", "int4"])
def test_any_number_of_threads_computes_the_same_bits(storage: str) -> None:
    # one request that is split, beside short ones
    table = np.full((3, 400), -1)
    table[0], table[1, :2], table[2, :2] = np.arange(400), [400, 401], [402, 403]
    case = random_case([1, 20, 1], [6300, 3, 17], table, 64, storage)
    expected, *_ = reference(*arrays(case), **case.attributes)
    first, *_ = by_kernel(case, 1)
    np.testing.assert_allclose(first, expected, atol=FLOAT32)
    for threads in (2, 3, 4):
        np.testing.assert_array_equal(by_kernel(case, threads)[0], first)


def test_heads_that_take_turns_compute_the_same_bits() -> None:
    # enough requests that a task reads both heads, page by page; alone each has a task for each head
    past = [int(number) for number in np.random.default_rng(1).integers(0, 150, 260)]
    table = np.random.default_rng(2).permutation(260 * 10).reshape(260, 10)
    case = random_case([1] * 260, past, table, 32)
    expected, *_ = reference(*arrays(case), **case.attributes)
    found, *_ = by_kernel(case)
    np.testing.assert_allclose(found, expected, atol=FLOAT32)
    for row in (0, 7, 259):
        alone = {name: tensor.values for name, tensor in case.inputs.items()}
        alone |= {name: alone[name][row : row + 1] for name in ("query", "key", "value", "past", "block_table")}
        alone["starts"] = np.array([0, 1], np.int32)
        np.testing.assert_array_equal(by_kernel(case_of(alone, **case.attributes))[0], found[row : row + 1])


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_a_prefix_that_requests_share_is_read_for_all_of_them(storage: str) -> None:
    # 0 to 3 share 32 blocks, 1 to 3 of them 20 more, 4 and 5 share 16 others, 6 has nothing in common with anyone
    # behind its first block, and 7 has as many new tokens as a prompt
    table = np.full((8, 60), -1)
    table[:4, :32] = table[7, :32] = np.arange(32)
    table[1:4, 32:52] = np.arange(32, 52)
    table[4:6, :16] = np.arange(60, 76)
    table[6, :20] = [0, *range(80, 99)]
    past, new = [520, 835, 840, 833, 257, 300, 310, 512], [1, 1, 2, 1, 3, 1, 1, 30]
    fresh = iter(range(100, 200))
    for row, tokens in enumerate(past):
        for column in range(tokens // 16, -(-(tokens + new[row]) // 16)):
            table[row, column] = next(fresh)
        table[row][(table[row] < 0) & (np.arange(60) * 16 < tokens)] = 150
    order = np.random.default_rng(0).permutation(8)
    case = random_case([new[row] for row in order], [past[row] for row in order], table[order], 32, storage)
    y, *after = reference(*arrays(case), **case.attributes)
    found, *stored = by_kernel(case)
    np.testing.assert_allclose(found, y, atol=FLOAT32)
    for expected, made in zip(after, stored, strict=True):
        np.testing.assert_array_equal(expected, made)
    np.testing.assert_array_equal(by_kernel(case, 1)[0], found)


def test_rows_of_pages_of_their_own_compute_the_same_bits() -> None:
    """``KVAttention`` over pages as long as the blocks."""
    random, past, page, size = np.random.default_rng(0), [300, 70], 64, 64
    table = np.array([[3, 1, 5, 0, 6], [4, 2, -1, -1, -1]])
    numbers = random.standard_normal((2, 7, 2, page, size), np.float32)
    tokens = {name: random.standard_normal((2, 1, heads * size), np.float32) for name, heads in QUERIES.items()}
    attrs = KVAttributes(kv_heads=2, scale=0.125, page=page)
    states = attrs.state(2, 5, size).zeros()
    for name, each in zip(("keys", "values"), numbers, strict=True):
        packed = (pack_keys if name == "keys" else pack_values)(each, "float32")  # block, head, numbers
        states[name] = np.ascontiguousarray(packed[table].swapaxes(1, 2))
    nothing = np.zeros(0, np.float32)
    lengths = {"past": np.array(past), "new": np.array([1, 1])}
    given_tensors = {**tokens, **lengths, "sink_logits": nothing, "sink_query": nothing, **states}
    kv = Case("KVAttention", {name: Tensor(array, "fed") for name, array in given_tensors.items()}, attrs.for_node())
    flat = {name: array.reshape(2, -1) for name, array in tokens.items()}
    lengths = {"starts": np.array([0, 1, 2], np.int32), "past": np.array(past, np.int32)}
    shared = {**flat, **lengths, "block_table": table.astype(np.int32), "sink_logits": nothing}
    case = case_of({**shared, **pools(numbers, "float32")}, scale=0.125)
    np.testing.assert_array_equal(by_kernel(case)[0], by_kernel(kv)[0].reshape(2, -1))


@pytest.mark.parametrize("block", [16, 64])
def test_residuals_of_pieces_are_those_of_single_tokens(block: int) -> None:
    """The same bits of y and of blocks, in pieces of up to 16 tokens; a page may have blocks in front of the newest."""
    random, tokens = np.random.default_rng(0), 70
    table = random.permutation(6)[: -(-tokens // block)][None].astype(np.int32)
    names = ("keys", "values", "key_scales", "value_scales")
    fed = {name: random.standard_normal((tokens, heads * 64), np.float32) for name, heads in QUERIES.items()}
    made = []
    for piece in (1, 7):
        state = list(pools(random.standard_normal((2, 6, 2, block, 64)) * 0, "int4").values())
        rows = []
        for begin in range(0, tokens, piece):
            inputs = {name: array[begin : begin + piece] for name, array in fed.items()}
            count = len(inputs["key"])
            inputs |= {"starts": np.array([0, count], np.int32), "past": np.array([begin], np.int32)}
            inputs |= {"block_table": table, "sink_logits": np.zeros(0, np.float32)}
            inputs |= dict(zip(names, state, strict=True))
            y, *state = by_kernel(case_of(inputs, storage="int4", residuals=1, scale=0.125))
            rows.append(y)
        made.append([np.concatenate(rows), *state])
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)


def test_blocks_are_written_where_they_lie() -> None:
    inputs = requests([3, 2], [14, 15], [[5, 1, -1], [0, 7, -1]])
    y, keys, values, *_ = reference(*inputs.values(), **SIZES)
    session = kernel_session(Case("PagedAttention", {n: Tensor(a, "fed") for n, a in inputs.items()}, dict(SIZES)))
    given_values = {name: ort_value(array.copy()) for name, array in inputs.items()}
    binding = session.io_binding()
    for name, value in given_values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("made_y", "cpu")
    binding.bind_ortvalue_output("made_new_keys", given_values["keys"])
    binding.bind_ortvalue_output("made_new_values", given_values["values"])
    binding.bind_output("made_new_key_scales", "cpu")
    binding.bind_output("made_new_value_scales", "cpu")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(array_of(given_values["keys"]), keys)
    np.testing.assert_array_equal(array_of(given_values["values"]), values)
    np.testing.assert_allclose(binding.get_outputs()[0].numpy(), y, atol=FLOAT32)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_reach_those_that_read_them(odd: float) -> None:
    inputs = requests([2, 1], [17, 16], [[5, 1], [0, 7]])
    spoil(inputs, odd)
    for window in (0, 3):
        attributes = {**SIZES, "window": window}
        case = Case("PagedAttention", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes)
        expected = np.isnan(reference(*inputs.values(), **attributes)[0])
        np.testing.assert_array_equal(np.isnan(by_kernel(case)[0]), expected)


@pytest.mark.parametrize(("lie", "message"), LIES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_lie_is_an_error_that_names_the_node(lie: dict[str, Any], message: str) -> None:
    inputs = requests([3, 2], [14, 15], [[5, 1, -1], [0, 7, -1]])
    inputs |= {name: np.array(numbers, np.int32) for name, numbers in lie.items()}
    with pytest.raises(Exception, match="ai.graphopt node 'node': (starts|past|request|block [57] is written)"):
        by_kernel(Case("PagedAttention", {n: Tensor(a, "fed") for n, a in inputs.items()}, dict(SIZES)))


@pytest.mark.parametrize("wrong", CHOICES, ids=str)
def test_wrong_choices_are_errors_that_name_the_token(wrong: list[int]) -> None:
    inputs = latent_requests()
    by_kernel(case_of(inputs, **LATENT, chooses=1))
    inputs["choice"][0] = wrong
    with pytest.raises(Exception, match="token 0 must choose positions that rise from 0 to 14 at most, one at least"):
        by_kernel(case_of(inputs, **LATENT, chooses=1))


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_what_is_chosen_of_a_long_text_is_gathered(storage: str) -> None:
    """More positions than a run of the kernel has, in blocks of any order, for a prompt and for one token."""
    random, past = np.random.default_rng(0), [3000, 40 * 64 - 1]
    order = random.permutation(60)
    table = np.full((2, 48), -1, np.int32)
    table[0], table[1, :12] = order[:48], order[48:]
    table[1, 12:39] = table[0, 12:39]  # full blocks of both
    table[1, 39] = 60
    positions = [*range(3000, 3005), past[1]]
    inputs = {
        "query": random.standard_normal((6, 4 * 48), np.float32),
        "key": random.standard_normal((6, 48), np.float32),
        "value": np.zeros(0, np.float32),
        "starts": np.array([0, 5, 6], np.int32),
        "past": np.array(past, np.int32),
        "block_table": table,
        "sink_logits": random.standard_normal(4, np.float32),
        **latents(random.standard_normal((61, 1, 64, 48)), storage),
        "feedback": np.zeros(0, np.float16),
        "choice": choices(random, positions, 2400),
    }
    case = case_of(inputs, **{**LATENT, "storage": storage, "value_size": 32, "scale": 48**-0.5}, chooses=1)
    y, *after = reference(*arrays(case), **case.attributes)
    found, *stored = by_kernel(case)
    for expected, made in zip(after, stored, strict=True):
        np.testing.assert_array_equal(expected, made)
    np.testing.assert_allclose(found, y, atol=FLOAT32)
    alone = inputs | {name: inputs[name][5:] for name in ("query", "key", "choice")}
    alone |= {"starts": np.array([0, 1], np.int32), "past": inputs["past"][1:], "block_table": table[1:]}
    np.testing.assert_array_equal(by_kernel(case_of(alone, **case.attributes))[0], found[5:])
