"""``graphopt run`` and ``graphopt eval`` on an encoder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from graphopt import cli


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["graphopt", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_run_prints_cosines_and_json_has_the_embeddings(
    bert_artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ("--prompt", "import os", "--prompt", "class Stack:")
    code, out, _ = call(monkeypatch, capsys, "run", bert_artifact, *prompts)
    assert code == 0
    assert out.count("1.0000") == 2
    code, out, _ = call(monkeypatch, capsys, "run", bert_artifact, *prompts, "--json")
    first, second = json.loads(out)
    assert (code, len(first["embedding"]), first["text"]) == (0, 64, "import os")
    assert first["cosines"][1] == pytest.approx(second["cosines"][0])
    assert -1 <= first["cosines"][1] < 0.999
    code, _, err = call(monkeypatch, capsys, "run", bert_artifact, *prompts, "--top-k", 3)
    assert (code, "an encoder generates nothing" in err) == (2, True)


def test_eval_compares_with_a_reference(
    bert_artifact: Path,
    llama_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\nclass Stack:\n\nimport os\n")
    against = ("--reference", bert_artifact, "--text", text)
    code, out, _ = call(monkeypatch, capsys, "eval", bert_artifact, *against, "--json")
    report = json.loads(out)
    assert (code, report["texts"], report["cut"]) == (0, 2, 0)
    assert report["cosine_smallest"] == pytest.approx(1, abs=1e-12)
    code, out, _ = call(monkeypatch, capsys, "eval", bert_artifact, *against)
    assert (code, "1.000000" in out) == (0, True)
    for arguments, message in (
        ((bert_artifact, "--text", text), "no reference was given"),
        ((bert_artifact, *against, "--window", 8), "an encoder reads no windows"),
        ((llama_artifact, *against), "--reference is for encoders"),
        ((bert_artifact, "--reference", llama_artifact, "--text", text), "makes no embeddings"),
    ):
        code, _, err = call(monkeypatch, capsys, "eval", *arguments)
        assert (code, message in err) == (2, True), err


def test_a_step_for_caches_is_refused_by_its_name(
    bert_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe, step in (("kv4", "quantize_kv"), ("streaming", "sparse_kv"), ("retrieval", "sparse_kv")):
        code, _, err = call(monkeypatch, capsys, "optimize", bert_artifact, "-r", recipe, "-o", tmp_path / "made")
        message = " ".join(err.replace("│", " ").split())
        assert (code, f"the step {step} of the recipe {recipe} is for a cache of keys and values" in message) == (
            2,
            True,
        )
        assert not (tmp_path / "made").exists()


def test_sizes_of_files_are_texts(
    bert_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made"
    code, _, _ = call(monkeypatch, capsys, "export", bert_artifact, "-o", output, "--part-size", "20kB")
    sizes = {file.name: file.stat().st_size for file in output.iterdir() if file.name.startswith("model.onnx.data")}
    assert (code, len(sizes) > 2, "model.onnx.data.2" in sizes) == (0, True, True)
    for size in ("2 parsecs", "0", "-1GB"):
        code, _, err = call(monkeypatch, capsys, "export", bert_artifact, "-o", tmp_path / "no", "--part-size", size)
        assert (code, "write it as 2GB, 512MiB or 4096" in " ".join(err.replace("│", " ").split())) == (2, True)
