from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphopt.inference.conversation.template import TEMPLATE
from graphopt.inference.session import Session, load

PYTHON = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}# {{ message.content }}
{% elif message.role == 'system' %}\"\"\"{{ message.content }}\"\"\"
{% else %}{{ message.content }}

{% endif %}{% endfor %}"""
"""Turns of a conversation with a model of Python: a comment, and the code behind it."""


@pytest.fixture(scope="session")
def chat_folder(shipped_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(shipped_artifact, folder)
    (folder / TEMPLATE).write_text(PYTHON)
    return folder


@pytest.fixture(scope="session")
def session(chat_folder: Path) -> Session:
    return load(chat_folder, threads=1)
