"""Names that say nothing: bare participles, pronouns and adverbs as names of variables, functions, classes and files.

    python tools/names.py                    # how many there are in graphopt/, tools/ and tests/, by folder
    python tools/names.py graphopt/passes    # those of a folder, with file and line
    python tools/names.py --write            # remove from the list those that are gone: it only shrinks

Names are nouns for data, verb and object for functions. The remaining offenders are listed in ``tests/names.txt``;
``tests/test_names.py`` refuses any other.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "names.txt"
FOLDERS = ("graphopt", "tools", "tests")
UNCHECKED_FOLDERS = ("tests/passes", "tests/runtime_ops")
"""Folders whose names are not checked."""
NATIVE_SUFFIXES = (".h", ".cc", ".cu")
"""Sources in C++ and CUDA, of which only the names of files are looked at."""

PRONOUNS = frozenset(
    """
    each every all both any some none nothing everything one ones other others another same such this that
    these those it its ours theirs mine own self_ who what which whose there here where why how when now then
    again once twice together apart alone alike aside away most least more less many few several enough first_
    rest usual of at by to into onto with within like near behind below above beside between among around
    along beyond off on over
    """.split()  # noqa: SIM905
)
"""Words that point at something and do not say what it is."""

PARTICIPLES = frozenset(
    """
    found made said asked kept given taken seen known done held told left chosen written shown drawn lost
    built begun fed gone got grown heard laid led lent met paid put ran read sent sold spent stood struck sunk
    thought thrown understood won worn meant come came began took gave went knew saw was were is are has have
    had does did place places thing things stuff
    """.split()  # noqa: SIM905
)
"""Irregular participles and past forms, and nouns that mean as little."""

NOUNS = frozenset(
    """
    seed seeds need needs feed speed embed shed red bed hundred id fed_ bleed breed weed
    """.split()  # noqa: SIM905
)
"""Nouns and verbs that end like a participle."""

TEST_WORDS = frozenset(("expected", "actual"))
"""What names one side of a comparison in a test, and there only."""


def is_offender(name: str) -> bool:
    """Return whether a name is one word that says nothing: ``found``, ``_Said``, ``each``, ``packed``."""
    if name.startswith("__") and name.endswith("__"):  # Python's own, such as __all__
        return False
    word = name.strip("_").lower()
    if word in PRONOUNS or word in PARTICIPLES:
        return True
    return len(word) > 4 and word not in NOUNS and re.fullmatch(r"[a-z]+ed", word) is not None


def assignments(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module assigns, with its line: variables, parameters, attributes, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno


def offenders(root: Path = ROOT) -> Iterator[tuple[Path, str, int]]:
    """Yield the file, the name and the line of each offender; line 0 for the name of a file or folder."""
    for file in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        path = file.relative_to(root)
        if any(path.is_relative_to(folder) for folder in UNCHECKED_FOLDERS):
            continue
        words = TEST_WORDS if path.parts[0] == "tests" else frozenset[str]()
        stem = file.parent.name if file.stem == "__init__" else file.stem
        if is_offender(stem):
            yield file, stem, 0
        names = list(assignments(ast.parse(file.read_text(encoding="utf-8"))))
        sides = {"left", "right"} & {name for name, _ in names}
        for name, line in names:
            is_side = name == "left" and len(sides) == 2  # left beside right is a side
            if is_offender(name) and not is_side and name.strip("_").lower() not in words:
                yield file, name, line
    for file in sorted((root / "graphopt").rglob("*")):
        if file.suffix in NATIVE_SUFFIXES and is_offender(file.stem):
            yield file, file.stem, 0


def count_offenders(root: Path = ROOT) -> Counter[tuple[str, str]]:
    """Return how often each file assigns each offender."""
    return Counter((str(file.relative_to(root)), name) for file, name, _ in offenders(root))


def read_list() -> Counter[tuple[str, str]]:
    """Return the offenders in the list."""
    rows = (line.split() for line in LIST.read_text(encoding="utf-8").splitlines())
    return Counter({(file, name): int(count) for file, name, count in rows})


def main(arguments: list[str]) -> None:
    """Print offenders, or write the list."""
    if "--write" in arguments:
        counts = count_offenders()
        if LIST.is_file() and "--again" not in arguments:
            counts &= read_list()
        LIST.write_text("".join(f"{file} {name} {count}\n" for (file, name), count in sorted(counts.items())))
        print(f"{counts.total()} in {LIST.relative_to(ROOT)}")
    elif arguments:
        for file, name, line in offenders():
            path = str(file.relative_to(ROOT))
            if any(path.startswith(folder.rstrip("/")) for folder in arguments):
                print(f"{path}:{line} {name}")
    else:
        folders = Counter("/".join(file.relative_to(ROOT).parts[:2]) for file, _, _ in offenders())
        print(*(f"{count:5} {folder}" for folder, count in folders.most_common()), f"{folders.total():5}", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
