from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from graphopt.artifact import artifact
from graphopt.compile.pipeline import optimize
from graphopt.report.notebook import html_of
from tests.graphs import residual_model, save

# What IPython calls are these two, and no more: a shell that keeps what it is told.
SHELL = """
import sys, types
told = {}
class Formatter:
    def for_type_by_name(self, module, name, function): told[module, name] = function
shell = types.SimpleNamespace(display_formatter=types.SimpleNamespace(formatters={"text/html": Formatter()}))
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
import graphopt
from graphopt.artifact.artifact import Artifact
(place, function), = told.items()
assert place == (Artifact.__module__, Artifact.__name__), place
assert function.__name__ == "html_of"
assert "graphopt.compile.pipeline" not in sys.modules, "importing graphopt is to be quick"
"""


def test_ipython_is_told_when_graphopt_is_imported() -> None:
    subprocess.run([sys.executable, "-c", SHELL], check=True)


def test_an_artifact_shows_what_was_done_and_checked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = save(residual_model(), tmp_path / "model")
    result = optimize(file, "int4-rtn", tmp_path / "<made>", run=False)
    html = html_of(result)
    assert "int4-rtn" in html
    assert "quantize_weights" in html
    assert "bits each" in html
    assert "&lt;made&gt;" in html_of(artifact.read(tmp_path / "<made>"))
    assert "<made>" not in html


def test_a_plain_file_shows_that_nothing_was_done(tmp_path: Path) -> None:
    html = html_of(artifact.read(save(residual_model(), tmp_path)))
    assert "none" in html
    assert "changed" not in html
