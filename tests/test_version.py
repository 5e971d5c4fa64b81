from __future__ import annotations

import tomllib
from pathlib import Path

import graphopt


def test_the_package_and_pyproject_say_the_same_version() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert graphopt.__version__ == project["version"]
