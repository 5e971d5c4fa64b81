"""Texts behind a kept prompt are those that a model makes of the whole prompt, and feed only what is new."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.conversation.conversation import Conversation
from graphopt.inference.conversation.template import TEMPLATE
from graphopt.inference.decoding.continuation import Settings
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.generation import generate
from graphopt.inference.prompt_cache import PromptCache
from graphopt.inference.session import Session, load
from graphopt.inference.states import compression
from graphopt.passes.recipe import Recipe
from tests.inference.conversation.conftest import PYTHON

BEGINNING = '"""Containers for numbers and texts, with the methods that lists have."""\n\nimport sys\n\n\n' * 3
ENDS = ("class Stack:\n    def push(self,", "def sum(", "class")


@pytest.fixture(scope="module", params=["growing", "float32 pages", "int8 pages"])
def session(
    request: pytest.FixtureRequest, shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Session:
    folder = tmp_path_factory.mktemp("prompts") / "model"
    steps = {"float32 pages": {"step": "page_kv", "page": 16}, "int8 pages": {"step": "quantize_kv", "page": 16}}
    if request.param == "growing":
        shutil.copytree(shipped_artifact, folder)
    else:
        recipe = {"name": "pages", "steps": [{"step": "canonicalize"}, steps[request.param]]}
        optimize(shipped_artifact, Recipe.model_validate(recipe), folder, run=False)
    (folder / TEMPLATE).write_text(PYTHON)
    return load(folder, threads=1)


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


def test_texts_behind_a_kept_prompt_are_those_of_the_whole_prompt(
    session: Session, call_lengths: list[int], tmp_path: Path
) -> None:
    cache = PromptCache.read_text(session, BEGINNING)
    cache.save(tmp_path / "beginning.cache")
    cache = PromptCache.load(session, tmp_path / "beginning.cache")
    prompts = [BEGINNING + end for end in ENDS]
    expected = generate(session, prompts, max_new_tokens=8)
    whole = sum(call_lengths)
    call_lengths.clear()
    # twice: a cache is copied before it goes on
    for _ in range(2):
        assert generate(session, prompts, max_new_tokens=8, cache=cache) == expected
    assert sum(call_lengths) < whole - len(cache.prompt.tokens)
    assert cache.decoder.tokens.tolist() == [len(cache.prompt.tokens)]


def test_a_prompt_that_goes_another_way_is_read_from_where_it_does(session: Session, call_lengths: list[int]) -> None:
    cache = PromptCache.read_text(session, BEGINNING)
    call_lengths.clear()
    for prompt in (BEGINNING[:60] + "ly", "import re", BEGINNING):
        expected = generate(session, [prompt], max_new_tokens=4)
        assert generate(session, [prompt], max_new_tokens=4, cache=cache) == expected
    # the last prompt is the cache itself: its last token is fed again
    assert call_lengths[-4:] == [1, 1, 1, 1]


def test_a_chat_begins_behind_a_kept_system_prompt(session: Session, call_lengths: list[int], tmp_path: Path) -> None:
    system = "Answer as a programmer would. " * 4
    settings = Settings(max_new_tokens=8)
    expected = Conversation(session, system=system, settings=settings)
    replies = [expected.reply(message).text for message in ("a stack", "a queue")]
    whole = sum(call_lengths)
    cache = PromptCache.read_system(session, system)
    cache.save(tmp_path / "system.cache")
    cache = PromptCache.load(session, tmp_path / "system.cache")
    call_lengths.clear()
    conversation = Conversation(session, settings=settings, cache=cache)
    assert [conversation.reply(message).text for message in ("a stack", "a queue")] == replies
    assert conversation.messages == expected.messages
    assert sum(call_lengths) == whole - len(cache.prompt.tokens)


def test_files_that_hold_no_prompt_or_are_of_another_model_are_refused(
    session: Session, llama_artifact: Path, tmp_path: Path
) -> None:
    cache, file = PromptCache.read_text(session, BEGINNING), tmp_path / "some.cache"
    cache.decoder.save(file)
    with pytest.raises(InputError, match=r"holds no prompt .*make it by `graphopt cache make`"):
        PromptCache.load(session, file)
    cache.save(file)
    with pytest.raises(InputError, match="the cache is of another model"):
        PromptCache.load(load(llama_artifact, threads=1), file)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"Containers", b"containers"))
    with pytest.raises(InputError, match="has changed since it was written"):
        PromptCache.load(session, file)
    with pytest.raises(InputError, match="has no tokens"):
        PromptCache.read_text(session, "")


@pytest.fixture(scope="module")
def folder(shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands") / "model"
    shutil.copytree(shipped_artifact, folder)
    (folder / TEMPLATE).write_text(PYTHON)
    return folder


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands_make_show_and_use_a_cache(folder: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "a.cache", tmp_path / "beginning.txt"
    text.write_text(BEGINNING)
    call("cache", "make", folder, "--prompt-file", text, "-o", file)
    report = json.loads(call("cache", "show", file, "--json"))
    assert (report["kind"], report["text"], report["bytes"]) == ("text", BEGINNING, file.stat().st_size)
    assert f"{report['tokens']} tokens in" in call("cache", "show", file)
    options = ("--max-new-tokens", 6, "--threads", 1)
    expected = call("run", folder, "--prompt", BEGINNING + ENDS[0], *options)
    assert call("run", folder, "--cache", file, "--prompt", ENDS[0], *options) == expected
    with pytest.raises(InputError, match=r"the cache is for texts .*leave --chat out"):
        call("run", folder, "--chat", "--cache", file, "--prompt", "a stack")
    call("cache", "make", folder, "--system", "Lists.", "-o", file, "--json")
    assert json.loads(call("cache", "show", file, "--json"))["kind"] == "system prompt"
    expected = call("run", folder, "--chat", "--system", "Lists.", "--prompt", "a stack", *options)
    assert call("run", folder, "--chat", "--cache", file, "--prompt", "a stack", *options) == expected
    with pytest.raises(InputError, match=r"the cache is for chats .*add --chat"):
        call("run", folder, "--cache", file, "--prompt", "a stack")
    with pytest.raises(InputError, match="holds the system prompt"):
        call("run", folder, "--chat", "--system", "Lists.", "--cache", file, "--prompt", "a stack")
    with pytest.raises(InputError, match="a cache is of one text"):
        call("cache", "make", folder, "-o", file)


def test_a_text_is_edited_where_it_differs(
    session: Session, call_lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PromptCache.read_text(session, BEGINNING)
    text = BEGINNING.replace("texts", "strings", 1)
    if not session.interface.has_pages:
        with pytest.raises(InputError, match="caches that grow are not edited"):
            cache.edit(text)
        assert cache.prompt.text == BEGINNING
        return
    call_lengths.clear()
    edits = cache.edit(text, reread=4)
    assert sum(call_lengths) == sum(len(edit.tokens) for edit in edits) + 4 < len(cache.prompt.tokens) / 4
    assert cache.prompt.text == text
    assert cache.prompt.tokens == session.encode(text)
    assert cache.decoder.tokens.tolist() == [len(cache.prompt.tokens)]
    call_lengths.clear()
    assert cache.edit(text) == []
    assert not call_lengths
    cache.save(tmp_path / "edited.cache")
    cache_again = PromptCache.load(session, tmp_path / "edited.cache")
    assert cache_again.prompt == cache.prompt
    # what stands before an edit of a file is taken over from there, page by page
    monkeypatch.setattr(compression, "GROUP_TOKENS", 16)
    cache.save(tmp_path / "edited.cache")
    cache_again = PromptCache.load(session, tmp_path / "edited.cache")
    cache_again.edit(text + "import re\n", reread=4)
    for name in ("edited.cache", "another.cache"):  # for the second one the first is another file by now
        cache_again.save(tmp_path / name)
        reloaded_cache = PromptCache.load(session, tmp_path / name)
        next_token = np.array([session.encode("a")[:1]])
        logits = [prompt_cache.decoder.fork([0]).step(next_token) for prompt_cache in (cache_again, reloaded_cache)]
        assert np.array_equal(*logits)
    with pytest.raises(InputError, match="has no tokens"):
        cache.edit("")


def test_commands_edit_a_cache(folder: Path, tmp_path: Path) -> None:
    pages, file, edited_file = tmp_path / "pages", tmp_path / "a.cache", tmp_path / "b.cache"
    recipe = {"name": "pages", "steps": [{"step": "canonicalize"}, {"step": "page_kv", "page": 16}]}
    optimize(folder, Recipe.model_validate(recipe), pages, run=False)
    call("cache", "make", pages, "--prompt", BEGINNING, "--loss", "scales", "-o", file)
    text = BEGINNING + "import math\n"
    (tmp_path / "text").write_text(text)
    assert "replaced: tokens" in call("cache", "edit", pages, file, "--text-file", tmp_path / "text", "-o", edited_file)
    report = json.loads(call("cache", "show", edited_file, "--json"))
    assert (report["text"], report["loss"]) == (text, "scales")
    # nothing stands behind what is new, so all was read
    options = ("--max-new-tokens", 6, "--threads", 1)
    expected = call("run", pages, "--prompt", text + ENDS[0], *options)
    assert call("run", pages, "--cache", edited_file, "--prompt", ENDS[0], *options) == expected
    call("cache", "edit", pages, edited_file, "--replace", "import math\n", "--json")
    assert json.loads(call("cache", "show", edited_file, "--json"))["text"] == BEGINNING
    with pytest.raises(InputError, match="the text has 'import sys' 3 times"):
        call("cache", "edit", pages, edited_file, "--replace", "import sys")
    with pytest.raises(InputError, match="give --text, --text-file or --replace"):
        call("cache", "edit", pages, edited_file)
    call("cache", "make", pages, "--system", "Lists of numbers, and of texts.", "-o", file)
    call("cache", "edit", pages, file, "--replace", "numbers", "--by", "lists")
    report = json.loads(call("cache", "show", file, "--json"))
    assert report["kind"] == "system prompt"
    assert "Lists of lists, and of texts." in report["text"]
