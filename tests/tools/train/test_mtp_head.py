"""The tool that trains the layer that predicts one more token: what it writes enters as such a layer."""

from __future__ import annotations

from pathlib import Path

import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from graphopt.models.loading import load
from graphopt.models.mtp_head import load_head
from tests.checkpoints import write_checkpoint
from tools.train import mtp_head


def test_a_layer_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "checkpoint")
    text = tmp_path / "text"
    text.write_text("for number in range(10):\n    print(number, number * 2)\n" * 60, encoding="utf-8")
    app = typer.Typer()
    app.command()(mtp_head.main)
    options = ["--text", str(text), "--minutes", "0.005", "--windows", "2", "--length", "16"]
    result = CliRunner().invoke(app, [str(tmp_path / "checkpoint"), "-o", str(tmp_path / "with"), *options])
    assert result.exit_code == 0, result.output
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint", "with"))
    assert all((after[name] == tensor).all() for name, tensor in before.items())
    names = {name for name in after if name not in before}
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"} <= names
    head = load_head(load(str(tmp_path / "with")), "here")
    assert "mtp.layers.0.mtp_block.self_attn.q_proj.weight" in head.weights
