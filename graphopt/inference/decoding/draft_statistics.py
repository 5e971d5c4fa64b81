"""What drafts did: how often they were right, how wide steps were, where time went."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphopt.inference.decoding.proposer import Guess


@dataclass
class DraftStats:
    """Counts and times of all texts that one :class:`graphopt.inference.decoding.speculation.Speculation` served.

    Attributes:
        tokens: tokens of texts behind the first of each.
        widths: steps behind prompts, by their columns.
        checks: guesses that were checked, by source and place in the draft.
        right: those of them that were right.
        drafting: seconds spent on drafts.
        verifying: seconds of steps with drafts.
        plain: seconds of steps without.
        as_plain: seconds that the same tokens would have taken without drafts, by the times of single steps here.
        notes: what to know about the texts: why there were no drafts, or why a text may differ from plain decoding.
    """

    tokens: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    checks: Counter[tuple[str, int]] = field(default_factory=Counter)
    right: Counter[tuple[str, int]] = field(default_factory=Counter)
    drafting: float = 0.0
    verifying: float = 0.0
    plain: float = 0.0
    as_plain: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Steps of the model behind prompts."""
        return sum(self.widths.values())

    @property
    def seconds(self) -> float:
        """Time of all steps behind prompts, and of drafts."""
        return self.drafting + self.verifying + self.plain

    @property
    def speedup(self) -> float | None:
        """Time without drafts over time with them; ``None`` before the first step."""
        return self.as_plain / self.seconds if self.seconds else None

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def count(self, columns: int, tokens: int, seconds: float, drafting: float, as_plain: float) -> None:
        """Count a step of so many columns, the tokens that it gave and its times."""
        self.widths[columns] += 1
        self.tokens += tokens
        self.as_plain += as_plain
        self.drafting += drafting
        if columns > 1:
            self.verifying += seconds
        else:
            self.plain += seconds

    def record_verdict(self, draft: Sequence[Guess], right: int, wrong: bool) -> None:
        """Count the guesses of a draft that were checked: the right ones, and the wrong one behind them."""
        for position, guess in enumerate(draft[: right + wrong]):
            self.checks[guess.source, position] += 1
            self.right[guess.source, position] += position < right

    def acceptance(self) -> dict[str, list[float]]:
        """Return by source the share of guesses that were right, by place in the draft, of those whose turn came."""
        lengths: defaultdict[str, int] = defaultdict(int)
        for source, position in self.checks:
            lengths[source] = max(lengths[source], position + 1)
        return {
            source: [_share(self.right[source, position], self.checks[source, position]) for position in range(length)]
            for source, length in sorted(lengths.items())
        }

    def report(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": _share(self.tokens, self.passes),
            "widths": {str(width): self.widths[width] for width in sorted(self.widths)},
            "acceptance": self.acceptance(),
            "drafting_ms": 1000 * self.drafting,
            "verifying_ms": 1000 * self.verifying,
            "plain_ms": 1000 * self.plain,
            "speedup": self.speedup,
            "notes": self.notes,
        }

    def lines(self) -> Iterable[str]:
        """Yield everything as sentences."""
        yield f"{self.tokens} tokens in {self.passes} passes, {_share(self.tokens, self.passes):.2f} a pass"
        if self.widths:
            counts = ", ".join(f"{self.widths[width]} of {width}" for width in sorted(self.widths))
            yield f"passes by width: {counts}"
        for source, shares in self.acceptance().items():
            yield f"{source}: right by place {' '.join(f'{share:.2f}' for share in shares)}"
        yield (
            f"drafting {1000 * self.drafting:.0f} ms, verifying {1000 * self.verifying:.0f} ms, "
            f"plain steps {1000 * self.plain:.0f} ms"
        )
        if self.speedup is not None:
            yield f"{self.speedup:.2f} times as fast as single tokens would have been"
        yield from self.notes


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0
