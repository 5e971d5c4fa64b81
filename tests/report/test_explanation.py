"""Every node leads back to the model as it came in, by the record that it carries and the reports of the passes."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphopt.artifact import artifact
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.graph import provenance
from graphopt.passes import PASSES
from graphopt.report.explanation import explain, explain_model, rewrite_of
from graphopt.util.targets import ChosenTarget
from tests.decoders import decoder


def names_of(graph: ir.Graph) -> set[str]:
    outputs = {value.name or "" for node in graph for value in node.outputs}
    ports = {value.name or "" for value in graph.inputs}
    return outputs | ports | set(graph.initializers) | {node.name or "" for node in graph}


@pytest.mark.parametrize(("preset", "target"), [("w4a8-rtn", "ort-cpu:avx512"), ("fp6-rtn", "ort-cpu:avx512")])
def test_nodes_for_graphopt_s_kernels_have_an_origin_too(
    llama_artifact: Path, preset: str, target: ChosenTarget
) -> None:
    source = artifact.read(llama_artifact).model.graph
    source_names = names_of(source)
    source_nodes = {(node.name, node.op_type) for node in source}
    result = optimize(llama_artifact, preset, run=False, target=target, quality_tokens=0)
    for node in result.model.graph:
        steps, origins = provenance.steps(node), provenance.history(node)[1]
        if not steps:
            assert (node.name, node.op_type) in source_nodes
        else:
            assert origins, node.name
            assert set(origins) <= source_names, node.name


@pytest.fixture(scope="module")
def rotated_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("explained") / "w4a4"
    optimize(llama_artifact, "w4a4-rtn", output, target="ort-cpu:avx512", run=False)
    return output


def test_a_merged_product_leads_back_to_three(rotated_artifact: Path) -> None:
    graph = artifact.read(rotated_artifact).model.graph
    (node,) = [node for node in graph if "layers.1" in (node.name or "") and "q_proj" in (node.name or "")
               and node.op_type == "MatMulDynamic"]  # fmt: skip
    explanation = explain(rotated_artifact, node.name or "")
    assert explanation.node.role == "qkv_proj"
    stages = [edge.stage for edge in explanation.edges]
    assert stages == sorted(stages, key=[stage.stage for stage in explanation.edges].index)
    step_names = ["fold_norms", "rotate", "quantize_weights", "quantize_activations", "merge_products", "lower"]
    assert [name for name in dict.fromkeys(stages) if name in step_names] == step_names
    for letter in "qkv":
        assert any(f"layers.1.self_attn.{letter}_proj" in origin for origin in explanation.origins)
    merges = [edge for edge in explanation.edges if edge.stage == "merge_products"]
    assert max(len(edge.sources) for edge in merges) >= 3
    assert {edge.effect for edge in merges} == {"exact"}
    assert not explanation.as_it_came_in


def test_the_certificate_has_a_word_on_what_was_rotated(rotated_artifact: Path) -> None:
    graph = artifact.read(rotated_artifact).model.graph
    down = next(node.name or "" for node in graph if "down_proj" in (node.name or "") and node.op_type != "Mul")
    explanation = explain(rotated_artifact, down)
    (rotation, *_) = [edge for edge in explanation.edges if edge.stage == "rotate"]
    assert {"certificate"} <= {check.name for check in rotation.checks}
    assert rotation.findings
    assert {finding.status for finding in rotation.findings} == {"proved"}
    assert rotation.seconds is not None
    assert rotation.what


def test_what_no_pass_touched_came_in_so(rotated_artifact: Path) -> None:
    answers = [
        explain(rotated_artifact, node.name or "")
        for node in list(artifact.read(rotated_artifact).model.graph)
        if node.op_type == "Sigmoid"
    ]
    assert [answer.as_it_came_in for answer in answers] == [True, True]
    assert answers[0].origins == [answers[0].node.name]
    assert any(skip.by == "rotate" for skip in answers[0].left)


def test_names_of_weights_and_values_stand_for_nodes() -> None:
    model = decoder(2)
    assert explain_model(model, None, "down1.weight").node.name == "down1"
    assert explain_model(model, None, "present.1.key").node.name == "present_key1"
    assert explain_model(model, None, "down1").call == "down1.out = MatMul(gated1.out, down1.weight)"


def test_a_weight_that_is_gone_stands_for_what_came_of_it(rotated_artifact: Path) -> None:
    explanation = explain(rotated_artifact, "model.layers.1.mlp.down_proj.weight")
    assert explanation.node.role == "down_proj"
    assert explanation.node.layer == 1
    assert "model.layers.1.mlp.down_proj.weight" in explanation.origins


def _named_as_exported() -> ir.Model:
    model = decoder(2)
    for node in model.graph:
        if (node.name or "").startswith("down"):
            node.name = f"model.mlp.down_proj{node.name[-1]}.MatMul"
    return model


def test_an_unknown_name_gets_those_that_are_alike() -> None:
    with pytest.raises(InputError, match="there are down0, down1"):
        explain_model(decoder(2), None, "down")
    with pytest.raises(InputError, match="model.mlp.down_proj0.MatMul"):
        explain_model(_named_as_exported(), None, "dwn_proj")
    with pytest.raises(InputError, match="gate1"):
        explain_model(decoder(2), None, "gatr1")
    with pytest.raises(InputError, match=r"no node, value or weight") as refusal:
        explain_model(decoder(1), None, "[red]\n" * 5000)
    # a question of 30,000 letters is cut, and with what stands around it a message stays readable
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_shows_its_rewrite(name: str) -> None:
    text = rewrite_of(name)
    assert text.startswith("before")
    assert "after" in text
    assert text.splitlines()[-1].startswith("    ")
