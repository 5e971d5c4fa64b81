from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.util import stdlib_text
from graphopt.util.stdlib_text import HELD_OUT, held_out_text, stdlib_folder, training_texts


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library in place of the real one, with every held-out module."""
    for name in HELD_OUT:
        write(tmp_path, f"{name}.py", f"# {name}\n")
    monkeypatch.setattr(stdlib_text, "stdlib_folder", lambda: tmp_path)
    return tmp_path


def write(folder: Path, name: str, text: str | bytes) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)


def test_held_out_text_is_the_modules_in_order(library: Path) -> None:
    assert held_out_text() == "".join(f"# {name}\n" for name in HELD_OUT)


def test_missing_held_out_module_is_named(library: Path) -> None:
    (library / "csv.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"csv\.py; install the standard library's source, or .* --text FILE"):
        held_out_text()


def test_training_never_sees_what_is_held_out(library: Path) -> None:
    for name in ("abc.py", "email/parser.py", "test/test_csv.py", "test/test_json_decoder.py", "test/test_abc.py"):
        write(library, name, "x = 1\n")
    # A module of the same last name elsewhere has a test of the same name, so it is left out too.
    write(library, "xml/string.py", "y = 1\n")
    assert list(training_texts()) == ["abc.py", "email/parser.py", "test/test_abc.py", "xml/string.py"]


def test_training_leaves_out_tables_and_foreign_code(library: Path) -> None:
    for name in (
        "encodings/cp037.py",
        "html/entities.py",
        "site-packages/pip/csvs.py",
        "__pycache__/a.py",
        "ensurepip/__init__.py",
    ):
        write(library, name, "x = 1\n")
    assert training_texts() == {}


def test_files_that_are_not_utf8_are_left_out(library: Path) -> None:
    write(library, "good.py", "ä = 'ü'\n")
    write(library, "bad.py", b"# -*- coding: latin-1 -*-\n# \xe4\n")
    assert training_texts() == {"good.py": "ä = 'ü'\n"}


def test_this_python_has_the_held_out_text() -> None:
    text = held_out_text()
    assert "class HTMLCalendar" in text
    # About 15 modules; much less would make bits per byte a matter of luck.
    assert len(text) > 200_000


def test_no_held_out_module_is_in_the_training_text_of_this_python() -> None:
    folder, texts = stdlib_folder(), training_texts()
    assert len(texts) > 500
    held_out = {(folder / f"{name}.py").read_text(encoding="utf-8") for name in HELD_OUT}
    assert held_out.isdisjoint(texts.values())
    assert list(texts) == sorted(texts)
