"""A command is one function in one file."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from graphopt.cli.commands import COMMANDS
from graphopt.cli.entry import build_app
from tests.registry_files import file_added

FILE = '''
from graphopt.cli.commands import command

@command("greet")
def greet(name: str) -> None:
    """Say hello."""
    print(f"hello {name}")
'''


def test_a_function_in_a_new_file_is_a_command(tmp_path: Path) -> None:
    with file_added(COMMANDS, "graphopt.cli", tmp_path, FILE):
        result = CliRunner().invoke(build_app(), ["greet", "you"])
    assert (result.exit_code, result.output) == (0, "hello you\n")
    assert "greet" not in COMMANDS
