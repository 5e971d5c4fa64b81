"""Recordings: WAV files in, features as transformers makes them, and the text of a Whisper of random weights."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.decoding.continuation import Settings
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.recordings import features_of_files, read_wav
from graphopt.inference.seq2seq import SourceDecoder, complete
from tests.cli.test_embeddings import call

RATE = 16000
# Float32, run in another order of sums: seen 5e-7 of the largest.
FLOAT32 = 1e-5


def write_wav(file: Path, samples: np.ndarray, rate: int = RATE, width: int = 2) -> Path:
    """Write samples between -1 and 1, [samples] or [samples, channels]."""
    with wave.open(str(file), "wb") as stream:
        stream.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        stream.setsampwidth(width)
        stream.setframerate(rate)
        numbers = np.round(samples * ((1 << (8 * width - 1)) - 1)) + (128 if width == 1 else 0)
        stream.writeframes(numbers.astype({1: "u1", 2: "<i2", 3: "<i4", 4: "<i4"}[width]).tobytes())
    return file


def tone(frequency: float, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * RATE)) / RATE)


@pytest.fixture(scope="module")
def folder(make_artifact: Callable[[str], Path]) -> Path:
    return make_artifact("whisper")


def test_features_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    import transformers

    files = [write_wav(tmp_path / f"{hertz}.wav", tone(hertz)) for hertz in (440, 1000)]
    features = features_of_files(folder, files)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    expected = extractor([tone(440), tone(1000)], sampling_rate=RATE, return_tensors="np")["input_features"]
    assert features.shape == (2, 16, 3000)
    # Samples have 16 bits, and features are logarithms with a floor eight powers of ten below the peak.
    assert np.abs(features - expected).mean() < 0.02


def test_a_recording_becomes_the_text_that_torch_writes(
    folder: Path, make_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    import torch
    import transformers

    (check,) = read_manifest(folder).checks
    assert (check.status, check.figures["largest_change"] <= FLOAT32) == ("measured", True)
    session = graphopt.load_seq2seq(folder)
    facts = session.decoder.manifest.model
    assert (facts.decoder_start, facts.decoder_task, facts.languages) == ([2], [13, 15], {"en": 10, "de": 11, "fr": 12})
    features = features_of_files(folder, [write_wav(tmp_path / f"{hertz}.wav", tone(hertz)) for hertz in (440, 3000)])
    completions = complete(session, session.source_of_recordings(features), Settings(10))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(make_folder("whisper")).eval()
    for completion, row in zip(completions, torch.from_numpy(features), strict=True):

        def logits_of(ids: list[int], row: torch.Tensor = row) -> torch.Tensor:
            with torch.no_grad():
                logits = model(row[None], decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            logits[[5, 6]] = -np.inf
            return logits

        language = max((10, 11, 12), key=lambda token: float(logits_of([2])[token]))
        ids = [2, language, 13, 15]
        assert completion.prompt == ids
        for _ in range(10):
            logits = logits_of(ids)
            if len(ids) == 4:
                logits[7] = -np.inf
            ids.append(int(logits.argmax()))
        assert completion.tokens == ids[4:][: len(completion.tokens)]
        assert completion.tokens
    german_texts = complete(session, session.source_of_recordings(features), Settings(3), language="de")
    assert [completion.prompt for completion in german_texts] == [[2, 11, 13, 15]] * 2
    with pytest.raises(InputError, match=r"does not know the language xx.*it knows de, en, fr"):
        complete(session, session.source_of_recordings(features), Settings(3), language="xx")
    with pytest.raises(InputError, match=r"a recording has the shape \[16, 2999\], and the encoder takes \[16, 3000\]"):
        session.source_of_recordings(features[:, :, :2999])


def test_genai_writes_the_same_text(folder: Path, tmp_path: Path) -> None:
    import onnxruntime_genai as og

    artifact = tmp_path / "out"
    graphopt.optimize(folder, "rotate", artifact)
    features = features_of_files(folder, [write_wav(tmp_path / "a.wav", tone(440))])
    session = graphopt.load_seq2seq(artifact)
    source = session.source_of_recordings(features)
    decoder = SourceDecoder(session.decoder, source, 1)
    beginning = ids = [2, 10, 13, 15]
    logits = Decoder.step(decoder, np.array([ids]))
    while len(ids) < 16 and ids[-1] != 3:  # genai suppresses no token
        ids = [*ids, int(logits[0, -1].argmax())]
        logits = Decoder.step(decoder, np.array([ids[-1:]]))
    model = og.Model(str(artifact))
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=16, do_sample=False)
    generator, tensors = og.Generator(model, options), og.NamedTensors()
    tensors["input_features"] = features
    generator.set_inputs(tensors)
    generator.append_tokens(np.array([beginning], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    tokens = [int(token) for token in generator.get_sequence(0)]
    assert tokens == ids[: len(tokens)]
    assert len(tokens) > len(beginning)


def test_both_graphs_are_optimized_run_and_verified(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = graphopt.optimize(folder, "rotate-int4-rtn", tmp_path / "out")
    for part in (result, *result.parts.values()):
        assert part.manifest.check("certificate", after="rotate").status == "proved"
    assert "recordings of noise" in str(result.manifest.check("quality").reason)
    assert {check.status for check in verify(folder, tmp_path / "out").checks} <= {"measured", "proved"}
    with pytest.raises(InputError, match=r"the encoder reads recordings.*rounds to nearest"):
        graphopt.optimize(folder, "int4", tmp_path / "no")
    # Convolutions need ranges of real recordings to become integers: without, their weights alone are codes.
    weights_alone = graphopt.optimize(folder, "int8", tmp_path / "int8").parts["encoder"].manifest
    skips = {skip.where: skip.reason.code for report in weights_alone.passes for skip in report.skips}
    assert skips["activations"] == "quantize_convolutions.weights-alone"
    file = write_wav(tmp_path / "a.wav", tone(440))
    code, out, _ = call(monkeypatch, capsys, "run", tmp_path / "out", "--audio", file, "--language", "en", "--json")
    (row,) = json.loads(out)
    assert (code, row["source"], row["prompt"]) == (0, str(file), [2, 10, 13, 15])
    code, _, err = call(monkeypatch, capsys, "run", tmp_path / "out", "--prompt", "a text")
    assert (code, "reads recordings, and no texts" in err) == (2, True)


def test_recordings_that_cannot_be_read_are_refused(
    folder: Path,
    llama_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stereo = np.stack([tone(440), -tone(440)], axis=1)
    assert not read_wav(write_wav(tmp_path / "stereo.wav", stereo), RATE).any()
    for width in (1, 2, 4):
        samples = read_wav(write_wav(tmp_path / f"{width}.wav", tone(440), width=width), RATE)
        # A sample of 8 bits is right to a half of 1/128.
        np.testing.assert_allclose(samples, tone(440), atol=1 / 128)
    with pytest.raises(InputError, match=r"16 bits and 8000 samples a second, and the model takes 16000.*ffmpeg"):
        features_of_files(folder, [write_wav(tmp_path / "slow.wav", tone(440), rate=8000)])
    with pytest.raises(InputError, match=r"the recording has 31\.0 seconds, the model reads 30 at once"):
        features_of_files(folder, [write_wav(tmp_path / "long.wav", tone(440, 31))])
    with pytest.raises(InputError, match="the recording is empty"):
        features_of_files(folder, [write_wav(tmp_path / "empty.wav", np.zeros(0))])
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(InputError, match="the recording cannot be read"):
        features_of_files(folder, [tmp_path / "text.wav"])
    with pytest.raises(InputError, match="does not say how a recording becomes features"):
        features_of_files(tmp_path, [tmp_path / "stereo.wav"])
    code, _, err = call(monkeypatch, capsys, "run", llama_artifact, "--audio", tmp_path / "stereo.wav")
    assert (code, "reads texts, and no recordings" in err) == (2, True)
