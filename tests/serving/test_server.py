"""``graphopt serve`` as its clients see it: one front, two workers, pools that are soon full."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import BLOCKS

# They are imported where they are used: importing takes seconds, and every worker collects this file.
pytestmark = [
    pytest.mark.skipif(not find_spec("dynamo"), reason="the extra `serve` is not installed"),
    pytest.mark.skipif(not find_spec("openai"), reason="the extra `dev` is not installed"),
]

ROOT = Path(__file__).parents[2]
TEXTS = (
    "def read_lines(path):\n",
    "class Stack:\n",
    "import ",
    "for line in stream:\n",
    "x = [",
    "def test_",
    "try:\n",
    "@",
)


# A kernel that crashes on an input, as a worker sees it: Python runs this file when it starts.
FAULT = """
import os, signal
from graphopt.serving import batch
start = batch.Batch._start
def crash_on_a_token(self, stream):
    if {token} in stream.turn.prompt:
        os.kill(os.getpid(), signal.SIGSEGV)
    return start(self, stream)
batch.Batch._start = crash_on_a_token
"""
DEADLY = 4095


class ServerProcess:
    """A running ``graphopt serve``, whose workers crash when they begin to read the token :data:`DEADLY`."""

    def __init__(self, folder: Path, faults: Path, *options: object) -> None:
        from openai import OpenAI

        (faults / "sitecustomize.py").write_text(FAULT.format(token=DEADLY))
        code = "from graphopt.cli import main; main()"
        command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0", *map(str, options)]
        environment = os.environ | {"PYTHONPATH": f"{faults}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()
        self.url = self.until(r"serving python at (http://127\.0\.0\.1:\d+/v1)")[1]
        self.client = OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def _read_lines(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._lines.put(line)
        self._lines.put("")

    def until(self, pattern: str) -> re.Match[str]:
        while line := self._lines.get(timeout=120):
            if match := re.search(pattern, line):
                return match
        raise AssertionError("".join(self.lines))

    def processes(self, module: str) -> list[int]:
        """Return the processes of a module of graphopt.serving, the oldest first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        numbers = [pid for pid in children if f"graphopt.serving.{module}" in Path(f"/proc/{pid}/cmdline").read_text()]
        return sorted(map(int, numbers))

    def instances(self) -> set[int]:
        """Return the workers that the front hands requests to: those that have read their model."""
        health = json.loads(get(self.url.removesuffix("/v1") + "/health"))
        return {entry["instance_id"] for entry in health["instances"] if entry["endpoint"] == "generate"}

    def wait_for_workers(self, before: set[int]) -> None:
        """Wait until there are two again, of which one is new since ``before``."""
        for _ in range(600):
            if len(instances := self.instances()) == 2 and instances != before:
                return
            time.sleep(0.1)
        raise AssertionError("".join(self.lines))

    def text(self, prompt: str | list[int], tokens: int, **options: Any) -> str:
        settings = {"temperature": 0, **options}
        return (
            self.client.completions.create(model="python", prompt=prompt, max_tokens=tokens, **settings).choices[0].text
        )

    def close(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read()).decode()


@pytest.fixture(scope="module")
def server(narrow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        narrow, tmp_path_factory.mktemp("faults"), "--replicas", 2, "--threads", 1, "--tool-parser", "hermes"
    )
    yield process
    if process.process.poll() is None:
        assert process.close() == 0


def test_models_chat_and_completions(server: ServerProcess, expected: Any) -> None:
    client = server.client
    assert [model.id for model in client.models.list()] == ["python"]
    assert server.text(TEXTS[0], 20) == expected([TEXTS[0]], [20])[0]

    messages = [{"role": "system", "content": "Lists."}, {"role": "user", "content": "a stack"}]
    request = {"model": "python", "messages": messages, "max_tokens": 12, "temperature": 0}
    reply = client.chat.completions.create(**request)
    # the template of the folder, rendered by the front
    assert reply.choices[0].message.content == expected(['"""Lists."""\n# a stack\n'], [12])[0]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 12

    parts = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == reply.choices[0].message.content
    assert len(parts) > 6
    assert parts[-1].usage.completion_tokens == 12
    assert parts[-1].usage.prompt_tokens == reply.usage.prompt_tokens


def test_health_and_readiness(server: ServerProcess) -> None:
    base = server.url.removesuffix("/v1")
    assert json.loads(get(f"{base}/live"))["status"] == "live"
    assert len(json.loads(get(f"{base}/health"))["instances"]) == 2
    assert json.loads(get(f"{server.url}/models/python/ready"))["ready"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{server.url}/models/other/ready")


def test_seeds_stop_strings_and_schemas(server: ServerProcess) -> None:
    def sample(seed: int) -> str:
        return server.text(TEXTS[1], 24, temperature=0.9, top_p=0.95, seed=seed)

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(3)}) > 1
    whole = server.text(TEXTS[1], 40)
    stop = whole[30:40]
    assert server.text(TEXTS[1], 40, stop=[stop]) == whole.split(stop)[0]

    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    request = {"model": "python", "messages": [{"role": "user", "content": "a stack"}], "max_tokens": 40}
    reply = server.client.chat.completions.create(**request, response_format=form)
    assert json.loads(reply.choices[0].message.content) == {"a": "b"}


