"""Chat templates: messages into the text that a model was trained on, rendered as transformers renders it.

A template is code of the model's maker, in jinja2. It runs in a sandbox
(:mod:`graphopt.inference.conversation.sandbox`) and sees copies of plain JSON data only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphopt.artifact.hf_config import json_object
from graphopt.errors import InputError
from graphopt.inference.conversation.sandbox import environment, import_jinja2

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, Any]
"""``role`` and ``content``, and what else a template reads, such as ``tool_calls``: plain JSON data."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a model.

    Attributes:
        source: the template.
        file: where it is from.
        special: the named special tokens, such as ``bos_token``, which the template may write.
    """

    source: str
    file: Path
    special: Mapping[str, str]

    @classmethod
    def of_folder(cls, folder: Path) -> ChatTemplate:
        """Read the template of a model from ``chat_template.jinja``, or else from ``tokenizer_config.json``.

        Raises:
            InputError: there is none, or it cannot be read.
        """
        config = json_object(folder / CONFIG)
        file, source = folder / TEMPLATE, None
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"the chat template is not UTF-8: {error}", file=file) from error
        elif "chat_template" in config:
            file, source = folder / CONFIG, _default(config["chat_template"], folder / CONFIG)
        if source is None:
            raise InputError(
                "this model has no chat template, so it cannot chat",
                file=folder,
                remedy=f"put the {TEMPLATE} of the checkpoint into the folder if the model was trained to chat; a base "
                "model only completes texts: `graphopt run FOLDER --prompt TEXT`",
            )
        return cls(source, file, special_tokens(folder))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: the messages, oldest first.
            add_generation_prompt: whether the text ends where the model's reply begins.
            tools: functions that the model may call, as JSON schemas.
            variables: what else the template reads, such as ``enable_thinking``.

        Raises:
            InputError: the template refuses the messages, or cannot be rendered.
            MissingDependencyError: jinja2 is not installed.
        """
        template = self._template
        context = {
            **self.special,
            **_plain(variables),
            "messages": [_reasoning(_plain(message)) for message in messages],
            "tools": _plain(None if tools is None else list(tools)),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = template.render(context)
        except Exception as error:  # a template is code: it may raise anything
            raise InputError(f"the chat template refuses these messages: {error}", file=self.file) from error
        return str(text)

    @cached_property
    def _template(self) -> Any:
        jinja2 = import_jinja2()
        try:
            return environment(jinja2).from_string(self.source)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template cannot be read: {error}", file=self.file) from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the named special tokens of the model in a folder, by name, such as ``eos_token``."""
    config = {**json_object(folder / SPECIAL), **json_object(folder / CONFIG)}
    tokens = {name: config[name] for name in _TOKEN_NAMES if name in config}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning the names that templates read: ``reasoning_content``, and ``thinking`` for gpt-oss."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return data that consists of exact JSON types, copied: objects have methods that a sandbox does not know.

    Raises:
        InputError: there is something else in it.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    raise InputError(
        f"a message holds a {type(value).__name__}", remedy="give text, numbers, booleans, lists and dictionaries"
    )


def _default(template: Any, file: Path) -> str:
    """Return the template, or the one called ``default`` where a model has several."""
    if isinstance(template, list):
        templates = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = templates.get("default")
    if not isinstance(template, str):
        raise InputError("its chat_template is neither a text nor a list with one called default", file=file)
    return template
