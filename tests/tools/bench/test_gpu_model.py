"""The benchmark of whole models: graphs without weights, weights drawn for them, the builder's caches, what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import typer
from onnx import TensorProto, helper, numpy_helper

import graphopt
from graphopt.artifact.artifact import DATA, MODEL
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.errors import InputError
from graphopt.inference.profiling.events import Event
from graphopt.ort.session import import_onnxruntime
from tests.contrib_graphs import FLOAT32, VOCABULARY, Layer, group_query_model, tokens
from tools.bench import gpu_model
from tools.bench.gpu_model import Model, Work
from tools.bench.parts import large_graphs
from tools.bench.parts.drawn_weights import DrawnWeight, drawn_numbers, fill_external_data, missing_files, use_of
from tools.bench.parts.large_graphs import with_layers, write_graph
from tools.bench.parts.shared_buffer import SharedBufferDecoder, SharedBufferModel


@pytest.fixture
def graph_folder(random_artifact: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The graph of int4-rtn in float16 with caches that grow, without its weights."""
    monkeypatch.setattr(large_graphs, "make_artifact", lambda _config, _folder: random_artifact)
    write_graph({}, "int4-rtn", tmp_path / "graph", caches="growing", target="ort-cpu")
    return tmp_path / "graph"


def test_the_graph_is_the_one_that_optimize_writes(graph_folder: Path, random_artifact: Any, tmp_path: Path) -> None:
    recipe = graphopt.load_recipe("int4-rtn").adding("lower").setting("lower", caches="growing")
    graphopt.optimize(
        random_artifact, recipe, tmp_path / "whole", target="ort-cpu", float16=True, last_logits=1, run=False
    )
    random_graph, whole = (ir.load(folder / MODEL).graph for folder in (graph_folder, tmp_path / "whole"))

    def content(graph: ir.Graph) -> list[Any]:
        nodes = [
            (node.op_type, [value and value.name for value in node.inputs], str(node.attributes)) for node in graph
        ]
        weights = [(name, value.dtype, str(value.shape)) for name, value in graph.initializers.items()]
        return [nodes, sorted(weights, key=str)]

    assert content(random_graph) == content(whole)
    assert any(node.op_type == "MatMulTable" for node in random_graph)


def test_files_of_weights_are_drawn_once_and_the_model_runs(graph_folder: Path, tmp_path: Path) -> None:
    assert not (graph_folder / DATA).exists()
    assert list(missing_files(graph_folder / MODEL)) == [graph_folder / DATA]
    byte_count = fill_external_data(graph_folder / MODEL, threads=2)
    assert byte_count == (graph_folder / DATA).stat().st_size > 0
    before = (graph_folder / DATA).read_bytes()
    assert fill_external_data(graph_folder / MODEL) == 0  # they stay
    (graph_folder / DATA).unlink()
    fill_external_data(graph_folder / MODEL)
    assert (graph_folder / DATA).read_bytes() == before  # any run draws the same
    json_file = tmp_path / "figures.json"
    gpu_model.main(
        [graph_folder, graph_folder], device="cpu", context=5, tokens=2, prompt=7, rounds=2, json_file=json_file
    )
    first, second = json.loads(json_file.read_text())["rows"]
    for name in ("decode 1", "decode 8", "prompt"):
        assert len(first[name]["seconds"]) == 2
        assert first[name]["ratio"] == 1
        assert second[name]["ratio"] > 0
    model = gpu_model.open_model(graph_folder, "cpu")
    logits = model.start(2, 9)(model.tokens(2, 9))
    assert logits.shape == (2, 1, model.vocabulary)
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def test_codes_are_below_the_levels_of_their_table_and_rows_differ() -> None:
    weight = DrawnWeight("w", "codes", ir.DataType.UINT8, (300, 200), 64, 1.0)
    whole = weight.numpy()
    assert whole.max() == 63
    assert whole.min() == 0
    assert np.array_equal(weight.evaluate((slice(7, 299), slice(3, 50))), whole[7:299, 3:50])
    assert np.mean(whole[0] == whole[1]) < 0.1  # one in 64 is equal by chance
    scales = drawn_numbers("scales", ir.DataType.FLOAT16, None, 4.6).astype(np.float32)
    # uniform between half and one and a half times the deviation of a weight over that of codes, as float16
    assert scales.min() > 0.99 * 0.01 / 4.6
    assert scales.max() < 1.01 * 0.03 / 4.6


