from __future__ import annotations

import io

import pytest
from rich.console import Console

from graphopt.report.console_table import ConsoleTable, figure_columns, wrap


def lines_of(table: ConsoleTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").split("│" if "│" in line else "┃")]


def test_a_row_goes_on_in_a_second_line_where_columns_do_not_fit() -> None:
    table = ConsoleTable(["model", *figure_columns("perplexity", "divergence", "largest", "seconds")])
    table.add_row("before", "1,234.5678", "1.25e-10", "0.5", "12.3")
    table.add_row("after", "2,345.6789", "2.5e-10", "0.25", "4.5")
    wide = [cells_of(line) for line in lines_of(table, 80) if "before" in line]
    assert wide == [["before", "1,234.5678", "1.25e-10", "0.5", "12.3"]]
    narrow = lines_of(table, 40)
    start = next(number for number, line in enumerate(narrow) if "before" in line)
    assert [cells_of(line) for line in narrow[start : start + 2]] == [
        ["before", "1,234.5678", "1.25e-10"],
        ["", "0.5", "12.3"],
    ]
    assert [cells_of(line) for line in narrow[1:3]] == [
        ["model", "perplexity", "divergence"],
        ["", "largest", "seconds"],
    ]


def test_figures_stand_to_the_right() -> None:
    table = ConsoleTable(["model", *figure_columns("bytes")])
    table.add_row("a", "7")
    table.add_row("b", "1,234,567")
    assert [line.index("7 ") for line in lines_of(table, 40) if "7 " in line] == [18, 18]


def test_texts_wrap_before_a_row_is_broken() -> None:
    table = ConsoleTable(["pass", *figure_columns("places"), "why"])
    table.add_row("rotate", "12", "a sentence of many words that says why nothing was done to it")
    text = lines_of(table, 50)
    assert sum("rotate" in line for line in text) == 1
    assert len(text) > 5
    assert all(len(line) <= 50 for line in text)


def test_markup_in_cells_is_text() -> None:
    table = ConsoleTable(["name"])
    table.add_row("[red]x[/nothing]")
    assert any("[red]x[/nothing]" in line for line in lines_of(table, 40))


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        ConsoleTable(["a", "b"]).add_row("x")


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("two words", 9, ["two words"]),
        ("two words", 8, ["two", "words"]),
        ("stored in 3.25 MB of codes", 12, ["stored in", "3.25 MB of", "codes"]),
        ("9 x float32, 3 x nl4", 12, ["9 x float32,", "3 x nl4"]),
        ("model.layers.0.self_attn", 13, ["model.", "layers.0.", "self_attn"]),
        ("x" * 10, 4, ["xxxx", "xxxx", "xx"]),
        ("one\n\ntwo", 10, ["one", "", "two"]),
        ("日本語", 4, ["日本", "語"]),
        ("", 4, [""]),
    ],
)
def test_lines_break_between_words_and_names_at_their_dots(text: str, width: int, lines: list[str]) -> None:
    assert wrap(text, width) == lines
