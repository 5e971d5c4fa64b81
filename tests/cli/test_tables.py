"""The tables that commands print of real artifacts, on terminals of several widths."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from graphopt import cli
from graphopt.cli.console import out
from graphopt.report.console_table import ConsoleTable

FIGURE = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]\d+)?%?")
WIDTHS = (60, 80, 120)
"""Columns of a terminal: half a window, the usual one, a wide one."""


def text_of(table: ConsoleTable, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def tables(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ConsoleTable]]:
    """What commands print of an artifact, by command."""
    folder = tmp_path_factory.mktemp("tables")
    text = folder / "text"
    text.write_text("def f(x):\n    return x\n" * 400, encoding="utf-8")
    after, int4 = folder / "w4a4", folder / "int4"
    options = ("--quality-tokens", 64)
    commands = (
        ("optimize", llama_artifact, "-r", "w4a4", "-o", after, "--set", "quantize_weights.rounding=nearest", *options),
        ("optimize", llama_artifact, "-r", "rotate-kv4-rtn", "-o", folder / "kv4", "--all", *options),
        ("optimize", llama_artifact, "-r", "rotate-int4-rtn", "-o", int4, *options),
        ("verify", llama_artifact, int4, "--all"),
        ("inspect", after),
        ("inspect", after, "--all"),
        ("diff", llama_artifact, after),
        ("diff", llama_artifact, after, "--all"),
        ("quality", llama_artifact, int4, "--where", "--text", text, "--tokens", 512, "--window", 128),
        ("table", llama_artifact, "int4-rtn", "rotate", "--text", text, "--tokens", 512, "--window", 128),
        ("eval", after, "--text", text),
        ("heads", llama_artifact, "--text", text, "--windows", 1, "--page", 16, "--sinks", 16, "--recent", 16),
        ("profile", llama_artifact, "--prompt-tokens", 16, "--tokens", 2),
        ("calibrate", llama_artifact, "-o", folder / "statistics"),
        ("recipes",),
    )
    tables_by_command: dict[str, list[ConsoleTable]] = {}
    for number, command in enumerate(commands):
        console_tables = tables_by_command.setdefault(f"{command[0]} {number}", [])
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(sys, "argv", ["graphopt", *map(str, command)])
            monkeypatch.setattr(
                out, "print", lambda *values, console_tables=console_tables, **_: console_tables.extend(values)
            )
            with pytest.raises(SystemExit) as stop:
                cli.main()
        assert stop.value.code in ((1,) if command[0] == "diff" else (0, None)), command
    return {
        name: [value for value in values if isinstance(value, ConsoleTable)]
        for name, values in tables_by_command.items()
    }


def test_each_command_prints_a_table(tables: dict[str, list[ConsoleTable]]) -> None:
    assert all(tables.values())


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_and_headings_are_whole(tables: dict[str, list[ConsoleTable]], width: int) -> None:
    for name, console_tables in tables.items():
        for table in console_tables:
            text = text_of(table, width)
            lines = text.splitlines()
            assert max(map(len, lines)) <= width, name
            assert "…" not in text, name
            cells = [*table.headings, *(cell for row in table.rows for cell in row), table.title]
            expected = Counter(figure for cell in cells for figure in FIGURE.findall(cell))
            assert Counter(FIGURE.findall(text)) == expected, (name, text)
            words = {word for heading in table.headings for word in heading.split()}
            assert words <= set(re.findall(r"[^\s┃│]+", text)), name


def test_reasons_are_folded_unless_all_are_asked_for(tables: dict[str, list[ConsoleTable]]) -> None:
    short_table, full_table = tables["inspect 4"][-1], tables["inspect 5"][-1]
    assert len(short_table.rows) < len(full_table.rows) / 4
    assert sum(int(row[1]) for row in short_table.rows) >= len(full_table.rows)
