"""What ``graphopt serve`` runs on a machine, kept alive: a front, workers, or both."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import IO, TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.serving.beginnings import BEGINNINGS, beginnings_of
from graphopt.serving.checks import check_command, check_etcd, check_folder, check_packages, check_ports, free_port
from graphopt.serving.etcd import ENDPOINTS, Etcd
from graphopt.serving.presence import LEASE_OF_DYNAMO, LEASE_OF_HOST, Presence
from graphopt.serving.worker import instance_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphopt.serving.settings import Settings

_LOOK = 0.1  # seconds between two looks at the processes
_LONG = 30.0  # seconds after which a process counts as one that worked, and between two starts at most
_OF_REQUESTS = (b"request_span", b"dynamo_llm::http::service", b"monitor_instance_source", b"discovery stream ended")
_UNUSABLE = 2  # exit code of a process whose input cannot be used: another start would not help


class _Process:
    """A process that is started again when it ends."""

    def __init__(
        self,
        title: str,
        command: list[str],
        environment: Mapping[str, str],
        say: Callable[[str], None],
        forget: Callable[[int], None],
    ) -> None:
        self.title, self._command, self._environment, self._say = title, command, environment, say
        self._forget = forget
        self.failures, self._due = 0, 0.0
        self.start()

    def start(self) -> None:
        self._start_time = time.monotonic()
        quiet = "DYN_LOG" not in os.environ
        errors = subprocess.PIPE if quiet else None
        # A session of its own: Ctrl-C in a terminal is for us, who let requests end.
        self.process = subprocess.Popen(
            self._command, env=dict(self._environment), stderr=errors, start_new_session=True
        )
        if quiet:
            threading.Thread(target=self._pass_on, args=(self.process.stderr,), daemon=True).start()

    def _pass_on(self, lines: IO[bytes]) -> None:
        """Print what the process prints, without a line for each request that is refused or moves."""
        for line in lines:
            if not any(pattern in line for pattern in _OF_REQUESTS):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def look(self, time_now: float) -> None:
        """Start the process again where it has ended: at once, and less and less often where that does not help."""
        code = self.process.poll()
        if code is None:
            return
        if not self._due:
            self._forget(self.process.pid)
            if code == _UNUSABLE:
                raise InputError(f"the {self.title} cannot run", remedy="see its message above")
            self.failures = 0 if time_now - self._start_time > _LONG else self.failures + 1
            delay = 0.0 if self.failures < 2 else min(_LONG, 0.5 * 2**self.failures)
            ending = signal.Signals(-code).name if code < 0 else f"code {code}"
            self._say(f"the {self.title} ended ({ending}); it starts again" + (f" in {delay:.0f} s" if delay else ""))
            self._due = time_now + delay
        if time_now >= self._due:
            self._due = 0.0
            self.start()

    def stop(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


def serve(folder: Path | None, settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and let requests end then; the second one does not wait.

    Args:
        folder: an artifact with the graph of the step ``serve``; only workers need it.
        settings: how.
        say: told when clients can come, and when a process ended and starts again.

    Raises:
        InputError: the folder cannot be served, a port is taken, or etcd does not answer.
        MissingDependencyError: the extra ``serve`` is not installed.
    """
    check_command(folder, settings)
    check_packages()
    beginnings: list[list[int]] = []
    if folder is not None and settings.replicas:
        check_folder(folder)
        beginnings = beginnings_of(folder, settings.caches)
    check_ports(settings)
    if settings.discovery == "etcd":
        check_etcd(dict(os.environ))
    port = free_port(settings.host, settings.port) if settings.front else 0
    signals: list[int] = []
    with contextlib.ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-serve-")))
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, lambda code, _: signals.append(code)))
        (state / BEGINNINGS).write_text(json.dumps(beginnings))
        processes = _start(folder, settings, port, state, say)
        if settings.discovery == "etcd":
            presence = _presence(processes, state, say)
            presence.start()
            stack.callback(presence.stop)
        stack.callback(_stop, processes, settings.patience, signals)
        is_announced = not settings.front
        while not signals:
            time_now = time.monotonic()
            for process in processes:
                process.look(time_now)
            if not is_announced and _ready(settings, port):
                is_announced = True
                address = f"http://{_address(settings.host)}:{port}/v1"
                workers = f"{settings.replicas} worker{'s' if settings.replicas > 1 else ''}"
                say(
                    f"serving {settings.name} at {address} with {workers}"
                    if settings.replicas
                    else f"listening at {address} for the workers of other machines"
                )
            time.sleep(_LOOK)
        say("ending: requests on their way are finished")


