"""Print the wheel's bill of materials, CycloneDX 1.6 as JSON. CMake puts it into the wheel (PEP 770).

The wheel holds graphopt alone: its Python files, and one library compiled from its own C++. Packages that pip installs
beside it are listed as what they are, required or optional, with the versions that are asked for.
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
    required = project["dependencies"]
    # What only helps to work on graphopt is not part of using it.
    extras = {extra: each for extra, each in project["optional-dependencies"].items() if extra not in ("dev", "bench")}
    components = {_name(each): _component(each, "required") for each in required}
    for extra, each in ((extra, each) for extra, several in extras.items() for each in several):
        components.setdefault(_name(each), _component(each, "optional", extra))
    found = [components[key] for key in sorted(components)]
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
        "components": found,
        "dependencies": [
            {"ref": itself, "dependsOn": [each["bom-ref"] for each in found]},
            *({"ref": each["bom-ref"]} for each in found),
        ],
    }


def _name(requirement: str) -> str:
    """Return the name of a requirement as package indexes write it (PEP 503)."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _component(requirement: str, scope: str, extra: str | None = None) -> dict[str, Any]:
    purl = f"pkg:pypi/{_name(requirement)}"
    properties = [{"name": "python:requirement", "value": requirement}]
    properties += [] if extra is None else [{"name": "python:extra", "value": extra}]
    known = {"type": "library", "bom-ref": purl, "name": _name(requirement), "purl": purl, "scope": scope}
    return {**known, "properties": properties}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=2))
