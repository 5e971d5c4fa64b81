from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM

from graphopt.artifact.hf_config import ModelFacts
from graphopt.artifact.manifest import Manifest, Source
from graphopt.errors import GraphoptError, InputError
from graphopt.inference.decoding.detokenize import TextStream
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.generation import Completion, Prompt, generate, stream
from graphopt.inference.session import Session, load
from tests.small_models import byte_tokenizer, counting_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [41], [3, 200, 17], [250, 4, 9, 33, 8]]
SAMPLING = Sampling(temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def session(llama_artifact: Path) -> Session:
    return load(llama_artifact, threads=1)


@pytest.fixture(scope="module")
def llama(llama_folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()


def counting(folder: Path, **facts: object) -> Session:
    """A session on the model that counts, with facts of our own."""
    session = load(counting_model(folder), threads=1)
    manifest = Manifest(source=Source(kind="onnx", name="counting"), model=ModelFacts.model_validate(facts))
    return dataclasses.replace(session, manifest=manifest)


# Greedy, against transformers


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} tokens")
def test_greedy_tokens_are_those_of_transformers(session: Session, llama: Any, prompt: list[int]) -> None:
    # Exact: two of these models' logits would have to agree to 1e-6 of the largest before rounding could choose.
    ids = torch.tensor([prompt])
    rows = llama.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0)
    expected = rows[0, len(prompt) :].tolist()
    completion = generate(session, [prompt], max_new_tokens=40)[0]
    assert completion.prompt == prompt
    if expected[-1] in session.manifest.model.eos_token_ids:
        assert (completion.tokens, completion.stopped) == (expected[:-1], "end of text")
    else:
        assert (completion.tokens, completion.stopped) == (expected, "length")


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING, Sampling(0.7, top_k=20, top_p=0.9)])
def test_a_batch_gives_what_its_rows_give_alone(session: Session, sampling: Sampling) -> None:
    batch = generate(session, PROMPTS, max_new_tokens=30, sampling=sampling)
    single_rows = [generate(session, [prompt], max_new_tokens=30, sampling=sampling)[0] for prompt in PROMPTS]
    assert batch == single_rows


def test_pieces_of_a_long_prompt_change_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    # With padding longer than a piece: the first pieces of the short rows hold nothing at all.
    whole = generate(session, PROMPTS, max_new_tokens=10)
    monkeypatch.setattr("graphopt.inference.decoding.decoder._PIECE", 3)
    assert generate(session, PROMPTS, max_new_tokens=10) == whole


# Drawn


def test_a_seed_fixes_the_tokens(session: Session) -> None:
    first, second = (generate(session, PROMPTS, max_new_tokens=20, sampling=SAMPLING) for _ in range(2))
    other_seed = generate(session, PROMPTS, max_new_tokens=20, sampling=dataclasses.replace(SAMPLING, seed=8))
    assert first == second
    assert first != other_seed


def test_the_same_prompt_twice_gives_two_answers(session: Session) -> None:
    first, second, _ = generate(session, [PROMPTS[0], PROMPTS[0], PROMPTS[1]], max_new_tokens=20, sampling=SAMPLING)
    single = generate(session, [PROMPTS[0]], max_new_tokens=20, sampling=SAMPLING)[0]
    assert first == single
    assert second.tokens != single.tokens


LOGITS = stn.arrays(
    np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -np.inf])
).filter(lambda logits: np.isfinite(logits.max()))
TEMPERATURES = st.floats(0.05, 5)


@given(LOGITS, TEMPERATURES, st.integers(1, 45))
def test_top_k_keeps_the_k_most_likely(logits: np.ndarray, temperature: float, k: int) -> None:
    probabilities = Sampling(temperature, top_k=k).probabilities(logits)
    candidates = probabilities > 0
    assert candidates.sum() <= k
    assert candidates.any()
    # What was dropped is at most as likely as what was kept, or too unlikely for a float64.
    assert logits[~candidates].max(initial=-np.inf) <= logits[candidates].min()
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)  # 40 float64 terms


