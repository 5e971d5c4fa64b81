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
def detoured(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that multiplies by two large matrices in one layer, for nothing."""
    made = artifact.read(llama_artifact)
    model = made.model
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
    artifact.write(made, folder)
    return folder


@pytest.fixture(scope="module")
def found(detoured: Path) -> Profile:
    return profile(detoured, prompt=64, tokens=9, repeats=5, threads=1)


def test_a_planted_detour_is_the_slowest(found: Profile, detoured: Path) -> None:
    for run in (found.prompt, found.token):
        assert run is not None
        # medians of several runs: other programs on this machine do not disturb one node in most of them
        slowest = max(run.nodes, key=run.nodes.__getitem__)
        assert slowest.startswith(DETOUR)
        assert run.kernels[slowest] == ["MatMul"]
    traced = trace(detoured)
    first = next(row for row in rows(traced, found.prompt) if row.role != OUTSIDE)
    assert first.worst[1].startswith(DETOUR)


def test_shares_add_up_to_the_whole(found: Profile, detoured: Path) -> None:
    traced = trace(detoured)
    for run in (found.prompt, found.token):
        assert run is not None
        assert sum(run.nodes.values()) + run.between == pytest.approx(run.seconds, rel=0.05)
        assert sum(row.seconds for row in rows(traced, run)) == pytest.approx(run.seconds, rel=0.05)
        assert sum(seconds for _, seconds in by_pass(traced, run)) == pytest.approx(sum(run.nodes.values()))
    assert found.bandwidth > 1e8


@pytest.mark.parametrize(("preset", "target"), [("int4-rtn", None), ("w4a4-rtn", None), ("rotate-kv4-rtn", None)])
def test_what_onnxruntime_runs_leads_back_to_the_file(
    llama_artifact: Path, tmp_path: Path, preset: str, target: str | None
) -> None:
    optimize(llama_artifact, preset, tmp_path / "made", run=False)
    found = profile(tmp_path / "made", prompt=16, tokens=3, repeats=2, threads=1)
    nodes = {node.name for node in artifact.read(tmp_path / "made").model.graph}
    for run in (found.prompt, found.token):
        assert run is not None
        lost = {name for name in run.nodes if name not in nodes}
        assert not lost, lost
    # products are told by themselves, not by what reads them
    assert found.token is not None
    products = {name for name in found.token.nodes if name.endswith("_proj.MatMul")}
    assert len(products) == 14


def test_a_fused_node_stands_for_the_last_of_its_nodes() -> None:
    def node(kind: str, inputs: list[ir.Value], name: str, output: str) -> ir.Node:
        made = ir.node(kind, inputs, name=name)
        made.outputs[0].name = output
        return made

    x = ir.val("x", ir.DataType.FLOAT, [1])
    first = node("Sigmoid", [x], "sigmoid", "s")
    last = node("Mul", [x, first.outputs[0]], "mul", "m")
    end = node("Relu", [last.outputs[0]], "relu", "y")
    file = ir.Graph([x], end.outputs, nodes=[first, last, end], name="file")
    other = ir.val("x", ir.DataType.FLOAT, [1])
    inner = node("Abs", [other], "_inlined_abs", "_inlined_value")
    fused = node("QuickGelu", [inner.outputs[0]], "fused", "m")
    relu = node("Relu", [fused.outputs[0]], "relu", "y")
    ran = ir.Graph([other], relu.outputs, nodes=[inner, fused, relu], name="ran")
    assert origins(file, ran) == {"relu": "relu", "fused": "mul", "_inlined_abs": "mul"}


def test_a_body_whose_last_node_is_gone_stands_for_what_its_reader_reads() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [1])
    ours = ir.node("MatMulTable", [x], domain="ai.graphopt", name="product")
    ours.outputs[0].name = "p"
    add = ir.node("Add", [x, ours.outputs[0]], name="add")
    add.outputs[0].name = "y"
    file = ir.Graph([x], add.outputs, nodes=[ours, add], name="file")
    other = ir.val("x", ir.DataType.FLOAT, [1])
    inner = ir.node("MatMul", [other, other], name="_inlined_MatMul")
    inner.outputs[0].name = "_inlined_1"
    reader = ir.node("Add", [other, inner.outputs[0]], name="add")
    reader.outputs[0].name = "y"
    ran = ir.Graph([other], reader.outputs, nodes=[inner, reader], name="ran")
    assert origins(file, ran) == {"add": "add", "_inlined_MatMul": "product"}


@pytest.mark.parametrize("content", ["", "{}", '[{"cat": "Node", "name": 5}]', '[{"cat": "Session"}]'])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "profile.json").write_text(content)
    with pytest.raises(InputError, match="cannot be read|holds no run"):
        read_events(tmp_path / "profile.json")


def test_a_prompt_that_is_too_long_is_refused(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match="positions"):
        profile(llama_artifact, prompt=100_000)


def test_the_command_and_the_page(detoured: Path, tmp_path: Path) -> None:
    options = ["--prompt-tokens", "8", "--tokens", "2", "--threads", "1", "--perfetto", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(app, ["profile", str(detoured), *options, "--json"])
    assert result.exit_code == 0
    found = Profile.model_validate(json.loads(result.stdout))
    assert any(event.get("cat") == "Node" for event in json.loads((tmp_path / "trace.json").read_text()))
    result = CliRunner().invoke(app, ["profile", str(detoured), *options])
    assert "tokens/s" in result.stdout
    page = report(trace(detoured), None, None, None, found)
    assert 'id="time"' in page
    assert DETOUR in page
    result = CliRunner().invoke(app, ["explain", str(detoured), f"{DETOUR}0", "--time"])
    assert "of one token, run as MatMul" in result.stdout


def test_hostile_names_of_kernels_are_text(detoured: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    run = Run(tokens=1, runs=1, seconds=1, profiled=1, nodes={name: 0.5}, kernels={name: [name]}, between=0.5)
    found = Profile(model=name, threads=1, bandwidth=1e9, prompt=run)
    traced = trace(detoured)
    assert "<img" not in report(traced, None, None, None, found)
    assert len(times_table(traced, run, 1e9).rows) == 2
    assert all("\n" not in line for line in summary_lines(traced, found))


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 us"), (0, "0")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
