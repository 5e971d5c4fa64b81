"""A command is one function: what marks it, where it is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graphopt.cli.commands import found_commands

MODULE = """
from graphopt.cli.commands import command

@command({name!r})
def greet() -> None:
    "Say hello."
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package ``commands_of_a_test`` that can be imported."""
    made = tmp_path / "commands_of_a_test"
    made.mkdir()
    (made / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for name in [name for name in sys.modules if name.startswith("commands_of_a_test")]:
        del sys.modules[name]


def test_a_function_in_a_new_file_is_a_command(folder: Path) -> None:
    (folder / "one.py").write_text(MODULE.format(name="greet"))
    assert [(name, each.__doc__) for name, each in found_commands(folder.name).items()] == [("greet", "Say hello.")]


def test_two_commands_of_one_name_are_refused(folder: Path) -> None:
    for file in ("one", "two"):
        (folder / f"{file}.py").write_text(MODULE.format(name="greet"))
    with pytest.raises(ValueError, match="two commands are called greet: in commands_of_a_test.one and"):
        found_commands(folder.name)


def test_what_a_module_imports_is_no_command_of_it(folder: Path) -> None:
    (folder / "one.py").write_text(MODULE.format(name="greet"))
    (folder / "two.py").write_text("from commands_of_a_test.one import greet\n")
    assert list(found_commands(folder.name)) == ["greet"]
