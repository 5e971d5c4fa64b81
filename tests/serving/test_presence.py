"""Hosts that watch one another in a real etcd, where it is installed."""

from __future__ import annotations

import time

import pytest

from graphopt.serving import presence
from graphopt.serving.etcd import ENDPOINTS, Etcd
from graphopt.serving.presence import Presence


class Host:
    """A host whose workers have leases."""

    def __init__(self, environment: dict[str, str], *leases: int) -> None:
        self.leases, self.lost_leases, self.messages = set(leases), list[int](), list[str]()
        self.presence = Presence(
            Etcd(environment), lambda: set(self.leases), self.lost_leases.append, self.messages.append
        )


def leases_in_etcd(etcd: Etcd) -> set[int]:
    return set(map(int, etcd.keys("graphopt-worker/")))


def test_workers_of_a_host_that_is_silent_are_taken_out(environment: dict[str, str]) -> None:
    etcd = Etcd(environment)
    lease = etcd.grant(60)
    etcd.save("what Dynamo lists", "", lease)
    host, front = Host(environment, lease), Host(environment)
    for member in (host, front, host, front):
        member.presence.look()
    assert leases_in_etcd(etcd) == {lease}
    # what etcd does when the host has not said anything for ten seconds
    etcd.revoke(host.presence._host_lease)
    front.presence.look()
    assert leases_in_etcd(etcd) == set()
    assert etcd.load("what Dynamo lists") is None
    # the host comes back: its worker has to register again
    host.presence.look()
    assert host.lost_leases == [lease]
    host.leases = {etcd.grant(60)}
    for member in (host, front):
        member.presence.look()
    assert leases_in_etcd(etcd) == host.leases
    assert front.lost_leases == []
    assert host.lost_leases == [lease]


def test_a_worker_that_ended_is_taken_out_even_if_etcd_was_away_then(environment: dict[str, str]) -> None:
    etcd = Etcd(environment)
    lease, second_lease = etcd.grant(60), etcd.grant(60)
    host = Host(environment, lease, second_lease)
    host.presence.look()
    addresses, host.presence._etcd._addresses = host.presence._etcd._addresses, ["http://127.0.0.1:9"]
    host.leases.remove(lease)
    with pytest.raises(OSError, match="refused"):
        host.presence.look()
    host.presence._etcd._addresses = addresses
    host.presence.look()
    assert leases_in_etcd(etcd) >= {second_lease}
    assert lease not in leases_in_etcd(etcd)
    assert not etcd.renew(lease)
    assert host.lost_leases == []


def test_a_host_lease_that_ended_is_made_again_before_others_see_it(environment: dict[str, str]) -> None:
    etcd = Etcd(environment)
    lease = etcd.grant(60)
    host, front = Host(environment, lease), Host(environment)
    host.presence.look()
    etcd.revoke(host.presence._host_lease)
    host.presence.look()
    front.presence.look()
    assert lease in leases_in_etcd(etcd)
    assert host.lost_leases == []


def test_an_etcd_that_is_away_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_BEAT", 0.01)
    host = Host({ENDPOINTS: "http://127.0.0.1:9"})
    host.presence.start()
    time.sleep(0.3)
    host.presence.stop()
    assert len(host.messages) == 1
    assert "nobody can join" in host.messages[0]
