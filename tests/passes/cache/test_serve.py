"""Requests that share a pool of blocks: the graph, and onnxruntime-genai's Engine on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime_genai
import pytest
from pydantic import ValidationError

from graphopt.analysis.ports import POOL
from graphopt.artifact import verify_files
from graphopt.errors import InputError
from graphopt.genai import GENAI_CONFIG
from graphopt.generation import generate
from graphopt.passes.cache.serve import ServeOptions
from graphopt.pipeline import optimize
from graphopt.recipe import Recipe
from graphopt.runtime_ops import library_path
from graphopt.session import load
from graphopt.tasks.causal_lm.interface import Interface
from tests.graphs import run_pass

MakeArtifact = Callable[[str], Path]


def recipe(*steps: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "served", "steps": [{"step": "canonicalize"}, *steps]})


@pytest.fixture(scope="module")
def served(shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "served"
    # Other tests compare logits: here tokens are compared.
    optimize(shipped_artifact, recipe({"step": "serve", "memory": "16MB"}), folder, run=False)
    return folder


def run_engine(folder: Path, prompts: list[list[int]], starts: list[int], new_tokens: int) -> list[list[int]]:
    """Return the greedy tokens of requests of which each begins at a step of the Engine."""
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
        for event in engine.run(buffer):
            index = next(index for index, request in requests.items() if request == event.request)
            if event.flags & onnxruntime_genai.EngineEventFlags.TOKEN:
                made[index].append(event.token)
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
    assert interface.shared
    assert {interface.inputs[name].shape[1] for name in interface.past} == {32}


def test_blocks_may_be_float16(llama: ir.Model) -> None:
    run_pass(llama, "quantize_kv", storage="float16")
    run_pass(llama, "serve", memory=1 << 20)
    types = {value.dtype for value in llama.graph.inputs if "key_values" in str(value.name)}
    assert types == {ir.DataType.FLOAT16}
    # 2 layers, keys and values of 2 heads of 16 numbers
    assert json.loads(llama.metadata_props[POOL]) == {
        "block_size": 16,
        "num_blocks": (1 << 20) // (2 * 2 * 16 * 2 * 16 * 2),
    }


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        ("sparse_kv", {}, "it reads a part of its cache: leave out the step sparse_kv"),
        ("quantize_kv", {"storage": "int8"}, "its cache is stored as int8, and an engine shares blocks of floats"),
        (
            "last_logits",
            {},
            "logits cannot be made for the last token of each request: they are of one position already",
        ),
        ("page_kv", {"memory": 100}, "a block of all layers takes 8192 bytes, and the memory for caches is 100"),
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
            ServeOptions.model_validate(wrong)
    assert ServeOptions.model_validate({"memory": "4GB"}).memory == 4_000_000_000
