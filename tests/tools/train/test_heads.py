"""The tool that trains heads: what it learns, and where it writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from graphopt.artifact.artifact import HEADS, verify_files
from graphopt.compile.pipeline import optimize
from graphopt.inference.decoding.proposers import Heads
from graphopt.inference.decoding.proposers.heads_file import HeadsFile
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.passes.recipe import load_recipe
from tests.families import HIDDEN, VOCABULARY
from tests.native import needs_library
from tools.train import heads as train_heads
from tools.train.heads import Blocks, Texts, accuracies, loss_of


def test_heads_learn_what_follows() -> None:
    """States go round in a circle, one way or the other, which only the token behind a state tells."""
    torch.manual_seed(0)
    circle, lm_head = torch.randn(6, 8), torch.randn(8, 20)
    positions = torch.stack([torch.arange(24) % 6, -torch.arange(24) % 6])
    texts = Texts(positions, circle[positions])
    blocks = Blocks(8, 2, 16, 6, 4)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=0.02)
    before = loss_of(blocks, lm_head, texts).item()
    for _ in range(60):
        loss = loss_of(blocks, lm_head, texts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.7 * before  # seen 0.36
    assert accuracies(blocks, lm_head, texts) == [1.0, 1.0]


@needs_library
def test_heads_are_written_into_an_artifact_and_carried_on(llama_artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_artifact, tmp_path / "float")
    text = tmp_path / "text"
    text.write_text("for number in range(10):\n    print(number, number * 2)\n" * 60, encoding="utf-8")
    app = typer.Typer()
    app.command()(train_heads.main)
    options = ["-o", str(tmp_path / "float"), "--text", str(text), "--minutes", "0.01", "--tokens", "1000"]
    small = ["--window", "80", "--batch", "2", "--heads", "2", "--inner", "16", "--no-bfloat16"]
    result = CliRunner().invoke(app, [str(llama_artifact), *options, *small])
    assert result.exit_code == 0, result.output
    assert "right on held-out text" in result.output
    verify_files(tmp_path / "float")
    heads = HeadsFile.load(tmp_path / "float" / HEADS)
    assert (heads.width, heads.count, heads.vocabulary, len(heads.tokens)) == (HIDDEN, 2, VOCABULARY, 2 * HIDDEN)
    optimize(tmp_path / "float", load_recipe("rotate", add=["expose_hidden"]), tmp_path / "made", quality_tokens=0)
    verify_files(tmp_path / "made")
    session = load(tmp_path / "made", threads=1)
    speculation = Speculation(Heads(session, min_chance=0.0), 2)
    assert generate(session, [[1, 2, 3]], proposer=speculation) == generate(session, [[1, 2, 3]])
    assert speculation.stats.checks["heads", 0] > 5


def test_a_graph_that_cannot_have_heads_is_refused(tmp_path: Path) -> None:
    from graphopt.errors import InputError
    from tests.small_models import counting_model

    with pytest.raises(InputError, match="cannot have heads: no product with a matrix makes the logits"):
        train_heads.open_with_hidden(counting_model(tmp_path), 1)
