"""Files of prompts as a server takes them: their texts are read before the first request, which finds their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.errors import InputError
from graphopt.inference.prompt_cache import PromptCache
from graphopt.inference.session import Session
from graphopt.serving.batch import Batch
from graphopt.serving.beginnings import beginnings_of, read_first
from graphopt.serving.stream import Turn
from tests.serving.conftest import with_blocks
from tests.serving.test_batch import run

TEXT = (
    "import os\nimport sys\n\n\ndef main(arguments):\n    for name in sorted(os.listdir('.')):\n        print(name)\n"
    * 2
)


@pytest.fixture(scope="module")
def file(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "text.cache"
    PromptCache.read_text(session, TEXT).save(file)
    return file


def test_a_request_finds_what_was_read_before(served_folder: Path, session: Session, file: Path) -> None:
    tokens = session.encode(TEXT)
    assert beginnings_of(served_folder, [file]) == [tokens]
    turn = Turn((*tokens, *session.encode("\nmain(")), 8)
    results = []
    for beginnings in ([], [tokens]):
        batch = Batch(served_folder, threads=1, on_failure=print)
        read_first(batch, beginnings)
        results.append(run(batch, [turn])[0])
        batch.close()
    (text, before), (same_text, after) = results
    assert text == same_text
    assert before.cached_tokens == 0
    assert after.cached_tokens >= len(tokens) // 16 * 16 - 16  # whole blocks, of 16 tokens


def test_what_cannot_be_read_first_is_refused(served_folder: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"take [0-9]+ blocks of 16 tokens, and the pool has 6"):
        beginnings_of(with_blocks(served_folder, tmp_path / "small", 6), [file, file])
    with pytest.raises(InputError, match="there is no cache file here"):
        beginnings_of(served_folder, [tmp_path / "missing.cache"])
