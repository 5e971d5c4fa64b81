"""Requests that share a pool of blocks: the graph, and onnxruntime-genai's Engine on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime_genai
import pytest
from pydantic import ValidationError

from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.analysis.structure.ports import BLOCK_TABLE, POOL
from graphopt.artifact.artifact import verify_files
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.graph.editing import Inserter
from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.ort.session import open_session
from graphopt.passes.context import make_context
from graphopt.passes.interface.serve import Serve
from graphopt.passes.interface.serve.shared_blocks import wide_feedback
from graphopt.passes.recipe import Recipe
from graphopt.runtime_ops import DOMAIN, library_path, port
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.tasks import task_of
from graphopt.tasks.causal_lm.interface import Interface
from tests.graphs import canonical, run_pass

MakeArtifact = Callable[[str], Path]


def recipe(*steps: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "served", "steps": [{"step": "canonicalize"}, *steps]})


@pytest.fixture(scope="module")
def served(shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "served"
    # Other tests compare logits: here tokens are compared.
    optimize(shipped_artifact, recipe({"step": "serve", "memory": "16MB", "block": 16}), folder, run=False)
    return folder


ROUNDED: dict[str, list[dict[str, Any]]] = {
    "int8": [{"step": "quantize_kv", "storage": "int8"}],
    "int6": [
        {"step": "fold_norms"},
        {"step": "rotate", "query_key": "hadamard"},
        {"step": "quantize_kv", "storage": "int6", "key_feedback": True, "key_whitening": True},
    ],
    "int4": [
        {"step": "fold_norms"},
        {"step": "rotate", "query_key": "hadamard"},
        {"step": "quantize_kv", "storage": "int4", "key_feedback": True},
    ],
}
"""Steps in front of serve; int4 as in the preset rotate-kv4."""

LOGITS_CHANGE = {"int8": 0.01, "int6": 0.03, "int4": 0.09}
"""Largest change of a logit by the largest logit that is allowed, twice what was seen."""


@pytest.fixture(scope="module", params=ROUNDED)
def rounded(
    request: pytest.FixtureRequest, shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("serve") / request.param
    steps = [*ROUNDED[request.param], {"step": "serve", "memory": "4MB", "block": 16}]
    optimize(shipped_artifact, recipe(*steps), folder, run="parts")
    return request.param, folder


def logits_of(folder: Path, prompts: list[list[int]]) -> np.ndarray:
    """Return the logits [requests, vocabulary] of a served graph for requests that come together."""
    session = open_session(folder / "model.onnx", threads=1)
    interface = Interface.of_session(session)
    longest = max(map(len, prompts))
    ids, mask = np.zeros((2, len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    past = interface.empty_past(len(prompts), longest)
    made: np.ndarray = session.run(["logits"], interface.feeds(ids, mask, past))[0]
    return made


def run_engine(
    folder: Path, prompts: list[list[int]], starts: list[int], new_tokens: int, made_at: list[int] | None = None
) -> list[list[int]]:
    """Return the greedy tokens of requests of which each begins at a step of the Engine.

    How many requests get a token in a step goes to ``made_at``.
    """
    engine = onnxruntime_genai.Engine(onnxruntime_genai.Model(str(folder)))
    buffer, requests, made = engine.create_event_buffer(64), {}, [[] for _ in prompts]
    for step in range(500):
        for index in (index for index, start in enumerate(starts) if start == step):
            requests[index] = engine.create_request()
            options = onnxruntime_genai.TurnOptions(requests[index])
            options.set_max_generated_tokens(new_tokens)
            requests[index].begin_turn(np.array(prompts[index], np.int32), options)
        if step > max(starts) and not engine.has_pending_requests():
            break
        got = set()
        for event in engine.run(buffer):
            index = next(index for index, request in requests.items() if request == event.request)
            if event.flags & onnxruntime_genai.EngineEventFlags.TOKEN:
                made[index].append(event.token)
                got.add(index)
        if made_at is not None:
            made_at.append(len(got))
    return made


def test_the_engine_says_what_generate_says(served: Path, shipped_artifact: Path) -> None:
    float32 = load(shipped_artifact, threads=1)
    texts = [
        "def read_lines(path):\n    with open(path) as stream:\n        ",
        "class Stack:",
        "import",
        "def read_lines(path):\n    with",
    ]
    prompts = [float32.encode(text) for text in texts]
    expected = [generate(float32, [prompt], max_new_tokens=16)[0].tokens for prompt in prompts]
    # longer than a block of 16 tokens, staggered, and two of them with a common prefix
    assert max(len(prompt) + 16 for prompt in prompts) > 32
    assert prompts[0][:10] == prompts[3][:10]
    assert run_engine(served, prompts, [0, 2, 5, 9], 16) == expected
    assert run_engine(served, prompts, [0, 0, 0, 0], 16) == expected


def test_ten_requests_store_their_prefix_once(served: Path, shipped_artifact: Path, tmp_path: Path) -> None:
    encode = load(shipped_artifact, threads=1).encode
    prefix = (encode("def read_lines(path):\n    with open(path) as stream:\n") * 20)[:160]
    prompts = [[*prefix, *encode(f"        value_{number} = ")] for number in range(10)]
    assert {-(-(len(prompt) + 8) // 16) for prompt in prompts} == {11}
    # ten blocks of 16 tokens that all share, and two of each: apart they would take 110
    folder = shutil.copytree(served, tmp_path / "small")
    config = json.loads((folder / GENAI_CONFIG).read_text())
    config["engine"]["dynamic_batching"]["num_blocks"] = 22
    (folder / GENAI_CONFIG).write_text(json.dumps(config))
    steps: list[int] = []
    made = run_engine(folder, prompts, [0] + [4] * 9, 8, steps)
    assert max(steps) == 10, "all of them run at once"
    assert made == run_engine(served, prompts, [0] * 10, 8)


def test_integers_move_logits_by_little(rounded: tuple[str, Path], served: Path, shipped_artifact: Path) -> None:
    storage, folder = rounded
    float32 = load(shipped_artifact, threads=1)
    text = float32.encode(Path(json.__file__).read_text()[:800])
    prompts = [text[:length] for length in (20, 50, 90, 130, 170, 200)]
    expected, found = logits_of(served, prompts), logits_of(folder, prompts)
    change = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < change < LOGITS_CHANGE[storage]
    config = json.loads((folder / GENAI_CONFIG).read_text())
    # 6 layers of keys and values, 2 heads: 64 codes and a scale
    block = 6 * 2 * 16 * 2 * ({"int8": 64, "int6": 48, "int4": 32}[storage] + 4)
    assert config["engine"]["dynamic_batching"]["num_blocks"] == 4_000_000 // block
    assert config["model"]["decoder"]["inputs"]["past_key_scale_names"] == "past_key_values.%d.key_scale"
    # what the Engine says is what the graph says, token by token
    short = [text[:40], text[:60], text[60:90]]
    made = run_engine(folder, short, [0, 2, 2], 6)
    for prompt, tokens in zip(short, made, strict=True):
        again = [int(logits_of(folder, [[*prompt, *tokens[:count]]])[0].argmax()) for count in range(6)]
        assert tokens == again


def with_blocks(folder: Path, target: Path, block: int) -> Path:
    """Return a copy of a served graph for blocks of so many tokens."""
    shutil.copytree(folder, target)
    model = ir.load(target / "model.onnx")
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None and value.shape[0] == "num_blocks":
            value.shape = ir.Shape(["num_blocks", block, *list(value.shape)[2:]])
    model.metadata_props[POOL] = json.dumps({**json.loads(model.metadata_props[POOL]), "block_size": block})
    ir.save(model, target / "model.onnx")
    return target


def test_residuals_leave_texts_to_their_tokens(shipped_artifact: Path, served: Path, tmp_path: Path) -> None:
    """Whatever comes with a request, in which pieces it comes, and whether its beginning is known: its text stays."""
    folder, plain = tmp_path / "residuals", tmp_path / "plain"
    for target, options in ((folder, {}), (plain, {"residuals": False})):
        steps = [*ROUNDED["int4"], {"step": "serve", "memory": "4MB", "block": 64, **options}]
        optimize(shipped_artifact, recipe(*steps), target, run="parts")
        nodes = [node for node in ir.load(target / "model.onnx").graph if node.op_type == "PagedAttention"]
        assert {node.attributes.get_int("residuals", 0) for node in nodes} == {int(not options)}
    encode = load(shipped_artifact, threads=1).encode
    text = encode(Path(json.__file__).read_text()[:1500])
    prompts = [text[:150], text[:90], [*text[:128], *text[200:230]], text[30:75]]
    alone = [run_engine(folder, [prompt], [0], 12)[0] for prompt in prompts]
    assert run_engine(folder, prompts, [0, 0, 0, 0], 12) == alone, "in company"
    assert run_engine(folder, prompts, [0, 3, 20, 5], 12) == alone, (
        "behind a prefix of two blocks that another one read"
    )
    pieces = shutil.copytree(folder, tmp_path / "pieces")
    config = json.loads((pieces / GENAI_CONFIG).read_text())
    config["search"]["chunk_size"] = 24
    (pieces / GENAI_CONFIG).write_text(json.dumps(config))
    assert run_engine(pieces, prompts, [0, 3, 20, 5], 12) == alone, "in pieces that end within blocks"
    # a request that left and comes back with its tokens, as where the pool is full
    assert run_engine(folder, [[*prompts[0], *alone[0][:5]]], [0], 7)[0] == alone[0][5:]
    six = [encode(Path(json.__file__).read_text()[:800])[:length] for length in (20, 50, 90, 130, 170, 200)]
    expected = logits_of(served, six)
    # the largest change of a logit by the largest logit that was seen: blocks of 64 and of 128 tokens, and one code
    for each, seen in ((folder, 0.030), (with_blocks(folder, tmp_path / "longer", 128), 0.023), (plain, 0.062)):
        change = np.abs(logits_of(each, six) - expected).max() / np.abs(expected).max()
        # sums of other instruction sets turn a code now and then
        assert 0.8 * seen < change < 1.2 * seen


def test_blocks_have_no_residuals_where_bodies_read_them(shipped_artifact: Path) -> None:
    model = canonical(shipped_artifact)
    run_pass(model, "quantize_kv", storage="int4")
    report = Serve()(model, make_context(task_of(model.graph), "ort-cuda")).report
    told = [str(change.what) for change in report.changes if change.what.code == "serve.shares"]
    assert told
    assert all("without second codes: on GPUs" in text for text in told)
    nodes = [node for node in model.graph if node.op_type == "PagedAttention"]
    assert nodes
    assert all("residuals" not in node.attributes for node in nodes)
    assert json.loads(model.metadata_props[POOL])["block_size"] == 64, "long blocks are for second codes"


@pytest.mark.parametrize(
    ("storage", "options", "block"),
    [
        ("int4", {}, 128),
        ("int4", {"residuals": False}, 64),
        ("int4", {"block": 16}, 16),
        ("int8", {}, 64),
    ],
)
def test_blocks_are_long_where_newest_tokens_have_second_codes(
    storage: str, options: dict[str, Any], block: int, shipped_artifact: Path
) -> None:
    model = canonical(shipped_artifact)
    run_pass(model, "quantize_kv", storage=storage)
    run_pass(model, "serve", memory=4_000_000, **options)
    # 6 layers of keys and values, 2 heads: 64 codes and a scale
    of_block = 6 * 2 * block * 2 * ({"int8": 64, "int4": 32}[storage] + 4)
    assert json.loads(model.metadata_props[POOL]) == {"block_size": block, "num_blocks": 4_000_000 // of_block}
    shapes = {tuple(value.shape)[1:3] for value in model.graph.inputs if "past_key_values" in str(value.name)}
    assert shapes == {(block, 2)}


def test_the_folder_is_whole(served: Path) -> None:
    verify_files(served)
    config = json.loads((served / GENAI_CONFIG).read_text())
    batching = config["engine"]["dynamic_batching"]
    # 16 MB over 6 layers of keys and values, 2 heads of 64 floats
    assert (batching["block_size"], batching["num_blocks"]) == (16, 16_000_000 // (6 * 2 * 16 * 2 * 64 * 4))
    library = library_path("cpu")
    if library is not None:
        assert config["model"]["decoder"]["session_options"]["custom_ops_library"] == library.name
        assert (served / library.name).read_bytes() == library.read_bytes()
    with pytest.raises(InputError, match="made for an engine that many requests share.*without the step serve"):
        load(served)


@pytest.mark.parametrize("family", ["mistral_window", "gemma2"])
def test_families_compute_what_they_did(family: str, make_artifact: MakeArtifact, tmp_path: Path) -> None:
    # The check behind the pass compares logits: windows, soft caps.
    made = optimize(make_artifact(family), recipe({"step": "serve", "block": 32}), tmp_path / family)
    check = made.manifest.check("logits", after="serve")
    assert check.status == "measured"
    assert check.figures["largest_change"] < 1e-5
    interface = Interface.of_graph(made.model.graph)
    assert interface.has_shared_pool
    assert {interface.inputs[name].shape[1] for name in interface.past} == {32}


def test_feedback_of_heads_that_are_stored_wider_has_zeros_behind_it() -> None:
    matrices = np.random.default_rng(0).uniform(-1, 1, (2, 16, 16)).astype(np.float16)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="one")
    feedback = ir.val("feedback", const_value=ir.tensor(matrices))
    node = ir.node("KVAttention", [None] * 12 + [feedback], domain=DOMAIN, name="attention")
    kv = KVAttributes(2, 1.0, storage="int4", key_feedback=1)
    assert wide_feedback(graph, node, PagedLayer(0, 16, kv)) is feedback
    wide = wide_feedback(graph, node, PagedLayer(0, 32, replace(kv, kv_heads=3))).const_value
    assert wide is not None
    expected = np.zeros((3, 32, 32), np.float16)
    expected[:2, :16, :16] = matrices
    np.testing.assert_array_equal(wide.numpy(), expected)


def test_blocks_may_be_float16(llama: ir.Model) -> None:
    run_pass(llama, "quantize_kv", storage="float16")
    run_pass(llama, "serve", memory=1 << 20)
    types = {value.dtype for value in llama.graph.inputs if "key_values" in str(value.name)}
    assert types == {ir.DataType.FLOAT16}
    # 2 layers, keys and values of 2 heads of 16 numbers
    assert json.loads(llama.metadata_props[POOL]) == {
        "block_size": 64,
        "num_blocks": (1 << 20) // (2 * 2 * 64 * 2 * 16 * 2),
    }


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        ("sparse_kv", {}, "it reads a part of its cache: leave out the step sparse_kv"),
        (
            "quantize_kv",
            {"storage": "float8"},
            "its cache cannot be stored so in blocks that requests share: blocks are stored as float32, float16, "
            "bfloat16, int8, int6, int4, not float8",
        ),
        (
            "quantize_kv",
            {"storage": "int8", "clip": 0.9},
            "its cache cannot be stored so in blocks that requests share: tokens are rounded one by one, and their "
            "codes are not clipped: leave clip out",
        ),
        (
            "quantize_kv",
            {"storage": "int8", "value_storage": "int6"},
            "its cache cannot be stored so in blocks that requests share: blocks store keys and values alike, not int8 "
            "keys and int6 values: leave value_storage out",
        ),
        (
            "quantize_kv",
            {"storage": "int4"},
            "its cache cannot be stored so in blocks that requests share: a head of int4 has a multiple of 32 "
            "channels up to 256, not 16",
        ),
        (
            "quantize_kv",
            {"storage": "int6"},
            "its cache cannot be stored so in blocks that requests share: a head of int6 has a multiple of 64 "
            "channels up to 256, not 16",
        ),
        (
            "last_logits",
            {},
            "logits cannot be made for the last token of each request: they are of one position already",
        ),
        ("page_kv", {"memory": 100}, "a block of all layers takes 32768 bytes, and the memory for caches is 100"),
    ],
)
def test_what_stays_says_why(step: str, options: dict[str, Any], message: str, llama: ir.Model) -> None:
    memory = options.pop("memory", 1 << 30)
    run_pass(llama, step, **options)
    inputs = [value.name for value in llama.graph.inputs]
    report = run_pass(llama, "serve", memory=memory)
    assert {str(skip.reason) for skip in report.skips if skip.node != "graph"} == {message}
    assert POOL not in llama.metadata_props
    assert "block_table" not in [value.name for value in llama.graph.inputs]
    assert step == "last_logits" or inputs == [value.name for value in llama.graph.inputs]


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"block": 17}, {"memory": "much"}, {"memory": 0}):
        with pytest.raises(ValidationError):
            Serve.model_validate(wrong)
    assert Serve.model_validate({"memory": "4GB"}).memory == 4_000_000_000


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "mamba",
        "rwkv",
        "deepseek_v3",
        "glm_moe_dsa",
        "granitemoehybrid",
        "gpt_oss",
        "gemma3n",
        "gemma4",
        "llama4",
    ],
)
def test_states_of_requests_give_the_texts_of_requests_alone(
    family: str, make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    """Recurrences and tails of convolutions, with and without attention, two of a kind in a layer; a latent, chosen."""
    source, folder = make_artifact(family), tmp_path / family
    steps = [{"step": "absorb_latent"}] if family in ("deepseek_v3", "glm_moe_dsa") else []
    made = optimize(source, recipe(*steps, {"step": "serve", "memory": "1MB", "block": 32}), folder)
    assert BLOCK_TABLE in [value.name for value in ir.load(folder / "model.onnx").graph.inputs]
    check = made.manifest.check("logits", after="serve")
    assert check.status == "measured"
    # Both add up the same products in float32, of tokens in rows of another length.
    assert check.figures["largest_change"] < 1e-5
    random, alone = np.random.default_rng(0), load(source, threads=1)
    prompts = [[int(token) for token in random.integers(1, 290, length)] for length in (40, 7, 3)]
    expected = [generate(alone, [prompt], max_new_tokens=8)[0].tokens for prompt in prompts]
    # a prompt of two pieces beside single tokens, and a request in a row that another one has left
    assert run_engine(folder, prompts, [0, 2, 13], 8) == expected


def test_a_recurrence_that_something_else_reads_is_not_shared(make_artifact: MakeArtifact) -> None:
    model = ir.load(make_artifact("qwen3_next") / "model.onnx")
    state = next(value for value in model.graph.inputs if value.name == "past_key_values.0.conv_state")
    reader = ir.node("Identity", [state], name="reader")
    model.graph.append(reader)
    reader.outputs[0].name = "kept"
    model.graph.outputs.append(reader.outputs[0])
    inputs = [value.name for value in model.graph.inputs]
    report = run_pass(model, "serve")
    assert [skip.reason.code for skip in report.skips] == ["serve.state-reader"]
    assert "past_key_values.0.conv_state belongs to one request, and Identity reader" in str(report.skips[0].reason)
    assert [value.name for value in model.graph.inputs] == inputs


def indexed(artifact: Path) -> ir.Model:
    """Return a model of two layers whose latents are absorbed; the second shares what the first one chooses."""
    model = ir.load(artifact / "model.onnx")
    for step in ("canonicalize", "absorb_latent"):
        run_pass(model, step)
    return model


def test_keys_of_an_indexer_lie_behind_the_latent(make_artifact: MakeArtifact) -> None:
    model = indexed(make_artifact("glm_moe_dsa"))
    report = run_pass(model, "serve", block=32)
    assert not report.skips
    shapes = {str(value.name): list(value.shape or ()) for value in model.graph.inputs if "past_key" in str(value.name)}
    # latents of 32 numbers, 16 rotated ones, keys of 32: a row of the second layer is as wide, and has zeros there
    assert {name: shape[1:] for name, shape in shapes.items()} == {
        f"past_key_values.{layer}.{part}": [32, 1, 40] for layer in (0, 1) for part in ("key", "value")
    }
    attentions = [node for node in model.graph if node.op_type == "PagedAttention"]
    assert len({port(node, "choice") for node in attentions}) == 1
    assert [node.attributes.get_int("chooses") for node in attentions] == [1, 1]
    told = [str(change.what) for change in report.changes if change.what.code == "serve.shares"]
    assert all("; a token reads 6 of all, which an indexer chooses" in text for text in told)
    assert [" KV heads of 48 numbers are stored as 1 of 80" in text for text in told] == [False, True]


def test_what_an_indexer_chooses_stays_where_blocks_are_too_short(make_artifact: MakeArtifact) -> None:
    """Nothing is rewritten: attention that reads all would be another function."""
    model = indexed(make_artifact("glm_moe_dsa"))
    nodes = [node.op_type for node in model.graph]
    report = run_pass(model, "serve", block=16)
    assert "a block of latents has 32 tokens or more, not 16" in str(report.skips[0].reason)
    assert [node.op_type for node in model.graph] == nodes


def hide_first(model: ir.Model) -> None:
    """Let the mask of scores show one position of all."""
    node = next(node for node in model.graph if node.op_type == "Where" and node.name.endswith("indexer.Where"))
    mask = node.inputs[0]
    assert mask is not None
    insert = Inserter(model.graph, node, "odd")
    first = insert.op(
        "Slice", [mask, insert.integers([0]), insert.integers([1]), insert.integers([2])], None, mask.dtype
    )
    node.replace_input_with(0, first)


def show_all(model: ir.Model) -> None:
    """Let attention read what is causal, and what is chosen beside it."""
    node = next(node for node in model.graph if node.op_type == "And" and node.name.endswith("self_attn.And"))
    node.op_type = "Or"


def turn_keys(model: ir.Model) -> None:
    """Let scores be read through a softmax over positions."""
    node = next(node for node in model.graph if node.op_type == "Relu" and node.name.endswith("indexer.Relu"))
    node.op_type = "Softmax"


def fix_count(model: ir.Model) -> None:
    """Let as many tokens be chosen as the call has."""
    node = next(node for node in model.graph if node.op_type == "Min")
    node.replace_input_with(1, node.inputs[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hide_first, "indexer.TopK chooses among more or less than what is causal and no padding"),
        (show_all, "means something else than causal, not padding, and among what the indexer of"),
        (turn_keys, "Softmax model.layers.0.self_attn.indexer.Relu between the keys of an indexer and its choice"),
        (fix_count, "how many tokens model.layers.0.self_attn.indexer.TopK chooses is no constant"),
    ],
)
def test_choices_that_mean_something_else_stay(
    change: Callable[[ir.Model], None], message: str, make_artifact: MakeArtifact
) -> None:
    model = indexed(make_artifact("glm_moe_dsa"))
    change(model)
    nodes = [node.op_type for node in model.graph]
    report = run_pass(model, "serve", block=32)
    assert message in " ".join(str(skip.reason) for skip in report.skips)
    assert [node.op_type for node in model.graph] == nodes
