"""A graph of any kind goes the way of a language model: optimized, checked, run, judged, verified, shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt import cli
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.replay import verify
from graphopt.errors import InputError, VerificationError
from graphopt.inference.profiling import profile
from graphopt.quality.judge import quality_figures
from tests.tasks.graph import graphs


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["graphopt", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    streams = capsys.readouterr()
    return int(end.value.code or 0), streams.out + streams.err


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graphs.picture(tmp_path_factory.mktemp("graph") / "picture.onnx")


@pytest.fixture(scope="module")
def inputs(picture: Path) -> Path:
    file = picture.parent / "pixels.npz"
    np.savez(file, pixels=np.random.default_rng(5).standard_normal((6, 1, 3, 32, 48)).astype(np.float32))
    return file


@pytest.fixture(scope="module")
def int4(picture: Path, inputs: Path) -> Path:
    graphopt.optimize(picture, "int4", picture.parent / "int4", inputs=inputs)
    return picture.parent / "int4"


def test_a_graph_of_an_old_opset_is_raised_and_its_products_quantized(picture: Path, int4: Path, inputs: Path) -> None:
    manifest = read_manifest(int4)
    assert manifest.task == "graph"
    lift = manifest.check("outputs", after="canonicalize")
    # Exact: float32 rounding of one convolution and two products.
    assert (lift.status, lift.figures["largest_change"] < 1e-4) == ("measured", True)
    assert "2 samples of pixels.npz, pixels [1, 3, 32, 48]" in str(lift.reason)
    (report,) = [report for report in manifest.passes if report.name == "quantize_weights"]
    assert {change.what.figures.get("format") for change in report.changes} >= {"uint4"}
    assert [str(skip.reason) for skip in report.skips] == ["Conv with a weight of shape [32, 3, 16, 16], not a matrix"]
    quality = manifest.check("quality")
    # Four bits with GPTQ: errors of a few hundredths on two products in a row.
    assert 0.99 < quality.figures["cosine_mean"] < 1
    assert (quality.figures["samples"], quality.figures["is_random"]) == (6, 0)
    assert "6 samples" in str(quality.reason)
    figures = quality_figures(picture, int4, "graph", inputs=inputs)
    assert figures["cosine_mean"] == quality.figures["cosine_mean"]
    checks = verify(picture, int4).checks
    assert {check.name: check.status for check in checks} == {"replay": "proved", "outputs": "measured"}


def test_statistics_of_random_inputs_are_called_so(picture: Path, tmp_path: Path) -> None:
    artifact = graphopt.optimize(picture, "int4", tmp_path / "random")
    assert "graph.random-statistics" in [note.code for note in artifact.manifest.notes]
    assert "8 draws of random inputs" in str(artifact.manifest.check("quality").reason)
    assert verify(picture, tmp_path / "random").checks[0].status == "proved"


def test_a_branch_stays_as_it_is_with_its_reason(tmp_path: Path) -> None:
    file = graphs.sound(tmp_path / "sound.onnx")
    artifact = graphopt.optimize(file, "w8a8", tmp_path / "out", quality_tokens=0)
    skips = {str(skip.reason) for report in artifact.manifest.passes for skip in report.skips}
    assert "the subgraphs of If hold 2560 weights, and stay as they are" in skips
    assert artifact.manifest.weights is not None
    assert artifact.manifest.weights.parameters > 2560


def test_a_requirement_is_met_or_nothing_is_written(picture: Path, tmp_path: Path) -> None:
    graphopt.optimize(picture, "w8a8", tmp_path / "w8a8", require="cosine>0.999, relative_error<0.05, same_class>0.9")
    with pytest.raises(VerificationError, match=r"cosine is 0\.99\d+, not >= 0\.9999"):
        graphopt.optimize(picture, "small-rtn", tmp_path / "small", require="cosine>=0.9999")
    assert not (tmp_path / "small").exists()


def test_commands_take_a_graph(
    picture: Path, int4: Path, inputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output_file = picture.parent / "outputs.npz"
    code, text = call(capsys, monkeypatch, "run", int4, "--inputs", inputs, "--save", output_file)
    assert (code, "6 samples of pixels.npz" in text) == (0, True)
    with np.load(output_file) as outputs:
        assert (outputs["logits"].shape, outputs["label"].shape) == ((6, 1, 10), (6, 1))
        assert np.array_equal(outputs["logits"].argmax(-1), outputs["label"])
    code, text = call(capsys, monkeypatch, "run", picture, "--json")
    assert (code, len(json.loads(text)[0]["label"])) == (0, 2)
    code, text = call(capsys, monkeypatch, "quality", picture, int4, "--inputs", inputs)
    assert (code, "cosine" in text and "same class" in text) == (0, True)
    code, text = call(capsys, monkeypatch, "verify", picture, int4, "--inputs", inputs)
    assert (code, "proved" in text) == (0, True)
    for command in (["inspect", int4], ["diff", picture, int4], ["report", int4, "-o", picture.parent / "page.html"]):
        code, text = call(capsys, monkeypatch, *command)
        assert code == (command[0] == "diff"), text  # as diff(1): 1 where files differ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "{int4}", "--prompt", "a"], "a graph reads arrays, and no texts.*--inputs"),
        (["run", "{int4}", "--top-k", "3"], "a graph generates nothing"),
        (["eval", "{int4}", "--held-out"], "graphopt quality BEFORE AFTER"),
        (["run", "{int4}", "--inputs", "none.npz"], "there are no inputs here"),
    ],
)
def test_what_a_graph_cannot_do_is_said(
    int4: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import re

    code, text = call(capsys, monkeypatch, *(argument.format(int4=int4) for argument in arguments))
    assert code == 2
    assert re.search(message, text.replace("\n", " ")), text


def test_a_language_model_takes_no_arrays(llama_artifact: Path, inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a causal language model reads texts, and no arrays"):
        graphopt.optimize(llama_artifact, "int4-rtn", tmp_path / "out", inputs=inputs)


def test_a_profile_counts_a_branch_once(tmp_path: Path) -> None:
    file = graphs.sound(tmp_path / "sound.onnx")
    measurement = profile(file, repeats=3, threads=1)
    assert measurement.token is None
    assert measurement.prompt.tokens == 0
    branch = next(name for name, kernels in measurement.prompt.kernels.items() if kernels == ["If"])
    assert measurement.prompt.nodes[branch] > 0
    assert not any("LSTM" in kernels for kernels in measurement.prompt.kernels.values())
    total = sum(measurement.prompt.nodes.values()) + measurement.prompt.between
    assert total == pytest.approx(measurement.prompt.seconds, rel=0.05)
