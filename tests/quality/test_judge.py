from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphopt
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.pipeline import IN_MEMORY
from graphopt.compile.replay import verify
from graphopt.errors import InputError, VerificationError
from graphopt.graph.diagnostics import Check
from graphopt.quality import judge as judging
from graphopt.quality.compare import ReferenceOutputs
from graphopt.quality.judge import confirm, judge, sentences_of
from graphopt.quality.texts import documentation, held_out_texts
from graphopt.quality.verdict import Requirement, verdict_of


@pytest.fixture(scope="module")
def int4_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "int4"
    graphopt.optimize(llama_artifact, "int4-rtn", folder, quality_tokens=40)
    return folder


def test_the_texts_are_long_enough_and_differ() -> None:
    english, code = held_out_texts()
    assert min(len(english), len(code)) > 50_000
    assert english == documentation() != code
    sentences = sentences_of(english)
    assert len(sentences) == 64 == len(set(sentences))


def test_a_lossy_compile_ends_with_a_verdict_that_verify_leaves_alone(
    llama_artifact: Path, int4_artifact: Path
) -> None:
    check = read_manifest(int4_artifact).check("quality")
    assert check.status == "measured"
    assert check.reason.code == "quality.text"
    assert 0 < check.figures["kl_mean"] < 0.15
    assert check.reason.figures["verdict"] == verdict_of(check.figures)
    assert check.figures["tokens"] <= 40
    assert [entry.status for entry in verify(llama_artifact, int4_artifact).checks if entry.status == "failed"] == []


def test_a_reference_that_runs_beside_the_compilation_says_the_same(
    llama_artifact: Path, int4_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "processors", lambda: 2)
    types: list[object] = []
    compare = judging.compare

    def compare_and_note(reference: Path | ReferenceOutputs, *arguments: Any, **options: Any) -> Any:
        types.append(type(reference))
        return compare(reference, *arguments, **options)

    monkeypatch.setattr(judging, "compare", compare_and_note)
    graphopt.optimize(llama_artifact, "int4-rtn", tmp_path / "out", quality_tokens=40)
    assert types == [ReferenceOutputs]
    figures = [dict(read_manifest(folder).check("quality").figures) for folder in (int4_artifact, tmp_path / "out")]
    assert all(row.pop("seconds") > 0 for row in figures)
    assert figures[0] == figures[1]


def test_no_reference_runs_beside_where_it_cannot(
    llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "processors", lambda: 2)
    for reference in (None, tmp_path / "nothing"):
        with judging.reference_beside(reference) as get_reference:
            assert get_reference is None
    stop_flags: list[Callable[[], bool]] = []
    with monkeypatch.context() as patch:
        patch.setattr(judging, "run_reference", lambda *_, is_stopped, **__: stop_flags.append(is_stopped))
        with judging.reference_beside(llama_artifact) as get_reference:
            assert get_reference is not None
            get_reference()
            assert not stop_flags[0]()
    assert stop_flags[0]()
    monkeypatch.setattr(judging, "available_memory", lambda: 1000)
    with judging.reference_beside(llama_artifact) as get_reference:
        assert get_reference is None


def test_an_exact_compile_has_none(llama_artifact: Path, tmp_path: Path) -> None:
    graphopt.optimize(llama_artifact, "rotate", tmp_path / "out")
    with pytest.raises(LookupError, match="no check quality"):
        read_manifest(tmp_path / "out").check("quality")


def test_why_there_is_no_verdict(llama_artifact: Path, tmp_path: Path) -> None:
    cases = {"asked": {"quality_tokens": 0}, "not_run": {"run": False}}
    for name, options in cases.items():
        graphopt.optimize(llama_artifact, "int4-rtn", tmp_path / name, **options)  # type: ignore[arg-type]
        check = read_manifest(tmp_path / name).check("quality")
        assert (check.status, check.reason.code) == ("not covered", "equivalence.not-asked")
    source = graphopt.read(llama_artifact)
    source.path = None
    graphopt.optimize(source, "int4-rtn", tmp_path / "memory")
    assert read_manifest(tmp_path / "memory").check("quality").reason.code == IN_MEMORY.code
    source = graphopt.read(llama_artifact)
    source.companions = {}
    graphopt.optimize(source, "int4-rtn", tmp_path / "mute")
    check = read_manifest(tmp_path / "mute").check("quality")
    assert check.status == "not covered"
    assert "no tokenizer" in str(check.reason)


def test_what_is_required_decides_whether_anything_is_written(llama_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"kl is .*, not < 1e-09; nothing was written"):
        graphopt.optimize(llama_artifact, "int4-rtn", tmp_path / "out", require="kl<1e-9", quality_tokens=20)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VerificationError, match="cannot be confirmed"):
        graphopt.optimize(llama_artifact, "int4-rtn", tmp_path / "out", require="kl<1", run=False)
    graphopt.optimize(llama_artifact, "int4-rtn", tmp_path / "out", require="kl<1", quality_tokens=20)


def test_a_requirement_needs_an_output(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match="kl<1 is for an artifact that is written"):
        graphopt.optimize(llama_artifact, "int4-rtn", require="kl<1")


def test_a_broken_model_is_refused_unless_forced(llama_artifact: Path, tmp_path: Path) -> None:
    # Another model: its logits are turned upside down, and are large.
    source = graphopt.read(llama_artifact)
    gain = source.model.graph.initializers["model.norm.weight"]
    assert gain.const_value is not None
    gain.const_value = ir.tensor(-1000 * np.asarray(gain.const_value.numpy()), name=gain.name)
    graphopt.artifact.artifact.write(source, tmp_path / "wrong")
    check = judge(llama_artifact, tmp_path / "wrong", "causal_lm", tokens=20)
    assert check.reason.figures["verdict"] == "broken"
    with pytest.raises(VerificationError, match="the model is broken: .*--force"):
        confirm(check, None, force=False)
    confirm(check, None, force=True)
    with pytest.raises(VerificationError, match="kl is"):
        confirm(check, Requirement.parse("kl<0.1"), force=True)


def test_a_model_that_says_nan_is_broken_in_words_that_json_keeps(llama_artifact: Path, tmp_path: Path) -> None:
    source = graphopt.read(llama_artifact)
    gain = source.model.graph.initializers["model.norm.weight"]
    assert gain.const_value is not None
    gain.const_value = ir.tensor(np.full(gain.const_value.shape.numpy(), np.nan, np.float32), name=gain.name)
    graphopt.artifact.artifact.write(source, tmp_path / "nan")
    check = judge(llama_artifact, tmp_path / "nan", "causal_lm", tokens=20)
    assert check.reason.figures["verdict"] == "broken"
    assert "NaN or infinite" in str(Check.model_validate_json(check.model_dump_json()).reason)
    with pytest.raises(VerificationError, match="NaN or infinite"):
        confirm(check, None, force=False)


def test_encoders_are_judged_by_cosines(bert_artifact: Path, tmp_path: Path) -> None:
    graphopt.optimize(bert_artifact, "int4-rtn", tmp_path / "out", require="cosine>0.5")
    check = read_manifest(tmp_path / "out").check("quality")
    assert check.reason.code == "quality.embeddings"
    assert 0.9 < check.figures["cosine_mean"] <= 1
