from __future__ import annotations

from pathlib import Path

import pytest

from tools.release.requirements import requirements

PYPROJECT = """
[project]
dependencies = ["numpy>=2"]
[project.optional-dependencies]
cpu = ["onnxruntime"]
dev = ["pytest", "numpy>=2"]
"""


@pytest.fixture
def pyproject(tmp_path: Path) -> Path:
    file = tmp_path / "pyproject.toml"
    file.write_text(PYPROJECT)
    return file


def test_the_package_and_its_extras_each_once(pyproject: Path) -> None:
    assert requirements("", pyproject) == ["numpy>=2"]
    assert requirements("dev,cpu", pyproject) == ["numpy>=2", "pytest", "onnxruntime"]


def test_an_extra_that_is_not_there_is_named(pyproject: Path) -> None:
    with pytest.raises(SystemExit, match=r"EXTRAS=cpu,gpus: .*no extra 'gpus'; it has cpu, dev"):
        requirements("cpu,gpus", pyproject)


def test_torch_is_pinned_as_the_makefile_reads_it() -> None:
    assert any(requirement.startswith("torch==") for requirement in requirements("export"))
    assert (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8").count('"torch==') == 1
