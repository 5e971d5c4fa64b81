"""Keys in a real etcd, where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.serving.etcd import ENDPOINTS, Etcd
from graphopt.serving.journal import Journal


def test_keys_and_leases(environment: dict[str, str]) -> None:
    # the first address is one that nobody listens on
    etcd = Etcd({ENDPOINTS: f"http://127.0.0.1:9,{environment[ENDPOINTS].removeprefix('http://')}"})
    assert etcd.load("key") is None
    etcd.save("key", "täxt")
    assert etcd.load("key") == "täxt"
    etcd.remove("key")
    assert etcd.load("key") is None
    etcd.save("key", "text")
    etcd.revoke(int(etcd._lease))
    assert etcd.load("key") is None


def test_workers_of_two_machines_share_a_journal(environment: dict[str, str], tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (Journal(tmp_path / name, Etcd(environment)) for name in "ab")
    assert first.take("a", 7, 5).prompt == 7
    first.note_token("a")
    entry = second.take("a", 9, 0)
    assert (entry.prompt, entry.seed) == (7, 5)
    first.end("a")  # another worker has it by now
    second.end("a")
    assert second.take("a", 9, 1).prompt == 9


def test_an_etcd_that_is_not_there_is_an_oserror() -> None:
    with pytest.raises(OSError, match="refused"):
        Etcd({ENDPOINTS: "http://127.0.0.1:9"}).load("a")
