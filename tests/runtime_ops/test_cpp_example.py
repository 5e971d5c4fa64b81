"""The example in C++ is built as its first lines say, and finds the token that Python finds."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from graphopt.compile.pipeline import optimize
from graphopt.inference.session import load
from graphopt.passes.recipe import load_recipe
from graphopt.runtime_ops import library_path
from tests.native import needs_library

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"


@needs_library
@pytest.mark.parametrize("caches", ["growing", "pages"])
def test_one_step_in_cpp_is_one_step_in_python(llama_artifact: Path, tmp_path: Path, caches: str) -> None:
    compiler = shutil.which("c++") or pytest.skip("there is no C++ compiler")
    source = (EXAMPLE / "main.cc").read_text()
    assert source.count("\n") <= 60  # what the README promises
    found = re.search(r"//   c\+\+ (.+) -o step\n", source)
    assert found
    subprocess.run([compiler, *found[1].split(), "-o", tmp_path / "step"], cwd=EXAMPLE, check=True)
    recipe = load_recipe("rotate-online")
    optimize(llama_artifact, recipe.adding("page_kv") if caches == "pages" else recipe, tmp_path / "model")
    files = list(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    if not files:
        pytest.skip("this onnxruntime has no shared library of its own")
    tokens = np.random.default_rng(0).integers(0, 200, (1, 12))
    what = [tmp_path / "step", files[0], library_path(), tmp_path / "model" / "model.onnx", *tokens[0].astype(str)]
    said = subprocess.run(what, capture_output=True, text=True, check=True)
    assert int(said.stdout) == load(tmp_path / "model").logits(tokens)[0, -1].argmax()


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or pytest.skip("there is no C++ compiler")
    include = EXAMPLE.parents[1] / "graphopt" / "runtime_ops"
    what = ["-std=c++17", f"-I{include}", EXAMPLE / "main.cc", "-ldl", "-o", tmp_path / "step"]
    subprocess.run([compiler, *what], check=True)
    said = subprocess.run([tmp_path / "step"], capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (2, "")
    assert "usage: step ONNXRUNTIME OPERATORS MODEL TOKEN..." in said.stderr
