"""Time is told by the nodes of the file: fused, inlined or as they are; a slow detour that was planted is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from graphopt.artifact import artifact
from graphopt.cli import app
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.profiling import Profile, Run, profile
from graphopt.inference.profiling.events import origins, read_events
from graphopt.report.page import report
from graphopt.report.times import OUTSIDE, by_pass, duration, rows, summary_lines, times_table
from graphopt.report.trace_builder import trace

DETOUR = "model.layers.1.mlp.detour"


@pytest.fixture(scope="module")
def detour_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that multiplies by two large matrices in one layer, for nothing."""
    source = artifact.read(llama_artifact)
    model = source.model
    (gate,) = [node for node in model.graph if node.name == "model.layers.1.mlp.gate_proj.MatMul"]
    width = gate.inputs[1].const_value.shape[1]
    random = np.random.default_rng(0)
    value, nodes = gate.outputs[0], []
    uses = list(value.uses())
    for number, shape in enumerate(((width, 8192), (8192, width))):
        matrix = ir.val(f"detour{number}", const_value=ir.tensor(random.standard_normal(shape).astype(np.float32)))
        model.graph.register_initializer(matrix)
        nodes.append(ir.node("MatMul", [value, matrix], name=f"{DETOUR}{number}"))
        value = nodes[-1].outputs[0]
        value.name, value.dtype = f"{DETOUR}{number}.out", ir.DataType.FLOAT
    model.graph.insert_after(gate, nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, value)
    folder = tmp_path_factory.mktemp("profiled") / "detoured"
    artifact.write(source, folder)
    return folder


@pytest.fixture(scope="module")
def detour_profile(detour_artifact: Path) -> Profile:
    return profile(detour_artifact, prompt=64, tokens=9, repeats=5, threads=1)


def test_a_planted_detour_is_the_slowest(detour_profile: Profile, detour_artifact: Path) -> None:
    for run in (detour_profile.prompt, detour_profile.token):
        assert run is not None
        # medians of several runs: other programs on this machine do not disturb one node in most of them
        slowest = max(run.nodes, key=run.nodes.__getitem__)
        assert slowest.startswith(DETOUR)
        assert run.kernels[slowest] == ["MatMul"]
    trace_of_model = trace(detour_artifact)
    first = next(row for row in rows(trace_of_model, detour_profile.prompt) if row.role != OUTSIDE)
    assert first.worst[1].startswith(DETOUR)


def test_shares_add_up_to_the_whole(detour_profile: Profile, detour_artifact: Path) -> None:
    trace_of_model = trace(detour_artifact)
    for run in (detour_profile.prompt, detour_profile.token):
        assert run is not None
        assert sum(run.nodes.values()) + run.between == pytest.approx(run.seconds, rel=0.05)
        assert sum(row.seconds for row in rows(trace_of_model, run)) == pytest.approx(run.seconds, rel=0.05)
        assert sum(seconds for _, seconds in by_pass(trace_of_model, run)) == pytest.approx(sum(run.nodes.values()))
    assert detour_profile.bandwidth > 1e8


@pytest.mark.parametrize(("preset", "target"), [("int4-rtn", None), ("w4a4-rtn", None), ("rotate-kv4-rtn", None)])
def test_what_onnxruntime_runs_leads_back_to_the_file(
    llama_artifact: Path, tmp_path: Path, preset: str, target: str | None
) -> None:
    optimize(llama_artifact, preset, tmp_path / "made", run=False)
    measurements = profile(tmp_path / "made", prompt=16, tokens=3, repeats=2, threads=1)
    nodes = {node.name for node in artifact.read(tmp_path / "made").model.graph}
    for run in (measurements.prompt, measurements.token):
        assert run is not None
        foreign_nodes = {name for name in run.nodes if name not in nodes}
        assert not foreign_nodes, foreign_nodes
    # products are told by themselves, not by what reads them
    assert measurements.token is not None
    products = {name for name in measurements.token.nodes if name.endswith("_proj.MatMul")}
    assert len(products) == 14


