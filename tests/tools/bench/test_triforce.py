"""The benchmark of three levels of drafts: what it writes, and that caches hold what it says, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import typer

from graphopt.analysis.structure.paged_caches import kv_nodes
from graphopt.inference.states.device_memory import DeviceBuffer
from graphopt.inference.states.pages import PagedStates
from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE, RETRIEVAL, STREAMING
from tools.bench import triforce
from tools.bench.parts import large_graphs
from tools.bench.parts.attention_problem import Sequence
from tools.bench.parts.attention_state import fill
from tools.bench.triforce import SimulatedLevel, Way, best, expected_seconds, write

COSTS = {
    "target": {1: 10.0, 12: 10.0},
    "middle": {1: 1.0, 12: 1.0},
    "draft": {1: 0.01, 12: 0.01},
}


@pytest.mark.parametrize(
    "way",
    [Way("single"), Way("draft", draft=3), Way("middle", middle=4), Way("three", draft=2, middle=5)],
    ids=lambda way: way.name,
)
def test_caches_hold_the_text_without_its_newest_token(way: Way) -> None:
    levels = {name: SimulatedLevel(costs, 100) for name, costs in COSTS.items()}
    count = write(way, levels, 100, 50, (0.7, 0.9), seed=0)
    assert count >= 50
    assert levels["target"].length == 100 + count
    # drafters may lag behind the target, and are never ahead of it
    assert all(level.length <= 100 + count for level in levels.values())


def test_right_guesses_save_what_steps_cost() -> None:
    # a step of the target writes its 5 guesses and one more; five steps of the middle cost 5
    assert expected_seconds(Way("middle", middle=5), COSTS, (0.0, 1.0)) == pytest.approx((10 + 5) / 6, rel=1e-2)
    # one of 3 guesses of a draft that is never right: a token a step
    assert expected_seconds(Way("draft", draft=3), COSTS, (0.0, 0.0)) == pytest.approx(10 + 0.03)
    # every guess of the draft is right: a step of the middle gives 3 tokens, one of the target those and one
    assert expected_seconds(Way("three", draft=2, middle=3), COSTS, (1.0, 1.0)) == pytest.approx(
        (10 + 1 + 0.02) / 4, rel=1e-2
    )


def test_the_fastest_lengths_are_found() -> None:
    fastest = {way.name: (way, seconds) for way, seconds in best(COSTS, (1.0, 1.0), 6)}
    assert fastest["middle"][0].middle == 5
    assert fastest["three levels"][1] < fastest["middle"][1] < fastest["single tokens"][1]
    assert fastest["single tokens"][1] == pytest.approx(10)
    assert np.isclose(fastest["draft"][1], (10 + 0.05) / 6, rtol=1e-2)


@pytest.fixture
def files(random_artifact: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Graphs for a GPU, of a tiny model that has positions for some pages of codes."""
    manifest = random_artifact.manifest
    facts = manifest.model.model_copy(update={"max_positions": 1024})
    random_artifact.manifest = manifest.model_copy(update={"model": facts})
    monkeypatch.setattr(large_graphs, "make_artifact", lambda _config, _folder: random_artifact)
    monkeypatch.setattr(triforce, "WIDTHS", (1, 3))
    triforce.main(tmp_path, context="250", budget=64, device="cuda", make=True)
    assert not list(tmp_path.rglob("*.data"))
    shapes = json.loads((tmp_path / "shapes.json").read_text())
    del shapes["device"]
    return triforce.build(tmp_path, shapes, "int8", 64, "cuda")


def test_graphs_are_those_of_three_levels(files: dict[str, Path]) -> None:
    nodes = {name: kv_nodes(ir.load(file).graph) for name, file in files.items()}
    for name, policy in {"target": DENSE, "middle": RETRIEVAL, "draft": STREAMING}.items():
        assert nodes[name]
        assert all(list(node.attributes["policies"].as_ints()) == [policy] for node in nodes[name])
    assert all(node.attributes["storage"].as_string() == "int8" for node in nodes["target"] + nodes["middle"])
    assert all(node.attributes["budget"].as_int() == 1 for node in nodes["middle"])
    assert files["middle"].parent == files["target"].parent  # of one file of weights
    graph = ir.load(files["target"]).graph
    assert str(graph.outputs[0].shape) == str(ir.load(files["middle"]).graph.outputs[0].shape)
    assert "last_3" in str(graph.outputs[0].shape)  # a step of the widest has logits of all its tokens


@pytest.mark.usefixtures("interpreted_gpu")
def test_levels_run_on_a_gpu_behind_a_context_that_was_never_read(files: dict[str, Path], tmp_path: Path) -> None:
    """In the interpreter: memory of its device stands for a GPU's."""
    sessions = triforce.open_levels(files, 1, "cuda")
    levels = {name: triforce.behind_context(session, 250, 1) for name, session in sessions.items()}
    for name, level in levels.items():
        assert level.decoder.tokens.tolist() == [250]
        layer = sessions[name].interface.layers[0]
        states = level.decoder.states
        assert isinstance(states, PagedStates)
        keys = states.tensors[0]["keys"].buffers[0]
        assert isinstance(keys, DeviceBuffer)
        sequence = Sequence(layer.attributes.kv_heads, layer.head_size)
        expected_state = fill(layer.attributes, sequence, 250, keys.pages, 1)
        assert np.array_equal(keys.array_of(keys.pages), expected_state["keys"])
        assert expected_state["keys"].any()
        level.feed_to(253)
        steps = level.seconds
        assert steps > 0
        assert level.rollback_seconds == 0
        level.roll_back(251)
        assert level.decoder.tokens.tolist() == [251]
        assert level.seconds - steps == pytest.approx(level.rollback_seconds)
        assert level.rollback_seconds > 0
    json_file = tmp_path / "figures.json"
    triforce.main(
        tmp_path, context="250", budget=64, device="cuda", longest=2, tokens=2, rounds=1, threads=1, json_file=json_file
    )
    report = json.loads(json_file.read_text())
    assert [row["way"] for row in report["rows"]] == ["single tokens", "draft", "middle", "three levels"]
    assert report["rows"][0]["speedup"] == 1
    assert all(row["milliseconds"] > row["rewind_milliseconds"] >= 0 for row in report["rows"])
    assert report["steps"].keys() == levels.keys()


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps({"device": "cpu"}))
    with pytest.raises(typer.BadParameter, match="holds models of other shapes"):
        triforce.main(tmp_path, device="cuda", make=True)
    with pytest.raises(typer.BadParameter, match=r"shapes are llama-1.1b, llama-3.1-8b, .* not small and cpu"):
        triforce.main(tmp_path, shape="small")
