"""Serves the page about a model to a browser on this machine, and makes it anew when the model's files change."""

from __future__ import annotations

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from graphopt.errors import GraphoptError, InputError
from graphopt.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOST = "127.0.0.1"

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of the files of a model."""


class PageServer(ThreadingHTTPServer):
    """A server of one page, for the same machine only.

    ``/`` is the page, ``/stamp`` a text that changes with the files of the model: the page asks for it each second, and
    loads itself again when it is another one.

    Args:
        model: an artifact, or an .onnx file.
        make: makes the page, from what lies there at that moment.
        port: 0 takes a free one.
        on_failure: called with the reason when a page cannot be made, while an artifact is being written say; the last
            page stays until the files change again.

    Raises:
        InputError: the port is taken, or there is no model.
    """

    daemon_threads = True

    def __init__(
        self,
        model: Path,
        make: Callable[[], str],
        port: int = 0,
        on_failure: Callable[[GraphoptError], None] = lambda _: None,
    ) -> None:
        self._model, self._make, self._on_failure = model, make, on_failure
        self._lock = threading.Lock()
        self._stamp = stamp(model)
        self._page = make()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise InputError(
                f"nothing can listen on {HOST}:{port}: {error.strerror}", remedy="choose another --port, or 0"
            ) from error

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_port}/"

    def current(self) -> tuple[str, str]:
        """Return the page and its stamp; the page is made again if the files have changed."""
        with self._lock:
            stamp_now = stamp(self._model)
            if stamp_now and stamp_now != self._stamp:
                # Also where it fails: the next attempt is worth it only when the files have changed again.
                self._stamp = stamp_now
                try:
                    self._page = self._make()
                except GraphoptError as error:
                    self._on_failure(error)
            return self._page, _text(self._stamp)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = f"graphopt/{VERSION}"

    def do_GET(self) -> None:
        # A page of another site could have its own name resolve to this machine, and read the answer.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if self.path not in ("/", "/stamp"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        page, mark = self.server.current()
        body, kind = (page, "text/html") if self.path == "/" else (mark, "text/plain")
        self.send_response(HTTPStatus.OK)
        content = body.encode()
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "ETag": f'"{mark}"'}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the page asks each second."""


def stamp(model: Path) -> Stamp:
    """Return what changes when the files of ``model`` do; empty where there are none, as while they are replaced."""
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    entries = []
    for file in files:
        try:
            status = file.stat()
        except OSError:  # it went while it was looked at
            continue
        entries.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(entries)


def _text(time_stamp: Stamp) -> str:
    return f"{hash(time_stamp) & (1 << 64) - 1:016x}"
