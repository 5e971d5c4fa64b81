"""Ports for the servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ports that Linux gives to clients (net.ipv4.ip_local_port_range), and the largest that Dynamo takes
FIRST, END = 20000, 32768


def free_port() -> int:
    """Return a port nobody listens on, at random, so that tests beside one another hardly ever get the same one."""
    for port in random.SystemRandom().sample(range(FIRST, END), END - FIRST):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