def test_calls_of_tools_are_told_from_text(server: ServerProcess) -> None:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    look = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    # what a model that was trained to would write
    call = r'<tool_call>\{"name": "look", "arguments": \{"place": "[a-z]{3}"\}\}</tool_call>'
    request = {"model": "python", "messages": [{"role": "user", "content": "a stack"}], "max_tokens": 60}
    reply = server.client.chat.completions.create(**request, tools=[look], extra_body={"guided_regex": call}).choices[0]
    assert reply.finish_reason == "tool_calls"
    assert [tool_call.function.name for tool_call in reply.message.tool_calls] == ["look"]
    assert json.loads(reply.message.tool_calls[0].function.arguments).keys() == {"place"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=2"),
        ({"logprobs": 1}, "log probabilities"),
        ({"presence_penalty": 0.5}, "presence"),
        ({"prompt": [5, 4096]}, "Invalid request"),
        ({"prompt": [5] * (BLOCKS * 16)}, "640"),
        ({"prompt": []}, "cannot be empty"),
        ({"extra_body": {"guided_json": "{"}}, "not JSON"),
        ({"temperature": -1.0}, "Temperature must be"),
        ({"model": "other"}, "404 - Model not found"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals_are_clear(options: dict[str, Any], message: str, server: ServerProcess) -> None:
    from openai import APIStatusError

    request = {"model": "python", "prompt": "x", "max_tokens": 4, **options}
    with pytest.raises(APIStatusError, match=message) as refusal:
        server.client.completions.create(**request)
    assert 400 <= refusal.value.status_code < 500
    with pytest.raises(APIStatusError) as refusal:
        next(iter(server.client.completions.create(**request, stream=True)))
    assert 400 <= refusal.value.status_code < 500


def test_growing_requests_all_end_in_a_small_pool(server: ServerProcess, expected: Any) -> None:
    prompts = [TEXTS[i % len(TEXTS)] * (1 + i % 3) for i in range(20)]
    tokens = [90 + 3 * i for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        texts = list(threads.map(server.text, prompts, tokens))
    assert texts == expected(prompts, tokens)


def test_a_client_that_goes_frees_its_blocks(server: ServerProcess) -> None:
    extra = {"extra_body": {"ignore_eos": True}}
    begin = time.monotonic()
    server.text(TEXTS[1], 600, **extra)
    duration = time.monotonic() - begin
    # Each worker gets sixteen requests, of which each takes nearly the whole pool; nobody waits for them.
    body = {"model": "python", "prompt": TEXTS[3], "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    connections = [http.client.HTTPConnection(server.url.split("/")[2]) for _ in range(32)]
    for connection in connections:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(0.3)
    for connection in connections:
        connection.close()
    begin = time.monotonic()
    server.text(TEXTS[4], 20)
    server.text(TEXTS[4], 20)
    # Two replies of a thirtieth of the length; behind the 32 that were given up they would wait for 32 of its time.
    assert time.monotonic() - begin < 4 * duration


def test_nothing_listens_beyond_this_machine(server: ServerProcess) -> None:
    sockets = set()
    for pid in (*server.processes("front"), *server.processes("worker")):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(file))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].split(":")[0])
    assert len(listening) >= 3
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}


def test_streams_go_on_when_a_worker_is_killed(server: ServerProcess, expected: Any) -> None:
    tokens, extra = 400, {"extra_body": {"ignore_eos": True}}
    arrivals = threading.Semaphore(0)

    def read_stream(prompt: str) -> str:
        parts = []
        request = {"model": "python", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **extra}
        for number, part in enumerate(server.client.completions.create(**request)):
            parts.append(part.choices[0].text if part.choices else "")
            if number == 20:
                arrivals.release()
        return "".join(parts)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        texts = [threads.submit(read_stream, prompt) for prompt in TEXTS]
        for _ in range(2):
            assert arrivals.acquire(timeout=60)
        before = server.instances()
        os.kill(server.processes("worker")[0], signal.SIGKILL)
        replies = [text.result() for text in texts]
    assert replies == expected(list(TEXTS), [tokens] * 8, exact=True)
    server.until(r"worker \d ended \(SIGKILL\); it starts again")
    server.wait_for_workers(before)


def test_a_request_that_crashes_its_worker_is_not_handed_round(server: ServerProcess, expected: Any) -> None:
    from openai import BadRequestError

    before, instances = server.processes("worker"), server.instances()
    with pytest.raises(BadRequestError, match="a worker crashed while it read this request"):
        server.text([5, DEADLY], 4)
    server.until(r"worker \d ended \(SIGSEGV\); it starts again")
    server.wait_for_workers(instances)
    assert len(set(before) & set(server.processes("worker"))) == 1
    assert server.text(TEXTS[0], 20) == expected([TEXTS[0]], [20])[0]


def test_a_front_that_is_killed_comes_back(server: ServerProcess, expected: Any) -> None:
    from openai import OpenAIError

    os.kill(server.processes("front")[0], signal.SIGKILL)
    server.until(r"front ended \(SIGKILL\); it starts again")
    for _ in range(600):
        with contextlib.suppress(OpenAIError):
            assert server.text(TEXTS[0], 20) == expected([TEXTS[0]], [20])[0]
            return
        time.sleep(0.1)
    raise AssertionError("".join(server.lines))


def test_sigterm_lets_requests_end(server: ServerProcess, expected: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        request = {"model": "python", "prompt": TEXTS[1], "max_tokens": 200, "temperature": 0, "stream": True}
        stream = server.client.completions.create(**request, extra_body={"ignore_eos": True})
        first = next(iter(stream)).choices[0].text
        code = threads.submit(server.close)
        text = first + "".join(part.choices[0].text for part in stream if part.choices)
        assert code.result() == 0
    assert text == expected([TEXTS[1]], [200], exact=True)[0]
