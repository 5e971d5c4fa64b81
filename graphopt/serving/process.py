"""What front and workers have in common: how they find and lose one another, and that they end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time

NAMESPACE = "graphopt"
"""Under which Dynamo lists the workers."""

SILENCE = 4
"""Seconds after which a host that does not answer is lost."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent ends in any way; on Linux only."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def watch_connections(port_of_clients: int = 0) -> None:
    """Let this process lose a connection when nothing came back for :data:`SILENCE` seconds.

    Clients at a port may take longer: one that reads nothing for a while is there, and TCP_USER_TIMEOUT would end it.

    A host whose link is down says nothing, and Dynamo waits for it for ever: it sets no option of its sockets. The
    kernel asks the other side each second (tcp(7): TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_USER_TIMEOUT) and ends a connection
    that is not answered, which Dynamo understands: it moves the requests. On Linux only.
    """
    if sys.platform == "linux":
        arguments = (port_of_clients,)
        threading.Thread(target=_set_options_of_new_sockets, args=arguments, name="connections", daemon=True).start()


def _set_options_of_new_sockets(port_of_clients: int) -> None:
    old_sockets: set[str] = set()
    while True:
        sockets = set()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    sockets.add(name)
                    if name not in old_sockets:
                        _set_options(int(number), port_of_clients)
        old_sockets = sockets
        time.sleep(0.5)


def _set_options(number: int, port_of_clients: int) -> None:
    # What a listening socket is told is inherited by what it accepts.
    with socket.socket(fileno=os.dup(number)) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if is_tcp and connection.getsockname()[1] != port_of_clients:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, 1),
                (socket.TCP_KEEPINTVL, 1),
                (socket.TCP_KEEPCNT, SILENCE),
                (socket.TCP_USER_TIMEOUT, SILENCE * 1000),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