def test_a_fused_node_stands_for_the_last_of_its_nodes() -> None:
    def node(kind: str, inputs: list[ir.Value], name: str, output: str) -> ir.Node:
        new_node = ir.node(kind, inputs, name=name)
        new_node.outputs[0].name = output
        return new_node

    x = ir.val("x", ir.DataType.FLOAT, [1])
    first = node("Sigmoid", [x], "sigmoid", "s")
    last = node("Mul", [x, first.outputs[0]], "mul", "m")
    end = node("Relu", [last.outputs[0]], "relu", "y")
    file = ir.Graph([x], end.outputs, nodes=[first, last, end], name="file")
    body_input = ir.val("x", ir.DataType.FLOAT, [1])
    inner = node("Abs", [body_input], "_inlined_abs", "_inlined_value")
    fusion = node("QuickGelu", [inner.outputs[0]], "fused", "m")
    relu = node("Relu", [fusion.outputs[0]], "relu", "y")
    run_graph = ir.Graph([body_input], relu.outputs, nodes=[inner, fusion, relu], name="ran")
    assert origins(file, run_graph) == {"relu": "relu", "fused": "mul", "_inlined_abs": "mul"}


def test_a_body_whose_last_node_is_gone_stands_for_what_its_reader_reads() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [1])
    product = ir.node("MatMulTable", [x], domain="ai.graphopt", name="product")
    product.outputs[0].name = "p"
    add = ir.node("Add", [x, product.outputs[0]], name="add")
    add.outputs[0].name = "y"
    file = ir.Graph([x], add.outputs, nodes=[product, add], name="file")
    body_input = ir.val("x", ir.DataType.FLOAT, [1])
    inner = ir.node("MatMul", [body_input, body_input], name="_inlined_MatMul")
    inner.outputs[0].name = "_inlined_1"
    reader = ir.node("Add", [body_input, inner.outputs[0]], name="add")
    reader.outputs[0].name = "y"
    run_graph = ir.Graph([body_input], reader.outputs, nodes=[inner, reader], name="ran")
    assert origins(file, run_graph) == {"add": "add", "_inlined_MatMul": "product"}


@pytest.mark.parametrize("content", ["", "{}", '[{"cat": "Node", "name": 5}]', '[{"cat": "Session"}]'])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "profile.json").write_text(content)
    with pytest.raises(InputError, match="cannot be read|holds no run"):
        read_events(tmp_path / "profile.json")


def test_a_prompt_that_is_too_long_is_refused(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match="positions"):
        profile(llama_artifact, prompt=100_000)


def test_the_command_and_the_page(detour_artifact: Path, tmp_path: Path) -> None:
    options = ["--prompt-tokens", "8", "--tokens", "2", "--threads", "1", "--perfetto", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(app, ["profile", str(detour_artifact), *options, "--json"])
    assert result.exit_code == 0
    measurements = Profile.model_validate(json.loads(result.stdout))
    assert any(event.get("cat") == "Node" for event in json.loads((tmp_path / "trace.json").read_text()))
    result = CliRunner().invoke(app, ["profile", str(detour_artifact), *options])
    assert "tokens/s" in result.stdout
    page = report(trace(detour_artifact), None, None, None, measurements)
    assert 'id="time"' in page
    assert DETOUR in page
    result = CliRunner().invoke(app, ["explain", str(detour_artifact), f"{DETOUR}0", "--time"])
    assert "of one token, run as MatMul" in result.stdout


def test_hostile_names_of_kernels_are_text(detour_artifact: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    run = Run(tokens=1, runs=1, seconds=1, profiled=1, nodes={name: 0.5}, kernels={name: [name]}, between=0.5)
    measurements = Profile(model=name, threads=1, bandwidth=1e9, prompt=run)
    trace_of_model = trace(detour_artifact)
    assert "<img" not in report(trace_of_model, None, None, None, measurements)
    assert len(times_table(trace_of_model, run, 1e9).rows) == 2
    assert all("\n" not in line for line in summary_lines(trace_of_model, measurements))


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 us"), (0, "0")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
