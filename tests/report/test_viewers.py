from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.compile.pipeline import optimize
from graphopt.report.trace_builder import trace_of
from graphopt.report.viewers import GRAPH, graph
from tests.decoders import decoder


def test_ids_are_unique_and_edges_lead_to_them() -> None:
    model = decoder(2)
    for node in list(model.graph)[-3:]:
        node.name = ""
    (description,) = graph(trace_of(model, None, "m"))["graphs"]
    ids = [node["id"] for node in description["nodes"]]
    assert len(set(ids)) == len(ids) == len(list(model.graph))
    assert all(edge["sourceNodeId"] in ids for node in description["nodes"] for edge in node["incomingEdges"])
    (down,) = [node for node in description["nodes"] if node["id"] == "down1"]
    assert down["namespace"] == "layer 1"
    assert [edge["sourceNodeId"] for edge in down["incomingEdges"]] == ["gated1"]
    assert {"key": "operator", "value": "MatMul"} in down["attrs"]
    assert all(isinstance(attribute["value"], str) for node in description["nodes"] for attribute in node["attrs"])


def test_the_command_writes_graph_figures_and_mapping(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "rotate-int4-rtn", tmp_path / "made", run=False, quality_tokens=0)
    options = ["--before", str(llama_artifact), "--model-explorer", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["view", str(tmp_path / "made"), *options])
    assert result.exit_code == 0, result.output
    files = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert set(files) == {"graph", "figures", "before", "mapping"}
    ids = {name: {node["id"] for node in files[name]["graphs"][0]["nodes"]} for name in ("before", "graph")}
    assert set(files["figures"][GRAPH]["results"]) <= ids["graph"]
    mapping = files["mapping"]["mapping"]
    assert set(mapping) <= ids["before"]
    assert set(mapping.values()) <= ids["graph"]
    assert any("down_proj" in old and "down_proj" in new for old, new in mapping.items())
