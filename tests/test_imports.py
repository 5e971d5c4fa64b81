"""The floors of the house: an import only points down, as CONTRIBUTING.md lists them; and no file is long."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import graphopt

LONGEST = 300
"""Lines that a file of the package may have."""

PACKAGE = Path(graphopt.__file__).parent
GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def floors() -> list[list[str]]:
    """Return the names of each floor, the lowest first."""
    paragraph = next(part for part in GUIDE.read_text(encoding="utf-8").split("\n\n") if part.count("→") > 3)
    return [re.findall(r"`(\w+)`", floor) for floor in paragraph.split("→")]


def imports(file: Path) -> Iterator[str]:
    """Yield the parts of graphopt that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module] if node.module != "graphopt" else [f"graphopt.{name.name}" for name in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("graphopt."))


@functools.cache
def edges() -> set[tuple[str, str]]:
    """Return which part of the package imports which other one."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        # `import graphopt` gathers what it offers from all floors; presets are data
        found |= {(part, other) for other in imports(file) if part not in ("__init__", other)}
    return found


def test_every_part_has_a_floor() -> None:
    parts = {file.stem for file in PACKAGE.glob("*.py")} | {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    listed = [name for floor in floors() for name in floor]
    assert sorted(listed) == sorted(parts - {"__init__", "preset_files"})


def test_an_import_only_points_down() -> None:
    of = {name: number for number, floor in enumerate(floors()) for name in floor}
    assert len(edges()) > 50
    assert [(part, other) for part, other in sorted(edges()) if of[other] > of[part]] == []


def test_no_two_parts_need_one_another() -> None:
    assert list(nx.simple_cycles(nx.DiGraph(edges()))) == []


def test_no_file_is_long() -> None:
    sources = [file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".h", ".cc", ".cu", ".cuh", ".cpp")]
    assert {file.suffix for file in sources} >= {".py", ".h", ".cc", ".cu"}
    lengths = {file: file.read_text(encoding="utf-8").count("\n") for file in sources}
    assert {str(file.relative_to(PACKAGE)): length for file, length in lengths.items() if length > LONGEST} == {}


def test_text_is_made_without_the_passes() -> None:
    """They import half a second of libraries, which a session would wait for."""
    code = (
        "import sys, graphopt.generation; print([name for name in sys.modules if name.startswith('graphopt.passes')])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
