"""Tables for a terminal of any width: columns fit, or a row goes on in a second line; no figure is cut or broken."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

_WORDS = (28, 16)
"""Columns of a terminal up to which words of text are kept whole, the first that fits; a longer one is a name, and
breaks behind its dots."""

_WORD = re.compile(r"(?:[\d.,]+ (?:x )?)*\S+")
"""A word; a figure stands in one line with the word behind it: ``3.2 MB``, ``4 bits``, ``30 x int4``."""

_BREAK = re.compile(r"(?<=[./_])(?![./_\d])")
"""Where a long name may break: behind its dots, but not in front of a number."""

_FRAME = 3
"""Columns of a terminal that each column of a table takes besides its text: a blank on both sides, and a line."""


class Figures(str):
    """The heading of a column of figures, which stay whole and stand to the right; any other heading is of texts."""

    __slots__ = ()


def figure_columns(*names: str) -> list[Figures]:
    """Return headings of columns of figures."""
    return [Figures(name) for name in names]


@dataclass(frozen=True)
class _Layout:
    """Where columns stand: ``lines`` of columns by number, below each other, and the width of each place in them."""

    lines: list[list[int]]
    widths: list[int]


@dataclass
class ConsoleTable:
    """A table that rich prints: the first column is the name of a row, and stands in its first line.

    Attributes:
        headings: of the columns; :class:`Figures` for those of figures.
        title: a line above the table.
        rows: cells as plain text, without markup.
    """

    headings: Sequence[str]
    title: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add a row with a cell for each column.

        Raises:
            ValueError: there are more or fewer cells than columns.
        """
        if len(cells) != len(self.headings):
            raise ValueError(f"{len(cells)} cells for {len(self.headings)} columns")
        self.rows.append(list(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        layout = self._layout(options.max_width)
        table = Table(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            show_lines=len(layout.lines) > 1,
        )
        head, *body = ([*self._blocks(row, layout, row is self.headings)] for row in (self.headings, *self.rows))
        for text, width in zip(head, layout.widths, strict=True):
            table.add_column(Text(text), width=width, no_wrap=True, overflow="crop")
        for cells in body:
            table.add_row(*map(Text, cells))
        yield table

    def _layout(self, width: int) -> _Layout:
        """Return the first layout that fits: as few lines as possible, words whole as far as possible."""
        layout = None
        for lines, words in product(self._arrangements(), _WORDS):
            room = width - 1 - _FRAME * len(lines[0])
            minima = self._widths(lines, [self._minimum(number, words) for number in range(len(self.headings))])
            layout = _Layout(lines, self._grow(lines, minima, room - sum(minima)))
            if sum(minima) <= room:
                return layout
        assert layout is not None
        return layout

    def _arrangements(self) -> list[list[list[int]]]:
        """Return the columns in one line, in two, and so on; lines after the first begin below the second column."""
        numbers = list(range(1, len(self.headings)))
        if not numbers:
            return [[[0]]]
        arrangements = []
        for count in range(1, len(numbers) + 1):
            size = -(-len(numbers) // count)
            lines = [[0, *numbers[first : first + size]] for first in range(0, len(numbers), size)]
            if len(lines) == count:
                arrangements.append(lines)
        return arrangements

    def _widths(self, lines: list[list[int]], columns: list[int]) -> list[int]:
        return [max(columns[line[index]] for line in lines if index < len(line)) for index in range(len(lines[0]))]

    def _minimum(self, number: int, words: int) -> int:
        """Return the least width of a column: its figures and the words of its heading are whole."""
        heading = self.headings[number]
        longest = max(map(cell_len, heading.split()), default=1)
        if isinstance(heading, Figures):
            return max([longest, *(cell_len(line) for row in self.rows for line in row[number].split("\n"))])
        return max([longest, *(min(words, cell_len(word)) for row in self.rows for word in _WORD.findall(row[number]))])

    def _grow(self, lines: list[list[int]], minima: list[int], spare: int) -> list[int]:
        """Share what is left of the terminal among columns that could use it, equally."""
        cells = [
            max(cell_len(line) for row in (self.headings, *self.rows) for line in row[number].split("\n"))
            for number in range(len(self.headings))
        ]
        naturals, widths = self._widths(lines, cells), list(minima)
        while spare > 0 and (short := [index for index, width in enumerate(widths) if width < naturals[index]]):
            share = max(1, spare // len(short))
            for index in short[:spare]:
                growth = min(share, naturals[index] - widths[index])
                widths[index] += growth
                spare -= growth
        return widths

    def _blocks(self, row: Sequence[str], layout: _Layout, is_head: bool) -> list[str]:
        """Return the cells of a row as they are printed: wrapped, and those of further lines below."""
        blocks: list[list[str]] = [[] for _ in layout.widths]
        for line_number, line in enumerate(layout.lines):
            pieces = []
            for index, number in enumerate(line):
                text = "" if index == 0 and line_number else row[number]
                text_lines = wrap(text, layout.widths[index])
                if isinstance(self.headings[number], Figures):
                    text_lines = [" " * (layout.widths[index] - cell_len(part)) + part for part in text_lines]
                pieces.append(text_lines)
            height = max(map(len, pieces))
            for index in range(len(layout.widths)):
                part = pieces[index] if index < len(pieces) else []
                blank = [""] * (height - len(part))
                blocks[index] += [*blank, *part] if is_head else [*part, *blank]
        return ["\n".join(block) for block in blocks]


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines: between words; in a longer one behind a dot, slash or underscore; else anywhere."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in _WORD.findall(paragraph):
            separator = " " if line else ""
            if cell_len(line + separator + word) <= width:
                line += separator + word
                continue
            if line:
                lines.append(line)
            line = ""
            parts = [word] if cell_len(word) <= width else _BREAK.split(word)
            for part in (piece for long in parts for piece in chop_cells(long, width)):
                if cell_len(line + part) > width:
                    lines.append(line)
                    line = ""
                line += part
        lines.append(line)
    return lines
