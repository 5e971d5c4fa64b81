"""Workers that are jobs of Slurm."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.clusters.kind import ClusterKind
from graphopt.compile.clusters.packages import distributed_package, jobqueue_package
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

_MEMORY = "8GB"


class Slurm(ClusterKind):
    """``slurm``: jobs that ``sbatch`` starts, a worker for each of their cores, and that end with the command.

    Queue, account, memory, time and whatever else a site wants stand in Dask's configuration of ``jobqueue.slurm``,
    see https://jobqueue.dask.org; without any a job has one processor and 8 GB. Its ``processes`` is not used.
    """

    form: ClassVar[str] = "slurm"
    patience: ClassVar[float] = 24 * 3600.0  # jobs wait in a queue

    @classmethod
    def matches(cls, address: str) -> bool:
        """Return whether that is all of it."""
        return address == cls.form

    @contextlib.contextmanager
    def connect(self, address: str, jobs: int | None) -> Iterator[Client]:
        """Ask for jobs, and give the client; the executor waits for the first of them."""
        del address
        if jobs is None:
            raise InputError("slurm starts jobs, and does not know how many", remedy="say it: --jobs 16")
        dask_distributed, jobqueue = distributed_package(), jobqueue_package()
        if shutil.which("sbatch") is None:
            raise InputError("there is no sbatch here", remedy="run this on a machine that submits jobs of Slurm")
        import dask

        settings = {name: dask.config.get(f"jobqueue.slurm.{name}", None) for name in ("cores", "memory")}
        with (
            jobqueue.SLURMCluster(
                cores=settings["cores"] or 1,
                memory=settings["memory"] or _MEMORY,
                processes=settings["cores"] or 1,
                scheduler_options={"dashboard_address": ":0"},
            ) as cluster,
            dask_distributed.Client(cluster, set_as_default=False) as client,
        ):
            cluster.scale(jobs=jobs)
            yield client
