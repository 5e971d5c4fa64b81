"""`optimize --cluster` makes the bytes of one process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.compile.clusters import open_cluster
from graphopt.compile.clusters.kinds import slurm
from graphopt.compile.clusters.kinds.local import Local
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError, MissingDependencyError
from tests.compile.test_resume import files_of

pytest.importorskip("distributed", reason="distributed is not installed, of the extra `cluster`")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Rotations, and codes by GPTQ."""
    steps: list[dict[str, Any]] = [
        {"step": "canonicalize"},
        {"step": "fold_norms"},
        {"step": "rotate"},
        {"step": "quantize_weights", "rounding": "gptq", "linear": {"format": "nl4", "group": 32}},
    ]
    (tmp_path / "text.txt").write_text("def f(x):\n    return [x, x + 1]\n" * 40)
    calibration = {"text": "text.txt", "windows": 3, "window": 100}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", "steps": steps, "calibration": calibration}))
    return file


def test_gptq_on_a_cluster_gives_the_bytes_of_one_process(
    llama_artifact: Path, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    stages: list[str] = []

    class Here(Local):
        """Two workers that are there already."""

        def connect(self, address: str, jobs: int | None) -> Any:
            assert (address, jobs) == ("dask://", 2)
            return contextlib.nullcontext(client)

    @contextlib.contextmanager
    def progress() -> Iterator[Any]:
        yield lambda stage, count=0, total=None: stages.append(stage)

    monkeypatch.setattr("graphopt.compile.clusters.kind.KINDS", {"dask://": Here})
    monkeypatch.setattr("graphopt.cli.compile.progress", progress)
    optimize(llama_artifact, recipe, tmp_path / "plain", quality_tokens=0)
    arguments = ["optimize", llama_artifact, "-r", recipe, "-o", tmp_path / "out", "--quality-tokens", "0"]
    ran = CliRunner().invoke(app, [*map(str, arguments), "--cluster", "dask://", "-j", "2"])
    assert ran.exit_code == 0, ran.output
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")
    work = {stage.partition(",")[0] for stage in stages if stage.endswith(("1 worker", "2 workers"))}
    assert {"evaluating weights", "writing", "collecting statistics"} <= work
    assert not list(tmp_path.glob(".*"))  # no work folder is left
    assert "cluster" not in {thread.name for thread in threading.enumerate()}


def test_clusters_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, jobs, message in (
        ("ray://", None, r"'ray://' is no cluster: write it as dask://, dask://HOST:PORT, slurm"),
        ("dask://127.0.0.1:1", 2, "--jobs 2 is for workers that graphopt starts"),
        ("slurm", None, "does not know how many: say it: --jobs 16"),
    ):
        with pytest.raises(InputError, match=message), open_cluster(address, jobs):
            pass
    monkeypatch.setattr("graphopt.compile.clusters.kinds.scheduler.CONNECTING", 0.3)
    with (
        pytest.raises(InputError, match=r"no scheduler answers at 127.0.0.1:1.*dask worker"),
        open_cluster("dask://127.0.0.1:1"),
    ):
        pass
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="there is no sbatch here"), open_cluster("slurm", 2):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="jobs are started by a shell script for Linux")
def test_jobs_are_submitted_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is not here: an ``sbatch`` that starts the script of dask-jobqueue at once takes its place."""
    sbatch, scancel = tmp_path / "sbatch", tmp_path / "scancel"
    sbatch.write_text(
        f'#!/bin/bash\ncp "${{@: -1}}" {tmp_path}/job\nsetsid bash {tmp_path}/job </dev/null &>{tmp_path}/log &\n'
        'echo "Submitted batch job $!"\n'
    )
    scancel.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/ended\nkill -- -"$1"\n')
    for script in (sbatch, scancel):
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with open_cluster("slurm", 1) as executor:
        executor.prepare(tmp_path, [])
        assert executor.submit(int, "ff", base=16).result(60) == 255
        assert "#SBATCH --mem=8G" in (tmp_path / "job").read_text()
    assert (tmp_path / "ended").read_text().strip()


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(MissingDependencyError, match=r'need distributed.*pip install "graphopt\[cluster\]"'),
        open_cluster("dask://"),
    ):
        pass
