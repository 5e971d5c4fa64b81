from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime_genai
import pytest

from graphopt.artifact import artifact
from graphopt.artifact.artifact import MODEL
from graphopt.artifact.genai import GENAI_CONFIG, NO_BOUND, UNKNOWN, genai_config
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact
from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.passes.recipe import Recipe
from graphopt.serving.request import Limits
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.ports import Port
from tests.graphs import canonical, run_pass

FACTS = {"max_positions": 128, "bos_token_id": 0, "eos_token_ids": [0], "session": {}}


@pytest.mark.parametrize("recipe", ["rotate", "rotate-online", "int4-rtn", "fp6-rtn", "w4a4-rtn"])
def test_onnxruntime_genai_makes_the_same_greedy_tokens(recipe: str, llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, recipe, tmp_path / recipe)
    prompt = [5, 17, 101, 43, 250]
    model = onnxruntime_genai.Model(str(tmp_path / recipe))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + 12)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    completion = generate(load(tmp_path / recipe), [prompt], max_new_tokens=12)[0]
    assert list(generator.get_sequence(0))[len(prompt) :][: len(completion.tokens)] == completion.tokens


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_onnxruntime_genai_carries_recurrent_states(
    family: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    optimize(make_artifact(family), "int4-rtn", tmp_path / "model")
    config = json.loads((tmp_path / "model" / GENAI_CONFIG).read_text())["model"]["decoder"]
    assert config["inputs"]["past_conv_names"] == "past_key_values.%d.conv_state"
    assert config["outputs"]["present_recurrent_names"] == "present.%d.recurrent_state"
    prompt = [5, 17, 101, 43, 250]
    model = onnxruntime_genai.Model(str(tmp_path / "model"))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + 12)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    completion = generate(load(tmp_path / "model"), [prompt], max_new_tokens=12)[0]
    assert list(generator.get_sequence(0))[len(prompt) :][: len(completion.tokens)] == completion.tokens
    with pytest.raises(InputError, match="takes one batch at a time"):
        Limits.of_folder(tmp_path / "model")


def test_a_pool_bounds_a_model_that_states_no_positions(llama_artifact: Path) -> None:
    steps = [{"step": "canonicalize"}, {"step": "serve", "memory": "1MB"}]
    served_artifact = optimize(llama_artifact, Recipe.model_validate({"name": "served", "steps": steps}), run=False)
    settings = {**FACTS, "max_positions": None}
    pool = {"block_size": 16, "num_blocks": 40}
    config = genai_config(Interface.of_graph(served_artifact.model.graph), MODEL, **settings, pool=pool)  # type: ignore[arg-type]
    assert isinstance(config, dict)
    assert config["model"]["context_length"] == NO_BOUND
    plain = genai_config(interface_of(llama_artifact), MODEL, **settings)  # type: ignore[arg-type]
    assert isinstance(plain, Fact)
    assert plain.code == UNKNOWN.code


def test_onnxruntime_genai_needs_no_logits_but_the_last(llama_artifact: Path, tmp_path: Path) -> None:
    for last in (False, True):
        optimize(llama_artifact, "int4-rtn", tmp_path / str(last), last_logits=last)
    prompt, sequences = [5, 17, 101, 43, 250], []
    for last in (False, True):
        model = onnxruntime_genai.Model(str(tmp_path / str(last)))
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(prompt) + 12)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array(prompt, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        sequences.append(list(generator.get_sequence(0)))
    assert sequences[0] == sequences[1]


def test_onnxruntime_genai_takes_the_library_of_kernels_from_its_configuration(
    llama_artifact: Path, tmp_path: Path
) -> None:
    optimize(llama_artifact, "fp6-rtn", tmp_path / "out")
    file = tmp_path / "out" / GENAI_CONFIG
    config = json.loads(file.read_text())
    config["model"]["decoder"]["session_options"]["custom_ops_library"] = "/nowhere/library.so"
    file.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="/nowhere/library.so"):
        onnxruntime_genai.Model(str(tmp_path / "out"))


def test_session_entries_of_the_recipe_are_handed_on(llama_artifact: Path, tmp_path: Path) -> None:
    manifest = optimize(llama_artifact, "int4-rtn", tmp_path / "out").manifest
    assert GENAI_CONFIG in manifest.files
    config = genai_config(interface_of(tmp_path / "out"), MODEL, **{**FACTS, "session": manifest.session})  # type: ignore[arg-type]
    assert isinstance(config, dict)
    options = config["model"]["decoder"]["session_options"]
    assert options["session.qdq_matmulnbits_accuracy_level"] == "4"


def interface_of(folder: Path) -> Interface:
    return Interface.of_graph(artifact.read(folder).model.graph)


def test_caches_in_pages_are_not_for_it(llama_artifact: Path) -> None:
    model = canonical(llama_artifact)
    run_pass(model, "page_kv")
    reason = genai_config(Interface.of_graph(model.graph), MODEL, **FACTS)  # type: ignore[arg-type]
    assert str(reason).startswith("its caches lie in pages that the caller allocates; --set lower.caches=growing")


def test_why_a_graph_cannot_run_there_is_said(llama_artifact: Path) -> None:
    interface = interface_of(llama_artifact)
    inputs = dict(interface.inputs)
    del inputs["attention_mask"]
    reason = genai_config(replace(interface, inputs=inputs), MODEL, **FACTS)  # type: ignore[arg-type]
    assert isinstance(reason, Fact)
    assert reason.code == "genai.no-mask"
    wide = Port("past_key_values.1.key", np.dtype(np.float32), (None, 2, None, 99))
    uneven = replace(interface, inputs={**interface.inputs, wide.name: wide})
    assert "differ in KV heads" in str(genai_config(uneven, MODEL, **FACTS))  # type: ignore[arg-type]
    assert "positions" in str(genai_config(interface, MODEL, **{**FACTS, "max_positions": None}))  # type: ignore[arg-type]
