"""Workers on this machine."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.clusters.kind import ClusterKind
from graphopt.compile.clusters.packages import distributed_package
from graphopt.util.processors import processors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client


class Local(ClusterKind):
    """``dask://``: a scheduler and workers on this machine, as many as there are processors."""

    form: ClassVar[str] = "dask://"

    @classmethod
    def matches(cls, address: str) -> bool:
        """Return whether there is no host in it."""
        return address == cls.form

    @contextlib.contextmanager
    def connect(self, address: str, jobs: int | None) -> Iterator[Client]:
        """Start workers of one thread each; one that dies is replaced."""
        del address
        dask_distributed = distributed_package()
        count = jobs or processors()
        # The machine's memory is shared as it is needed: a worker that holds no results has nothing to spill.
        import dask

        with (
            # Else a worker that dies again shortly after it was replaced is replaced no more.
            dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"}),
            dask_distributed.LocalCluster(
                n_workers=count,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address=None,
                memory_limit=None,
                silence_logs=logging.ERROR,  # of its deaths and its end we say what there is to say
                env=_settings(max(1, processors() // count)),
            ) as cluster,
            dask_distributed.Client(cluster, set_as_default=False) as client,
        ):
            yield client


def _settings(count: int) -> dict[str, str]:
    """Return environment variables that give libraries of linear algebra so many threads, and no profiler to Dask."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(count))
    return {**threads, "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"}
