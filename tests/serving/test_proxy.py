"""examples/serving as clients see it: Caddy before a front, with TLS, a token and a page, tried in a real browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.serving.test_deployment import metrics
from tests.serving.test_server import ServerProcess, get

pytestmark = [
    pytest.mark.skipif(not find_spec("dynamo"), reason="the extra `serve` is not installed"),
    pytest.mark.skipif(shutil.which("caddy") is None, reason="Caddy is not installed"),
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
TOKEN = "0123456789abcdef" * 2
TEXT = "a stack"


class Proxy:
    """A running Caddy with the example's configuration.

    Args:
        front: host and port of a front.
        folder: for Caddy's certificates.
        token: that clients need.
    """

    def __init__(self, front: str, folder: Path, token: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        environment = os.environ | {
            "GRAPHOPT_SITE": f"localhost:{self.port}",
            "GRAPHOPT_FRONT": front,
            "GRAPHOPT_TOKEN": token,
            "XDG_DATA_HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
        }
        command = ["caddy", "run", "--config", str(EXAMPLES / "Caddyfile"), "--adapter", "caddyfile"]
        self.process = subprocess.Popen(command, cwd=EXAMPLES, env=environment, stderr=subprocess.DEVNULL)
        root = folder / "caddy" / "pki" / "authorities" / "local" / "root.crt"
        for _ in range(600):
            with contextlib.suppress(OSError):
                self.context = ssl.create_default_context(cafile=root)
                self.ask("/live").read()
                return
            time.sleep(0.1)
        raise AssertionError("Caddy does not answer")

    def ask(self, path: str, body: object = None, token: str | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection("localhost", self.port, context=self.context, timeout=60)
        headers = {"Content-Type": "application/json"}
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        return connection.getresponse()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    port = free_port()
    process = ServerProcess(served_folder, tmp_path_factory.mktemp("faults"), "--threads", 1, "--metrics-port", port)
    process.metrics = f"http://127.0.0.1:{port}/metrics"  # type: ignore[attr-defined]
    yield process
    assert process.close() == 0


@pytest.fixture(scope="module")
def proxy(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    proxy = Proxy(server.url.split("/")[2], tmp_path_factory.mktemp("caddy"), TOKEN)
    yield proxy
    proxy.close()


def test_clients_need_the_token(proxy: Proxy) -> None:
    assert proxy.ask("/v1/models").status == 401
    for wrong in ("", TOKEN[:-1], f"{TOKEN}0"):
        answer = proxy.ask("/v1/completions", {"model": "python", "prompt": "x"}, wrong)
        assert (answer.status, json.load(answer)["type"]) == (401, "Unauthorized")
    assert json.load(proxy.ask("/v1/models", token=TOKEN))["data"][0]["id"] == "python"


def test_what_is_open_and_what_is_not(proxy: Proxy) -> None:
    assert proxy.ask("/").read() == (EXAMPLES / "page" / "index.html").read_bytes()
    assert proxy.ask("/live").status == 200
    for path in ("/metrics", "/health", "/docs", "/openapi.json", "/Caddyfile", "/page/index.html"):
        assert proxy.ask(path, token=TOKEN).status == 404


def test_streams_come_as_they_are_made(proxy: Proxy, server: ServerProcess) -> None:
    request = {"model": "python", "prompt": TEXT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    answer = proxy.ask("/v1/completions", {**request, "stream": True}, TOKEN)
    pieces = list(iter(lambda: answer.read1(1 << 16), b""))
    assert len(pieces) > 20  # of 401 parts; how many come at once depends on how busy the machine is
    parts = [json.loads(line[6:]) for line in b"".join(pieces).splitlines() if line.startswith(b"data: {")]
    text = server.text(TEXT, 400, extra_body={"ignore_eos": True})
    assert "".join(part["choices"][0]["text"] for part in parts) == text


def test_a_short_token_lets_nobody_in(server: ServerProcess, tmp_path: Path) -> None:
    for token in ("", "short"):
        proxy = Proxy(server.url.split("/")[2], tmp_path, token)
        assert proxy.ask("/v1/models", token=token).status == 401
        assert proxy.ask("/v1/models").status == 401
        proxy.close()


def test_metrics_on_the_dashboard_exist(server: ServerProcess) -> None:
    server.client.completions.create(model="python", prompt="x", max_tokens=4, stream=True).close()
    server.text(TEXT, 4)
    texts = get(f"{server.url.removesuffix('/v1')}/metrics") + get(server.metrics)  # type: ignore[attr-defined]
    names = set(re.findall(r"^# TYPE (\w+)", texts, re.MULTILINE))
    # counted since the first one; tests/serving/test_hosts.py lets requests move
    assert metrics() - names == {"dynamo_frontend_model_migration_total"}


@pytest.fixture(scope="module")
def page(proxy: Proxy) -> Iterator[Any]:
    pytest.importorskip("playwright", reason="playwright is not installed, which drives Chromium")
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("there is no Chromium")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=options)
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.goto(f"https://localhost:{proxy.port}/")
        yield page
        browser.close()


def test_a_person_types_and_sees_the_stream(page: Any, server: ServerProcess) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#state")).to_have_text("This server wants its token: enter it above.", timeout=30_000)
    page.fill("#token", TOKEN)
    page.locator("#token").blur()
    expect(page.locator("#model option")).to_have_text(["python"], timeout=30_000)
    page.fill("#temperature", "0")
    page.fill("#limit", "12")
    page.fill("#prompt", TEXT)
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text(re.compile(r"12 tokens in [\d.]+ s"), timeout=30_000)
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    request = {"model": "python", "max_tokens": 12, "temperature": 0}
    reply = server.client.chat.completions.create(messages=messages, **request).choices[0].message.content
    assert page.locator(".user").all_text_contents() == [TEXT]
    assert page.locator(".assistant").all_text_contents() == [reply]
    # The second message goes with those before it, and Stop ends what is being written. The line is slow: otherwise the
    # reply may be complete before a busy machine clicks.
    line = {"offline": False, "latency": 0, "downloadThroughput": 4000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", line)
    page.fill("#limit", "900")
    page.fill("#prompt", "a <b>list</b>")
    page.click("#send")
    expect(page.locator(".assistant").nth(1)).not_to_be_empty(timeout=30_000)
    page.click("#stop")
    expect(page.locator("#send")).to_be_enabled(timeout=30_000)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "a <b>list</b>"}]
    whole = server.client.chat.completions.create(messages=messages, **{**request, "max_tokens": 900})
    text = page.locator(".assistant").nth(1).text_content()
    assert text
    assert len(text) < len(str(whole.choices[0].message.content))
    assert str(whole.choices[0].message.content).startswith(text)
    assert page.locator(".user").nth(1).text_content() == "a <b>list</b>"


def test_a_text_that_goes_on(page: Any, server: ServerProcess) -> None:
    from playwright.sync_api import expect

    page.click("#clear")
    page.select_option("#mode", "completions")
    page.fill("#limit", "20")
    page.fill("#prompt", "class Stack:\n")
    page.click("#send")
    expect(page.locator("#state")).to_have_text(re.compile(r"20 tokens in"), timeout=30_000)
    assert page.locator("#texts p").all_text_contents() == ["class Stack:\n" + server.text("class Stack:\n", 20)]


def test_errors_are_shown(page: Any) -> None:
    from playwright.sync_api import expect

    page.fill("#temperature", "3")
    page.fill("#prompt", "x")
    page.click("#send")
    expect(page.locator(".error")).to_contain_text("400: ", timeout=30_000)
    assert page.input_value("#prompt") == "x"
