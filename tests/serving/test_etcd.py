"""Keys in a real etcd, where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphopt.serving.etcd import ENDPOINTS, Etcd
from graphopt.serving.journal import Journal


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    command = ["etcd", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--listen-peer-urls", "http://127.0.0.1:0"]
    command += ["--listen-client-urls", address, "--advertise-client-urls", address]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    environment = {ENDPOINTS: address}
    for _ in range(200):
        with contextlib.suppress(OSError):
            Etcd(environment).load("a")
            break
        time.sleep(0.1)
    yield environment
    process.terminate()
    process.wait()


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
    here, there = (Journal(tmp_path / name, Etcd(environment)) for name in "ab")
    assert here.take("a", 7, 5).prompt == 7
    here.note_token("a")
    entry = there.take("a", 9, 0)
    assert (entry.prompt, entry.seed) == (7, 5)
    here.end("a")  # another worker has it by now
    there.end("a")
    assert there.take("a", 9, 1).prompt == 9


def test_an_etcd_that_is_not_there_is_an_oserror() -> None:
    with pytest.raises(OSError, match="refused"):
        Etcd({ENDPOINTS: "http://127.0.0.1:9"}).load("a")
