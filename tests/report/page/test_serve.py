from __future__ import annotations

import os
import shutil
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError

import pytest

from graphopt.errors import GraphoptError, InputError
from graphopt.report.page.serve import HOST, PageServer, stamp
from graphopt.report.page.write import page_about
from tests.graphs import residual_model, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return save(residual_model(), tmp_path / "model")


@contextmanager
def running(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(server: PageServer, path: str = "") -> str:
    with urllib.request.urlopen(server.address + path, timeout=10) as answer:
        return str(answer.read().decode())


def test_the_page_follows_the_files_of_the_model(model: Path) -> None:
    with running(PageServer(model, lambda: page_about(model, live=True))) as server:
        page, first = get(server), get(server, "stamp")
        assert "connect-src 'self'" in page
        assert 'fetch("/stamp")' in page
        assert "extra.layer" not in page
        assert get(server, "stamp") == first
        new_model = residual_model(layers=3)
        next(node for node in new_model.graph if node.op_type == "MatMul").name = "extra.layer"
        save(new_model, model.parent)
        assert get(server, "stamp") != first
        assert "extra.layer" in get(server)


def test_a_page_that_cannot_be_made_leaves_the_last_one(model: Path) -> None:
    failures: list[GraphoptError] = []
    with running(PageServer(model, lambda: page_about(model), on_failure=failures.append)) as server:
        page = get(server)
        whole = model.read_bytes()
        model.write_bytes(whole[:100])
        assert get(server) == page
        assert get(server) == page
        assert ["truncated" in str(failure) for failure in failures] == [True], "told once, not at every question"
        model.unlink()
        assert get(server) == page
        model.write_bytes(whole)
        assert get(server) == page
    assert len(failures) == 1


def test_only_this_machine_is_answered_and_only_two_paths(model: Path) -> None:
    with running(PageServer(model, lambda: "page")) as server:
        assert server.server_address[0] == HOST
        with pytest.raises(HTTPError, match="404"):
            get(server, "model.onnx")
        connection = HTTPConnection(HOST, server.server_port, timeout=10)
        connection.request("GET", "/", headers={"Host": f"elsewhere.example:{server.server_port}"})
        assert connection.getresponse().status == 403
        connection.close()


def test_a_port_that_is_taken_is_an_error(model: Path) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        with pytest.raises(InputError, match="choose another --port"):
            PageServer(model, lambda: "page", listener.getsockname()[1])


def test_a_file_on_disk_asks_no_server(model: Path) -> None:
    page = page_about(model)
    assert "connect-src" not in page
    assert "/stamp" not in page


def test_the_stamp_knows_names_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    first = stamp(tmp_path)
    assert stamp(tmp_path) == first
    os.utime(tmp_path / "a", ns=(1, 1))
    second = stamp(tmp_path)
    shutil.copy2(tmp_path / "a", tmp_path / "b")
    assert len({first, second, stamp(tmp_path)}) == 3
    assert stamp(tmp_path / "a") == second
    assert stamp(tmp_path / "absent") == ()
