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
RECORDED_FIELDS = re.compile(
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
    inner = [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    yield from inner or [(path, value)]


def other_value(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value}x" if isinstance(value, str) else ["x"] if isinstance(value, list) else {"x": "x"}


def test_a_fault_in_any_field_is_refused(folder: Path) -> None:
    manifest, before = read_manifest(folder), read_manifest(BEFORE)
    document = manifest.model_dump(mode="json")
    new = len(before.checks)
    confirm_manifest(manifest, Manifest.model_validate(document), folder / MANIFEST, before)
    fault_count, unseen, kinds = 0, [], set()
    for path, value in leaves(document):
        # one of each kind of field is enough
        kind = tuple("*" if isinstance(step, int) and len(path) > 2 else step for step in path)
        name = ".".join(map(str, path))
        is_new = (
            path[0] == "checks" and int(path[1]) >= new and document["checks"][int(path[1])]["name"] != "certificate"
        )
        if kind in kinds or (RECORDED_FIELDS.fullmatch(name) and (path[0] != "checks" or is_new)):
            continue
        kinds.add(kind)
        faulty = copy.deepcopy(document)
        parent = faulty
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = other_value(value)
        fault_count += 1
        try:
            confirm_manifest(manifest, Manifest.model_validate(faulty), folder / MANIFEST, before)
        except (VerificationError, ValueError):
            continue
        unseen.append(name)
    assert fault_count > 60
    # what a certificate measured depends on the processor
    assert [name for name in unseen if not re.search(r"seconds|largest_share|findings|reason", name)] == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
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
    folder: Path, tmp_path: Path, path: tuple[str | int, ...], value: object, message: str
) -> None:
    faulty_copy = shutil.copytree(folder, tmp_path / "copy")
    manifest = parent = json.loads((faulty_copy / MANIFEST).read_text())
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    (faulty_copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match=re.escape(message)):
        verify(BEFORE, faulty_copy, run=False)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", "a\\b", MANIFEST])
def test_a_manifest_that_lists_files_elsewhere_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    faulty_copy = shutil.copytree(folder, tmp_path / "copy")
    manifest = json.loads((faulty_copy / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": ""}
    (faulty_copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="is not the name of another file in this folder"):
        read_manifest(faulty_copy)