def test_a_weight_of_an_unknown_reader_is_refused() -> None:
    weight = ir.val("w", ir.DataType.FLOAT, [4])
    ir.node("Erf", [weight])
    with pytest.raises(InputError, match=r"that Erf\[0\] reads.*w"):
        use_of(weight)


def _builder_like(weights: list[np.ndarray]) -> onnx.ModelProto:
    """Return a graph with names of the builder's: a layer multiplies and adds its cache, the end is a norm's place."""
    nodes = [helper.make_node("Identity", ["input_ids"], ["/model/embed/output_0"], name="/model/embed")]
    last, inputs, outputs = "/model/embed/output_0", [("input_ids", [2, 3])], []
    for layer in range(len(weights)):
        node_name = f"/model/layers.{layer}/attn/MatMul"
        nodes.append(
            helper.make_node(
                "MatMul", [last, f"model.layers.{layer}.weight"], [f"{node_name}/output_0"], name=node_name
            )
        )
        present = f"present.{layer}.key"
        nodes.append(helper.make_node("Add", [f"{node_name}/output_0", f"past_key_values.{layer}.key"], [present]))
        last = present
        inputs.append((f"past_key_values.{layer}.key", [2, 3]))
        outputs.append((present, [2, 3]))
    end = f"/model/layers.{len(weights)}/final_norm/output_0"
    nodes.append(helper.make_node("Neg", [last], [end], name=f"/model/layers.{len(weights)}/final_norm"))
    nodes.append(helper.make_node("Identity", [end], ["logits"], name="/lm_head"))
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in side] for side in (inputs, outputs)]
    initializers = [numpy_helper.from_array(w, f"model.layers.{n}.weight") for n, w in enumerate(weights)]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 3])
    graph = helper.make_graph(nodes, "built", ports[0], [logits, *ports[1]], initializer=initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def test_further_layers_are_copies_of_the_last() -> None:
    random = np.random.default_rng(0)
    weights = [random.normal(size=(3, 3)).astype(np.float32) for _ in range(2)]
    model = with_layers(_builder_like(weights), 5)
    session = import_onnxruntime().InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {v.name: random.normal(size=(2, 3)).astype(np.float32) for v in session.get_inputs()}
    assert list(feeds) == ["input_ids", *(f"past_key_values.{n}.key" for n in range(5))]
    assert [v.name for v in session.get_outputs()] == ["logits", *(f"present.{n}.key" for n in range(5))]
    x = feeds["input_ids"].astype(np.float64)
    for number in range(5):
        x = x @ weights[min(number, 1)] + feeds[f"past_key_values.{number}.key"]
    # five products of three float32 numbers each
    assert np.allclose(session.run(["logits"], feeds)[0], -x, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="the graph has 2 layers, and 1 were asked for"):
        with_layers(_builder_like(weights), 1)


def test_copies_of_stored_weights_have_places_of_their_own() -> None:
    model = _builder_like([np.ones((3, 3), np.float32)] * 2)
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "elsewhere"), ("offset", "64"), ("length", "36")):
            tensor.external_data.add(key=key, value=value)
    locations = [
        {entry.key: entry.value for entry in tensor.external_data} for tensor in with_layers(model, 3).graph.initializer
    ]
    assert locations == [{"location": DATA, "offset": str(4096 * n), "length": "36"} for n in range(3)]


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A folder as the builder writes it, of one layer."""
    onnx.save(ir.to_proto(group_query_model(Layer())), tmp_path / MODEL)
    decoder = {"head_size": Layer().size, "session_options": {"log_id": "genai", "session.inter_op": "1"}}
    (tmp_path / GENAI_CONFIG).write_text(json.dumps({"model": {"decoder": decoder}}))
    return tmp_path


def test_shared_buffers_give_what_growing_caches_give(peer: Path) -> None:
    assert gpu_model.is_of_builder(peer)
    model = SharedBufferModel(peer, "cpu", entries={})
    assert model.vocabulary == VOCABULARY
    calls, masks = tokens(3, 5, 1, 1)
    decoder = SharedBufferDecoder(model, 3, room=7)
    past = [np.zeros((3, Layer().groups, 0, Layer().size), np.float32)] * 2
    for ids, mask in zip(calls, masks, strict=True):
        feeds = {"input_ids": ids, "attention_mask": mask}
        feeds |= {f"past_key_values.0.{part}": array for part, array in zip(("key", "value"), past, strict=True)}
        expected, *past = model.inference.run(["logits", "present.0.key", "present.0.value"], feeds)
        assert np.abs(decoder.step(ids) - expected).max() < FLOAT32 * np.abs(expected).max()
    with pytest.raises(ValueError, match="8 tokens do not fit in buffers for 7"):
        decoder.step(calls[1])


def test_a_profile_tells_kinds_of_nodes(peer: Path) -> None:
    kinds_of_work = gpu_model.profile_of(peer, "cpu", Work((1,), 4, 3, 6))
    for part in ("decode 1", "prompt"):
        kinds = {kind["operator"]: kind for kind in kinds_of_work[part]}
        assert kinds["GroupQueryAttention"]["nodes"] == 1
        assert kinds["GroupQueryAttention"]["provider"] == "CPU"
        assert abs(sum(kind["share"] for kind in kinds_of_work[part]) - 1) < 1e-9


def test_kinds_are_means_of_the_runs_and_what_no_node_took_is_told() -> None:
    run_of = [
        Event("a", "MatMul", "CUDAExecutionProvider", 0, 10),
        Event("b", "MatMul", "CUDAExecutionProvider", 10, 20),
        Event("c", "Gather", "CPUExecutionProvider", 30, 4),
    ]
    kinds = gpu_model.by_kind([run_of, run_of], [40, 48])
    assert [(k["operator"], k["provider"], k["nodes"], k["microseconds"]) for k in kinds] == [
        ("MatMul", "CUDA", 2, 30),
        ("between nodes", "", 0.5, 10),
        ("Gather", "CPU", 1, 4),
    ]


def test_ratios_are_of_the_same_round_and_failures_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work((2,), 4, 3, 6)

    def model(name: str, **settings: Any) -> Model:
        return Model(name, None, 1, gpu_model._cannot_start, **settings)

    models = [
        model("a", seconds={"decode 2": [1.0, 2.0, 4.0], "prompt": [3.0]}),
        model("b", seconds={"decode 2": [0.5, 1.0, 1.0]}, failures={"prompt": "no kernel"}, memory=3 * 10**9),
    ]
    first, second = gpu_model.rows_of(models, work)
    assert first["decode 2"]["tokens_per_second"] == 1
    assert first["prompt"]["tokens_per_second"] == 2
    assert second["decode 2"]["ratio"] == 2
    assert "prompt" not in second
    folder = tmp_path / "missing"
    folder.mkdir()
    (folder / MODEL).write_bytes(ir.to_proto(group_query_model(Layer())).SerializeToString())
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(typer.Exit):
        gpu_model.main([folder], device="cpu", rounds=1)
    assert "missing, decode 1: " in capsys.readouterr().err


def test_a_graph_is_made_of_a_recipe_or_by_the_builder(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="a recipe .* or what the builder makes"):
        gpu_model.make(tmp_path, "llama-3.1-8b", None, None)
