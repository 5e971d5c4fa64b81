from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from graphopt.artifact.artifact import MODEL
from graphopt.artifact.manifest import read_manifest
from graphopt.errors import InputError, MissingDependencyError
from graphopt.models.export import export
from graphopt.models.gguf.checkpoint import load_gguf
from graphopt.ort.session import open_session
from graphopt.quantization.gguf import blocks
from graphopt.quantization.gguf.file import open_gguf, read_once
from tests import ggufs

KINDS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q6_K")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    path, expected = tmp_path / "llama.gguf", ggufs.llama()
    ggufs.write_llama(expected, path, dict.fromkeys(ggufs.MIXED_TYPES, kind))
    model, weights = load_gguf(path)
    state, expected_state = model.state_dict(), expected.state_dict()
    assert list(state) == list(expected_state)
    assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)
    # embedding and head are one tensor of the file
    assert set(weights) == {name for name, _ in expected.named_parameters()}
    assert all(np.array_equal(weights[name].numpy(), expected_state[name].numpy()) for name in weights)
    for key in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "vocab_size", "num_key_value_heads"):
        assert getattr(model.config, key) == pytest.approx(getattr(expected.config, key)), key


def test_an_export_computes_what_transformers_does_on_the_decoded_weights(tmp_path: Path, llama_folder: Path) -> None:
    model, folder = ggufs.llama(1), ggufs.export_llama(llama_folder)
    ggufs.write_llama(model, tmp_path / "again.gguf", ggufs.MIXED_TYPES)
    manifest = read_manifest(folder / "artifact")
    assert (manifest.source.kind, Path(manifest.source.name).name) == ("gguf", "llama.gguf")
    assert manifest.notes == []
    session = open_session(folder / "artifact" / MODEL)
    ids = np.random.default_rng(0).integers(0, ggufs.VOCABULARY, (1, 20))
    feeds: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(20)[None],
    }
    empty = np.zeros((1, ggufs.CACHES, 0, ggufs.WIDTH // ggufs.HEADS), np.float32)
    feeds |= {port.name: empty for port in session.get_inputs() if port.name not in feeds}
    (logits,) = session.run(["logits"], feeds)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    # The bound, relative to the largest logit; float32 in another order moves them by 1e-6.
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
    text = "def encode(self):\n    return 1"
    tokenizer, source_tokenizer = (
        Tokenizer.from_file(str(source / "tokenizer.json")) for source in (folder / "artifact", llama_folder)
    )
    assert tokenizer.encode(text).ids == source_tokenizer.encode(text).ids
    assert (folder / "artifact" / "chat_template.jinja").read_text() == ggufs.CHAT


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path, reader = tmp_path / "model.gguf", gguf.GGUFReader
    ggufs.write_llama(ggufs.llama(), path, {})
    with read_once():
        first = gguf.GGUFReader(path)
        with read_once():
            assert gguf.GGUFReader(str(path)) is first
        assert gguf.GGUFReader(path) is first
        assert open_gguf(path).metadata["general.architecture"] == "llama"
    assert gguf.GGUFReader is reader
    assert not hasattr(gguf.get_tensor_name_map, "cache_info")


def _scaling(kind: str, **numbers: float) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        for name, value in numbers.items():
            getattr(writer, f"add_rope_scaling_{name}")(value)

    return change


def test_rotary_scaling_is_not_left_out(tmp_path: Path) -> None:
    for kind, numbers in {"linear": {"factor": 4.0}, "yarn": {"factor": 4.0, "orig_ctx_len": 32}}.items():
        path = tmp_path / f"{kind}.gguf"
        ggufs.write_llama(ggufs.llama(), path, {}, change=_scaling(kind, **numbers))
        model, _ = load_gguf(path)
        rope = model.config.rope_parameters
        assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (kind, 4.0, 1000.0)
    path = tmp_path / "longrope.gguf"
    ggufs.write_llama(ggufs.llama(), path, {}, change=_scaling("longrope", factor=4.0))
    with pytest.raises(InputError, match="type longrope"):
        load_gguf(path)


def test_factors_of_rotary_frequencies_are_applied(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, ggufs.WIDTH // ggufs.HEADS // 2, dtype=np.float32)
    expected = ggufs.llama()
    path = tmp_path / "llama.gguf"
    ggufs.write_llama(expected, path, {}, change=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    model, _ = load_gguf(path)
    before, after = (
        dict(checkpoint.named_buffers())["model.rotary_emb.inv_freq"].numpy() for checkpoint in (expected, model)
    )
    assert np.array_equal(after, before / factors)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _cut_in_metadata(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _cut_in_head(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def _other_magic(path: Path) -> None:
    path.write_bytes(b"GGML" + path.read_bytes()[4:])


def _version(number: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(b"GGUF" + struct.pack("<I", number) + path.read_bytes()[8:])


def _unknown_type(path: Path) -> None:
    name = b"output_norm.weight"
    content = path.read_bytes()
    offset = content.index(name) + len(name) + 4 + 8
    path.write_bytes(content[:offset] + struct.pack("<I", 999) + content[offset + 4 :])


def _without_decoder(path: Path) -> None:
    name = b"output_norm.weight"
    content = path.read_bytes()
    offset = content.index(name) + len(name) + 4 + 8
    path.write_bytes(content[:offset] + struct.pack("<I", int(gguf.GGMLQuantizationType.I32)) + content[offset + 4 :])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut, "truncated"),
        (_cut_in_metadata, "truncated"),
        (_cut_in_head, "truncated"),
        (_other_magic, "does not begin as a GGUF file does"),
        (_version(1), "GGUF version 1"),
        (_version(3 << 24), "big-endian"),
        (_unknown_type, "999"),
        (_without_decoder, r"tensors of type I32 cannot be decoded .*tensor=output_norm.weight, shape=\[256\]"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    ggufs.write_llama(ggufs.llama(), path, {})
    spoil(path)
    with pytest.raises(InputError, match=message) as caught:
        export(path, tmp_path / "out")
    assert "llama.gguf" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["llama.gguf"]


def _left_over(writer: Any) -> None:
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 4, 32), np.float32))


def _no_norm(writer: Any) -> None:
    del writer.tensors[0]["output_norm.weight"]


def _narrow_norm(writer: Any) -> None:
    del writer.tensors[0]["output_norm.weight"]
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))


def _one_of_two(writer: Any) -> None:
    writer.add_uint16("split.count", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_left_over, "has no place for a tensor .*tensor=blk.0.ffn_gate_exps.weight"),
        (_no_norm, "lacks 1 weight.*tensor=model.norm.weight"),
        (_narrow_norm, r"does not fit LlamaForCausalLM, where it is \[256\] .*output_norm.weight, shape=\[32\]"),
        (_one_of_two, "one of 2 parts"),
    ],
)
def test_a_file_that_is_not_the_model_is_refused(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    ggufs.write_llama(ggufs.llama(), path, {}, change=change)
    with pytest.raises(InputError, match=message):
        load_gguf(path)


@pytest.mark.parametrize("architecture", ["rwkv7", "mamba", "t5"])
def test_an_architecture_that_is_not_taken_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    ggufs.write_llama(ggufs.llama(), path, {}, architecture=architecture)
    with pytest.raises(InputError, match=architecture):
        load_gguf(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for source in (tmp_path / "absent.gguf", "absent.gguf"):
        with pytest.raises(InputError, match="there is no such file"):
            export(source, tmp_path / "out")
    # tests use no network: the hub gives nothing
    with pytest.raises(InputError, match="the Hugging Face hub gave no such file"):
        export("owner/name:absent.gguf", tmp_path / "out")


def test_the_package_gguf_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    path = tmp_path / "llama.gguf"
    ggufs.write_llama(ggufs.llama(), path, {})
    monkeypatch.setattr(blocks.importlib, "import_module", absent)
    with pytest.raises(MissingDependencyError, match=r"graphopt\[export\]"):
        open_gguf(path)
