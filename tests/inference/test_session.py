from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from graphopt.artifact import artifact
from graphopt.artifact.hf_config import ModelFacts
from graphopt.artifact.manifest import Manifest, Source
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session, load
from tests.small_models import BOS, byte_tokenizer, counting_model

# Between two ways of computing the same float32 logits (torch and onnxruntime, or one run and many): 2 layers of sums
# of up to 160 terms give 1e-7 to 1e-6 of the largest logit. The project's bound is 1e-4; this one notices a lost digit.
LOGITS = 1e-5


@pytest.fixture(scope="module")
def session(llama_artifact: Path) -> Session:
    return load(llama_artifact, threads=1)


def tokens(session: Session, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, session.interface.vocabulary, (batch, length))


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(actual - expected).max() <= LOGITS * np.abs(expected).max())


def test_logits_are_those_of_transformers(session: Session, llama_folder: Path) -> None:
    ids = tokens(session, 3, 17)
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)(torch.from_numpy(ids)).logits
    logits = session.logits(ids)
    assert logits.dtype == np.float32
    assert close(logits, expected.numpy())


@pytest.mark.parametrize("pieces", [(12,), (5, 7), (1,) * 12, (9, 1, 2)])
def test_steps_through_the_cache_equal_one_run(session: Session, pieces: tuple[int, ...]) -> None:
    ids = tokens(session, 2, 12)
    decoder = Decoder(session, 2)
    begins = np.cumsum((0, *pieces[:-1]))
    steps = [decoder.step(ids[:, b : b + n]).copy() for b, n in zip(begins, pieces, strict=True)]
    assert decoder.length == 12
    assert close(np.concatenate(steps, axis=1), session.logits(ids))


def test_feed_cuts_into_pieces(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.inference.decoding.decoder._PIECE", 5)
    ids = tokens(session, 2, 12)
    pieces = [(begin, logits.copy()) for begin, logits in Decoder(session, 2).feed(ids)]
    assert [begin for begin, _ in pieces] == [0, 5, 10]
    assert close(np.concatenate([logits for _, logits in pieces], axis=1), session.logits(ids))


def test_feed_keeps_the_logits_of_a_piece_small(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "graphopt.inference.decoding.decoder._LOGITS_BYTES", 3 * 2 * 4 * (session.interface.vocabulary or 0)
    )
    shapes = [logits.shape[:2] for _, logits in Decoder(session, 2).feed(tokens(session, 2, 7))]
    assert shapes == [(2, 3), (2, 3), (2, 1)]


def test_padding_is_not_seen(session: Session) -> None:
    ids = tokens(session, 2, 10)
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    logits = Decoder(session, 2).step(ids, mask)
    assert close(logits[0], session.logits(ids[:1])[0])
    assert close(logits[1, 4:], session.logits(ids[1:, 4:])[0])


def test_logits_outlive_their_step(session: Session) -> None:
    # They lie in onnxruntime's memory: a later step, or the end of the decoder, must not take it away.
    ids = tokens(session, 1, 6)
    decoder = Decoder(session, 1)
    first = decoder.step(ids)
    logits = first.copy()
    for token in range(20):
        decoder.step(np.array([[token]]))
    del decoder
    assert np.array_equal(first, logits)


def test_positions_end(session: Session) -> None:
    assert session.max_positions is not None
    decoder = Decoder(session, 1)
    decoder.step(tokens(session, 1, session.max_positions))
    with pytest.raises(InputError, match=f"longer than the model's {session.max_positions} positions"):
        decoder.step(np.array([[0]]))
    with pytest.raises(InputError, match="positions"):
        session.logits(tokens(session, 1, session.max_positions + 1))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(session: Session, token: int) -> None:
    with pytest.raises(InputError, match=f"no token {token} "):
        session.logits(np.array([[0, token]]))


def test_text_and_tokens(session: Session) -> None:
    session = dataclasses.replace(session, tokenizer=byte_tokenizer("hello, wörld"))
    ids = session.encode("wörld")
    assert session.beginning == (0,)
    assert ids[0] == 0
    assert 0 not in ids[1:]  # one BOS token, not two
    assert session.decode(ids) == "wörld"


def test_a_tokenizer_that_adds_nothing(session: Session) -> None:
    session = dataclasses.replace(session, tokenizer=byte_tokenizer("abc", bos=False))
    assert session.beginning == ()
    assert session.decode(session.encode(f"a{BOS}b")) == "ab"


def test_without_a_tokenizer_text_is_refused(session: Session) -> None:
    session = dataclasses.replace(session, tokenizer=None)
    for use in (lambda: session.encode("a"), lambda: session.decode([1]), lambda: session.beginning):
        with pytest.raises(InputError, match=r"no tokenizer\.json"):
            use()


def test_a_tokenizer_that_cuts_and_fills_is_told_not_to(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("abc")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(counting_model(tmp_path) / "tokenizer.json"))
    assert len(load(tmp_path).encode("abcabcabc")) == 10


def test_a_plain_folder_and_a_plain_file_open_too(tmp_path: Path) -> None:
    counting_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 5, "eos_token_id": [3, 4]}))
    for path in (tmp_path, tmp_path / "model.onnx"):
        session = load(path)
        assert session.max_positions == 5
        assert session.manifest.model.eos_token_ids == [3, 4]
        assert session.logits(np.array([[0, 6, 7]])).argmax(-1).tolist() == [[1, 7, 0]]


def test_session_entries_of_the_manifest_are_used(tmp_path: Path) -> None:
    counting_model(tmp_path)
    manifest = Manifest(
        source=Source(kind="onnx", name="toy"),
        model=ModelFacts(),
        session={"session.intra_op.allow_spinning": "0"},
    )
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    options = load(tmp_path, threads=1).inference.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.intra_op_num_threads == 1


def test_a_graph_without_a_cache_gives_logits_but_cannot_go_on(tmp_path: Path) -> None:
    session = load(counting_model(tmp_path, cache=False))
    decoder = Decoder(session, 1)
    assert decoder.step(np.array([[1, 2]])).argmax(-1).tolist() == [[2, 3]]
    with pytest.raises(InputError, match="no past_key_values"):
        decoder.step(np.array([[3]]))


def test_what_onnxruntime_says_is_passed_on(session: Session) -> None:
    # A step does not look at each token; onnxruntime does.
    with pytest.raises(InputError, match=r"onnxruntime cannot run the model: .+file=.*model\.onnx"):
        Decoder(session, 1).step(np.array([[10**6]]))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no ONNX model here .*nowhere"):
        load(tmp_path / "nowhere")


def test_a_cut_off_model(tmp_path: Path) -> None:
    file = counting_model(tmp_path) / "model.onnx"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"onnxruntime cannot load the model.*model\.onnx"):
        load(tmp_path)


def test_a_cut_off_or_missing_file_of_an_artifact(llama_artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(llama_artifact, folder)
    data = folder / artifact.DATA
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"bytes where its manifest says .*model\.onnx\.data"):
        load(folder)
    data.unlink()
    with pytest.raises(InputError, match=r"is missing .*model\.onnx\.data"):
        load(folder)


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    (counting_model(tmp_path) / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer cannot be read.*tokenizer\.json"):
        load(tmp_path)
