from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from graphopt import cli
from graphopt.artifact.artifact import MODEL
from graphopt.artifact.manifest import MANIFEST
from graphopt.passes.recipe import Recipe, presets


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the command in this process and gives its exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["graphopt", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


@pytest.fixture(scope="module")
def int4_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from graphopt.compile.pipeline import optimize

    optimize(llama_artifact, "int4-rtn", folder := tmp_path_factory.mktemp("cli") / "int4")
    return folder


def test_optimize_reports_passes_checks_and_precision(run, llama_artifact: Path, tmp_path: Path) -> None:
    arguments = ("-r", "rotate-int4-rtn", "-o", tmp_path / "out", "--quality-tokens", 64)
    code, out, _ = run("optimize", llama_artifact, *arguments)
    assert code == 0
    assert all(name in out for name in ("canonicalize", "fold_norms", "rotate", "quantize_weights", "measured", "int8"))
    assert (tmp_path / "out" / MODEL).is_file()


def test_optimize_json_is_the_manifest(run, llama_artifact: Path, tmp_path: Path) -> None:
    code, out, _ = run("optimize", llama_artifact, "-r", "rotate", "-o", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "out" / MANIFEST).read_text())


def test_a_recipe_of_ones_own(run, llama_artifact: Path, tmp_path: Path) -> None:
    code, text, _ = run("recipes", "int4")
    recipe = yaml.safe_load(text)
    assert Recipe.model_validate(recipe).name == "int4"
    recipe["name"] = "mine"
    recipe["steps"][1]["linear"]["group"] = 32
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ("-r", tmp_path / "mine.yaml", "-o", tmp_path / "out", "--quality-tokens", 64, "--json")
    code, out, _ = run("optimize", llama_artifact, *arguments)
    assert code == 0
    assert json.loads(out)["recipe"]["steps"][1]["linear"]["group"] == 32


