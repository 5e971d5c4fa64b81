"""Print what ``pyproject.toml`` requires with some extras, one package a line: `tools/release/requirements.py cpu,dev`.

The Makefile installs it while the native operators compile, which ``pip install .[cpu,dev]`` would only do afterwards.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def requirements(extras: str, pyproject: Path = PYPROJECT) -> list[str]:
    """Return the requirements of the package and of its extras, which a comma separates.

    Raises:
        SystemExit: the project has no such extra.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    lines, optional = list(project["dependencies"]), project["optional-dependencies"]
    for extra in filter(None, extras.split(",")):
        if extra not in optional:
            raise SystemExit(f"EXTRAS={extras}: pyproject.toml has no extra {extra!r}; it has {', '.join(optional)}")
        lines += optional[extra]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    print("\n".join(requirements("".join(sys.argv[1:]))))
