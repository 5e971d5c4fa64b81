"""The workers of a scheduler of Dask that runs already."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.clusters.executor import CONNECTING
from graphopt.compile.clusters.kind import ClusterKind
from graphopt.compile.clusters.packages import distributed_package
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

_SCHEME = "dask://"


class Scheduler(ClusterKind):
    """``dask://HOST:PORT``: what ``dask scheduler`` prints, with the workers that ``dask worker`` has given it."""

    form: ClassVar[str] = "dask://HOST:PORT"

    @classmethod
    def matches(cls, address: str) -> bool:
        """Return whether a host stands behind the scheme."""
        return address.startswith(_SCHEME) and address != _SCHEME

    @contextlib.contextmanager
    def connect(self, address: str, jobs: int | None) -> Iterator[Client]:
        """Connect; workers are as many as the scheduler has."""
        if jobs is not None:
            raise InputError(
                f"--jobs {jobs} is for workers that graphopt starts, and {address} has its own",
                remedy="leave out --jobs",
            )
        dask_distributed = distributed_package()
        host_and_port = address.removeprefix(_SCHEME)
        try:
            client = dask_distributed.Client(f"tcp://{host_and_port}", timeout=CONNECTING, set_as_default=False)
        except (OSError, ValueError) as error:
            raise InputError(
                f"no scheduler answers at {host_and_port}: {error}",
                remedy="start one with `dask scheduler`, and workers with `dask worker HOST:PORT --nthreads 1`",
            ) from error
        with client:
            yield client
