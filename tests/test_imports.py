"""The floors of the house: an import only points down, as the contracts in pyproject.toml say."""

from __future__ import annotations

from pathlib import Path

import grimp
import networkx as nx
import pytest
from importlinter import cli

import graphopt

PACKAGE = Path(graphopt.__file__).parent
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
MOST_ROOMS = 22
"""Folders and modules at the root of the package: more than a newcomer can keep in mind is too many."""


def test_the_contracts_hold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PYPROJECT.parent)
    assert cli.lint_imports(config_filename=str(PYPROJECT), no_cache=True) == 0, capsys.readouterr().out


def test_an_import_that_points_up_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "house"
    for name, text in {"__init__": "", "roof": "", "floor": "import house.roof\n"}.items():
        package.mkdir(exist_ok=True)
        (package / f"{name}.py").write_text(text)
    config = tmp_path / "pyproject.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "house"\n[[tool.importlinter.contracts]]\nname = "floors"\n'
        'type = "layers"\ncontainers = ["house"]\nlayers = ["roof", "floor"]\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.lint_imports(config_filename=str(config), no_cache=True) == 1
    assert "house.floor is not allowed to import house.roof" in capsys.readouterr().out


def test_no_two_rooms_need_one_another() -> None:
    graph = grimp.build_graph("graphopt", cache_dir=None)
    rooms = nx.DiGraph()
    for module in graph.modules - {"graphopt"}:  # `import graphopt` gathers what it offers from all floors
        for dependency in graph.find_modules_directly_imported_by(module) - {"graphopt"}:
            ends = module.split(".")[1], dependency.split(".")[1]
            if ends[0] != ends[1]:
                rooms.add_edge(*ends)
    assert rooms.number_of_edges() > 50
    assert list(nx.simple_cycles(rooms)) == []


def test_there_are_few_rooms() -> None:
    rooms = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py"]
    assert 15 < len(rooms) <= MOST_ROOMS, rooms
