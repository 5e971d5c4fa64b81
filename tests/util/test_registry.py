"""What a registry finds in folders, what it does not, and when it looks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphopt.util.registry import Registry

SHAPE = """
class {name}:
    corners = {corners}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package ``shapes_of_a_test`` that can be imported."""
    path = tmp_path / "shapes_of_a_test"
    path.mkdir()
    (path / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    for name in [name for name in sys.modules if name.startswith("shapes_of_a_test")]:
        del sys.modules[name]


def shapes(*folders: str, part: str = "", **options: object) -> Registry[type]:
    return Registry(
        *(folders or ["shapes_of_a_test"]),
        kind="shape",
        name_of=lambda member: member.__name__.lower() if hasattr(member, "corners") else None,
        part=part,
        **options,  # type: ignore[arg-type]
    )


def test_a_new_file_is_a_new_member(folder: Path) -> None:
    (folder / "square.py").write_text(SHAPE.format(name="Square", corners=4) + "size = 3\n")
    registry = shapes()
    assert {name: member.corners for name, member in registry.items()} == {"square": 4}
    (folder / "triangle.py").write_text(SHAPE.format(name="Triangle", corners=3))
    assert "triangle" not in registry
    registry.refresh()
    assert list(registry) == ["square", "triangle"]
    assert len(registry) == 2
    with pytest.raises(KeyError):
        registry["circle"]


def test_twins_are_refused_and_both_modules_named(folder: Path) -> None:
    for file in ("one", "two"):
        (folder / f"{file}.py").write_text(SHAPE.format(name="Square", corners=4))
    with pytest.raises(ValueError, match=r"two shapes are called square: in shapes_of_a_test.one and shapes_.*two"):
        len(shapes())


def test_what_a_module_imports_is_no_member(folder: Path) -> None:
    (folder.parent / "elsewhere_of_a_test.py").write_text(SHAPE.format(name="Line", corners=2))
    (folder / "square.py").write_text("from elsewhere_of_a_test import Line\n" + SHAPE.format(name="Square", corners=4))
    (folder / "twin.py").write_text("from shapes_of_a_test.square import Square\n")
    try:
        assert list(shapes()) == ["square"]
    finally:
        sys.modules.pop("elsewhere_of_a_test")


def test_a_package_defines_what_it_re_exports_from_inside(folder: Path) -> None:
    (folder / "square").mkdir()
    (folder / "square" / "shape.py").write_text(
        SHAPE.format(name="Square", corners=4) + SHAPE.format(name="Hidden", corners=0)
    )
    (folder / "square" / "__init__.py").write_text("from shapes_of_a_test.square.shape import Square\n")
    assert list(shapes()) == ["square"]


def test_a_part_inside_of_each_package_is_read_in_its_place(folder: Path) -> None:
    (folder / "plain.py").write_text(SHAPE.format(name="Plain", corners=1))
    for name in ("empty", "square"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    (folder / "square" / "spec").mkdir()
    (folder / "square" / "spec" / "__init__.py").write_text("")
    (folder / "square" / "spec" / "op.py").write_text(SHAPE.format(name="Square", corners=4))
    assert list(shapes(part="spec.op")) == ["square"]


def test_members_are_sorted_by_what_the_registry_is_given(folder: Path) -> None:
    (folder / "both.py").write_text(SHAPE.format(name="Square", corners=4) + SHAPE.format(name="Triangle", corners=3))
    assert list(shapes()) == ["square", "triangle"]
    by_corners = shapes(order=lambda members: dict(sorted(members.items(), key=lambda entry: entry[1].corners)))
    assert list(by_corners) == ["triangle", "square"]


def test_importing_graphopt_registers_nothing() -> None:
    code = (
        "import sys, graphopt, graphopt.passes, graphopt.runtime_ops, graphopt.quantization.rounding.methods;"
        "print(*(m for m in sys.modules if m.endswith(('matmul_table.spec.op', 'methods.gptq')) or m.count('.') > 2"
        " and m.startswith('graphopt.passes')))"
    )
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not modules.strip()
