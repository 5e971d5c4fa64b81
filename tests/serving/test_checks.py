"""`graphopt serve --check`: what fits, what does not, and what to do about it."""

from __future__ import annotations

import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from graphopt.artifact.artifact import DATA, NO_GENAI_CONFIG
from graphopt.artifact.genai import GENAI_CONFIG, INDEXERS
from graphopt.artifact.manifest import MANIFEST, read_manifest
from graphopt.cli import app
from graphopt.errors import InputError, MissingDependencyError
from graphopt.serving import checks
from graphopt.serving.checks import check_folder, check_packages, examine, memory_of
from graphopt.serving.etcd import Etcd
from graphopt.serving.settings import Settings
from tests.serving.conftest import with_blocks

if TYPE_CHECKING:
    from click.testing import Result

pytestmark = pytest.mark.skipif(not find_spec("dynamo"), reason="the extra `serve` is not installed")


def check(*options: object) -> Result:
    return CliRunner().invoke(app, ["serve", "--check", "--port", "0", *map(str, options)])


def test_a_folder_that_fits(served_folder: Path) -> None:
    result = check(served_folder, "--replicas", 2)
    assert result.exit_code == 0, result.output
    lines = dict(line.removeprefix("ok  ").split(": ", 1) for line in result.output.splitlines())
    assert lines.keys() == {"command", "packages", "folder", "memory", "front"}
    assert lines["command"] == "a front and 2 workers, found by file"
    assert "651 blocks of 16 tokens" in lines["folder"]


def test_memory_is_that_of_weights_and_of_every_block(served_folder: Path) -> None:
    weights, caches = memory_of(served_folder)
    assert weights == sum((served_folder / name).stat().st_size for name in ("model.onnx", DATA))
    # 6 layers, keys and values, 651 blocks of 16 tokens of 2 heads of 64 float32
    assert caches == 6 * 2 * 651 * 16 * 2 * 64 * 4


def test_each_thing_that_does_not_fit_is_told(served_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: 10**9)
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:9")  # discard: nobody listens there
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = ["--discovery", "etcd", "--address", "192.0.2.1"]  # RFC 5737: an address for documentation
        result = check(served_folder, "--replicas", 9, "--port", port, *options)
    assert result.exit_code == 2
    problems = dict(line[4:].split(": ", 1) for line in result.output.splitlines() if line.startswith("no  "))
    assert problems.keys() == {"memory", "front", "address", "etcd"}
    assert "9 x (" in problems["memory"]
    assert "fewer --replicas" in problems["memory"]
    assert "choose another --port" in problems["front"]
    assert "`ip address` lists them" in problems["address"]
    assert "http://127.0.0.1:9 cannot be used" in problems["etcd"]


def test_damaged_folders(served_folder: Path, shipped_artifact: Path, tmp_path: Path) -> None:
    def problem(folder: Path) -> str:
        findings = {finding.subject: finding for finding in examine(folder, Settings("model", port=0))}
        return str(findings["folder"].problem)

    assert "takes one batch at a time" in problem(shipped_artifact)
    incomplete = with_blocks(served_folder, tmp_path / "refused", 40)
    (incomplete / GENAI_CONFIG).unlink()
    manifest = read_manifest(incomplete)
    manifest.notes.append(NO_GENAI_CONFIG(why=INDEXERS()))
    (incomplete / MANIFEST).write_text(manifest.model_dump_json())
    assert "the step serve could not change that" in problem(incomplete)
    assert "keys of trained indexers" in problem(incomplete)
    short = with_blocks(served_folder, tmp_path / "short", 40)
    (short / DATA).unlink()
    (short / DATA).write_bytes(b"cut")
    assert "has 3 bytes where its manifest says" in problem(short)
    with pytest.raises(InputError, match="cut off"):  # a start refuses it too
        check_folder(short)
    for library in served_folder.glob("*.so"):
        folder_of_link = with_blocks(served_folder, tmp_path / "linked", 40)
        (folder_of_link / library.name).unlink()
        (folder_of_link / library.name).symlink_to(library)
        assert "takes no link" in problem(folder_of_link)
        (folder_of_link / library.name).unlink()
        (folder_of_link / library.name).write_bytes(b"\x7fELF of another machine")
        assert "cannot be loaded on this machine" in problem(folder_of_link)
        shutil.rmtree(folder_of_link)


def test_a_start_refuses_what_cannot_work(served_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:9")
    result = CliRunner().invoke(app, ["serve", str(served_folder), "--port", "0", "--discovery", "etcd"])
    assert isinstance(result.exception, InputError)
    assert "say in ETCD_ENDPOINTS where it is" in str(result.exception)


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_packages().startswith("ai-dynamo-runtime 1.")
    monkeypatch.setattr(checks, "_PACKAGES", {"dynamo.of_another": ("ai-other", "")})
    with pytest.raises(MissingDependencyError, match=r"ai-other: pip install \"graphopt\[cpu,serve\]\""):
        check_packages()


def test_an_etcd_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("save", "remove"):
        monkeypatch.setattr(Etcd, method, lambda *_: None)
    for version, is_refused in (("3.3.27", True), ("3.4.0", False), ("3.10.1-rc.0", False)):
        monkeypatch.setattr(Etcd, "version", lambda _, version=version: version)
        findings = {
            finding.subject: finding
            for finding in examine(None, Settings("", replicas=0, port=0, discovery="etcd"), {"ETCD_ENDPOINTS": "e"})
        }
        assert (findings["etcd"].problem is not None) is is_refused