@given(LOGITS, TEMPERATURES, st.floats(0.01, 1))
def test_top_p_keeps_the_fewest_that_reach_p(logits: np.ndarray, temperature: float, p: float) -> None:
    full = Sampling(temperature).probabilities(logits)
    nucleus = Sampling(temperature, top_p=p).probabilities(logits) > 0
    assert logits[~nucleus].max(initial=-np.inf) <= logits[nucleus].min()
    # 1e-12: sums of 40 float64 terms, taken in another order than in the code.
    assert full[nucleus].sum() >= p - 1e-12
    if nucleus.sum() > 1:
        assert full[nucleus].sum() - full[nucleus].min() < p + 1e-12


@given(LOGITS, TEMPERATURES)
def test_all_tokens_have_their_softmax(logits: np.ndarray, temperature: float) -> None:
    exponents = torch.from_numpy(logits).double() / temperature
    expected = torch.softmax(exponents, dim=-1).numpy()
    # float64 on both sides; exponents of up to 60 / 0.05 = 1200 lose 1200 x 1e-16 of their precision
    np.testing.assert_allclose(Sampling(temperature).probabilities(logits), expected, rtol=1e-12, atol=1e-300)


def test_frequencies_are_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1, 1e-30])).astype(np.float32)
    sampling = Sampling(1.0, seed=3)
    random = sampling.stream([1])
    frequencies = np.bincount([sampling.choose(logits, random) for _ in range(20_000)], minlength=5) / 20_000
    # Four standard deviations of a frequency at 20 000 draws: 4 sqrt(0.25 / 20 000) = 0.014.
    np.testing.assert_allclose(frequencies, [0.5, 0.2, 0.2, 0.1, 0], atol=0.014)


