"""Text that must have a form: a JSON schema or a regular expression, held token by token by the library llguidance.

logits -> tokens that the grammar does not allow become -inf -> sampling chooses among the others
^                                         |
+------------- the chosen token <---------+
"""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from graphopt.errors import GraphoptError, InputError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.session import Session

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as ``json.dumps`` writes it, unless the schema's ``x-guidance`` says otherwise: where any white space is
allowed, small models write nothing else until their tokens run out."""


@dataclass(frozen=True)
class Grammar:
    """The form that a text must have; see :meth:`json_schema` and :meth:`regex`.

    Attributes:
        kind: what ``text`` is.
        text: a JSON schema as JSON, or a regular expression that the whole text matches.
    """

    kind: Literal["JSON schema", "regular expression"]
    text: str

    @classmethod
    def json_schema(cls, schema: str | dict[str, Any] | bool) -> Grammar:
        """Return the grammar of the JSON that a schema describes, in one line with a space behind ``:`` and ``,``.

        Args:
            schema: the schema, as JSON or as what JSON is in Python. ``{}`` is any JSON.

        Raises:
            InputError: it is not JSON, or neither an object nor a boolean.
        """
        try:
            content = json.loads(schema) if isinstance(schema, str) else schema
        except json.JSONDecodeError as error:
            raise InputError(f"the JSON schema is not JSON: {error}") from error
        if not isinstance(content, dict | bool):
            raise InputError(
                f"a JSON schema is an object or a boolean, and this is {json.dumps(content)[:60]}",
                remedy='describe the JSON that you want, such as {"type": "object"}',
            )
        return cls("JSON schema", json.dumps(content))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that a regular expression matches from end to end, in the syntax of Rust."""
        return cls("regular expression", pattern)

    def matcher(self, session: Session, eos: Sequence[int]) -> Matcher:
        """Return a matcher for one text of a model.

        Args:
            session: the model.
            eos: the tokens that end a text.

        Raises:
            InputError: the grammar cannot be used, with what llguidance says about it; or there is no tokenizer.
            MissingDependencyError: llguidance is not installed.
        """
        make, tokens = _llguidance().LLMatcher, _tokens(session, tuple(eos))
        if self.kind == "JSON schema":
            form = make.grammar_from_json_schema(self.text, defaults=JSON_STYLE)
        else:
            form = make.grammar_from_regex(self.text)
        wrong, messages = make.validate_grammar_with_warnings(form, tokens)
        if wrong:
            raise InputError(f"the {self.kind} cannot be used: {' '.join(messages[0].split())}")
        return Matcher(make(tokens, form, log_level=0))


class Matcher:
    """Which tokens may come next in one text.

    Args:
        matcher: ``LLMatcher`` of llguidance.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether the text has the form and nothing more can follow it."""
        return bool(self._matcher.is_stopped())

    def mask_logits(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Return logits of one position, [vocabulary], with -inf for tokens that are not allowed.

        Raises:
            GraphoptError: llguidance gave up.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        is_allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(np.bool_)
        # The tokenizer may know fewer tokens than the model has logits.
        return np.where(is_allowed, logits, logits.dtype.type(-np.inf))

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, are allowed one behind the other."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced_tokens(self) -> list[int]:
        """Return the tokens of what must come next, spelled as the tokenizer would; none where there is a choice."""
        return [int(token) for token in self._matcher.compute_ff_tokens()]

    def take(self, token: int) -> None:
        """Go on behind ``token``, which must be allowed.

        Raises:
            GraphoptError: llguidance gave up.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GraphoptError(
                f"llguidance gave up: {self._matcher.get_error()}", remedy="simplify the schema or the expression"
            )


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingDependencyError(
            "a JSON schema or a regular expression needs llguidance, which is not installed",
            remedy='pip install "graphopt[chat]"',
        ) from error


@functools.lru_cache(maxsize=4)
def _tokens_of(tokenizer: str, vocabulary: int | None, eos: tuple[int, ...]) -> Any:
    return _llguidance().LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos) or None)


def _tokens(session: Session, eos: tuple[int, ...]) -> Any:
    """Return the tokenizer as llguidance wants it; a large one takes a second to make, so it is kept."""
    text = session.require_tokenizer().to_str()
    try:
        return _tokens_of(text, session.interface.vocabulary, eos)
    except ValueError as error:
        raise InputError(f"llguidance cannot use the tokenizer: {error}", file=session.file.parent) from error
