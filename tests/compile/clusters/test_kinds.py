"""Addresses of clusters: which are refused, and jobs of Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from graphopt.compile.clusters import open_cluster
from graphopt.compile.clusters.kinds import slurm
from graphopt.errors import InputError, MissingDependencyError

pytest.importorskip("distributed", reason="distributed is not installed, of the extra `cluster`")


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
