"""What is asked of the Engine, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Turn:
    """What to continue, and how.

    Attributes:
        prompt: tokens of the prompt.
        prior_tokens: tokens that were made of it before, by another worker; the stream goes on behind them.
        limit: tokens to make at most, the known ones among them.
        min_tokens: tokens before which the text does not end.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among so many; 0 for all.
        top_p: draw among the most likely that reach this probability.
        seed: of the random numbers.
        repetition_penalty: divides the logits of tokens that are there already.
        guidance: ``json_schema``, ``regex`` or ``lark_grammar``, and its text.
    """

    prompt: tuple[int, ...]
    limit: int
    prior_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    guidance: tuple[str, str] | None = None

    @property
    def replays(self) -> bool:
        """Whether the Engine must make all tokens anew to go on: random numbers and grammars begin at the prompt."""
        return self.temperature > 0 or self.guidance is not None or self.repetition_penalty != 1


@dataclass(frozen=True)
class Event:
    """What became of a stream: a token, its end, or why it is refused.

    Attributes:
        token: the next token.
        finish: ``stop``, ``length``, ``cancelled`` or ``error``, at the end.
        message: what is wrong, where it is refused or failed.
        cached_tokens: tokens of the prompt that the Engine had already, at the end.
    """

    token: int | None = None
    finish: str | None = None
    message: str = ""
    cached_tokens: int = 0


@dataclass(eq=False)
class Stream:
    """A turn on its way.

    Attributes:
        turn: what to continue.
        deliver: called with each event, on the Engine's thread.
        number: its age; the oldest is the smallest.
        output: tokens behind the prompt, known ones among them.
    """

    turn: Turn
    deliver: Callable[[Event], None]
    number: int = 0
    output: list[int] = field(default_factory=list)
    request: Any = None
    turn_id: int | None = None
    replay_count: int = 0  # tokens that the Engine makes anew, and that were delivered before
    is_deferred: bool = False  # whether it had to leave a full pool

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return len(self.turn.prompt) + len(self.output)
