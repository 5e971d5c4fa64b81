"""Print the wheel's bill of materials, CycloneDX 1.6 as JSON. CMake puts it into the wheel (PEP 770).

The wheel holds graphopt alone: its Python files, and one library compiled from its own C++. Packages that pip installs
with it are listed as required or optional, with the versions of ``pyproject.toml``.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def bill(pyproject: Path = PYPROJECT) -> dict[str, Any]:
    """Return the document. It holds neither a time nor a random number: the same sources give the same bytes."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    itself = f"pkg:pypi/{name}@{version}"
    dependencies = project["dependencies"]
    # Extras for work on graphopt itself are no part of its use.
    extras = {
        extra: requirements
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in ("dev", "bench")
    }
    components = {_name(requirement): _component(requirement, "required") for requirement in dependencies}
    for extra, requirement in (
        (extra, requirement) for extra, requirements in extras.items() for requirement in requirements
    ):
        components.setdefault(_name(requirement), _component(requirement, "optional", extra))
    component_list = [components[key] for key in sorted(components)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": itself,
                "name": name,
                "version": version,
                "purl": itself,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": component_list,
        "dependencies": [
            {"ref": itself, "dependsOn": [component["bom-ref"] for component in component_list]},
            *({"ref": component["bom-ref"]} for component in component_list),
        ],
    }


def _name(requirement: str) -> str:
    """Return the name of a requirement as package indexes write it (PEP 503)."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _component(requirement: str, scope: str, extra: str | None = None) -> dict[str, Any]:
    purl = f"pkg:pypi/{_name(requirement)}"
    properties = [{"name": "python:requirement", "value": requirement}]
    properties += [] if extra is None else [{"name": "python:extra", "value": extra}]
    fields = {"type": "library", "bom-ref": purl, "name": _name(requirement), "purl": purl, "scope": scope}
    return {**fields, "properties": properties}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=2))
