"""Which workers are there, as all hosts see it in etcd: hosts bury one another's workers, and not their own.

Dynamo lists a worker under a lease, and ends the worker, and the front too, where etcd does not renew that in time.
With a short lease an etcd that is away for as long takes everything with it; with a long one a machine that died stays
listed. So Dynamo's leases are long, and each `graphopt serve` says every second that its workers are there, under a
lease of ten seconds of its own. Whoever finds a worker that nobody speaks for ends its lease, for which etcd must be
there; so nothing ends while it is not.

    graphopt-worker/LEASE   under Dynamo's lease: a worker that is listed
    graphopt-alive/LEASE    under the lease of its host
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING
from urllib.error import HTTPError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.serving.etcd import Etcd

LEASE_OF_DYNAMO = 3600
"""Seconds that etcd may be away before workers and fronts end."""

LEASE_OF_HOST = 10
"""Seconds after which workers of a host that says nothing are taken out of etcd."""

_BEAT = 1.0  # seconds between two looks
_WORKER, _ALIVE = "graphopt-worker/", "graphopt-alive/"


class Presence:
    """What this machine says of its workers, and what it does about those of others.

    Args:
        etcd: what all share.
        leases: says which leases of Dynamo's the workers here have.
        on_lost: told a lease of a worker here that etcd has not any more: the worker has to register again.
        say: told once when etcd cannot be reached, and once when it is back.
    """

    def __init__(
        self, etcd: Etcd, leases: Callable[[], set[int]], on_lost: Callable[[int], None], say: Callable[[str], None]
    ) -> None:
        self._etcd, self._leases, self._on_lost, self._say = etcd, leases, on_lost, say
        self._host_lease = 0
        self._own_leases: set[int] = set()
        self._end = threading.Event()
        self._is_reached = True

    def start(self) -> None:
        """Begin to say it, on a thread of its own."""
        threading.Thread(target=self._run, name="presence", daemon=True).start()

    def stop(self) -> None:
        """End; workers that are left are taken out of etcd by others."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(_BEAT):
            try:
                self.look()
            except OSError as error:
                if self._is_reached:
                    self._say(f"etcd cannot be reached; what runs goes on, and nobody can join ({error})")
                self._is_reached = False
            else:
                if not self._is_reached:
                    self._say("etcd is back")
                self._is_reached = True

    def look(self) -> None:
        """Speak for the workers here, and end the leases of those for whom nobody speaks.

        Raises:
            OSError: etcd cannot be reached.
        """
        leases = self._leases()
        if not self._host_lease or not self._etcd.renew(self._host_lease):
            self._host_lease = self._etcd.grant(LEASE_OF_HOST)
            for lease in leases & self._own_leases:
                self._etcd.save(f"{_ALIVE}{lease}", "", self._host_lease)
        for lease in self._own_leases - leases:
            self._bury(lease)
        for lease in leases - self._own_leases:
            # In this order, and others read it the other way round: nobody sees a worker that is not spoken for.
            self._etcd.save(f"{_ALIVE}{lease}", "", self._host_lease)
            with contextlib.suppress(HTTPError):  # Dynamo's lease has ended meanwhile
                self._etcd.save(f"{_WORKER}{lease}", "", lease)
                self._own_leases.add(lease)
        workers = set(map(int, self._etcd.keys(_WORKER)))
        alive = set(map(int, self._etcd.keys(_ALIVE)))
        for lease in workers - alive:
            self._bury(lease)
        for lease in (leases & self._own_leases) - workers:
            self._own_leases.discard(lease)
            self._on_lost(lease)

    def _bury(self, lease: int) -> None:
        with contextlib.suppress(HTTPError):  # somebody else was faster
            self._etcd.revoke(lease)
        self._etcd.remove(f"{_ALIVE}{lease}")
        self._own_leases.discard(lease)
