"""Models that graphopt did not make open in every command that reads: with less to say, and no crash."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.report.trace import Trace
from graphopt.report.trace_builder import trace
from tests.cached_folders import cached_folder

SIZE, PATCH, CLASSES, WIDTH = 16, 4, 5, 32


def vision_transformer(folder: Path) -> None:
    """Export a small ViT with torch's older exporter, as most vision models on the web are."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=SIZE,
        patch_size=PATCH, num_labels=CLASSES,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ViTForImageClassification(config).eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(pixel_values=pixels).logits
            return logits

    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Logits(), (torch.zeros(1, 3, SIZE, SIZE),), str(folder / "model.onnx"), input_names=["pixels"],
            output_names=["logits"], dynamic_axes={"pixels": {0: "batch"}}, opset_version=17, dynamo=False,
        )  # fmt: skip


def optimized_by_onnxruntime(artifact: Path, folder: Path) -> Path:
    """Let onnxruntime fuse what int4 makes of a model, and save that: its own operators, no metadata."""
    from graphopt.ort.session import open_session

    optimize(artifact, "int4-rtn", folder / "int4", run=False, quality_tokens=0)
    (folder / "fused").mkdir()
    open_session(folder / "int4" / "model.onnx", optimized_to=folder / "fused" / "model.onnx")
    shutil.copy(folder / "int4" / "model.onnx.data", folder / "fused")
    return folder / "fused" / "model.onnx"


@pytest.fixture
def foreign(
    request: pytest.FixtureRequest,
    llama_artifact: Path,
    make_genai: Callable[..., Path],
    tmp_path: Path,
) -> Path:
    if request.param == "vision":
        return cached_folder("vit", ("tests/report/test_foreign.py",), vision_transformer) / "model.onnx"
    if request.param == "onnxruntime":
        return optimized_by_onnxruntime(llama_artifact, tmp_path)
    return make_genai("llama") / "model.onnx"


# What each consists of, by role.
ROLES = {
    "genai": {"attention": 2, "down_proj": 2, "lm_head": 1},
    "onnxruntime": {"attention": 2, "down_proj": 2, "lm_head": 1},
    "vision": {"attention": 3, "down_proj": 3, "conv": 1, "head": 1},
}


@pytest.mark.parametrize(("foreign", "maker"), [(name, name) for name in ROLES], indirect=["foreign"])
def test_every_command_that_reads_opens_it(foreign: Path, maker: str, tmp_path: Path) -> None:
    def run_command(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    model_trace = Trace.model_validate(json.loads(run_command("inspect", foreign, "--json")))
    roles = Counter(node.role for node in model_trace.nodes if node.role == "attention" or node.weights)
    assert {name: roles[name] for name in ROLES[maker]} == ROLES[maker]
    # the first layer may differ: genai adds the residual of all others within their norm
    assert sum(len(fold.layers) for fold in model_trace.folds) == ROLES[maker]["attention"]
    assert "no manifest" in run_command("inspect", foreign, "role:down_proj")
    node = next(candidate for candidate in model_trace.nodes if candidate.role == "down_proj" and candidate.weights)
    assert "no pass of graphopt" in run_command("explain", foreign, node.name)
    assert "equal" in run_command("diff", foreign, foreign)
    run_command("report", foreign, "--before", foreign, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for part in ("verdict", "graph", "size", "diff", "nodes"):
        assert f'id="{part}"' in page
    # what has no recipe cannot be measured product by product, and is refused with the reason
    with pytest.raises(InputError, match="no recipe"):
        run_command("report", foreign, "--before", foreign, "--where", "-o", tmp_path / "page.html")


def test_a_model_is_told_from_what_onnxruntime_made_of_it(llama_artifact: Path, tmp_path: Path) -> None:
    fused_model = optimized_by_onnxruntime(llama_artifact, tmp_path)
    result = CliRunner().invoke(app, ["diff", str(tmp_path / "int4"), str(fused_model), "--json"])
    assert result.exit_code == 1
    difference = json.loads(result.stdout)
    # its record is gone; products are led back by what they are
    assert difference["record"] is False
    pairs = [edge for edge in difference["edges"] if edge["role"] == "down_proj" and edge["before"] and edge["after"]]
    assert len(pairs) == 2
    assert {node.operator for node in trace(fused_model).nodes if node.role == "down_proj"} == {
        "com.microsoft::MatMulNBits"
    }
