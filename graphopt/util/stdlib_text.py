"""The text that the shipped model was trained on and is judged by: the Python standard library's own source.

The text is read from the Python that runs, so that evaluation needs no download. A fixed list of modules is held
out; training sees neither them nor the test files named after them.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HELD_OUT: tuple[str, ...] = (
    "calendar",
    "configparser",
    "csv",
    "fractions",
    "graphlib",
    "heapq",
    "http/cookies",
    "json/decoder",
    "json/encoder",
    "shlex",
    "statistics",
    "string",
    "tempfile",
    "textwrap",
    "zipapp",
)
"""Modules that training never reads, as paths below the standard library's folder, without ``.py``."""

# Tables, not source: thousands of near-identical lines that would drown the code in the training text.
_TABLES = ("encodings/", "pydoc_data/topics.py", "_sysconfigdata", "html/entities.py", "lib2to3/tests/data/")
_FOREIGN = ("site-packages/", "__pycache__/", "ensurepip/")


def stdlib_folder() -> Path:
    """Return the folder that holds the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_text(modules: Sequence[str] = HELD_OUT) -> str:
    """Return the source of the held-out ``modules``, in order, as one string.

    Raises:
        FileNotFoundError: this Python was installed without the source of a held-out module.
    """
    folder = stdlib_folder()
    paths = [folder / f"{name}.py" for name in modules]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"held-out module(s) without source in this Python: {', '.join(missing)}; "
            "install the standard library's source, or evaluate on a text of your own with --text FILE"
        )
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def training_texts() -> dict[str, str]:
    """Return ``{path below the standard library: source}`` of every module that is not held out, sorted by path.

    Files that are not UTF-8 (the library ships a few on purpose, to test decoding) are left out.
    """
    folder = stdlib_folder()
    tests_of_held_out = {f"test_{name.replace('/', '_')}" for name in HELD_OUT} | {
        f"test_{name.rsplit('/', 1)[-1]}" for name in HELD_OUT
    }
    texts: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder).as_posix()
        if any(relative.startswith(part) or f"/{part}" in relative for part in _FOREIGN + _TABLES):
            continue
        if relative.removesuffix(".py") in HELD_OUT or path.stem in tests_of_held_out:
            continue
        try:
            texts[relative] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts
