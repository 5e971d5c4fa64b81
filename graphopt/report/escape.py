"""Text of others shown as text: names of nodes, tensors and files may hold anything."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 120
"""Characters of a name that are shown."""


def plain(text: str, width: int = WIDTH) -> str:
    """Return a name on one line, with control characters escaped, and its middle left out where it is long."""
    head = text if len(text) <= 4 * width else text[: 2 * width] + text[-2 * width :]
    line = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in head)
    if len(line) <= width:
        return line
    half = (width - 1) // 2
    return f"{line[:half]}…{line[-half:]}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: ``0-4, 6, 8-9``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def letters() -> Iterable[str]:
    """Yield A, B, ..., Z, A1, B1, ..."""
    for number in count():
        for code in range(26):
            yield chr(ord("A") + code) + (str(number) if number else "")


def count_text(counts: dict[str, int]) -> str:
    """Return what there is how often, most first: ``30 x int4, 2 x int8``; without numbers where all are alike."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(
        f"{times} x {name}" for name, times in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    )
