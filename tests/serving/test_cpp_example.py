"""The example in C++ that drives the Engine is built as its first lines say, and makes the tokens that Python makes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import onnxruntime
import onnxruntime_genai
import pytest

from graphopt.inference.generation import generate
from graphopt.inference.session import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    # Where operators were not built either, as from a wheel, there may be none.
    compiler = shutil.which("c++") or pytest.skip("there is no C++ compiler")
    source = (EXAMPLE / "engine.cc").read_text()
    assert source.count("\n") <= 75  # an example that grows is no longer read
    match = re.search(r"//   c\+\+ (.+) -o engine\n", source)
    assert match
    program = tmp_path_factory.mktemp("cpp") / "engine"
    package = str(Path(onnxruntime_genai.__file__).parent)
    options = match[1].replace("$GENAI", package).split()
    subprocess.run([compiler, *options, "-o", program], cwd=EXAMPLE, check=True)
    return [str(program)]


def test_replies_to_two_prompts_at_once_are_those_of_python(
    engine: list[str], served_folder: Path, shipped_artifact: Path
) -> None:
    files = list(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    if not files:
        # A build that links it into Python's module has nothing that another program could open.
        pytest.skip("this onnxruntime has no shared library of its own")
    session = load(shipped_artifact, threads=1)
    texts = ("class Stack:", "def read_lines(path):\n    with open(path) as stream:")
    prompts = [session.encode(text) for text in texts]
    token_lists = [",".join(map(str, prompt)) for prompt in prompts]
    process = subprocess.run(
        [*engine, str(served_folder), "12", *token_lists],
        env=os.environ | {"ORT_LIB_PATH": str(files[0])},
        capture_output=True,
        text=True,
        check=True,
    )
    tokens_in_order = [tuple(map(int, line.split())) for line in process.stdout.splitlines()]
    for number, prompt in enumerate(prompts):
        expected = generate(session, [prompt], max_new_tokens=12)[0].tokens
        assert [token for prompt_number, token in tokens_in_order if prompt_number == number] == expected
    # The second prompt came when the first had a token, and both went on together.
    order = [prompt_number for prompt_number, _ in tokens_in_order]
    assert order[0] == 0
    assert 1 in order[: len(order) - 2]


def test_it_says_what_it_needs(engine: list[str]) -> None:
    process = subprocess.run(engine, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert "usage: engine FOLDER LENGTH PROMPT..." in process.stderr


def test_a_folder_that_is_not_there_is_named(engine: list[str], tmp_path: Path) -> None:
    process = subprocess.run([*engine, str(tmp_path / "absent"), "1", "1"], capture_output=True, text=True)
    assert process.returncode == 1
    assert "absent" in process.stderr