def test_export_lets_a_plain_onnx_in(run, llama_artifact: Path, tmp_path: Path) -> None:
    code, out, _ = run("export", llama_artifact / MODEL, "-o", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(out)["source"]["kind"] == "onnx"


def test_run_streams_one_prompt_and_lists_several(run, int4_artifact: Path) -> None:
    code, out, _ = run("run", int4_artifact, "--prompt", "def f(x):", "--max-new-tokens", 5)
    assert code == 0
    assert out.startswith("def f(x):")
    assert len(out) > len("def f(x):\n")
    code, text, _ = run("run", int4_artifact, "--prompt", "def f(x):", "--prompt", "import", "--max-new-tokens", 5)
    assert code == 0
    assert "def f(x):" in text
    assert "import" in text
    assert "(length)" in text


def test_run_json_and_seeds(run, int4_artifact: Path) -> None:
    arguments = ("run", int4_artifact, "--prompt", "class", "--max-new-tokens", 8, "--temperature", 1.5, "--json")
    texts = [json.loads(run(*arguments, "--seed", seed)[1])[0]["tokens"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_run_tells_what_drafts_did(run, int4_artifact: Path) -> None:
    options = ("run", int4_artifact, "--prompt", "def f(x):", "--max-new-tokens", 12, "--threads", 1)
    plain = json.loads(run(*options, "--json")[1])
    report = json.loads(run(*options, "--json", "--speculate", "lookup", "--draft-tokens", 3, "--stats")[1])
    assert report["completions"] == plain
    assert report["drafts"]["tokens"] == 11
    assert json.loads(run(*options, "--json", "--speculate", "auto")[1]) == plain
    assert "11 tokens in" in run(*options, "--speculate", "lookup", "--draft-tokens", 3, "--stats")[2]
    code, _, error = run(*options, "--speculate", "nothing")
    assert code == 2
    assert "no drafts 'nothing'" in error


def test_run_on_a_gpu_that_onnxruntime_does_not_know_exits_4(run, int4_artifact: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has the provider")
    code, _, error = run("run", int4_artifact, "--prompt", "a", "--device", "cuda")
    assert code == 4
    assert "has no CUDAExecutionProvider" in error


def test_eval_measures_a_file(run, int4_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text("import os\nprint(os.getcwd())\n" * 10)
    code, out, _ = run("eval", int4_artifact, "--text", tmp_path / "text.py", "--json")
    assert code == 0
    report = json.loads(out)
    # this tokenizer adds no BOS, so the first token, one byte, cannot be scored
    assert report["bytes"] == (tmp_path / "text.py").stat().st_size - 1
    # random weights know nothing: about log2(300) bits per token, and no better than guessing bytes of a small alphabet
    assert 1 < report["bits_per_byte"] < 16
    assert "bits per byte" in run("eval", int4_artifact, "--text", tmp_path / "text.py")[1]


def test_passes_and_recipes_are_listed(run) -> None:
    _, out, _ = run("passes")
    assert "before::" in out
    assert "fold_norms (exact)" in out
    assert {p["effect"] for p in json.loads(run("passes", "--json")[1])} == {"exact", "lossy"}
    assert "rotate-int4-rtn" in run("recipes")[1]
    names = {r["name"] for r in json.loads(run("recipes", "--json")[1])}
    assert names == set(presets())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optimize", "{missing}", "-o", "{out}"), "no ONNX model here"),
        (("optimize", "{model}", "-r", "int5", "-o", "{out}"), "no recipe 'int5'"),
        (("optimize", "{model}", "-r", "{unknown key}", "-o", "{out}"), "sead: Extra inputs are not permitted"),
        (("optimize", "{model}", "-o", "{model}"), "output exists"),
        (("export", "{missing}/nothing.onnx", "-o", "{out}"), "nothing.onnx"),
        (("run", "{model}", "--prompt", ""), "empty"),
        (("run", "{model}", "--prompt", "x", "--keep", "10"), "has no room for the 64 first and the 256 newest"),
        (("run", "{model}", "--prompt", "{long}"), "128 positions"),
        (("run", "{model}", "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("eval", "{model}", "--text", "{missing}"), "cannot be read"),
        (("eval", "{model}", "--text", "{binary}"), "not UTF-8"),
        (("eval", "{model}"), "--held-out"),
        (("eval", "{model}", "--text", "{empty}"), "empty"),
    ],
)
def test_bad_input_exits_2_with_one_line_and_writes_nothing(
    run, llama_artifact: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "bad.yaml").write_text("name: x\nsteps: [{step: rotate, sead: 1}]")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    names = {
        "{missing}": tmp_path / "missing",
        "{out}": tmp_path / "out",
        "{model}": llama_artifact,
        "{unknown key}": tmp_path / "bad.yaml",
        "{long}": "x = 1; " * 200,
        "{binary}": tmp_path / "binary",
        "{empty}": tmp_path / "empty",
    }
    command = [re.sub(r"\{[^}]+\}", lambda match: str(names[match[0]]), argument) for argument in arguments]
    before = sorted(tmp_path.iterdir())
    code, out, err = run(*command)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_refused_check_exits_3(run, llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphopt.passes.algebra.fold_norms import gains

    monkeypatch.setattr(gains, "Scale", lambda matrix, factors, axis: matrix)
    code, _, err = run("optimize", llama_artifact, "-r", "rotate", "-o", tmp_path / "out")
    assert code == 3
    assert "fold_norms is exact" in err
    assert not list(tmp_path.iterdir())


def test_usage_errors_exit_2(run) -> None:
    assert run("optimize")[0] == 2
    assert run("frobnicate")[0] == 2


def test_without_onnxruntime_the_message_names_the_extra(llama_artifact: Path, tmp_path: Path) -> None:
    code = """
import sys
for name in ("onnxruntime", "torch", "transformers"):
    sys.modules[name] = None
import graphopt, graphopt.cli
sys.argv = ["graphopt", "run", sys.argv[1], "--prompt", "x"]
graphopt.cli.main()
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(llama_artifact)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 4
    assert 'pip install "graphopt[cpu]"' in result.stderr


def test_importing_graphopt_brings_neither_torch_nor_transformers_nor_onnxruntime() -> None:
    heavy = "{'torch', 'transformers', 'onnxruntime'}"
    code = f"import graphopt, graphopt.cli, sys; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_bases_says_what_can_be_rotated(run, llama_artifact: Path) -> None:
    code, out, _ = run("bases", llama_artifact)
    assert code == 0
    assert "model.embed_tokens.Gather.output [64]  residual, 5 writer(s), 11 reader(s): for free" in out
    assert "RotaryEmbedding turns each pair" in out
    code, out, _ = run("bases", llama_artifact, "--as-it-is", "--json")
    assert code == 0
    embedding = json.loads(out)[0]
    assert embedding["name"] == "model.embed_tokens.Gather.output"
    assert embedding["verdict"] == "pinned"
    assert embedding["reason"]["code"] == "basis.gain"


def test_inspect_folds_layers_and_takes_a_query(run, llama_artifact: Path) -> None:
    code, out, _ = run("inspect", llama_artifact)
    assert code == 0
    assert "2 layers: (A) x 2" in out
    code, out, _ = run("inspect", llama_artifact, "role:down_proj", "layer:1", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["format"] == "graphopt.trace/1"
    assert [(node["role"], node["layer"]) for node in report["nodes"]] == [("down_proj", 1)]
    code, _, err = run("inspect", llama_artifact, "colour:red")
    assert code == 2
    assert "the keys are op, role" in err


def test_verify_proves_again_and_names_what_is_wrong(run, llama_artifact: Path, tmp_path: Path) -> None:
    assert run("optimize", llama_artifact, "-r", "rotate", "-o", tmp_path / "out", "--no-run")[0] == 0
    code, out, _ = run("verify", llama_artifact, tmp_path / "out")
    assert code == 0
    assert "proved" in out
    assert "measured" in out
    code, out, _ = run("verify", llama_artifact, tmp_path / "out", "--no-run", "--json")
    assert [check["status"] for check in json.loads(out)["checks"]] == ["proved", "proved", "not covered"]
    data = tmp_path / "out" / "model.onnx.data"
    content = bytearray(data.read_bytes())
    content[len(content) // 2 + 2] ^= 64
    data.write_bytes(content)
    code, _, err = run("verify", llama_artifact, tmp_path / "out", "--no-run")
    assert code == 3
    assert "the hash differs" in err
    assert "model.onnx.data" in err


def test_heads_are_measured_and_a_recipe_takes_them(run, llama_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text("def f(x):\n    return [x, x + 1]\n" * 40)
    command = ["heads", llama_artifact, "--text", tmp_path / "text.py", "--windows", 1, "--recent", 16, "--page", 16]
    code, out, _ = run(*command, "-o", tmp_path / "heads.json")
    assert code == 0
    assert all(name in out for name in ("induction", "echo", "kept by", "attention kept"))
    code, out, _ = run(*command, "--json")
    assert json.loads(out) == json.loads((tmp_path / "heads.json").read_text())
    steps = [{"step": "canonicalize"}, {"step": "sparse_kv", "heads": str(tmp_path / "heads.json"), "page": 16}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"name": "mine", "steps": steps}))
    arguments = ("-r", tmp_path / "mine.yaml", "-o", tmp_path / "out", "--quality-tokens", 64, "--json")
    code, out, _ = run("optimize", llama_artifact, *arguments)
    assert code == 0
    # 0.15 of 4 KV heads, rounded up
    (sparse,) = (report for report in json.loads(out)["passes"] if report["name"] == "sparse_kv")
    assert str(sparse["changes"]).count("retrieval") == 1


def test_heads_that_cannot_be_measured_are_refused(run, llama_artifact: Path, tmp_path: Path) -> None:
    assert run("heads", llama_artifact)[0] == 2
    assert run("heads", llama_artifact, "--held-out", "--page", 48)[0] == 2
    code, _, error = run("heads", llama_artifact, "--held-out", "--windows", 1, "-o", tmp_path / "none" / "heads.json")
    assert code == 2
    assert "there is no such folder" in error


def test_shards_are_evaluated_and_assembled(run, llama_artifact: Path, tmp_path: Path) -> None:
    command = ("optimize", llama_artifact, "-r", "rotate-int4-rtn", "-o", tmp_path / "out", "--no-run")
    code, out, _ = run(*command, "--shard", "0/2")
    assert (code, out) == (0, f"shard 0/2 is evaluated: {tmp_path / '.out-work'}\n")
    code, _, err = run("assemble", "-o", tmp_path / "out", "--no-run")
    assert code == 2
    assert "these shards are not done: 1/2" in err
    code, out, _ = run(*command, "--shard", "1/2", "--jobs", "2", "--json")
    assert (code, json.loads(out)) == (0, [{"shard": "1/2", "work": str(tmp_path / ".out-work")}])
    code, out, _ = run("assemble", "-o", tmp_path / "out", "--no-run")
    assert code == 0
    assert f"written: {tmp_path / 'out'}" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_is_no_shard_is_refused(run, llama_artifact: Path, tmp_path: Path) -> None:
    for text, message in (("half", "'half' is no shard"), ("2/2", "there is no shard 2/2: the shards are 0/2 to 1/2")):
        code, _, err = run("optimize", llama_artifact, "-o", tmp_path / "out", "--shard", text)
        assert code == 2
        assert message in err
    assert not list(tmp_path.iterdir())
