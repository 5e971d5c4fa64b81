"""A conversation feeds what is new, and says what it would say if it were fed from the beginning."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import graphopt
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.conversation.conversation import Conversation, chat
from graphopt.inference.conversation.template import TEMPLATE, ChatTemplate
from graphopt.inference.decoding.continuation import Settings
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.proposers import Lookup
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.generation import generate
from graphopt.inference.session import Session, load
from tests.checkpoints import save_tokenizer
from tests.inference.conversation.conftest import PYTHON

SHORT = Settings(max_new_tokens=12)


@pytest.fixture
def call_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all calls of the model."""
    calls: list[int] = []
    step = Decoder.step

    def count_step(self: Decoder, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        calls.append(ids.shape[1])
        return step(self, ids, mask)

    monkeypatch.setattr(Decoder, "step", count_step)
    return calls


def tokens_of(session: Session, text: str) -> list[int]:
    assert isinstance(session.tokenizer, Tokenizer)
    return list(session.tokenizer.encode(text, add_special_tokens=False).ids)


def use_template(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Let templates be read with these changes."""
    of_folder = ChatTemplate.of_folder
    monkeypatch.setattr(ChatTemplate, "of_folder", lambda folder: dataclasses.replace(of_folder(folder), **changes))


def test_a_reply_is_the_completion_of_the_rendered_messages(session: Session) -> None:
    messages = [{"role": "system", "content": "Lists."}, {"role": "user", "content": "a stack"}]
    prompt = tokens_of(session, '<|endoftext|>"""Lists."""\n# a stack\n')
    expected = generate(session, [prompt], max_new_tokens=12)[0]
    assert chat(session, messages, max_new_tokens=12) == expected
    assert graphopt.chat is chat
    assert Conversation(session, system="Lists.", settings=SHORT).reply("a stack") == expected


def test_a_second_turn_feeds_only_what_is_new(session: Session, call_lengths: list[int]) -> None:
    conversation = Conversation(session, settings=SHORT)
    first = conversation.reply("a stack of names")
    assert conversation.fed_tokens == len(first.prompt) == call_lengths[0]
    assert call_lengths[1:] == [1] * 11  # the last token of a reply is fed by the next turn
    call_lengths.clear()
    second = conversation.reply("its top")
    new = 1 + len(tokens_of(session, "\n\n# its top\n"))
    assert conversation.fed_tokens == call_lengths[0] == new
    assert second.prompt == [*first.prompt, *first.tokens, *second.prompt[-new + 1 :]]
    # it knows the first turn: the same tokens, fed from the beginning, are continued alike
    assert generate(session, [second.prompt], max_new_tokens=12)[0].tokens == second.tokens
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.messages[1]["content"] == first.text
    assert conversation.tokens == len(second.prompt) + len(second.tokens)


def test_drafts_change_no_turn(session: Session) -> None:
    messages = ["a stack", "a stack", "a queue"]
    plain = Conversation(session, settings=SHORT)
    with_drafts = Conversation(session, settings=SHORT, proposer=Speculation(Lookup(), 3))
    for message in messages:
        assert with_drafts.reply(message) == plain.reply(message)
        assert with_drafts.fed_tokens == plain.fed_tokens
    # A reply that is not read to its end: what was guessed behind it is no part of the conversation.
    for conversation in (plain, with_drafts):
        pieces = conversation.stream("a list")
        next(iter(pieces))
        pieces.close()  # type: ignore[attr-defined]
    assert with_drafts.reply("a stack") == plain.reply("a stack")


@pytest.mark.parametrize("pages", [False, True])
def test_a_template_that_rewrites_a_reply_rewinds_the_cache(
    pages: bool, chat_folder: Path, tmp_path: Path, call_lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    recipe = graphopt.Recipe.model_validate({"name": "pages", "steps": [{"step": "page_kv"}] if pages else []})
    optimize(chat_folder, recipe, folder, run=False)
    session = load(folder, threads=1)
    assert ChatTemplate.of_folder(folder).source == PYTHON
    # as reasoning models drop their reasoning: of an earlier reply nothing is left
    use_template(monkeypatch, source=PYTHON.replace("{{ message.content }}\n\n", "pass\n\n"))
    conversation = Conversation(session, settings=SHORT)
    first = conversation.reply("a stack of names")
    call_lengths.clear()
    second = conversation.reply("its top")
    assert conversation.fed_tokens == call_lengths[0] < len(second.prompt)
    assert conversation.fed_tokens + len(first.prompt) >= len(second.prompt)
    # float32 caches, rewound: nothing is rounded
    assert generate(session, [second.prompt], max_new_tokens=12)[0].tokens == second.tokens


def test_recurrent_states_go_back_to_the_end_of_the_prompt(
    make_artifact: Callable[[str], Path], tmp_path: Path, call_lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(make_artifact("qwen3_next"), tmp_path / "model")
    save_tokenizer(folder)
    (folder / TEMPLATE).write_text(PYTHON)
    session = load(folder, threads=1)
    use_template(monkeypatch, source=PYTHON.replace("{{ message.content }}\n\n", "pass\n\n"))
    conversation = Conversation(session, settings=SHORT)
    first = conversation.reply("a stack of names")
    call_lengths.clear()
    second = conversation.reply("its top")
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert conversation.fed_tokens == call_lengths[0] == len(second.prompt) - len(first.prompt)
    assert generate(session, [second.prompt], max_new_tokens=12)[0].tokens == second.tokens
    call_lengths.clear()
    queue_conversation = Conversation(session, settings=SHORT)
    queue_conversation.reply("a queue")
    queue_conversation._tokens, queue_conversation._text = (
        [1, *queue_conversation._tokens[1:]],
        "",
    )  # as if it had begun in another way
    assert (
        queue_conversation.reply("its end").prompt == queue_conversation._tokens[: -len(queue_conversation.last.tokens)]
    )  # type: ignore[union-attr]
    assert queue_conversation.fed_tokens == len(queue_conversation.last.prompt)  # type: ignore[union-attr]


def test_a_stop_string_is_not_part_of_the_conversation(session: Session) -> None:
    whole = chat(session, [{"role": "user", "content": "a stack"}], max_new_tokens=30)
    assert whole.text is not None
    stop = whole.text[10:12]
    conversation = Conversation(session, settings=Settings(max_new_tokens=30, stop=(stop,)))
    first = conversation.reply("a stack")
    assert first.text == whole.text[: whole.text.index(stop)]
    assert first.stopped == "stop string"
    conversation.settings = SHORT
    second = conversation.reply("more")
    assert session.decode(second.prompt) == f"# a stack\n{first.text}\n\n# more\n"
    assert conversation.fed_tokens < len(second.prompt)
    assert generate(session, [second.prompt], max_new_tokens=12)[0].tokens == second.tokens


def test_an_interrupted_reply_stays_as_far_as_it_came(session: Session) -> None:
    conversation = Conversation(session, settings=SHORT)
    pieces = iter(conversation.stream("a stack"))
    beginning = next(pieces) + next(pieces)
    second = conversation.reply("more")  # ends the first
    assert session.decode(second.prompt) == f"# a stack\n{beginning}\n\n# more\n"
    assert generate(session, [second.prompt], max_new_tokens=12)[0].tokens == second.tokens

    runs = 0

    def third_run() -> bool:
        nonlocal runs
        runs += 1
        return runs == 3

    beginning = "".join(conversation.stream("again", third_run))
    assert conversation.last is not None
    assert (conversation.last.stopped, len(conversation.last.tokens)) == ("interrupted", 2)
    assert conversation.messages[-1] == {"role": "assistant", "content": beginning}


def test_a_turn_that_is_interrupted_before_its_reply_is_forgotten(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphopt.inference.decoding.decoder._PIECE", 4)
    conversation = Conversation(session, settings=SHORT)
    conversation.reply("a stack")
    messages = list(conversation.messages)
    assert "".join(conversation.stream("a long prompt that takes several pieces", lambda: True)) == ""
    assert conversation.messages == messages
    second = conversation.reply("more")
    assert "long" not in session.decode(second.prompt)
    assert generate(session, [second.prompt], max_new_tokens=12)[0].tokens == second.tokens


def test_a_conversation_longer_than_the_positions_is_refused_and_stays(session: Session) -> None:
    assert session.max_positions == 1024
    conversation = Conversation(session, settings=SHORT)
    conversation.reply("a stack")
    before = list(conversation.messages), conversation.tokens
    with pytest.raises(InputError, match=r"the conversation has \d{4} tokens, and the model only 1024 positions"):
        conversation.stream("word " * 600)
    assert (list(conversation.messages), conversation.tokens) == before
    conversation.settings = Settings(max_new_tokens=None)
    assert conversation.reply("word " * 450).stopped == "positions"


def test_the_eos_of_the_tokenizer_ends_a_reply_too(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "a stack"}]
    plain = chat(session, messages, max_new_tokens=12)
    assert session.tokenizer is not None
    last = session.tokenizer.id_to_token(plain.tokens[5])
    use_template(monkeypatch, special={"bos_token": "<|endoftext|>", "eos_token": last})
    reply = chat(session, messages, max_new_tokens=12)
    assert reply.stopped == "end of text"
    assert reply.tokens == plain.tokens[: plain.tokens.index(plain.tokens[5])]


def test_what_cannot_chat_is_refused(session: Session, shipped_artifact: Path) -> None:
    with pytest.raises(InputError, match="there is no message to reply to"):
        chat(session, [])
    with pytest.raises(InputError, match="no chat template"):
        chat(load(shipped_artifact), [{"role": "user", "content": "a"}])
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        Conversation(dataclasses.replace(session, tokenizer=None))


def test_seeds_and_log_probabilities(session: Session) -> None:
    messages = [{"role": "user", "content": "a stack"}]
    replies = [
        chat(session, messages, max_new_tokens=8, sampling=Sampling(1.0, seed=seed), logprobs=1) for seed in (1, 1, 2)
    ]
    assert replies[0] == replies[1] != replies[2]
    assert replies[0].logprobs is not None
    assert [logprob.token for logprob in replies[0].logprobs] == replies[0].tokens
