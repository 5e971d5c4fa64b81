from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tools.bench.parts.serving import Reply, Server, send_all
from tools.bench.parts.unavailable import UnavailableError
from tools.bench.serve import _figures

OPENAI = [
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "b"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]
LLAMA = [{"content": "a"}, {"content": "b"}, {"content": "", "tokens_predicted": 2}]
# since 2025 it counts in every part
LLAMA_COUNTING = [
    {"content": "a", "stop": False, "tokens_predicted": 1},
    {"content": "b", "stop": False, "tokens_predicted": 2},
    {"content": "", "stop": True, "tokens_predicted": 2},
]


def ask(parts: list[dict[str, Any]], counts: tuple[str, ...], status: str = "200 OK", clients: int = 1) -> list[Reply]:
    """Ask a server that streams such parts, an instant apart."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        assert body == {"stream": True, "prompt": [1, 2]}
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
        for part in parts:
            writer.write(f"data: {json.dumps(part)}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    async def run() -> list[Reply]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
            server = Server(listener.sockets[0].getsockname()[1], "/completions", {"stream": True}, counts)
            replies, _ = await send_all(server, [[1, 2]] * clients, clients)
            return replies

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("parts", "counts"),
    [
        (OPENAI, ("usage", "completion_tokens")),
        (LLAMA, ("tokens_predicted",)),
        (LLAMA_COUNTING, ("tokens_predicted",)),
    ],
    ids=["ours", "llama", "llama-counting"],
)
def test_each_part_has_its_time(parts: list[dict[str, Any]], counts: tuple[str, ...]) -> None:
    replies = ask(parts, counts, clients=3)
    assert [(reply.tokens, len(reply.arrivals)) for reply in replies] == [(2, 2)] * 3
    assert all(0 < reply.arrivals[0] < reply.arrivals[1] for reply in replies)
    figures = _figures(replies, 2.0, 2)
    assert figures["tokens_per_second"] == 3
    assert figures["between_p99"] >= figures["between_p50"] > 0
    with pytest.raises(UnavailableError, match="replies of .2. tokens, and not 5"):
        _figures(replies, 2.0, 5)


def test_a_server_that_refuses_is_named() -> None:
    with pytest.raises(UnavailableError, match="400 Bad Request"):
        ask([{"error": "no"}], ("usage",), "400 Bad Request")
    with pytest.raises(UnavailableError, match="a reply of 0 tokens"):
        ask([{"choices": [{"text": "a"}]}], ("usage", "completion_tokens"))