def _start(
    folder: Path | None, settings: Settings, port: int, state: Path, say: Callable[[str], None]
) -> list[_Process]:
    environment = _environment(settings, state)
    discovery = ["--discovery", settings.discovery]
    module = [sys.executable, "-m"]

    def forget(process: int) -> None:
        """Take a worker that has ended out of etcd, so that the front sends it nothing until its lease ends."""
        file = instance_file(state, process)
        if settings.discovery == "etcd" and file.is_file():
            try:
                Etcd(environment).revoke(int(file.read_text()))
            except OSError as error:
                say(f"etcd at {environment.get(ENDPOINTS)} cannot be told yet that a worker ended: {error}")
            file.unlink()

    processes = []
    if settings.front:
        command = [*module, "graphopt.serving.front", "--host", settings.host, "--port", str(port), *discovery]
        processes.append(_Process("front", [*command, "--routing", settings.routing], environment, say, forget))
    if folder is None:
        return processes
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // max(1, settings.replicas))
    command = [*module, "graphopt.serving.worker", str(folder.resolve()), "--name", settings.name]
    command += ["--state", str(state), "--threads", str(threads), *discovery]
    # Where a front is here it lets requests end itself, before its workers end.
    command += ["--patience", str(0.0 if settings.front else settings.patience)]
    command += ["--tool-parser", settings.tool_parser] if settings.tool_parser else []
    for number in range(settings.replicas):
        system = {}
        if settings.metrics_port or settings.discovery != "file":
            # Fronts of other machines fetch the tokenizer there.
            system = {"DYN_SYSTEM_PORT": str(settings.metrics_port and settings.metrics_port + number)}
        processes.append(_Process(f"worker {number + 1}", command, {**environment, **system}, say, forget))
    return processes


def _presence(processes: list[_Process], state: Path, say: Callable[[str], None]) -> Presence:
    """Return what speaks for the workers here."""

    def workers() -> dict[int, _Process]:
        by_lease = {}
        for process in processes:
            with contextlib.suppress(OSError, ValueError):
                by_lease[int(instance_file(state, process.process.pid).read_text())] = process
        return by_lease

    def start_again(lease: int) -> None:
        if process := workers().get(lease):
            say(f"etcd has forgotten the {process.title}, which ends and starts again")
            process.stop(signal.SIGTERM)

    return Presence(Etcd(os.environ), lambda: set(workers()), start_again, say)


def _environment(settings: Settings, state: Path) -> dict[str, str]:
    patience = str(math.ceil(settings.patience))
    environment = {
        "DYN_LOG": "error,dynamo_llm::discovery::controller=warn",
        "DYN_FILE_KV": str(state / "discovery"),
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": patience,
        "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": patience,
        # Status 200 waits for the first token so long: what a worker refuses gets a status of its own.
        "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "5000",
        # A host that is lost gets nothing for as long as etcd lists it, see Presence.
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": str(LEASE_OF_HOST),
        "ETCD_LEASE_TTL": str(LEASE_OF_DYNAMO),
        # What starts again while etcd is away waits for it.
        "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": str(LEASE_OF_DYNAMO),
        "DYN_TCP_CONNECT_TIMEOUT": "1",
        **os.environ,
        "DYN_DISCOVERY_BACKEND": settings.discovery,
    }
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
    if settings.address:
        environment |= dict.fromkeys(hosts, settings.address)
    elif settings.discovery == "file":
        # All of them are on this machine, whatever address the front has.
        environment |= dict.fromkeys(hosts, "127.0.0.1")
    if settings.discovery == "file":
        environment |= {"DYN_SELF_HOST_METADATA": "0"}
    return environment


def _stop(processes: list[_Process], patience: float, signals: list[int]) -> None:
    """Let the front finish what it has and take nothing new; then the workers have nothing to do.

    Without a front here they get no new requests, and those that they have end, or move when the time is over.
    """
    workers = [process for process in processes if process.title != "front"]
    fronts = [process for process in processes if process.title == "front"]
    limit = max(len(signals), 1)
    for group, seconds in ((fronts, patience + 5), (workers, 10.0 if fronts else patience + 5)):
        end = time.monotonic() + seconds
        _signal(group, signal.SIGTERM)
        while any(process.process.poll() is None for process in group):
            if time.monotonic() > end or len(signals) > limit:
                _signal(group, signal.SIGKILL)
            time.sleep(_LOOK / 2)


def _signal(processes: list[_Process], number: int) -> None:
    for process in processes:
        process.stop(number)


def _address(host: str) -> str:
    """Return an address to reach a front on this machine that listens on ``host``."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{local}]" if ":" in local else local


def _ready(settings: Settings, port: int) -> bool:
    """Return whether the front offers the model, and knows all workers; or just listens, where none is here."""
    try:
        if not settings.replicas:
            with urllib.request.urlopen(f"http://{_address(settings.host)}:{port}/v1/models", timeout=2):
                return True
        answers = []
        for path in ("v1/models", "health"):
            with urllib.request.urlopen(f"http://{_address(settings.host)}:{port}/{path}", timeout=2) as answer:
                answers.append(json.load(answer))
        workers = sum(entry["endpoint"] == "generate" for entry in answers[1]["instances"])
        return workers >= settings.replicas and any(entry["id"] == settings.name for entry in answers[0]["data"])
    except (OSError, ValueError, KeyError):
        return False
