"""A compilation that is cut off goes on where it was; shards make what one process makes; a full disk is said."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graphopt.artifact.artifact import DATA, MODEL
from graphopt.artifact.manifest import MANIFEST
from graphopt.compile.pipeline import optimize
from graphopt.compile.shards import assemble, evaluate_shard, share
from graphopt.errors import InputError, VerificationError
from graphopt.graph.weights import disk
from graphopt.graph.weights.evaluator import computed_weights
from graphopt.graph.weights.store import Store
from graphopt.graph.weights.work_folder import default_work_folder, open_work_folder
from graphopt.passes.algebra.fold_norms import gains
from graphopt.passes.recipe import load_recipe

RECIPE = "rotate-int4-rtn"

# Forks children that optimize, from a process without threads, and kills each at a random moment of its work.
KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
from graphopt.compile.pipeline import optimize
from graphopt.graph.weights.store import Store

source, out, recipe, seed = sys.argv[1:]
random.seed(int(seed))
weights = Path(out).parent / f".{Path(out).name}-work" / "weights"

def start(where):
    child = os.fork()
    if child == 0:
        optimize(source, recipe, where, run=False, overwrite=True)
        os._exit(0)
    return child

begin = time.monotonic()
assert os.waitpid(start(out + "-plain"), 0)[1] == 0
length = time.monotonic() - begin
killed = 0
for _ in range(10):
    child = start(out)
    time.sleep(random.uniform(0.0, 0.9 * length))
    os.kill(child, signal.SIGKILL)
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
there = {file.name for file in weights.glob("*.bin")} if weights.is_dir() else set()
again = []
write = Store._write
Store._write = lambda self, of, array: (again.append(f"{of.digest}.bin"), write(self, of, array))[1]
optimize(source, recipe, out, run=False, overwrite=True)
print(json.dumps({"killed": killed, "there": len(there), "again": len(there & set(again))}))
"""


class Files(NamedTuple):
    model: bytes
    data: bytes
    manifest: dict[str, Any]


def files_of(folder: Path) -> Files:
    """Return what an artifact says, but for how long things took."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for report in manifest["passes"]:
        report["seconds"] = 0
    for check in manifest["checks"]:
        check["figures"].pop("seconds", None)
    return Files((folder / MODEL).read_bytes(), (folder / DATA).read_bytes(), manifest)


@pytest.fixture(scope="module")
def plain(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """What one process makes without being disturbed."""
    output = tmp_path_factory.mktemp("plain") / "out"
    optimize(llama_artifact, RECIPE, output, run=False)
    return files_of(output)


def test_killed_ten_times_and_resumed_the_bytes_are_the_same(
    llama_artifact: Path, tmp_path: Path, plain: Files
) -> None:
    arguments = [str(llama_artifact), str(tmp_path / "out"), RECIPE, str(os.getpid())]
    process = subprocess.run([sys.executable, "-c", KILLS, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout)
    assert counts["killed"] >= 5
    assert counts["again"] == 0  # what was on the disk was not computed again
    assert files_of(tmp_path / "out") == plain
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "out-plain"]


@pytest.mark.parametrize(("jobs", "run"), [(2, False), (1, True)])
def test_processes_make_what_one_makes(
    llama_artifact: Path, tmp_path: Path, plain: Files, jobs: int, run: bool
) -> None:
    result = optimize(llama_artifact, RECIPE, tmp_path / "out", run=run, jobs=jobs)
    files = files_of(tmp_path / "out")
    assert (files.model, files.data) == (plain.model, plain.data)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    # and what is returned can still be read
    assert all(value.const_value.numpy() is not None for value in result.model.graph.initializers.values())


def test_shards_and_assemble_make_what_one_process_makes(
    llama_artifact: Path, tmp_path: Path, plain: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two processes, of which only the one that forks them imports
    script = """
import os, sys
from graphopt.compile.shards import evaluate_shard
from graphopt.passes.recipe import load_recipe

