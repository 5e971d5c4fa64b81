"""HTTP servers as a client sees them: when each token of each of many requests arrives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.parts.unavailable import UnavailableError

_ROOT = Path(__file__).parents[3]
_PATIENCE = 300.0  # seconds that a server has to load its model


@dataclass(frozen=True)
class Reply:
    """When the parts of a reply arrived, in seconds since the request was sent, and how many tokens it has."""

    arrivals: list[float]
    tokens: int


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        port: on the loopback.
        path: where completions are.
        body: what a request says beside its prompt.
        counts: the field of the last part that holds the number of tokens: its names, from the outside in.
    """

    port: int
    path: str
    body: Mapping[str, Any]
    counts: tuple[str, ...]

    async def ask(self, prompt: list[int]) -> Reply:
        """Send one request and read its reply to the end.

        Raises:
            UnavailableError: the server refuses, or says nothing of tokens.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({**self.body, "prompt": prompt}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        begin = time.perf_counter()
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            raise UnavailableError(f"{status.strip()}: {(await reader.read()).decode()[-300:]}")
        arrivals: list[float] = []
        tokens = 0
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            arrival, part = time.perf_counter() - begin, json.loads(line[6:])
            count = _field(part, self.counts)
            if count is not None:
                tokens = int(count)
            # llama-server counts in every part, and says which one is the last
            if _text(part) is not None and (count is None or part.get("stop") is False):
                arrivals.append(arrival)
        writer.close()
        if not tokens or not arrivals:
            raise UnavailableError(f"a reply of {tokens} tokens in {len(arrivals)} parts")
        return Reply(arrivals, tokens)


async def send_all(server: Server, prompts: list[list[int]], concurrent: int) -> tuple[list[Reply], float]:
    """Send requests, at most ``concurrent`` at a time; return their replies and the seconds that all took."""
    queue, replies = list(reversed(prompts)), []

    async def client() -> None:
        while queue:
            replies.append(await server.ask(queue.pop()))

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    return replies, time.perf_counter() - begin


@contextlib.contextmanager
def running(command: list[str], port: int, ready: str, log: Path) -> Iterator[None]:
    """Run a server in the block, from when ``ready`` answers with status 200 and names its model.

    Raises:
        UnavailableError: it ends or does not come up.
    """
    with log.open("w") as stream:
        environment = os.environ | {"PYTHONPATH": str(_ROOT)}
        # llama-server writes a log where it is started
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment, cwd=log.parent, start_new_session=True
        )
    try:
        end = time.monotonic() + _PATIENCE
        while not _answers(f"http://127.0.0.1:{port}{ready}"):
            if process.poll() is not None or time.monotonic() > end:
                raise UnavailableError(f"{Path(command[0]).name} does not serve: {log.read_text()[-300:]}")
            time.sleep(0.1)
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            body = json.load(answer)
    except (OSError, ValueError):
        return False
    return bool(body.get("data", True))


def _field(part: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        part = part.get(name) if isinstance(part, dict) else None
    return part


def _text(part: dict[str, Any]) -> str | None:
    """Return the text of a part: of an OpenAI-compatible server, or of llama-server."""
    choices = part.get("choices")
    if choices is not None:
        return choices[0].get("text") if choices else None
    content = part.get("content")
    return content if isinstance(content, str) else None
