"""Encoder-decoders of random weights, end to end: one artifact of two graphs, optimized, run, compared, verified."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.analysis.structure.ports import is_cross_port
from graphopt.artifact import artifact
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.replay import verify
from graphopt.compile.shards import evaluate_shard
from graphopt.errors import InputError, VerificationError
from graphopt.inference.decoding.continuation import Settings
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.seq2seq import Seq2SeqSession, SourceDecoder, complete
from graphopt.passes.recipe import load_recipe
from graphopt.quality.seq2seq import text_agreement
from tests.cli.test_embeddings import call

TEXTS = ["import os", "def read_lines(path): return open(path).read()", "class Stack:"]
GREEDY = Settings(12)
# Float32, run in another order of sums: seen 4e-6 of the largest for T5, whose scores have no factor.
FLOAT32 = 1e-5


@pytest.fixture(scope="module", params=["t5", "bart"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, make_artifact: Callable[[str], Path]) -> Path:
    return make_artifact(family)


def write_tokens(session: Seq2SeqSession, settings: Settings = GREEDY, texts: list[str] = TEXTS) -> list[list[int]]:
    """Return the new tokens of each source."""
    return [
        completion.tokens for completion in complete(session, session.source_of_texts(*session.encode(texts)), settings)
    ]


def test_texts_are_those_of_transformers(family: str, folder: Path, make_folder: Callable[[str], Path]) -> None:
    import torch
    import transformers

    manifest = read_manifest(folder)
    assert (manifest.task, [*manifest.parts]) == ("seq2seq", ["encoder"])
    assert read_manifest(folder / "encoder").task == "seq2seq_encoder"
    (check,) = manifest.checks
    assert (check.status, check.figures["largest_change"] <= FLOAT32) == ("measured", True)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(make_folder(family)).eval()
    session = graphopt.load_seq2seq(folder)
    ids, mask = session.encode(TEXTS)
    count = 12 + len(session.beginning)  # one more: BART's configuration forces what comes last
    expected = model.generate(
        torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    begin = session.beginning
    assert begin == {"t5": [0], "bart": [3, 2]}[family]
    for tokens, row in zip(write_tokens(session), expected.tolist(), strict=True):
        assert row[: len(begin)] == begin
        assert tokens == row[len(begin) :][: len(tokens)]
        assert len(tokens) > 2
    # A row of a batch is what it is alone, and drawn texts differ by their seed.
    assert [write_tokens(session, texts=[text])[0] for text in TEXTS] == write_tokens(session)
    samples = [write_tokens(session, Settings(12, Sampling(temperature=1.0, seed=seed))) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]


def test_keys_and_values_of_the_source_are_made_once(folder: Path) -> None:
    encoder, decoder = (artifact.read(part_folder).model.graph for part_folder in (folder / "encoder", folder))
    states = {value.name: value for value in decoder.inputs if is_cross_port(value.name or "")}
    assert list(states) == [value.name for value in encoder.outputs]
    assert not [value.name for value in decoder.outputs if is_cross_port(value.name or "")]
    # A step reads them, and their length, and computes nothing of them.
    readers = {node.op_type for value in states.values() for node in value.consumers()}
    assert readers <= {"Attention", "Shape"}
    session = graphopt.load_seq2seq(folder)
    source = session.source_of_texts(*session.encode(TEXTS))
    before = {name: value.numpy().copy() for name, value in source.items()}
    decoder_of_rows = SourceDecoder(session.decoder, source, len(TEXTS))
    sizes = []
    for _ in range(3):
        decoder_of_rows.step(np.full((len(TEXTS), 1), 5, np.int64))
        sizes.append(decoder_of_rows.states.bytes)
    # One layer, keys and values, three rows, width 64, four bytes: what a step adds is one token.
    assert sizes == [2 * 3 * 64 * 4 * count for count in (1, 2, 3)]
    for name, value in source.items():
        np.testing.assert_array_equal(value.numpy(), before[name])


def test_both_graphs_are_rotated_proved_and_verified(family: str, folder: Path, tmp_path: Path) -> None:
    result = graphopt.optimize(folder, "rotate", tmp_path / "out")
    assert write_tokens(graphopt.load_seq2seq(tmp_path / "out")) == write_tokens(graphopt.load_seq2seq(folder))
    for part in (result, *result.parts.values()):
        assert part.manifest.check("certificate", after="rotate").status == "proved"
        if family == "t5":  # the residual of both, since its last states are no output
            bases = {change.where for report in part.manifest.passes for change in report.changes}
            assert any("embed_tokens" in basis for basis in bases)
    statuses = {(check.name, check.after): check.status for check in verify(folder, tmp_path / "out").checks}
    assert statuses["replay", "the recipe"] == statuses["replay", "encoder: the recipe"] == "proved"
    assert statuses["cross-attention states", "encoder: the recipe"] == "measured"
    with pytest.raises(VerificationError, match="has the graphs encoder, and the model before has no other"):
        verify(folder / "encoder", tmp_path / "out")
    manifest = tmp_path / "out" / "encoder" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"kind": "transformers"', '"kind": "gguf"', 1))
    with pytest.raises(VerificationError, match=r"a graph of the artifact is not the one that its manifest says"):
        verify(folder, tmp_path / "out")


@pytest.mark.parametrize("recipe", ["int4", "small"])
def test_both_graphs_are_quantized_and_judged_together(
    recipe: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = make_artifact("bart")
    result = graphopt.optimize(folder, recipe, tmp_path / "out")
    quality = result.manifest.check("quality")
    # Random weights in 4 bits and in a mix of formats; those of T5, with scores of any size, lose more.
    assert 0 < quality.figures["kl_mean"] < 0.05
    assert "64 sentences" in str(quality.reason)
    assert not any(check.name == "quality" for check in result.parts["encoder"].manifest.checks)
    for part in ("", "encoder"):
        size, before = ((root / part / artifact.DATA).stat().st_size for root in (tmp_path / "out", folder))
        assert size < 0.4 * before
    session = graphopt.load_seq2seq(tmp_path / "out")
    assert all(write_tokens(session))
    figures = text_agreement(session, session, TEXTS)
    assert (figures["kl_mean"], figures["same_first_choice"], figures["texts"]) == (0, 1, 3)
    assert {check.status for check in verify(folder, tmp_path / "out").checks} <= {"measured", "proved"}


def test_run_and_eval_write_texts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = graphopt.load_seq2seq(folder)
    prompts = [option for text in TEXTS for option in ("--prompt", text)]
    code, out, _ = call(monkeypatch, capsys, "run", folder, *prompts, "--max-new-tokens", 12, "--json")
    rows = json.loads(out)
    assert (code, [row["tokens"] for row in rows]) == (0, write_tokens(session))
    assert [row["source"] for row in rows] == TEXTS
    code, out, _ = call(monkeypatch, capsys, "run", folder, "--prompt", TEXTS[0], "--max-new-tokens", 12)
    assert (code, out.strip()) == (0, rows[0]["text"].strip())
    code, _, err = call(monkeypatch, capsys, "run", folder, *prompts, "--speculate", "lookup")
    assert (code, "without a chat, drafts, kept prompts and eviction" in err) == (2, True)
    text = tmp_path / "text.txt"
    text.write_text("import os\nclass Stack:\n")
    code, out, _ = call(monkeypatch, capsys, "eval", folder, "--reference", folder, "--text", text, "--json")
    assert (code, json.loads(out)["kl_mean"]) == (0, 0)
    code, _, err = call(monkeypatch, capsys, "eval", folder, "--text", text)
    assert (code, "no reference was given" in err) == (2, True)


def test_what_is_no_whole_encoder_decoder_is_refused(folder: Path, bert_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of the kind encoder, which reads no source"):
        graphopt.load_seq2seq(bert_artifact)
    with pytest.raises(InputError, match="one is empty"):
        graphopt.load_seq2seq(folder).encode([])
    with pytest.raises(InputError, match="is made of several graphs"):
        evaluate_shard(folder, load_recipe("int4-rtn"), tmp_path / "out", 0, 2)
    decoder_only = tmp_path / "alone"
    shutil.copytree(folder, decoder_only)
    shutil.rmtree(decoder_only / "encoder")
    with pytest.raises(InputError, match=r"alone/encoder"):
        graphopt.load_seq2seq(decoder_only)
    with pytest.raises(InputError, match=r"alone/encoder"):
        artifact.read(decoder_only)
