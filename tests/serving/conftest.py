from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.compile.pipeline import optimize
from graphopt.inference.conversation.template import TEMPLATE
from graphopt.inference.session import Session, load
from graphopt.passes.recipe import Recipe
from graphopt.serving.batch import Batch
from graphopt.serving.etcd import ENDPOINTS, Etcd
from graphopt.serving.stream import Turn
from tests.inference.conversation.conftest import PYTHON

BLOCKS = 40
"""Blocks of a pool that is soon full: 640 tokens."""


@pytest.fixture(scope="session")
def served_folder(shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a pool of 651 blocks, and a chat template."""
    folder = tmp_path_factory.mktemp("served") / "python"
    steps = [{"step": "canonicalize"}, {"step": "serve", "memory": "64MB", "block": 16}]
    optimize(shipped_artifact, Recipe.model_validate({"name": "served", "steps": steps}), folder, run=False)
    (folder / TEMPLATE).write_text(PYTHON)
    return folder


@pytest.fixture(scope="session")
def narrow(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a pool of :data:`BLOCKS` blocks."""
    return with_blocks(served_folder, tmp_path_factory.mktemp("narrow") / "python", BLOCKS)


@pytest.fixture(scope="module")
def session(shipped_artifact: Path) -> Session:
    return load(shipped_artifact, threads=1)


@pytest.fixture(scope="module")
def expected(served_folder: Path, session: Session) -> Any:
    """Return a function that says what an Engine with a large pool makes of texts, each so many tokens."""
    from tests.serving.test_batch import run

    batch = Batch(served_folder, threads=1, on_failure=print)

    def texts(prompts: list[str], tokens: list[int], exact: bool = False) -> list[str]:
        turns = [
            Turn(tuple(session.encode(prompt)), limit, min_tokens=limit if exact else 0)
            for prompt, limit in zip(prompts, tokens, strict=True)
        ]
        return [session.decode(reply) for reply, _ in run(batch, turns)]

    yield texts
    batch.close()


def with_blocks(source: Path, folder: Path, blocks: int, **model: object) -> Path:
    """Return a folder with the files of another one and another pool; ``model`` overrides what is said of the model."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".so":  # onnxruntime-genai takes no link
            shutil.copy(file, folder)
        elif file.name != GENAI_CONFIG:
            (folder / file.name).symlink_to(file)
    config = json.loads((source / GENAI_CONFIG).read_text())
    config["engine"]["dynamic_batching"]["num_blocks"] = blocks
    config["model"] |= model
    (folder / GENAI_CONFIG).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where an etcd of its own is."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    command = ["etcd", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--listen-peer-urls", "http://127.0.0.1:0"]
    command += ["--listen-client-urls", address, "--advertise-client-urls", address]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    environment = {ENDPOINTS: address}
    for _ in range(200):
        with contextlib.suppress(OSError):
            Etcd(environment).load("a")
            break
        time.sleep(0.1)
    yield environment
    process.terminate()
    process.wait()
