"""Several hosts, each its own `graphopt serve`, that find each other; here all of them are on the loopback.

tools/bench/hosts.py does the same with a network in between: links that go down, etcd, addresses.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.serving.test_server import TEXTS, get

pytestmark = [
    pytest.mark.skipif(not find_spec("dynamo"), reason="the extra `serve` is not installed"),
    pytest.mark.skipif(not find_spec("openai"), reason="the extra `dev` is not installed"),
]
ROOT = Path(__file__).parents[2]


class Cluster:
    """A front, and hosts that join and leave."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        self.start("front", "--replicas", 0, "--port", 0)
        self.url = self.until(lambda: re.search(r"listening at (\S+/v1)", (work / "front").read_text()))[1]

    def start(self, name: str, *options: object) -> None:
        command = [sys.executable, "-c", "from graphopt.cli import main; main()", "serve", *map(str, options)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "DYN_FILE_KV": str(self.work / "discovery")}
        with (self.work / name).open("w") as log:
            self.processes[name] = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)

    def add(self, name: str) -> None:
        self.ports[name] = free_port()
        options = ["--name", "python", "--threads", 1, "--metrics-port", self.ports[name]]
        self.start(name, self.folder, "--no-front", *options)

    def metrics(self, name: str) -> dict[str, str]:
        """Return what the worker of a host says of itself."""
        page = get(f"http://127.0.0.1:{self.ports[name]}/metrics")
        return dict(line.split() for line in page.splitlines() if line[:8] == "graphopt")

    def wait_for_host(self, name: str) -> None:
        """Wait until the worker of a host is ready, and the front gives it requests."""
        address = f"http://127.0.0.1:{self.ports[name]}"
        worker = self.until(lambda: re.search(r'worker_id="(\w+)"', get(f"{address}/metrics")))[1]
        self.until(lambda: '"ready"' in get(f"{address}/health"))
        self.until(lambda: worker in get(f"{self.url.removesuffix('/v1')}/health"))

    def until(self, condition: Any) -> Any:
        for _ in range(600):
            with contextlib.suppress(OSError):
                if result := condition():
                    return result
            time.sleep(0.1)
        raise AssertionError("\n".join((self.work / name).read_text() for name in self.processes))

    def wait_for(self, count: int) -> None:
        address = self.url.removesuffix("/v1")
        self.until(
            lambda: get(f"{address}/health").count('"instance_id"') == count and '"id"' in get(f"{self.url}/models")
        )

    def worker(self, name: str) -> int:
        process = self.processes[name].pid
        return int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])


@pytest.fixture(scope="module")
def cluster(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(served_folder, tmp_path_factory.mktemp("hosts"))
    try:
        for name in "ab":
            cluster.add(name)
        cluster.wait_for(2)
        yield cluster
    finally:
        for process in cluster.processes.values():
            process.terminate()
        for process in cluster.processes.values():
            process.wait(60)


def read_all(cluster: Cluster, tokens: int, disturb: Any, part_to_disturb: int = 20) -> list[str]:
    """Read a stream of each text, and disturb when a client has read so many parts of the first one."""
    from openai import OpenAI

    completions = OpenAI(base_url=cluster.url, api_key="none", max_retries=0, timeout=60).completions
    # The first answer lets pydantic build the client's types, which it does not do in several threads at once.
    list(completions.create(model="python", prompt=TEXTS[0], max_tokens=1, stream=True))

    def read_stream(prompt: str) -> str:
        request: Any = {"model": "python", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        parts = []
        for number, part in enumerate(completions.create(**request, extra_body={"ignore_eos": True})):
            parts.append(part.choices[0].text if part.choices else "")
            if number == part_to_disturb and prompt == TEXTS[0]:
                disturb()
        return "".join(parts)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        return list(threads.map(read_stream, TEXTS))


def test_a_host_that_is_killed_loses_no_stream(cluster: Cluster, expected: Any) -> None:
    names = []

    def kill() -> None:
        # The front may have given all streams to one host.
        name = next(name for name in "ab" if cluster.metrics(name)["graphopt_worker_requests_running"] != "0")
        # What keeps the worker alive goes first, so that nobody starts it again.
        for process in (cluster.processes[name].pid, cluster.worker(name)):
            os.kill(process, signal.SIGKILL)
        names.append(name)

    # A worker is done long before its client has read all, and has to be at work still.
    assert read_all(cluster, 800, kill, part_to_disturb=0) == expected(list(TEXTS), [800] * 8, exact=True)
    assert cluster.processes[names[0]].wait(10) == -signal.SIGKILL
    assert "\ndynamo_frontend_model_migration_total{" in get(f"{cluster.url.removesuffix('/v1')}/metrics")


def test_a_host_that_joins_gets_requests_and_one_that_ends_ends_them(cluster: Cluster, expected: Any) -> None:
    (process,) = (cluster.processes[name] for name in "ab" if cluster.processes[name].poll() is None)
    cluster.add("c")
    cluster.wait_for_host("c")

    def end() -> None:
        process.send_signal(signal.SIGTERM)

    assert read_all(cluster, 200, end) == expected(list(TEXTS), [200] * 8, exact=True)
    assert process.wait(60) == 0
    assert read_all(cluster, 20, lambda: None) == expected(list(TEXTS), [20] * 8, exact=True)
    figures = cluster.metrics("c")
    assert int(figures["graphopt_worker_tokens_total"]) >= 8 * 20
    assert int(figures["graphopt_worker_requests_total"]) >= 8
    assert figures["graphopt_worker_requests_running"] == figures["graphopt_worker_blocks_used"] == "0"


def test_a_front_without_workers_lives_and_is_not_ready(cluster: Cluster) -> None:
    for name in set(cluster.processes) - {"front"}:
        cluster.processes[name].terminate()
    address = cluster.url.removesuffix("/v1")
    cluster.until(lambda: '"instance_id"' not in get(f"{address}/health"))
    assert '"live"' in get(f"{address}/live")
    with pytest.raises(urllib.error.HTTPError, match=r"503|404"):
        get(f"{cluster.url}/models/python/ready")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "no worker here, and none of another machine"),
        (["--replicas", "0", "--no-front", "--discovery", "etcd"], "no worker here"),
        (["--discovery", "etcd"], "workers need a model"),
    ],
)
def test_commands_that_would_serve_nothing_are_refused(options: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from graphopt.cli import app

    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code
    assert message in str(result.exception or result.output)
