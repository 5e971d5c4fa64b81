from __future__ import annotations

import tomllib
from pathlib import Path

from tools.release.sbom import bill

PYPROJECT = """
[project]
name = "thing"
version = "1.2"
license = "Apache-2.0"
dependencies = ["numpy>=2", "ml_dtypes"]
[project.optional-dependencies]
cpu = ["onnxruntime>=1.31; sys_platform == 'linux'", "numpy>=2"]
dev = ["pytest"]
"""


def test_what_comes_beside_the_wheel_is_listed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    document = bill(tmp_path / "pyproject.toml")
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/thing@1.2"
    components = {
        component["name"]: (component["scope"], component["properties"][0]["value"])
        for component in document["components"]
    }
    assert components == {
        "ml-dtypes": ("required", "ml_dtypes"),
        "numpy": ("required", "numpy>=2"),
        "onnxruntime": ("optional", "onnxruntime>=1.31; sys_platform == 'linux'"),
    }
    assert document["dependencies"][0]["dependsOn"] == [f"pkg:pypi/{name}" for name in sorted(components)]


def test_the_wheel_has_the_version_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert bill()["metadata"]["component"]["version"] == project["version"]
