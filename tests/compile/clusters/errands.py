"""What tests send to workers, and processes of Dask that tests start and kill."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from graphopt.errors import InputError
from graphopt.graph.weights.disk import writing

ROOT = Path(__file__).parents[3]


def double(number: int) -> int:
    return 2 * number


def doubled_array(array: np.ndarray) -> np.ndarray:
    # a large array is a read-only map of a file in the shared folder; small ones come with the message
    assert not array.flags.writeable or array.nbytes < 4096
    return 2 * array


def process_of(_: object) -> int:
    return os.getpid()


def write_slowly(task: tuple[str, int]) -> int:
    """Say which process is at it in a file, wait, and return the number."""
    folder, number = task
    Path(folder, f"{number}.{os.getpid()}").touch()
    time.sleep(0.15)
    return number


def die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk(folder: str) -> None:
    with writing(Path(folder), 10**9):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(_: object) -> None:
    raise InputError("no", file="model.onnx", tensor="w", shape=(2, 3), remedy="give another")


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def worker(address: str, *options: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``dask worker`` while the block lasts."""
    code = "import sys; from distributed.cli.dask_worker import main; main(sys.argv[1:])"
    with _process(
        code, address, *options, "--no-nanny", "--host", "127.0.0.1", "--no-dashboard", **environment
    ) as process:
        yield process


@contextlib.contextmanager
def scheduler(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a scheduler with one worker, in one process, while the block lasts."""
    code = (
        "import signal, sys\nfrom distributed import LocalCluster\n"
        "with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, host='127.0.0.1', "
        "scheduler_port=int(sys.argv[1]), dashboard_address=None): signal.pause()"
    )
    with _process(code, str(port)) as process:
        yield process


@contextlib.contextmanager
def _process(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
