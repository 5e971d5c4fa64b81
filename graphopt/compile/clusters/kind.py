"""What ``--cluster`` names: each kind is one file in :mod:`graphopt.compile.clusters.kinds`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from graphopt.compile.clusters.executor import PATIENCE, ClusterExecutor
from graphopt.errors import InputError
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client


class ClusterKind(ABC):
    """A kind of cluster.

    Attributes:
        form: how an address of it is written, for messages.
        patience: seconds that the scheduler may be away, and that there may be no worker.
    """

    form: ClassVar[str]
    patience: ClassVar[float] = PATIENCE

    @classmethod
    @abstractmethod
    def matches(cls, address: str) -> bool:
        """Return whether an address is of this kind."""

    @abstractmethod
    def connect(self, address: str, jobs: int | None) -> contextlib.AbstractContextManager[Client]:
        """Give a client of the cluster's scheduler; what it started ends when the block does.

        Args:
            address: an address of this kind.
            jobs: how many workers to start; ``None`` for as many as suit the kind.

        Raises:
            InputError: the cluster cannot be reached or started, or has no such number of workers.
            MissingDependencyError: a package is not installed.
        """


def _form_of(member: object) -> str | None:
    is_kind = isinstance(member, type) and issubclass(member, ClusterKind) and member is not ClusterKind
    return member.form if is_kind else None  # type: ignore[attr-defined]


KINDS: Registry[type[ClusterKind]] = Registry(
    "graphopt.compile.clusters.kinds", kind="kind of cluster", name_of=_form_of
)
"""The kinds, by the form of their addresses."""


@contextlib.contextmanager
def open_cluster(address: str, jobs: int | None = None) -> Iterator[ClusterExecutor]:
    """Give an executor on a cluster, for ``jobs`` of :func:`graphopt.optimize`; it is shut down when the block ends.

    Args:
        address: ``dask://`` for workers on this machine, ``dask://HOST:PORT``, or ``slurm``.
        jobs: how many workers to start; ``None`` for as many as suit the kind.

    Raises:
        InputError: there is no such kind of cluster, it cannot be reached or started, or it has no workers.
        MissingDependencyError: a package is not installed.
    """
    kind = next((kind for kind in KINDS.values() if kind.matches(address)), None)
    if kind is None:
        raise InputError(f"{address!r} is no cluster", remedy=f"write it as {', '.join(sorted(KINDS))}")
    with kind().connect(address, jobs) as client:
        executor = ClusterExecutor(client, kind.patience)
        try:
            yield executor
        finally:
            executor.shutdown(cancel_futures=True)
