"""A chat in a terminal, or over lines of standard input."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from graphopt.errors import GraphoptError, InputError
from graphopt.inference.conversation.conversation import Conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphopt.inference.decoding.continuation import Settings
    from graphopt.inference.decoding.speculation import Speculation
    from graphopt.inference.generation import Completion
    from graphopt.inference.prompt_cache import PromptCache
    from graphopt.inference.session import Session

_PROMPT, _CONTINUATION_PROMPT = ">>> ", "... "
_HELP = """/reset   begin a new conversation
/tokens  show how many tokens there are, and how fast the last reply was
/exit    end (so do /quit, /bye and Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C ends a reply, not the chat."""


def converse(
    session: Session,
    *,
    system: str | None,
    messages: Sequence[str],
    settings: Settings,
    streams: bool = True,
    proposer: Speculation | None = None,
    cache: PromptCache | None = None,
) -> list[dict[str, Any]]:
    """Chat with a model, and return the turns: what was said, how many tokens were fed, and the reply.

    Args:
        session: the model.
        system: what it is told before.
        messages: what the user says, turn by turn; where this is empty, lines of standard input.
        settings: how replies are made.
        streams: whether to print replies as they come.
        proposer: what guesses tokens; replies stay the same.
        cache: the system prompt, read already.

    Raises:
        InputError: the model has no chat template; or, where nobody is there to try again, a turn is refused.
    """
    interactive = not messages and sys.stdin.isatty()
    chat = _Chat(
        lambda: Conversation(session, system=system, settings=settings, proposer=proposer, cache=cache),
        Console(stderr=True),
        streams,
    )
    if interactive:
        chat.err.print(
            f"[dim]{escape(session.file.parent.name)}: /help lists commands, Ctrl-D ends[/dim]", highlight=False
        )
    for message in messages or _lines(interactive):
        if messages or not chat.obey(message, interactive):
            chat.turn(message, interactive)
        if chat.is_over:
            break
    return chat.turns


@dataclass
class _Chat:
    """The conversation, and what was measured of it."""

    new: Callable[[], Conversation]
    err: Console
    streams: bool

    def __post_init__(self) -> None:
        self.conversation, self.is_over, self.seconds = self.new(), False, 0.0
        self.turns: list[dict[str, Any]] = []

    def turn(self, message: str, interactive: bool) -> None:
        """Say something and print the reply as it comes."""
        begin = time.perf_counter()
        try:
            with _until_interrupted() as is_halted:
                for piece in self.conversation.stream(message, is_halted):
                    self._write(piece)
        except GraphoptError as error:
            if not interactive:
                raise
            remedy = "; /reset begins a new conversation" if isinstance(error, InputError) else ""
            return self.err.print(f"[red]error:[/red] {escape(str(error))}{remedy}", highlight=False, soft_wrap=True)
        self.seconds = time.perf_counter() - begin
        reply = self.conversation.last
        assert reply is not None
        self._write("\n")
        self.turns.append(
            {"message": message, "fed": self.conversation.fed_tokens, "reply": reply.model_dump(mode="json")}
        )
        if self.streams:
            self._explain_end(reply)
        if reply.stopped == "interrupted" and not interactive:
            raise KeyboardInterrupt

    def _write(self, text: str) -> None:
        if self.streams:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _explain_end(self, reply: Completion) -> None:
        reason = {
            "length": f"stopped after {len(reply.tokens)} tokens: --max-new-tokens allows more",
            "positions": "stopped: the model has no position left; /reset begins a new conversation",
            "interrupted": "interrupted",
        }.get(reply.stopped)
        if reason is not None:
            self.err.print(f"[dim]({reason})[/dim]", highlight=False)

    def obey(self, line: str, interactive: bool) -> bool:
        """Return whether the line is empty or a command, after it was obeyed."""
        word = line.strip()
        if word in ("/exit", "/quit", "/bye"):
            self.is_over = True
        elif word == "/reset":
            self.conversation = self.new()
            self.err.print("[dim](a new conversation)[/dim]", highlight=False)
        elif word == "/tokens":
            self.err.print(f"[dim]{self._counts()}[/dim]", highlight=False, soft_wrap=True)
        elif word == "/help":
            self.err.print(_HELP, markup=False, highlight=False, soft_wrap=True)
        elif interactive and line.startswith("/") and "/" not in word[1:] and " " not in word:
            self.err.print(
                f"there is no command {word}; a space in front makes it a message", markup=False, highlight=False
            )
        else:
            return not word
        return True

    def _counts(self) -> str:
        text = f"{self.conversation.tokens} tokens in the conversation"
        reply = self.conversation.last
        if reply is None:
            return text
        count = len(reply.tokens)
        return (
            f"{text}; the last turn fed {self.conversation.fed_tokens} and made {count} in {self.seconds:.1f} s, "
            f"{count / max(self.seconds, 1e-9):.1f} tokens/s"
        )


def _lines(interactive: bool) -> Iterator[str]:
    """Give what is typed, message by message, until the input ends."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited, and earlier ones come back
    parts: list[str] = []
    while True:
        prompt = _CONTINUATION_PROMPT if parts else _PROMPT
        try:
            line = input(prompt if interactive else "")
        except EOFError:
            if interactive:
                sys.stdout.write("\n")
            if parts:
                yield "\n".join(parts)
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            parts = []
            sys.stdout.write("\n")
            continue
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            message, parts = "\n".join(parts), []
            yield message


@contextlib.contextmanager
def _until_interrupted() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed; a run of the model is never cut off in the middle."""
    interrupt = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupt.set())
    try:
        yield interrupt.is_set
    finally:
        signal.signal(signal.SIGINT, before)