source, recipe, out = sys.argv[1:]
children = []
for number in range(2):
    children.append(os.fork())
    if not children[-1]:
        evaluate_shard(source, load_recipe(recipe), out, number, 2)
        os._exit(0)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""
    subprocess.run([sys.executable, "-c", script, str(llama_artifact), RECIPE, str(tmp_path / "out")], check=True)

    def refuse_write(self: Store, expression: object, array: object) -> None:
        raise AssertionError(f"{expression} was evaluated by no shard")

    monkeypatch.setattr(Store, "_write", refuse_write)
    assemble(tmp_path / "out", run=False)
    assert files_of(tmp_path / "out") == plain
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_each_weight_is_in_one_shard(llama_artifact: Path) -> None:
    result = optimize(llama_artifact, "rotate", run=False)
    expressions = [tensor.expression for _, tensor in computed_weights(result.model)]
    parts = [share(expressions, number, 3) for number in range(3)]
    assert sorted(map(id, [expression for part in parts for expression in part])) == sorted(map(id, expressions))


def test_assembling_too_early_names_the_shards_that_are_missing(llama_artifact: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(InputError, match=r"there is no work of shards here.*optimize --shard"):
        assemble(output)
    evaluate_shard(llama_artifact, load_recipe(RECIPE), output, 1, 3)
    with pytest.raises(InputError, match=r"these shards are not done: 0/3, 2/3"):
        assemble(output)
    with pytest.raises(InputError, match="other shards in this work folder have another recipe"):
        evaluate_shard(llama_artifact, load_recipe("fp6-rtn"), output, 0, 3)
    with pytest.raises(InputError, match="there is no shard 3/3"):
        evaluate_shard(llama_artifact, load_recipe(RECIPE), output, 3, 3)


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(
    llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: Usage(1000))
    with pytest.raises(InputError, match=r"the disk is full: 0\.\d MB are needed, 0\.0 MB are free.*make room"):
        optimize(llama_artifact, RECIPE, tmp_path / "deep" / "out", run=False)
    assert not list(tmp_path.iterdir())


class Usage(NamedTuple):
    free: int


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve the space of a file")
def test_a_disk_that_fills_while_the_artifact_is_written_leaves_nothing(
    llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match="the disk is full"):
        optimize(llama_artifact, RECIPE, tmp_path / "out", run=False)
    assert not list(tmp_path.iterdir())


def test_a_limit_on_the_size_of_files_is_said(llama_artifact: Path, tmp_path: Path) -> None:
    script = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from graphopt.cli import main\nsys.argv = ['graphopt', *sys.argv[1:]]\nmain()"
    )
    arguments = ["optimize", str(llama_artifact), "-r", "int4-rtn", "-o", str(tmp_path / "out"), "--no-run"]
    process = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "the file cannot be written (File too large)" in process.stderr
    assert "Traceback" not in process.stderr
    assert not list(tmp_path.iterdir())


def test_a_chosen_work_folder_outlives_a_refusal_and_is_gone_at_the_end(
    llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    with monkeypatch.context() as patch:
        patch.setattr(gains, "Scale", lambda source, factors, axis: source)
        with pytest.raises(VerificationError):
            optimize(llama_artifact, "rotate", tmp_path / "out", work=work)
    assert work.is_dir()
    optimize(llama_artifact, "rotate", tmp_path / "out", work=work)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_folder_of_something_else_is_not_worked_in(llama_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(InputError, match="this is not a work folder of graphopt"):
        optimize(llama_artifact, RECIPE, tmp_path / "out", work=tmp_path / "mine")
    assert (tmp_path / "mine" / "letter").read_text() == "dear"


def test_what_another_version_left_is_not_used(llama_artifact: Path, tmp_path: Path, plain: Files) -> None:
    folder = default_work_folder(tmp_path / "out")
    (folder / "weights").mkdir(parents=True)
    (folder / "graphopt-work").write_text("graphopt 0.0.1")
    (folder / "weights" / "old.bin").write_bytes(b"x")
    optimize(llama_artifact, RECIPE, tmp_path / "out", run=False)
    assert files_of(tmp_path / "out") == plain


def test_processes_that_start_together_share_one_work_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(lambda _: open_work_folder(tmp_path / "deep" / "out"), range(64)))
    assert folders == {default_work_folder(tmp_path / "deep" / "out")}
    assert [file.name for file in (tmp_path / "deep").iterdir()] == [".out-work"]
