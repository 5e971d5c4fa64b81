"""Which tests `make quick` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.quick_tests import CORE, ROOT, changed_files, mirrored_tests


@pytest.mark.parametrize(
    ("file", "test_file"),
    [
        ("graphopt/passes/codes/quantize_weights.py", "tests/passes/codes/test_quantize_weights.py"),
        ("graphopt/passes/algebra/rotate/__init__.py", "tests/passes/algebra/test_rotate.py"),
        ("graphopt/passes/algebra/rotate/online.py", "tests/passes/algebra/test_rotate.py"),
        ("graphopt/passes/recipe.py", "tests/passes/test_recipe.py"),
        ("tools/quick_tests.py", "tests/tools/test_quick_tests.py"),
        ("tests/util/test_memory.py", "tests/util/test_memory.py"),
    ],
)
def test_a_change_asks_for_the_tests_that_mirror_it(file: str, test_file: str) -> None:
    assert (ROOT / test_file).is_file()
    assert test_file in mirrored_tests([file])


def test_the_core_is_there_and_runs_whatever_changed() -> None:
    assert all((ROOT / test).is_file() for test in CORE)
    assert mirrored_tests([]) == sorted(CORE)
    assert mirrored_tests(["README.md", "tests/conftest.py"]) == sorted(CORE)


def test_what_changed_is_what_git_says(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        options = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for number in (1, 2):
        (tmp_path / f"{number}.py").write_text("")
        git("add", ".")
        git("commit", "-m", str(number))
    assert changed_files(tmp_path) == ["2.py"]
    (tmp_path / "3.py").write_text("")
    (tmp_path / "1.py").write_text("x = 1")
    assert changed_files(tmp_path) == ["1.py", "3.py"]
