"""Print the tests of `make quick`: those of the files that changed since the last commit, and a fixed core.

    .venv/bin/pytest -q $(.venv/bin/python tools/quick_tests.py)

Tests mirror the package: for a change of ``graphopt/passes/codes/quantize_weights.py`` it prints
``tests/passes/codes/test_quantize_weights.py``, or where no test has that name, the tests of the nearest folder with
tests. Where nothing has changed, it takes the files of the last commit.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[1]

CORE = (
    "tests/test_imports.py",
    "tests/passes/test_recipe.py",
    "tests/artifact/test_artifact.py",
    "tests/passes/test_base.py",
    "tests/passes/algebra/test_fold_norms.py",
    "tests/passes/codes/test_quantize_weights.py",
    "tests/verification/test_equivalence.py",
)


def changed_files(root: Path = ROOT) -> list[str]:
    """Return the files that differ from the last commit, new ones included, or else those of the last commit."""
    files = _git(root, "diff", "--name-only", "HEAD") + _git(root, "ls-files", "--others", "--exclude-standard")
    return files or _git(root, "diff", "--name-only", "HEAD~1", "HEAD")


def _git(root: Path, *arguments: str) -> list[str]:
    result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return result.stdout.splitlines()


def mirrored_tests(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files of ``files``, and the core, as paths from the root."""
    tests = set(CORE)
    for file in files:
        path = PurePath(file)
        if path.parts[0] == "tests":
            tests.update(str(test) for test in [path] if path.name.startswith("test_") and (root / path).is_file())
        elif path.parts[0] in ("graphopt", "tools") and path.suffix == ".py":
            tests.update(_tests_of(path, root))
    return sorted(tests)


def _tests_of(path: PurePath, root: Path) -> Iterator[str]:
    parts = path.with_suffix("").parts[1:] if path.parts[0] == "graphopt" else path.with_suffix("").parts
    name = parts[-1] if parts[-1] != "__init__" or len(parts) < 2 else parts[-2]
    folder = root / "tests" / PurePath(*parts[:-1])
    for test in (folder / f"test_{name}.py", folder.parent / f"test_{name}.py"):
        if test.is_file():
            yield str(test.relative_to(root))
            return
    while folder != root / "tests" and not list(folder.glob("test_*.py")):
        folder = folder.parent
    if folder != root / "tests":
        yield from (str(test.relative_to(root)) for test in folder.glob("test_*.py"))


if __name__ == "__main__":
    print(*mirrored_tests(changed_files()))
