"""Whether this machine can serve a folder, found out before anything starts."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.metadata
import importlib.util
import math
import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.artifact.hf_config import json_object
from graphopt.artifact.manifest import MANIFEST, read_manifest
from graphopt.errors import GraphoptError, InputError, MissingDependencyError
from graphopt.serving.etcd import ENDPOINTS, Etcd
from graphopt.serving.request import Limits
from graphopt.util.memory import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from graphopt.serving.settings import Settings

WORKER_BYTES, FRONT_BYTES = 200 << 20, 120 << 20
"""Memory of a worker besides weights and caches, and of a front: what VmRSS of /proc/PID/status says of idle ones."""

_OLDEST_ETCD = (3, 4)  # its JSON gateway is at /v3
_PACKAGES = {
    "dynamo._core": ("ai-dynamo-runtime", ", which has packages for Linux only"),
    "onnxruntime_genai": ("onnxruntime-genai", ""),
}


@dataclass(frozen=True)
class Finding:
    """What was found out.

    Attributes:
        subject: what was looked at, in a word.
        text: what is there, where it fits.
        problem: why it does not fit, and what to do.
    """

    subject: str
    text: str = ""
    problem: GraphoptError | None = None


def examine(folder: Path | None, settings: Settings, environment: dict[str, str] | None = None) -> Iterator[Finding]:
    """Yield what fits and what does not; nothing is started, and ports are free again afterwards.

    Args:
        folder: an artifact with the graph of the step ``serve``; ``None`` for a front alone.
        settings: how it would be served.
        environment: says where etcd is; that of this process by default.
    """
    environment = dict(os.environ) if environment is None else environment
    subjects: dict[str, Callable[[], str]] = {
        "command": lambda: check_command(folder, settings),
        "packages": check_packages,
    }
    if folder is not None and settings.replicas:
        subjects["folder"] = lambda: f"{check_folder(folder)}, {_check_graph(folder)}"
        subjects["memory"] = lambda: _check_memory(folder, settings)
    subjects |= _port_checks(settings)
    if settings.discovery == "etcd":
        subjects["etcd"] = lambda: check_etcd(environment)
    if settings.discovery == "kubernetes":
        subjects["kubernetes"] = lambda: "not looked at: only a pod of its cluster can"
    for subject, check in subjects.items():
        try:
            yield Finding(subject, check())
        except GraphoptError as error:
            yield Finding(subject, problem=error)


def check_command(folder: Path | None, settings: Settings) -> str:
    """Return what would run here.

    Raises:
        InputError: nothing could be served.
    """
    if not settings.replicas and (
        not settings.front or (settings.discovery == "file" and "DYN_FILE_KV" not in os.environ)
    ):
        raise InputError(
            "no worker here, and none of another machine could be found",
            remedy="give --replicas, or a front alone with --discovery etcd or kubernetes",
        )
    if settings.replicas and folder is None:
        raise InputError("workers need a model", remedy="give the folder that `graphopt optimize --add serve` made")
    parts = ["a front"] if settings.front else []
    if settings.replicas:
        parts.append(f"{settings.replicas} worker{'s' if settings.replicas > 1 else ''}")
    return f"{' and '.join(parts)}, found by {settings.discovery}"


def check_packages() -> str:
    """Return the versions of what serving needs.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
    """
    for module, (package, limit) in _PACKAGES.items():
        is_there = False
        with contextlib.suppress(ModuleNotFoundError):
            is_there = importlib.util.find_spec(module) is not None
        if not is_there:
            raise MissingDependencyError(f"serving needs {package}{limit}", remedy='pip install "graphopt[cpu,serve]"')
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package, _ in _PACKAGES.values())


def check_folder(folder: Path) -> str:
    """Return what the folder offers.

    Raises:
        InputError: its graph is another one, a file is missing or cut off, or its kernels cannot be loaded here.
    """
    from graphopt.artifact.artifact import MODEL, check_sizes, is_data

    limits = Limits.of_folder(folder)
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        # genai_config.json may be edited: it says how large the pool is.
        check_sizes(folder, manifest, {MODEL, *filter(is_data, manifest.files)})
    options = json_object(folder / GENAI_CONFIG)["model"]["decoder"].get("session_options", {})
    if library := options.get("custom_ops_library"):
        _check_library(folder / library)
    return (
        f"{limits.requests} requests at once of {limits.positions} tokens at most, "
        f"{limits.blocks} blocks of {limits.block} tokens"
    )


def _check_library(library: Path) -> None:
    if library.is_symlink():
        raise InputError(
            "onnxruntime-genai takes no link as a library of kernels", file=library, remedy="copy the file itself"
        )
    try:
        ctypes.CDLL(str(library.resolve()))
    except OSError as error:
        raise InputError(
            f"the kernels cannot be loaded on this machine ({error})",
            file=library,
            remedy="make the folder again with a graphopt that was built for it",
        ) from error


def _check_graph(folder: Path) -> str:
    from graphopt.artifact.artifact import read

    graph = read(folder).model.graph
    return f"{sum(1 for _ in graph.all_nodes()):,} nodes"


def _check_memory(folder: Path, settings: Settings) -> str:
    from graphopt.report.tables import size_text

    weights, caches = memory_of(folder)
    count = settings.replicas
    need = count * (weights + caches + WORKER_BYTES) + settings.front * FRONT_BYTES
    free = available_memory()
    text = (
        f"{size_text(need)} of {size_text(free)}: {count} x ({size_text(weights)} weights, {size_text(caches)} caches, "
        f"{size_text(WORKER_BYTES)} process)"
    )
    if need > free:
        raise InputError(
            f"serving takes more memory than there is: {text}",
            remedy="fewer --replicas, or make the folder again with a smaller --kv-memory or recipe",
        )
    return text


def memory_of(folder: Path) -> tuple[int, int]:
    """Return the bytes that a worker of a folder needs for weights, and for its pool and states.

    Every block of the pool counts, and a row of states for each request that runs at once.
    """
    from graphopt.analysis.structure.ports import past_port
    from graphopt.artifact.artifact import MODEL, is_data, read

    limits = Limits.of_folder(folder)
    weights = sum(file.stat().st_size for file in folder.iterdir() if file.name == MODEL or is_data(file.name))
    caches = 0
    for value in read(folder).model.graph.inputs:
        port = past_port(value)
        if port is not None and value.shape is not None and value.dtype is not None:
            rows = limits.requests if port.is_recurrent else limits.blocks
            sizes = [size for size in list(value.shape)[1:] if isinstance(size, int)]
            caches += math.ceil(rows * math.prod(sizes) * value.dtype.bitwidth / 8)
    return weights, caches


def check_ports(settings: Settings) -> None:
    """Confirm that all of this machine's addresses and ports can be listened on.

    Raises:
        InputError: a port is taken, or an address is none of this machine.
    """
    for check in _port_checks(settings).values():
        check()


def _port_checks(settings: Settings) -> dict[str, Callable[[], str]]:
    checks: dict[str, Callable[[], str]] = {}
    if settings.front:
        checks["front"] = lambda: f"{settings.host}, port {free_port(settings.host, settings.port)}"
    if address := settings.address:
        checks["address"] = lambda: f"{address}, port {free_port(address, 0, '--address')} for one"
    if settings.metrics_port and settings.replicas:
        # Dynamo listens on all interfaces where no address is given.
        host = settings.address or ("127.0.0.1" if settings.discovery == "file" else "0.0.0.0")
        ports = range(settings.metrics_port, settings.metrics_port + settings.replicas)
        checks["metrics"] = lambda: (
            f"{host}, port " + ", ".join(str(free_port(host, port, "--metrics-port")) for port in ports)
        )
    return checks


def free_port(host: str, port: int, option: str = "--port") -> int:
    """Return a port that can be listened on; any for 0.

    Raises:
        InputError: the port is taken, or this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            remedy = f"choose another {option}"
            if error.errno == errno.EADDRNOTAVAIL:
                remedy = "give an address of this machine: `ip address` lists them"
            raise InputError(f"{host}:{port} cannot be listened on: {error.strerror}", remedy=remedy) from error
        return int(listener.getsockname()[1])


def check_etcd(environment: dict[str, str]) -> str:
    """Return which etcd answers.

    Raises:
        InputError: none does, it is too old, or it lets this machine not write.
    """
    endpoints = environment.get(ENDPOINTS, "http://localhost:2379")
    etcd = Etcd(environment)
    key = f"graphopt-check-{os.getpid()}"
    try:
        version = etcd.version()
        etcd.save(key, "")
        etcd.remove(key)
    except OSError as error:
        raise InputError(
            f"etcd at {endpoints} cannot be used: {error}",
            remedy=f"start it, say in {ENDPOINTS} where it is, and in ETCD_AUTH_... how to come in",
        ) from error
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST_ETCD:
        raise InputError(f"etcd at {endpoints} is {version}", remedy="use 3.4 or newer")
    return f"{endpoints}, version {version}"
