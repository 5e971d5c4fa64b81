"""How to serve, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        name: what clients call the model.
        host: address that the front listens on.
        port: of the front; 0 for a free one.
        replicas: how many workers there are on this machine.
        threads: of onnxruntime in each worker; 0 shares the cores among them.
        discovery: how front and workers find each other: ``file``, ``etcd`` or ``kubernetes``.
        tool_parser: Dynamo's name for the form in which the model writes calls of tools, such as ``hermes``.
        front: whether there is a front on this machine.
        routing: how the front chooses a worker, see :data:`graphopt.serving.front.ROUTINGS`.
        address: of this machine, as others reach it; Dynamo takes that of the first interface by default.
        metrics_port: where the first worker says how it is, others behind it; 0 for free ones.
        patience: seconds that requests have to end after SIGTERM.
        caches: files of ``graphopt cache make``, whose texts each worker reads before it answers.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    threads: int = 0
    discovery: str = "file"
    tool_parser: str | None = None
    front: bool = True
    routing: str = "prefix"
    address: str | None = None
    metrics_port: int = 0
    patience: float = 60.0
    caches: tuple[Path, ...] = ()
