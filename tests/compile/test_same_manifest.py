"""Each field of a manifest is compared, or is one of few that no replay can state again."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphopt.artifact.manifest import MANIFEST, Manifest, read_manifest
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.compile.same_manifest import confirm_manifest
from graphopt.errors import InputError, VerificationError
from tests.verification.test_same_model import FROZEN, RECIPE

# What depends on time, on the machine, or on whether the model was run; and what was compared with the files.
RECORDED = re.compile(
    r"versions\..*|files\..*|passes\.\d+\.seconds"
    r"|checks\.\d+\.(reason|figures|findings)\b.*|checks\.\d+\.status"
)
BEFORE = FROZEN / "before"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("manifest") / "made"
    optimize(BEFORE, RECIPE, output, run=False)
    return output


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [found for key, each in items for found in leaves(each, (*path, key))]
    yield from below or [(path, value)]


def other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value}x" if isinstance(value, str) else ["x"] if isinstance(value, list) else {"x": "x"}


def test_a_fault_in_any_field_is_refused(folder: Path) -> None:
    made, before = read_manifest(folder), read_manifest(BEFORE)
    stored = made.model_dump(mode="json")
    new = len(before.checks)
    confirm_manifest(made, Manifest.model_validate(stored), folder / MANIFEST, before)
    planted, missed, kinds = 0, [], set()
    for path, value in leaves(stored):
        # one of each kind of field is enough
        kind = tuple("*" if isinstance(step, int) and len(path) > 2 else step for step in path)
        name = ".".join(map(str, path))
        is_new = path[0] == "checks" and int(path[1]) >= new and stored["checks"][int(path[1])]["name"] != "certificate"
        if kind in kinds or (RECORDED.fullmatch(name) and (path[0] != "checks" or is_new)):
            continue
        kinds.add(kind)
        spoiled = copy.deepcopy(stored)
        at = spoiled
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = other(value)
        planted += 1
        try:
            confirm_manifest(made, Manifest.model_validate(spoiled), folder / MANIFEST, before)
        except (VerificationError, ValueError):
            continue
        missed.append(name)
    assert planted > 60
    # what a certificate measured depends on the processor
    assert [name for name in missed if not re.search(r"seconds|largest_share|findings|reason", name)] == []


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("weights", "bytes"), 1, "weights.bytes is 1 in the file"),
        (("session",), {"session.x": "1"}, "session"),
        (("precision", "storage"), {"float32": 1}, "precision.storage"),
        (("precision", "products", 0, "count"), 99, "other products than precision.products says"),
        (("passes", 0, "changes"), [], "passes.0.changes"),
        (("source", "name"), "elsewhere", "source.name is 'elsewhere' in the file"),
        (("model", "max_positions"), 1 << 20, "model.max_positions"),
        (("notes",), [], "notes"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_verify_refuses_a_manifest_that_says_something_else(
    folder: Path, tmp_path: Path, place: tuple[str | int, ...], value: object, message: str
) -> None:
    spoiled = shutil.copytree(folder, tmp_path / "copy")
    manifest = at = json.loads((spoiled / MANIFEST).read_text())
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    (spoiled / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match=re.escape(message)):
        verify(BEFORE, spoiled, run=False)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", "a\\b", MANIFEST])
def test_a_manifest_that_lists_files_elsewhere_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    spoiled = shutil.copytree(folder, tmp_path / "copy")
    manifest = json.loads((spoiled / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": ""}
    (spoiled / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="is not the name of another file in this folder"):
        read_manifest(spoiled)