@given(LOGITS)
def test_no_temperature_takes_the_likeliest(logits: np.ndarray) -> None:
    random = np.random.default_rng(0)
    likeliest = Sampling().choose(logits, random)
    assert logits[likeliest] == logits.max()
    assert random.random() == np.random.default_rng(0).random()  # nothing was drawn
    # Nearly no temperature: the same, without a warning of an overflow; equally likely tokens have equal chances.
    assert logits[Sampling(1e-300).choose(logits, random)] == logits.max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature cannot be -1.0"),
        ({"temperature": float("nan")}, "temperature cannot be nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k cannot be 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p cannot be 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p cannot be 1.5"),
        ({"seed": -1}, "seed cannot be -1"),
        ({"top_k": 5}, "do nothing at temperature 0"),
        ({"top_p": 0.5}, "do nothing at temperature 0"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(GraphoptError, match="no token can be chosen"):
        Sampling().probabilities(np.array([0, value], np.float32))


# The end of a row


def test_end_of_text_is_not_part_of_the_completion(tmp_path: Path) -> None:
    session = counting(tmp_path, eos_token_ids=[5])
    first, second = generate(session, [[0, 1], [2, 3]], max_new_tokens=10)
    assert first == Completion(prompt=[0, 1], tokens=[2, 3, 4], text=None, stopped="end of text")
    assert second == Completion(prompt=[2, 3], tokens=[4], text=None, stopped="end of text")


def test_max_new_tokens_is_the_length(tmp_path: Path) -> None:
    completion = generate(counting(tmp_path, eos_token_ids=[5]), [[1]], max_new_tokens=3)[0]
    assert (completion.tokens, completion.stopped) == ([2, 3, 4], "length")


@pytest.mark.parametrize(("prompt", "new_tokens"), [([0], 4), ([0, 1, 2], 2), ([0, 1, 2, 3], 1)])
def test_positions_run_out(tmp_path: Path, prompt: list[int], new_tokens: int) -> None:
    # 4 positions: the token that the last one predicts is made, and never fed.
    completion = generate(counting(tmp_path, max_positions=4), [prompt], max_new_tokens=10)[0]
    assert (len(completion.tokens), completion.stopped) == (new_tokens, "positions")


def test_rows_end_apart_at_the_positions(session: Session) -> None:
    # The short row continues after the long one has no position left.
    room = session.max_positions
    assert room is not None
    session = dataclasses.replace(
        session, manifest=session.manifest.model_copy(update={"model": ModelFacts(max_positions=room)})
    )
    long, short = [9] * (room - 3), [7] * 5
    completions = generate(session, [long, short], max_new_tokens=10)
    assert [(len(row.tokens), row.stopped) for row in completions] == [(4, "positions"), (10, "length")]
    assert completions[1] == generate(session, [short], max_new_tokens=10)[0]


# Streaming


def test_steps_add_up_to_the_completions(session: Session) -> None:
    prompts: list[Prompt] = ["def ", [5], "class Été:\n    pass"]
    completions = generate(session, prompts, max_new_tokens=25, sampling=SAMPLING)
    steps = list(stream(session, prompts, max_new_tokens=25, sampling=SAMPLING))
    for row, completion in enumerate(completions):
        assert [step.tokens[row] for step in steps if step.tokens[row] is not None] == completion.tokens
        assert "".join(step.texts[row] for step in steps) == completion.text == session.decode(completion.tokens)
        reasons = [step.stopped[row] for step in steps]
        assert reasons[-1] == completion.stopped
        assert reasons.count(None) == reasons.index(completion.stopped)  # once it has ended, a row stays so


CHARACTERS = "aé€😀 \n\ufffd"


@given(st.text(CHARACTERS, max_size=6), st.text(CHARACTERS, max_size=12))
def test_streamed_characters_are_whole(prompt: str, text: str) -> None:
    stub = tokenizer_only(byte_tokenizer(CHARACTERS, bos=False))
    text_stream = TextStream(stub, stub.encode(prompt))
    pieces = [text_stream.push(token) for token in stub.encode(text)]
    if "\ufffd" not in prompt + text:
        # One token per byte: each character comes with its last byte, and not one later.
        sizes = [len(character.encode()) for character in text]
        assert [bool(piece) for piece in pieces] == [last for n in sizes for last in [False] * (n - 1) + [True]]
        assert "".join(pieces) == text
    assert "".join(pieces) + text_stream.finish() == text


@given(st.lists(st.integers(1, 10), max_size=20))
def test_streamed_bytes_that_are_no_text_add_up_too(ids: list[int]) -> None:
    stub = tokenizer_only(byte_tokenizer(CHARACTERS, bos=False))
    text_stream = TextStream(stub, [])
    assert "".join(map(text_stream.push, ids)) + text_stream.finish() == stub.decode(ids)


def test_a_space_before_a_word_is_not_lost() -> None:
    # Tokenizers of this kind write the space into the word and drop the one before a text's first word.
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    stub = tokenizer_only(tokenizer)
    assert stub.decode([1, 0]) == "b a"
    after_text, from_start = TextStream(stub, stub.encode("a b a")), TextStream(stub, [])
    assert [after_text.push(token) for token in (1, 0, 1)] == [" b", " a", " b"]
    assert [from_start.push(token) for token in (1, 0, 1)] == ["b", " a", " b"]


def tokenizer_only(tokenizer: Tokenizer) -> Session:
    """A session that can do no more than encode and decode."""
    session = Session.__new__(Session)
    object.__setattr__(session, "tokenizer", tokenizer)
    return session


# Refusals


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there is no prompt"),
        ("", "prompt 1 is empty"),
        (["a", ""], "prompt 2 is empty"),
        ([[]], "prompt 1 is empty"),
        ([[1], [10**6]], "no token 1000000 in a vocabulary"),
        ([[1] * 129], "prompt 1 has 129 tokens, and the model only 128 positions"),
    ],
)
def test_unusable_prompts_are_refused(session: Session, prompts: str | list[object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        stream(session, prompts)  # type: ignore[arg-type]  # at once, before the first step is consumed


def test_no_new_tokens_are_refused(session: Session) -> None:
    with pytest.raises(InputError, match="max_new_tokens cannot be 0"):
        generate(session, "a", max_new_tokens=0)


def test_text_without_a_tokenizer_is_refused(session: Session) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        generate(dataclasses.replace(session, tokenizer=None), "a")


def test_padding_without_a_mask_is_refused(tmp_path: Path) -> None:
    session = counting(tmp_path)
    assert len(generate(session, [[1, 2], [3, 4]], max_new_tokens=2)) == 2  # of one length: no padding
    with pytest.raises(InputError, match="no attention_mask input"):
        generate(session, [[1, 2], [3]])


def test_a_graph_without_a_cache_is_refused(tmp_path: Path) -> None:
    session = load(counting_model(tmp_path, cache=False))
    with pytest.raises(InputError, match="no past_key_values"):
        generate(session, [[1]])
