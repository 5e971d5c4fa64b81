"""Connections whose other side says nothing end; that streams then move, tools/bench/hosts.py shows with real links."""

from __future__ import annotations

import socket
import time

from graphopt.serving.process import SILENCE, _set_options, watch_connections


def test_what_a_process_accepts_and_opens_is_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        watch_connections()
        with socket.create_connection(listening.getsockname()) as client, listening.accept()[0] as connection:
            end = time.monotonic() + 10
            for side in (client, connection):
                while not side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and time.monotonic() < end:
                    time.sleep(0.01)
                assert side.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE * 1000
                assert side.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


def test_clients_may_take_their_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as of_workers:
        _set_options(listening.fileno(), listening.getsockname()[1])
        _set_options(of_workers.fileno(), listening.getsockname()[1])
        assert not listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert of_workers.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE * 1000
