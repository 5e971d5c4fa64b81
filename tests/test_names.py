"""Names say what a thing is: no new participle or pronoun alone; those that are left are listed and get fewer."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tools.names import assignments, count_offenders, is_offender, read_list


@pytest.fixture(scope="module")
def offenders() -> Counter[tuple[str, str]]:
    """Those of all sources, which take seconds to read."""
    return count_offenders()


def test_no_new_name_says_nothing(offenders: Counter[tuple[str, str]]) -> None:
    new = offenders - read_list()
    assert not new, f"say what it is, see CONTRIBUTING.md: {dict(new)}"


def test_the_list_of_offenders_is_current(offenders: Counter[tuple[str, str]]) -> None:
    assert not read_list() - offenders, "some are gone: run python tools/names.py --write"


@pytest.mark.parametrize("name", ["found", "_Said", "each", "packed", "there", "ours", "OURS"])
def test_words_that_say_nothing(name: str) -> None:
    assert is_offender(name)


@pytest.mark.parametrize("name", ["product", "speed", "seed", "is_packed", "packed_codes", "id", "rows", "__all__"])
def test_words_that_say_what_it_is(name: str) -> None:
    assert not is_offender(name)


def test_every_kind_of_assignment_counts() -> None:
    source = (
        "def a(b, *c, d=1, **e): ...\nclass F:\n    g: int = 1\n    def h(self): self.i = (j := 2)\nfor k in l: m = k\n"
    )
    assert {name for name, _ in assignments(ast.parse(source))} == set("abcdeFghijkm") | {"self"}


def test_names_of_native_sources_count(tmp_path: Path) -> None:
    for name in ("asked.h", "groups.cc", "made.cu", "found.txt"):
        file = tmp_path / "graphopt" / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert {file for file, _ in count_offenders(tmp_path)} == {"graphopt/asked.h", "graphopt/made.cu"}


def test_expected_is_a_name_in_tests_only(tmp_path: Path) -> None:
    for name in ("graphopt/a.py", "tests/a.py", "tests/passes/a.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text("expected = found = 1\n")
    offenders = Counter({("graphopt/a.py", "expected"): 1, ("graphopt/a.py", "found"): 1, ("tests/a.py", "found"): 1})
    assert count_offenders(tmp_path) == offenders
