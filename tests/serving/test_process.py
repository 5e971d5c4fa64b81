"""Connections whose other side says nothing end; that streams then move, tools/bench/hosts.py shows with real links."""

from __future__ import annotations

import socket
import time

from graphopt.serving.process import SILENCE, watch_connections


def test_what_a_process_accepts_and_opens_is_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        watch_connections()
        with socket.create_connection(listening.getsockname()) as opened, listening.accept()[0] as accepted:
            end = time.monotonic() + 10
            for each in (opened, accepted):
                while not each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and time.monotonic() < end:
                    time.sleep(0.01)
                assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE * 1000
                assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
