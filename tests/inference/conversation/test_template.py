"""Templates are rendered as transformers renders them, and do nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from graphopt.errors import InputError, MissingDependencyError
from graphopt.inference.conversation.template import CONFIG, SPECIAL, TEMPLATE, ChatTemplate
from tests.inference.conversation.templates import CONVERSATIONS, REQUEST, TEMPLATES, TOOL
from tests.small_models import byte_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer("abc"), **TOKENS)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, Path("chat_template.jinja"), TOKENS)


def render_text(render: Any) -> str | None:
    """The text, or nothing where the template refuses the messages."""
    try:
        return str(render())
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_conversation_reads_as_in_transformers(
    name: str, conversation: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages, source = CONVERSATIONS[conversation], TEMPLATES[name]
    texts = set()
    for add_prompt in (True, False):
        for options in ({}, {"tools": [TOOL]}, {"enable_thinking": False}):
            arguments = {"add_generation_prompt": add_prompt, **options}
            expected = render_text(
                lambda arguments=arguments: tokenizer.apply_chat_template(
                    messages, chat_template=source, tokenize=False, **arguments
                )
            )
            assert render_text(lambda arguments=arguments: template(source).render(messages, **arguments)) == expected
            texts.add(expected)
    assert texts != {None} or (name, conversation) in REFUSALS


# By their own words, or since a content is not a text there.
REFUSALS = {
    ("gemma", "system"),
    ("gemma", "user twice"),
    ("chatml", "tool calls"),
    ("gemma", "tool calls"),
    ("mistral", "user twice"),
    ("mistral", "tool calls"),
}


def test_a_refusal_says_what_the_template_says() -> None:
    with pytest.raises(InputError, match=r"refuses these messages: System role not supported.*chat_template\.jinja"):
        template(TEMPLATES["gemma"]).render(CONVERSATIONS["system"])
    with pytest.raises(InputError, match="refuses these messages: 'dict object' has no attribute 'content'"):
        template(TEMPLATES["chatml"]).render([{"role": "user"}])
    with pytest.raises(InputError, match="cannot be read: .*unknown tag 'nonsense'"):
        template("{% nonsense %}").render(REQUEST)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ dict.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% include 'file' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str, tokenizer: PreTrainedTokenizerFast) -> None:
    text = render_text(lambda: template(source).render(REQUEST))
    assert not text
    assert not render_text(lambda: tokenizer.apply_chat_template(REQUEST, chat_template=source, tokenize=False))


def test_messages_are_plain_data_and_stay_as_they_are() -> None:
    message = {"role": "user", "content": ["a"]}
    assert template("{{ messages[0].content.copy() }}").render([message]) == "['a']"
    assert message == {"role": "user", "content": ["a"]}
    with pytest.raises(InputError, match="a message holds a PosixPath"):
        template("").render([{"role": "user", "content": Path()}])


def test_where_a_template_is_read_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no chat template.*put the chat_template\.jinja.*--prompt TEXT"):
        ChatTemplate.of_folder(tmp_path)
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "chat_template": templates}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / SPECIAL).write_text('{"bos_token": "<s>", "eos_token": "older"}')
    chat_template = ChatTemplate.of_folder(tmp_path)
    assert (chat_template.source, chat_template.file.name) == ("{{ eos_token }}", CONFIG)
    assert chat_template.special == {"eos_token": "</s>", "bos_token": "<s>"}
    assert chat_template.render(REQUEST) == "</s>"
    (tmp_path / CONFIG).write_text(json.dumps(config | {"chat_template": "{{ bos_token }}"}))
    assert ChatTemplate.of_folder(tmp_path).render(REQUEST) == "<s>"
    (tmp_path / TEMPLATE).write_text("é")
    assert ChatTemplate.of_folder(tmp_path).render(REQUEST) == "é"
    (tmp_path / TEMPLATE).write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        ChatTemplate.of_folder(tmp_path)
    (tmp_path / TEMPLATE).unlink()
    (tmp_path / CONFIG).write_text(json.dumps({"chat_template": [{"name": "rag", "template": ""}]}))
    with pytest.raises(InputError, match="neither a text nor a list with one called default"):
        ChatTemplate.of_folder(tmp_path)


def test_without_jinja2_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match=r'need jinja2, which is not installed.*"graphopt\[chat\]"'):
        template("a").render(REQUEST)
